"""Three nested generators: token ids from the device, pieces of text with times and stop rules, the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from llmcl.engine.logits_processor import LogitsProcessor, process_logits
from llmcl.engine.no_token import why_no_token
from llmcl.engine.prompts import is_list
from llmcl.engine.speculation import NO_SPECULATION, Speculation
from llmcl.engine.stats import GenerationStats, Recorder
from llmcl.errors import (
    DeviceError,
    OutOfDeviceMemoryError,
    UsageError,
    check_flags,
    check_function,
    check_whole,
    shown,
)
from llmcl.grammar import Grammar, Matcher
from llmcl.models.kv_cache import common_prefix
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import WHOLE, SamplingParams
from llmcl.progress import Progress
from llmcl.runtime.cores import cores_now
from llmcl.runtime.preemptions import Preemptions
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.shown_text import ShownText
from llmcl.tokenizer.text import StopMatcher


@dataclass(frozen=True)
class Piece:
    """One token of an answer and the text that became final with it (possibly none yet, or held-back text too)."""

    text: str
    token_id: int
    tbt_ms: float | None  # since the arrival before; 0: it came with the token before; None for the first
    finish_reason: str | None = None  # "stop" or "length" on the last piece
    stats: GenerationStats | None = None  # on the last piece
    logprob: LogProb | None = None  # where asked for: of the token, and the most likely ones
    prompt_logprobs: tuple[LogProb | None, ...] | None = None  # on the first piece, where an engine was asked for them


def is_last(piece: Piece) -> bool:
    return piece.finish_reason is not None


@dataclass(frozen=True)
class AnswerOptions:
    """How an answer is made and when it ends: see `LLM.stream`. Raises UsageError for a value out of range."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before which neither an end-of-text token nor a stop token ends the answer
    stop_token_ids: Sequence[int] = ()  # further tokens that end it
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens)
        check_whole("min_tokens", self.min_tokens, 0)
        check_flags(ignore_eos=self.ignore_eos)
        # Of its own: the caller's may be an iterator, or change while the answer is made.
        if isinstance(self.stop, Iterable) and not isinstance(self.stop, (str, bytes)):
            object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        StopMatcher(self.stop)
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        check_function("logits_processor", self.logits_processor)
        _ = self.sampling
        if (to_match := self.to_match) is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise UsageError(f"{name} and {to_match.kind} exclude each other: an answer ends where that ends")

    @cached_property
    def to_match(self) -> Grammar | None:
        """What the answer is to match."""
        return Grammar.of(schema=self.schema, regex=self.regex, grammar=self.grammar, choices=self.choices)

    @cached_property
    def sampling(self) -> SamplingParams:
        """The part of them that says how tokens are chosen."""
        return SamplingParams(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=self.logit_bias,
            logprobs=self.logprobs,
        )


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not is_list(ids) or not all(isinstance(token, WHOLE) and token >= 0 for token in ids):
        raise UsageError(f"{name} is {shown(ids)}; expected a list of token ids, 0 or more")
    return tuple(map(int, ids))


ANSWER_OPTIONS = tuple(each.name for each in fields(AnswerOptions))

Answer = Callable[[list[int], SequenceState | None], Generator[Piece, None, None]]
"""What makes the answer to a prompt, in a sequence or (None) with an empty context."""

Begin = Callable[[Answer], Generator[Piece, None, None]]
"""What a conversation does with it once nothing else is under way."""


