"""Three nested generators: token ids from the device, pieces of text with times and stop rules, the whole answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmcl.engine.dry_breakers import checked_breakers, with_breakers
from llmcl.engine.logits_processor import LogitsProcessor, process_logits
from llmcl.engine.matching import TokenMatcher, grammar_of
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
from llmcl.models.image_rows import PlacedImage, not_inside, on_device
from llmcl.models.kv_cache import common_prefix
from llmcl.models.model import Model
from llmcl.models.no_token import why_no_token
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import WHOLE, SamplingParams
from llmcl.progress import Progress
from llmcl.runtime.cores import cores_now
from llmcl.runtime.preemptions import Preemptions
from llmcl.sampling_options import DRY_BREAKERS, PARAMETERS, SamplingOptions
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.shown_text import ShownText
from llmcl.tokenizer.text import StopMatcher

if TYPE_CHECKING:
    from llmcl.engine.matching import Grammar


@dataclass(frozen=True)
class Piece:
    """A token of an answer, and the text made final by the token (possibly empty, or with text held back before)."""

    text: str
    token_id: int
    tbt_ms: float | None  # since the last arrival; 0: came together with the token before; None for the first
    finish_reason: str | None = None  # "stop" or "length" on the last piece
    stats: GenerationStats | None = None  # on the last piece
    logprob: LogProb | None = None  # if asked for: the token and the most likely tokens
    prompt_logprobs: tuple[LogProb | None, ...] | None = None  # on the first piece, if an engine was asked


def is_last(piece: Piece) -> bool:
    return piece.finish_reason is not None


@dataclass(frozen=True)
class _AnswerLength:
    max_tokens: int = 256


@dataclass(frozen=True)
class AnswerOptions(SamplingOptions, _AnswerLength):
    """How an answer is generated and when it ends: see `LLM.stream`. Raises UsageError for a value out of range."""

    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # before, no end-of-text token or stop token ends the answer
    stop_token_ids: Sequence[int] = ()  # further tokens that end the answer
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    dry_sequence_breakers: Sequence[str] = DRY_BREAKERS
    schema: Any = None
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None
    logits_processor: LogitsProcessor | None = None
    lora: str | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens)
        check_whole("min_tokens", self.min_tokens, 0)
        check_flags(ignore_eos=self.ignore_eos)
        # A copy, because the caller's object may be an iterator, or change while the answer is generated.
        if isinstance(self.stop, Iterable) and not isinstance(self.stop, (str, bytes)):
            object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.lora, Mapping):
            object.__setattr__(self, "lora", dict(self.lora))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        StopMatcher(self.stop)
        object.__setattr__(self, "dry_sequence_breakers", checked_breakers(self.dry_sequence_breakers))
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        check_function("logits_processor", self.logits_processor)
        _ = self.sampling
        if (to_match := self.to_match) is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise UsageError(f"{name} and {to_match.kind} exclude each other: an answer ends where that ends")

    @cached_property
    def to_match(self) -> Grammar | None:
        """The grammar for the answer, or None."""
        return grammar_of(self)

    @cached_property
    def sampling(self) -> SamplingParams:
        """The options for choosing tokens, checked."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        bias = {} if self.logit_bias is None else self.logit_bias
        return SamplingParams(**values, logit_bias=bias, logprobs=self.logprobs)


def _checked_ids(name: str, ids: object) -> tuple[int, ...]:
    if not is_list(ids) or not all(isinstance(token, WHOLE) and token >= 0 for token in ids):
        raise UsageError(f"{name} is {shown(ids)}; expected a list of token ids, 0 or more")
    return tuple(map(int, ids))


ANSWER_OPTIONS = tuple(each.name for each in fields(AnswerOptions))


def answer_options(**options: Any) -> AnswerOptions:
    """Raises TypeError for an unknown name, and AnswerOptions' errors."""
    if unknown := [name for name in options if name not in ANSWER_OPTIONS]:
        raise TypeError(f"{unknown[0]} is no option of an answer; expected some of {', '.join(ANSWER_OPTIONS)}")
    return AnswerOptions(**options)


Answer = Callable[[list[int], SequenceState | None], Generator[Piece, None, None]]
"""A function that generates the answer to a prompt, in a sequence or (None) with an empty context."""

Begin = Callable[[Answer], Generator[Piece, None, None]]
"""A function through which a conversation starts the answer once no other call is under way."""


