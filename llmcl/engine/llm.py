"""LLM: what a Python user holds. Streaming, conversations, logits, measuring."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import Any, cast, overload

import numpy as np

from llmcl.engine.chat import Chat
from llmcl.engine.engine import MAX_SEQUENCES, PAGE_TOKENS, Engine, are_prompts, is_chat, is_list
from llmcl.engine.generation import AnswerOptions, Begin, Generation, Piece, collect, is_last, pieces
from llmcl.engine.kept_batch import BatchSizes, KeptBatch, ReadyBatch
from llmcl.engine.leases import Lease, Leases
from llmcl.engine.no_token import check_logits, check_scored
from llmcl.engine.speculation import NO_SPECULATION, Speculation
from llmcl.errors import (
    ContextLengthError,
    UsageError,
    check_flags,
    check_function,
    check_text,
    check_whole,
    shown,
)
from llmcl.grammar import CompiledGrammar, Grammars
from llmcl.models.batch import Batch, make_batch
from llmcl.models.kv_cache import kv_bytes_per_position
from llmcl.models.model import Model
from llmcl.models.scoring import Scoring
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb, check_alternatives
from llmcl.progress import Progress
from llmcl.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]


def _are_ids(prompt: Prompt) -> bool:
    return is_list(prompt) and all(issubclass(kind, (int, np.integer)) for kind in {*map(type, prompt)})


class LLM:
    """A model on a device, ready to generate. Use it as a context manager, or call `close()`.

    config, tokenizer (None for random weights), device, model_name, dtype, kv_dtype, max_context (tokens), load_ms.
    One thing at a time: the next call of the thread that reads an answer ends what could still come of it. For other
    threads the model is busy until the answer ends, is closed or is collected: UsageError, or with wait=True they wait.
    """

    def __init__(self, name: str, model: Model, dtype: str, kv_dtype: str):
        self.model_name = name
        self._model: Model | None = model
        self.config = model.config
        self.device = model.device
        self.tokenizer: Tokenizer | None = None  # `load` sets it
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.max_context = model.cache.max_context
        self.load_ms = 0.0
        self.sampling_defaults: dict[str, float] = {}  # what the checkpoint recommends; `llmcl chat` takes it
        self.speculation = NO_SPECULATION  # how an answer's tokens are computed; `load` sets it
        self.leases = Leases(name)
        self._grammars: Grammars | None = None
        self._scoring: Scoring | None = None
        self._warned_no_template = False
        self._kept = KeptBatch()
        self.device.spares.add(self._kept)
        self.sequence = model.cache.sequence()  # where everything goes that is no conversation

    @property
    def model(self) -> Model:
        """The weights, the KV cache and the kernels. Raises UsageError once they were given back by `close`."""
        if (model := self._model) is None:
            raise self.leases.closed_error()
        return model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    def encode(
        self, prompt: Prompt, *, raw: bool = False, system_prompt: str | None = None, most: int | None = None
    ) -> list[int]:
        """Token ids of a prompt: text (through the chat template unless `raw` or there is none), messages, or ids.

        most: tokens that there is room for; ContextLengthError for a text that has more for certain.
        """
        if not isinstance(prompt, str) and not is_list(prompt):
            raise UsageError(
                f"the prompt is {shown(prompt)}; expected text, messages [{{'role': ..., 'content': ...}}], or "
                "token ids"
            )
        check_flags(raw=raw)
        if system_prompt is not None:
            check_text("system_prompt", system_prompt)
        if _are_ids(prompt):
            return [*map(int, prompt)]  # type: ignore[arg-type]
        if self.tokenizer is None:
            raise UsageError(f"{self.model_name} has no tokenizer; expected token ids as the prompt")
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                if system_prompt is not None:
                    reason = "raw prompts" if raw else f"{self.model_name}, which has no chat template,"
                    raise UsageError(f"system_prompt has no place in {reason}; put it into the prompt")
                if not raw and not self._warned_no_template:
                    self._warned_no_template = True
                    _log.warning(
                        "%s has no chat template, so the prompt is given to it as it is; --raw (raw=True) says that "
                        "this is meant, --chat-template-file (chat_template) gives it one",
                        self.model_name,
                    )
                return self.tokenizer.encode(prompt, most=most)
            prompt = [{"role": "user", "content": prompt}]
        messages: list[Message] = [*prompt]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return self.tokenizer.encode_chat(messages, most=most)

    @overload
    def stream(self, prompt: Prompt, **options: Any) -> Lease[Piece]: ...
    @overload
    def stream(self, prompt: Sequence[Prompt], **options: Any) -> Generator[tuple[int, Piece], None, None]: ...

    def stream(  # type: ignore[misc]  # the options of both are those here
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        schema: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
        raw: bool = False,
        system_prompt: str | None = None,
        sequence: SequenceState | None = None,
        progress: Progress | None = None,
        wait: bool = False,
        begin: Begin | None = None,
    ) -> Lease[Piece] | Generator[tuple[int, Piece], None, None]:
        """Yields a Piece for each token as it is made; closing the generator stops the work.

        prompt: text, messages [{"role": ..., "content": ...}], or token ids. Of a list of prompts the answers are made
        at the same time, in an `engine`, and yield (index of the prompt, piece); sequence and begin are for one.
        Sampling parameters, logit_bias and logprobs: see SamplingParams; with logprobs each piece has its `logprob`.
        stop: strings that end the answer and are not part of it. schema, regex, grammar: what the answer is to match,
        one of them (`llmcl.grammar.Grammar.of`); max_tokens may cut it before. raw: no chat template. sequence: the
        place in the KV cache to go on from (a conversation's); None: an empty context. progress(what, done, total):
        called while the prompt is read, with its tokens; reading waits for the device a few times more. wait: until no
        other thread generates. begin: for conversations, called with what makes the answer once nothing else is under
        way.

        Raises (before the first token) ContextLengthError for a prompt longer than the context, UsageError for a value
        out of range, or where another thread generates.
        """
        options = AnswerOptions(
            max_tokens,
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            presence_penalty,
            frequency_penalty,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
            logit_bias={} if logit_bias is None else logit_bias,
            logprobs=logprobs,
            schema=schema,
            regex=regex,
            grammar=grammar,
        )  # its errors, and those of the ids, now and not at the first token
        check_function("progress", progress)
        check_function("begin", begin)
        if not isinstance(sequence, SequenceState | None):
            raise UsageError(f"sequence is {shown(sequence)}; expected a conversation's place in the KV cache, or None")
        if are_prompts(prompt):
            given = {field.name: getattr(options, field.name) for field in fields(options)}
            return self._stream_each(prompt, given | {"raw": raw, "system_prompt": system_prompt}, wait, progress)
        ids = self.encode(cast(Prompt, prompt), raw=raw, system_prompt=system_prompt, most=self.max_context)
        self.check_prompt(ids)
        if options.logit_bias:
            self.model.check_vocabulary(list(options.logit_bias))
        compiled = self.compiled(options)

        def answer(asked: list[int], sequence: SequenceState | None) -> Generator[Piece, None, None]:
            if asked is not ids:
                self.check_prompt(asked)
            if sequence is None:
                self.clear()
            else:
                self.model.cache.share_prefix(sequence, asked)
            return pieces(
                self.model,
                self.tokenizer,
                sequence or self.sequence,
                asked,
                options,
                load_ms=self.load_ms,
                progress=progress,
                speculation=self.speculation,
                matcher=None if compiled is None else compiled.matcher(),
                shown=begin is not None or is_chat(prompt, raw=raw),
            )

        return self.leases.begin(lambda: begin(answer) if begin else answer(ids, sequence), is_last, wait=wait)

    @property
    def grammars(self) -> Grammars:
        """What compiles a schema, an expression or a grammar for this model, and keeps what it compiled."""
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.config.vocab_size)
        return self._grammars

    def compiled(self, options: AnswerOptions) -> CompiledGrammar | None:
        """What the answer is to match, compiled. Raises UsageError where that is refused."""
        grammar = options.to_match
        return None if grammar is None else self.grammars.compile(grammar)

    def check_prompt(self, ids: list[int]) -> None:
        """Raises UsageError, ContextLengthError for token ids that no answer can be made to."""
        if not ids:
            raise UsageError("the prompt has no tokens; expected at least one")
        if len(ids) > self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the context {self.max_context}; shorten the prompt or raise the "
                "context (--ctx-size, max_context)"
            )
        self.model.check_vocabulary(ids)

    @overload
    def generate(self, prompt: Prompt, **options: Any) -> Generation: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Any) -> list[Generation]: ...

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generation | list[Generation]:
        """The whole answer at once, or those to a list of prompts; arguments as in `stream`."""
        if are_prompts(prompt):
            wait, progress = options.pop("wait", False), options.pop("progress", None)
            with self._engine_for(prompt, wait, progress) as engine:
                return engine.generate(prompt, **options)
        encoding = {name: options.pop(name) for name in ("raw", "system_prompt") if name in options}
        ids = self.encode(cast(Prompt, prompt), **encoding, most=self.max_context)
        return collect(ids, self.stream(ids, **options))

    def engine(
        self,
        *,
        max_sequences: int = MAX_SEQUENCES,
        max_step_tokens: int | None = None,
        max_context: int | None = None,
        kv_page_tokens: int = PAGE_TOKENS,
        kv_pages: int | None = None,
        batch_invariant: bool = False,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> Engine:
        """Opens an engine, which makes answers to many requests at the same time with the weights of this model.

        max_sequences: texts that a step extends. max_step_tokens: tokens of a step, those of prompts included: fewer
        disturb running answers less, more read prompts faster; None: a choice for the device. max_context: tokens of
        prompt and answer; None: the model's own. kv_page_tokens, kv_pages: as of `load`; the pages are for all texts
        together, None: enough for max_sequences of max_context tokens. batch_invariant: a request gets the same ids
        alone as beside others, in whatever chunks its prompt is read and however often it is preempted; slower. Without
        it a model that was loaded with prompt_lookup or draft_model drafts for a text that is alone in its step, with
        prompt_lookup for several texts, too. progress: called while kernels are compiled. wait: as in `stream`.

        Raises UsageError for sizes out of range, or where another thread generates; OutOfDeviceMemoryError.
        """
        sizes = {"max_sequences": max_sequences, "kv_page_tokens": kv_page_tokens}
        optional = {"max_step_tokens": max_step_tokens, "max_context": max_context, "kv_pages": kv_pages}
        for name, size in {**sizes, **{name: size for name, size in optional.items() if size is not None}}.items():
            check_whole(name, size)
        check_flags(batch_invariant=batch_invariant)
        check_function("progress", progress)
        context = self.max_context if max_context is None else max_context
        if context > self.max_context:
            raise UsageError(
                f"max_context is {context}; expected at most the model's {self.max_context} (max_context of load)"
            )
        batch = BatchSizes(max_sequences, context, kv_page_tokens, kv_pages, batch_invariant, max_step_tokens)
        return self._open(batch, wait, progress)

    def _open(self, sizes: BatchSizes, wait: bool, progress: Progress | None, *, keep: bool = False) -> Engine:
        """keep: the batch, which may have more places, stays with the model once the engine is closed. Otherwise one
        that was kept goes back, and a new one is given up.
        """
        ready: ReadyBatch | None = None

        def make() -> Batch:
            nonlocal ready
            ready = self._kept.take(sizes, exact=not keep)
            if ready is not None:
                return ready.batch
            return make_batch(
                self.model,
                sizes.max_sequences,
                sizes.max_context,
                sizes.page_tokens,
                sizes.n_pages,
                progress,
                invariant=sizes.invariant,
                max_rows=sizes.max_rows,
            )

        def speculation(batch: Batch) -> Speculation:
            if ready is not None:
                return ready.speculation
            return NO_SPECULATION if sizes.invariant else self._speculation_on(batch, progress)

        def leave(batch: Batch, speculation: Speculation) -> None:
            nonlocal ready
            if keep or ready is not None:
                self._kept.keep(ready or ReadyBatch(sizes, batch, speculation))
            ready = None

        return Engine(self, make, sizes.max_rows, wait=wait, speculation=speculation, leave=leave)

    def _speculation_on(self, batch: Batch, progress: Progress | None) -> Speculation:
        speculation = self.speculation.on(batch.model, progress)
        if speculation.for_several[0] is not None and batch.max_sequences > 1:
            batch.prepare_drafts(progress)
        return speculation

    def _engine_for(self, prompts: Sequence[Prompt], wait: bool, progress: Progress | None) -> Engine:
        check_function("progress", progress)
        n_places = min(len(prompts), MAX_SEQUENCES)
        sizes = BatchSizes(n_places, self.max_context, PAGE_TOKENS, None, invariant=False, max_rows=None)
        return self._open(sizes, wait, progress, keep=True)

    def _stream_each(
        self, prompts: Sequence[Prompt], options: dict[str, Any], wait: bool, progress: Progress | None
    ) -> Generator[tuple[int, Piece], None, None]:
        engine = self._engine_for(prompts, wait, progress)
        try:
            questions = engine.questions(prompts, **options)
        except BaseException:
            engine.close()
            raise

        def pieces() -> Generator[tuple[int, Piece], None, None]:
            with engine:
                yield from engine.stream_questions(questions)

        return pieces()

    def chat(self, *, on_full: str = "error") -> Chat:
        """A conversation that keeps its KV cache from turn to turn.

        on_full: what happens when the context is full. "error" raises ContextLengthError, "drop" drops the oldest
        turns and keeps the system prompt.
        """
        return Chat(self, on_full=on_full)

    def logits(self, token_ids: Sequence[int], *, wait: bool = False) -> np.ndarray:
        """Logits after every token of a text: token_ids int [n_tokens] -> float32 [n_tokens, vocab], for evaluation.

        Raises UsageError for no ids or ids that the vocabulary lacks, ContextLengthError for more than the context,
        DeviceError for logits that are no numbers. wait: as in `stream`.
        """
        if not _are_ids(token_ids):
            raise UsageError(f"token_ids is {shown(token_ids)}; expected token ids, as `encode` gives them")
        ids = list(token_ids)

        def work() -> np.ndarray:
            self.clear()
            logits = self.model.logits(self.sequence, ids)
            check_logits(self.model, self.sequence, logits)
            return logits

        return self.leases.call(work, wait=wait)

    def logprobs(self, token_ids: Sequence[int], *, top: int = 0, wait: bool = False) -> list[LogProb | None]:
        """The log-probability of each token of a text after those before it, and of the `top` (0 to 20) most likely
        ones in its place; None for the first token. The logits stay on the device. Raises as `logits`. wait: likewise.
        """
        if not _are_ids(token_ids):
            raise UsageError(f"token_ids is {shown(token_ids)}; expected token ids, as `encode` gives them")
        if top is None:
            raise UsageError("top is None; expected 0 to 20 alternatives")
        check_alternatives("top", top)
        ids = [int(token) for token in token_ids]
        self.check_prompt(ids)

        def work() -> list[LogProb | None]:
            self.clear()
            if self._scoring is None:
                self._scoring = Scoring(self.model)
            scored = self._scoring.score(self.sequence, ids[:-1], ids[1:], top)() if ids[1:] else []
            if not all(math.isfinite(token.logprob) for token in scored):
                self.clear()
                check_scored(self.model, self.sequence, ids[:-1])
            return [None, *scored]

        return self.leases.call(work, wait=wait)

    def reset(self, *, wait: bool = False) -> None:
        """Ends what this thread generates; what comes next starts with an empty context. wait: as in `stream`."""
        self.leases.call(self.clear, wait=wait)

    def clear(self) -> None:
        """Within a turn: what comes next starts with an empty context."""
        self.model.cache.truncate(self.sequence, 0)

    def close(self) -> None:
        """Ends what is generated, after its step, and gives the device's memory back; then nothing can be generated.

        Another thread that reads an answer gets UsageError.
        """
        self.leases.close()
        self._kept.close()
        self.device.close()
        self._model, self._scoring, self.speculation = None, None, NO_SPECULATION

    def __reduce_ex__(self, protocol: object) -> str:
        raise UsageError(
            f"{self.model_name} is loaded on a device, so it can be neither copied nor pickled; share it between "
            "threads, and load it in each process that needs it (llmcl.load)"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- measuring ----------------------------------------------------------------------------------

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that a decode step reads."""
        return self.model.weights.decode_bytes()

    @property
    def kv_bytes_per_position(self) -> int:
        """Bytes of the KV cache that a decode step reads for each position it attends to."""
        return kv_bytes_per_position(self.config, self.kv_dtype)

    def bench_prefill(self, n_tokens: int) -> float:
        """Seconds to prefill n_tokens random tokens into an empty context, as llama-bench's pp test."""
        ids = self._bench_tokens(n_tokens, 0)

        def work() -> float:
            self.clear()
            return self._seconds(self.model.prefill, ids)

        return self.leases.call(work)

    def bench_decode(self, n_tokens: int, depth: int = 0) -> list[float]:
        """Seconds of each of n_tokens single-token decodes after `depth` tokens: llama-bench's tg test, no sampling."""
        ids = self._bench_tokens(n_tokens, depth)

        def work() -> list[float]:
            self.clear()
            if depth:
                self.model.prefill(self.sequence, ids[:depth])
            return [self._seconds(self.model.decode_token, token) for token in ids[depth:]]

        return self.leases.call(work)

    def _seconds(self, step: Callable[[SequenceState, Any], None], tokens: Any) -> float:
        self.device.finish()
        start = time.perf_counter()
        step(self.sequence, tokens)
        self.device.finish()
        return time.perf_counter() - start

    def _bench_tokens(self, n_tokens: int, depth: int) -> list[int]:
        check_whole("n_tokens", n_tokens)
        check_whole("depth", depth, 0)
        n = int(n_tokens) + int(depth)
        if n > self.max_context:
            raise ContextLengthError(
                f"{n} tokens exceed the context of {self.max_context}; take fewer or raise the context (max_context)"
            )
        return [int(i) for i in np.random.default_rng(0).integers(0, self.config.vocab_size, n)]