@dataclass(frozen=True)
class Generation:
    """A whole answer. token_ids includes the end-of-text token that ended it; text does not.

    logprobs: of each token, where they were asked for; else empty.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[LogProb] = field(default_factory=list)


def token_ids(
    model: Model,
    sequence: SequenceState,
    prompt: Sequence[int],
    params: SamplingParams,
    max_tokens: int,
    *,
    progress: Progress | None = None,
    on_decode: Callable[[], None] = lambda: None,
    on_arrival: Callable[[], None] = lambda: None,
    on_logprob: Callable[[LogProb | None], None] = lambda logprob: None,
    speculation: Speculation = NO_SPECULATION,
    matcher: Matcher | None = None,
    processor: LogitsProcessor | None = None,
) -> Generator[int, None, None]:
    """Prefills `prompt` and yields at most max_tokens sampled ids, the device one step ahead of the host.

    Step n + 1 takes token n from the device's own memory, so a GPU gets it before the host has read token n. Intel's
    CPU driver computes with the very thread that waits for token n, and would not hand it out before step n + 1 is
    done: there the step follows the reading. Either way the host receives 4 bytes a token, and the device works while
    the caller handles the token. What the sequence holds of the prompt's beginning is kept.
    Stops early, without an error, when the context is full. on_decode is called when the prompt's work is enqueued,
    on_logprob before a token is yielded whose log-probability is wanted, on_arrival before one that did not arrive with
    the token before.

    speculation: a step then may verify drafted tokens. The ids are the same, but several come at once.
    matcher: which tokens may come next, from the first of the answer on. A token is chosen once the one before is read
    and the mask is known, while the device computes the step, which needs neither. processor: likewise; it gets the
    logits that the step leaves.
    """
    model.cache.truncate(sequence, reusable_prefix(sequence, prompt))
    sequence.sampling, sequence.n_sampled = params, 0
    model.start_sampling(sequence)
    speculation.begin(prompt, params)
    model.prefill(sequence, prompt[sequence.position :], progress=progress)

    left = token_budget(model.cache.max_context, len(prompt), max_tokens)  # tokens that have not been read
    if params.logprobs is not None or params.logit_bias or processor is not None:
        speculation = NO_SPECULATION  # a step that verifies a draft has none of these
    step, drafted = _sample(model, sequence, on_logprob, matcher, processor), False
    preemptions = Preemptions(model.device.compute_units)

    def read() -> list[int]:
        """The ids that the step under way sampled, once they are there."""
        ids = step()
        on_arrival()
        speculation.push(ids)
        if matcher is not None:
            matcher.accept(ids)
        return ids

    on_decode()
    while True:
        # Where the text goes on after a draft is known once it is read, and which draft a matcher allows.
        unread = int(left > 1 and not drafted and model.device.runs_ahead and speculation.looks_ahead)
        if matcher is not None and speculation is not NO_SPECULATION:
            unread = 0
        ids: list[int] = []
        if not unread:
            ids = read()
            sequence.token_ids.extend(ids[:-1])  # of several: their keys and values are written
            left -= len(ids)
            if left == 0:
                yield from ids
                return
            if speculation is not NO_SPECULATION:  # else the device gets its next step before any is handled
                yield from ids[:-1]
                ids = ids[-1:]
        draft = speculation.draft(unread, left - unread - 1)
        if matcher is not None:
            draft = draft[: matcher.n_allowed(draft)]
        if draft:
            following = speculation.verify(sequence, draft, matcher)
        elif matcher is None and processor is None:
            n = _steps_at_once(model, sequence, left, preemptions) if speculation is NO_SPECULATION else 1
            following = speculation.decoded(_decode(model, sequence, n, on_logprob))
        else:
            model.decode(sequence)
            if unread:
                ids = read()
            following = speculation.decoded(_sample(model, sequence, on_logprob, matcher, processor, ids[-1:]))
        if not unread:
            preemptions.passed(len(ids))  # after the next step is enqueued: threads that wait for it soon sleep
        else:
            ids = ids or read()
            left -= 1
        sequence.token_ids.append(ids[-1])  # the step under way is writing its key and value
        yield from ids
        step, drafted = following, bool(draft)


def reusable_prefix(sequence: SequenceState, prompt: Sequence[int]) -> int:
    """How many of the prompt's first tokens a sequence holds already, the last one never: its logits are not kept."""
    return min(len(prompt) - 1, common_prefix(prompt, sequence.token_ids))