@dataclass(frozen=True)
class Generation:
    """A whole answer. token_ids includes the final end-of-text token; text does not.

    logprobs: for each token, if asked for; else empty.
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
    images: Sequence[PlacedImage] = (),
    progress: Progress | None = None,
    on_decode: Callable[[], None] = lambda: None,
    on_arrival: Callable[[], None] = lambda: None,
    on_logprob: Callable[[LogProb | None], None] = lambda logprob: None,
    speculation: Speculation = NO_SPECULATION,
    matcher: TokenMatcher | None = None,
    processor: LogitsProcessor | None = None,
) -> Generator[int, None, None]:
    """Prefills `prompt` and yields at most max_tokens sampled ids, the device one step ahead of the host.

    Step n + 1 takes token n from device memory, so a GPU gets step n + 1 before the host has read token n. Intel's CPU
    driver computes on the thread that waits for token n, and would return token n only after step n + 1: on such a
    device, the step is enqueued after reading the token. Either way the host receives 4 bytes a token, and the device
    works while the caller handles the token. If the sequence already holds the prompt's beginning, the beginning is
    kept. Stops early, without an error, when the context is full. on_decode is called when the prompt's work is
    enqueued, on_logprob before a token is yielded if log-probabilities are wanted, on_arrival before each token except
    tokens that arrived together with the token before.

    images: in the prompt, whose ids are keyed (`image_rows.keyed`).
    speculation: a step may then verify drafted tokens. The ids are the same, but several come at once.
    matcher: says which tokens may come next, from the answer's first token on. A token is chosen after the host has
    read the token before and computed the mask. The device computes the step meanwhile, since the step itself does not
    need the mask. processor: likewise; it gets the step's logits.
    """
    model.cache.truncate(sequence, not_inside(images, reusable_prefix(sequence, prompt)))
    sequence.images = [*images]
    sequence.sampling, sequence.n_sampled, sequence.mu = params, 0, None
    model.start_sampling(sequence)
    speculation.begin(prompt, params)
    model.prefill(sequence, prompt[sequence.position :], progress=progress)
    model.remember_text(sequence)

    left = token_budget(model.cache.max_context, len(prompt), max_tokens)  # tokens not yet read
    if not params.takes_drafts or processor is not None:
        speculation = NO_SPECULATION
    step, drafted = _sample(model, sequence, on_logprob, matcher, processor), False
    preemptions = Preemptions(model.device.compute_units)

    def read() -> list[int]:
        """Waits for the ids sampled by the current step."""
        ids = step()
        on_arrival()
        speculation.push(ids)
        if matcher is not None:
            matcher.accept(ids)
        return ids

    on_decode()
    while True:
        # The end of a draft, and the draft a matcher allows, are known only once the ids are read.
        unread = int(left > 1 and not drafted and model.device.runs_ahead and speculation.looks_ahead)
        if matcher is not None and speculation is not NO_SPECULATION:
            unread = 0
        ids: list[int] = []
        if not unread:
            ids = read()
            sequence.token_ids.extend(ids[:-1])  # if several: keys and values are written
            left -= len(ids)
            if left == 0:
                yield from ids
                return
            if speculation is not NO_SPECULATION:  # else the device gets the next step first
                yield from ids[:-1]
                ids = ids[-1:]
        most = min(left - unread, model.cache.frequencies_end(sequence) - sequence.position) - 1
        draft = speculation.draft(unread, most)
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
            preemptions.passed(len(ids))  # after the next step is enqueued: waiting threads soon sleep
        else:
            ids = ids or read()
            left -= 1
        sequence.token_ids.append(ids[-1])  # the current step is writing the key and value
        yield from ids
        step, drafted = following, bool(draft)


def reusable_prefix(sequence: SequenceState, prompt: Sequence[int]) -> int:
    """Counts the prompt's first tokens already in a sequence, without the last token: its logits are not kept."""
    return min(len(prompt) - 1, common_prefix(prompt, sequence.token_ids))


def token_budget(max_context: int, n_prompt: int, max_tokens: int) -> int:
    """Returns how many tokens can follow a prompt: the last sampled token needs no room in the cache."""
    return min(max_tokens, max_context - n_prompt + 1)


def _steps_at_once(model: Model, sequence: SequenceState, most: int, preemptions: Preemptions) -> int:
    """Returns how many tokens the next launch chooses: several only if threads would lose cores between launches."""
    if not preemptions.cost_turns or cores_now() < model.device.compute_units:
        return 1
    return max((n for n in model.steps_at_once(sequence) if n <= most), default=1)


def _sample(
    model: Model,
    sequence: SequenceState,
    on_logprob: Callable[[LogProb | None], None],
    matcher: TokenMatcher | None,
    processor: LogitsProcessor | None,
    last: Sequence[int] = (),
) -> Callable[[], list[int]]:
    """Enqueues choosing the next token and reading the id. The returned function waits for the id.

    last: the token missing in the sequence so far.
    """
    if matcher is not None:
        model.device.flush()  # the device computes the step while the host computes the mask
        model.sampler.bias.allow({0: matcher.mask()})
    if processor is not None:
        process_logits(model, 0, processor, [*on_device(sequence.token_ids, sequence.images, 0), *last])
    wait = model.sample(sequence)
    return _sampled(model, sequence, lambda: [wait()], on_logprob)


def _decode(
    model: Model, sequence: SequenceState, n: int, on_logprob: Callable[[LogProb | None], None]
) -> Callable[[], list[int]]:
    """Enqueues n steps, or one if the cache lacks room for n. The returned function waits for the ids."""
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
    """Enqueues reading the token's log-probability, if wanted, right after the choice of tokens. `wait` returns the
    ids. The returned function waits for the ids, too, and checks them.
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
    """Detokenizer for a model without a tokenizer (random weights): tokens have no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class PieceWriter:
    """Makes a Piece for each token in an answer: text, time, and whether the token is the last.

    Text goes out as soon as no later token can change it: whole characters, and no possible start of a stop string.

    n_tokens: the answer's largest length. stats: returns the answer's statistics at the end. shown: the pieces have the
    text for people, if it differs from the model's text.
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
        exact = options.to_match is not None  # the first space is part of the match
        self._detokenizer = tokenizer.detokenizer(as_it_is=exact) if tokenizer else NoText()
        self._shown = ShownText.of(tokenizer) if tokenizer and shown and not exact else None
        self._matcher = StopMatcher(options.stop)
        self._eos = tokenizer.eos_token_ids if tokenizer and not options.ignore_eos else frozenset()
        self._stops = frozenset(options.stop_token_ids)
        self._n_before_end = options.min_tokens  # tokens left before a token may end the answer
        self._left = n_tokens
        self._recorder = recorder
        self._stats = stats

    def push(self, token: int, logprob: LogProb | None = None, *, together: bool = False) -> Piece:
        """Makes the next piece. together: the token arrived with the token before."""
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
    images: Sequence[PlacedImage] = (),
    load_ms: float = 0.0,
    progress: Progress | None = None,
    speculation: Speculation = NO_SPECULATION,
    matcher: TokenMatcher | None = None,
    shown: bool = False,
) -> Generator[Piece, None, None]:
    """Yields a Piece a token; the last piece has the finish reason and the statistics. shown: see PieceWriter."""
    model.cache.choose_frequencies(sequence, len(prompt))
    kept = model.cache.kept(sequence, reusable_prefix(sequence, prompt))
    recorder = Recorder(len(prompt), prefilled_tokens=len(prompt) - kept)
    decode_start = model.traffic, model.decode_steps, speculation.counted, model.seconds_before

    def on_decode() -> None:
        nonlocal decode_start
        decode_start = model.traffic, model.decode_steps, speculation.counted, model.seconds_before

    def stats() -> GenerationStats:
        moved = model.traffic.since(decode_start[0])
        return recorder.finish(
            load_ms=load_ms,
            compile_ms=1e3 * sum(device.compile_s for device in model.devices),
            decode_steps=model.decode_steps - decode_start[1],
            verified=None if speculation is NO_SPECULATION else speculation.counted.since(decode_start[2]),
            device_to_host_bytes=moved.device_to_host_bytes,
            host_to_device_bytes=moved.host_to_device_bytes,
            kernel_launches=moved.kernel_launches,
            stage_seconds=[now - then for now, then in zip(model.seconds_before, decode_start[3], strict=True)],
            peak_device_bytes=sum(device.peak_bytes for device in model.devices),
        )

    n_tokens = token_budget(model.cache.max_context, len(prompt), options.max_tokens)
    params = with_breakers(options.sampling.seeded(), options.dry_sequence_breakers, tokenizer)
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
        images=images,
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
    """Joins a stream of pieces into a whole answer."""
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