def token_budget(max_context: int, n_prompt: int, max_tokens: int) -> int:
    """How many tokens can follow a prompt: the last one sampled needs no place in the cache."""
    return min(max_tokens, max_context - n_prompt + 1)


def _steps_at_once(model: Model, sequence: SequenceState, most: int, preemptions: Preemptions) -> int:
    """How many tokens the next launch chooses: several only where threads would lose their cores between launches."""
    if not preemptions.cost_turns or cores_now() < model.device.compute_units:
        return 1
    return max((n for n in model.steps_at_once(sequence) if n <= most), default=1)


def _sample(
    model: Model,
    sequence: SequenceState,
    on_logprob: Callable[[LogProb | None], None],
    matcher: Matcher | None,
    processor: LogitsProcessor | None,
    last: Sequence[int] = (),
) -> Callable[[], list[int]]:
    """Enqueues the choice of the next token and the reading of its id; the function returned waits for this one id.

    last: the token that the sequence does not have yet.
    """
    if matcher is not None:
        model.device.flush()  # it computes the step while the host computes the mask
        model.sampler.bias.allow({0: matcher.mask()})
    if processor is not None:
        process_logits(model, 0, processor, [*sequence.token_ids, *last])
    wait = model.sample(sequence)
    return _sampled(model, sequence, lambda: [wait()], on_logprob)


def _decode(
    model: Model, sequence: SequenceState, n: int, on_logprob: Callable[[LogProb | None], None]
) -> Callable[[], list[int]]:
    """Enqueues n steps, one where the cache has no room for more; the function returned waits for their ids."""
    try:
        wait = model.decode_and_sample(sequence, n)
    except OutOfDeviceMemoryError:
        if n == 1:
            raise
        wait = model.decode_and_sample(sequence)
    return _sampled(model, sequence, wait, on_logprob)


def _sampled(
    model: Model, sequence: SequenceState, wait: Callable[[], list[int]], on_logprob: Callable[[LogProb | None], None]
) -> Callable[[], list[int]]:
    """Right after the choice of tokens whose ids `wait` returns: enqueues the reading of the log-probability, where
    that of the one token is wanted. The function returned waits for the ids.
    """
    logprobs = None if sequence.sampling.logprobs is None else model.logprobs(sequence)

    def tokens() -> list[int]:
        ids = wait()
        if not all(0 <= token < model.config.vocab_size for token in ids):
            raise DeviceError(why_no_token(model, sequence))
        if logprobs is not None:
            on_logprob(logprobs()[0])
        return ids

    return tokens


class NoText:
    """Detokenizer of a model without a tokenizer (random weights): its tokens have no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class PieceWriter:
    """Makes a Piece of each token of one answer: its text, its time, and whether it is the last.

    Text goes out as soon as no later token can change it: whole characters, and nothing that may become a stop string.

    n_tokens: with which the answer ends at the latest. stats: those of the answer, once it has ended. shown: the text
    is what people are shown, if that is another one than the model writes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        options: AnswerOptions,
        n_tokens: int,
        recorder: Recorder,
        stats: Callable[[], GenerationStats],
        *,
        shown: bool = False,
    ):
        exact = options.to_match is not None  # its first space was chosen as part of what matches
        self._detokenizer = tokenizer.detokenizer(as_it_is=exact) if tokenizer else NoText()
        self._shown = ShownText.of(tokenizer) if tokenizer and shown and not exact else None
        self._matcher = StopMatcher(options.stop)
        self._eos = tokenizer.eos_token_ids if tokenizer and not options.ignore_eos else frozenset()
        self._stops = frozenset(options.stop_token_ids)
        self._n_before_end = options.min_tokens  # tokens that still come before one may end the answer
        self._left = n_tokens
        self._recorder = recorder
        self._stats = stats

    def push(self, token: int, logprob: LogProb | None = None, *, together: bool = False) -> Piece:
        """together: the token arrived with the one before."""
        tbt_ms = self._recorder.token(together=together)
        self._left -= 1
        may_end, self._n_before_end = self._n_before_end <= 0, self._n_before_end - 1
        at_end = may_end and token in self._eos
        at_stop = may_end and token in self._stops
        text, stopped = self._matcher.push("" if at_end else self._text_of(token, self._detokenizer.push(token)))
        if not stopped and (at_end or at_stop or not self._left):
            tail, stopped = self._matcher.push(self._last_text())
            text += tail + self._matcher.flush()
        if stopped or at_end or at_stop:
            return Piece(text, token, tbt_ms, "stop", self._stats(), logprob)
        if not self._left:
            return Piece(text, token, tbt_ms, "length", self._stats(), logprob)
        return Piece(text, token, tbt_ms, logprob=logprob)

    def _text_of(self, token: int, text: str) -> str:
        return text if self._shown is None else self._shown.push(text, token)

    def _last_text(self) -> str:
        text = self._detokenizer.flush()
        return text if self._shown is None else self._shown.flush(text)


def pieces(
    model: Model,
    tokenizer: Tokenizer | None,
    sequence: SequenceState,
    prompt: Sequence[int],
    options: AnswerOptions,
    *,
    load_ms: float = 0.0,
    progress: Progress | None = None,
    speculation: Speculation = NO_SPECULATION,
    matcher: Matcher | None = None,
    shown: bool = False,
) -> Generator[Piece, None, None]:
    """Yields a Piece a token; the last one says why it is the last and has the statistics. shown: as of PieceWriter."""
    kept = model.cache.kept(sequence, reusable_prefix(sequence, prompt))
    recorder = Recorder(len(prompt), prefilled_tokens=len(prompt) - kept)
    decode_start = model.device.traffic.copy(), model.decode_steps, speculation.counted

    def on_decode() -> None:
        nonlocal decode_start
        decode_start = model.device.traffic.copy(), model.decode_steps, speculation.counted

    def stats() -> GenerationStats:
        moved = model.device.traffic.since(decode_start[0])
        return recorder.finish(
            load_ms=load_ms,
            compile_ms=1e3 * model.device.compile_s,
            decode_steps=model.decode_steps - decode_start[1],
            verified=None if speculation is NO_SPECULATION else speculation.counted.since(decode_start[2]),
            device_to_host_bytes=moved.device_to_host_bytes,
            host_to_device_bytes=moved.host_to_device_bytes,
            kernel_launches=moved.kernel_launches,
            peak_device_bytes=model.device.peak_bytes,
        )

    n_tokens = token_budget(model.cache.max_context, len(prompt), options.max_tokens)
    params = options.sampling.seeded()
    writer = PieceWriter(tokenizer, options, n_tokens, recorder, stats, shown=shown)
    logprob: LogProb | None = None

    together = False

    def on_logprob(found: LogProb | None) -> None:
        nonlocal logprob
        logprob = found

    def on_arrival() -> None:
        nonlocal together
        together = False

    ids = token_ids(
        model,
        sequence,
        prompt,
        params,
        options.max_tokens,
        progress=progress,
        on_decode=on_decode,
        on_arrival=on_arrival,
        on_logprob=on_logprob,
        speculation=speculation,
        matcher=matcher,
        processor=options.logits_processor,
    )
    try:
        for token in ids:
            piece = writer.push(token, logprob, together=together)
            together = True
            yield piece
            if is_last(piece):
                return
    finally:
        ids.close()


def collect(prompt: Sequence[int], stream: Iterable[Piece]) -> Generation:
    """The whole answer of a stream of pieces."""
    parts = list(stream)
    last = parts[-1] if parts else None
    if last is None or last.finish_reason is None or last.stats is None:
        raise UsageError(
            "the answer was ended before its last token (by reset, close or another call); generate it again"
        )
    return Generation(
        "".join(piece.text for piece in parts),
        [piece.token_id for piece in parts],
        list(prompt),
        last.finish_reason,
        last.stats,
        [piece.logprob for piece in parts if piece.logprob is not None],
    )
