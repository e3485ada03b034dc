"""Engine: many concurrent requests on one model, from any thread or task."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar
from weakref import finalize

from llmcl.checkpoint.lora import NO_ADAPTERS, Adapter, AdapterChoice
from llmcl.engine.dry_breakers import with_breakers
from llmcl.engine.engine_metrics import EngineMetrics, StepTotals
from llmcl.engine.generation import AnswerOptions, Generation, Piece, PieceWriter, answer_options, token_budget
from llmcl.engine.images import images_of
from llmcl.engine.leases import RECHECK_S, Leases
from llmcl.engine.matching import Compiled
from llmcl.engine.message_parts import Picture
from llmcl.engine.prompts import are_prompts, is_chat, is_list
from llmcl.engine.requests import Mailbox, PieceStream, Request
from llmcl.engine.scheduler import Job, Scheduler
from llmcl.engine.speculation import MakeDrafts, NoDrafts
from llmcl.engine.stats import GenerationStats, Recorder
from llmcl.engine.step_loop import StepBatch, StepLoop
from llmcl.engine.worker import Answering, End, Worker, nothing
from llmcl.errors import ContextLengthError, LlmclError, UsageError, check_whole, shown
from llmcl.models import prefix_file
from llmcl.models.adapters import AdapterSet
from llmcl.models.image_rows import PlacedImage, keyed
from llmcl.models.model import Model
from llmcl.ops.logprobs import check_alternatives
from llmcl.ops.sample import WHOLE
from llmcl.runtime import driver_calls
from llmcl.runtime.cache_files import expanded
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer

MAX_SEQUENCES = 8
# Rows per step: on a CPU, and on other devices. On an H200 a step with 256 rows, 32 decoding, takes twice as long as a
# step with only the 32.
STEP_TOKENS, STEP_TOKENS_GPU = 96, 256
FEW_TOKENS = 8
PAGE_TOKENS = 64
MAX_ANSWERS = 1024  # to one prompt


B = TypeVar("B", bound=StepBatch)


def tokens_beside(n_decoding: int) -> int:
    """Returns the row limit for a CPU step with n_decoding decoding rows, so the step takes at most 2.5 times as long
    as without prompts.

    A step with up to 4 rows takes as long as 5 prompt rows; a step with 32 rows as long as 54 (notes/cpu.md).
    Therefore the former has room for 8 more rows, and the latter for 64, two per row.
    """
    return max(n_decoding + FEW_TOKENS, 3 * n_decoding)


class ServedLLM(Protocol):
    """The parts of an `LLM` that an engine needs."""

    model_name: str
    leases: Leases
    device: Device
    load_ms: float

    @property
    def model(self) -> Model: ...
    @property
    def has_tokenizer(self) -> bool: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def encode(self) -> Callable[..., list[int]]: ...
    def check_prompt(self, ids: list[int]) -> None: ...
    def compiled(self, options: AnswerOptions) -> Compiled | None: ...
    def open_lora(self, lora: str) -> Adapter: ...
    def put_lora(self, adapter: Adapter, used: Iterable[Adapter] = ()) -> None: ...


@dataclass(frozen=True)
class Question:
    """A checked request, made by `Engine.question`. grammar: the answer must match it. shown: see PieceWriter."""

    prompt_token_ids: list[int]
    options: AnswerOptions
    priority: int
    grammar: Compiled | None = None
    prompt_logprobs: int | None = None
    shown: bool = False
    adapters: AdapterChoice = NO_ADAPTERS

    def again(self, i: int) -> Question:
        """The same question for answer i of several, which draws with another seed."""
        seed = self.options.seed
        return self if seed is None else replace(self, options=replace(self.options, seed=(int(seed) + i) % (1 << 64)))


class Engine:
    """Answers many requests at the same time. `LLM.engine` opens it. Use it as a context manager, or call `close`.

    A step extends up to max_sequences sequences. Further requests wait, first come, first served. Requests with a
    common beginning share the computed prefix. All methods may be called from many threads and tasks. An open engine
    owns the model: other calls of the LLM are refused, or with wait=True wait until it is closed.

    max_context: tokens of prompt and answer.
    """

    def __init__(
        self,
        llm: ServedLLM,
        make_batch: Callable[[], B],
        max_step_tokens: int | None,
        *,
        wait: bool,
        drafts_on: Callable[[B], MakeDrafts] = lambda batch: NoDrafts,
        leave: Callable[[B, MakeDrafts], None] = lambda batch, make_drafts: None,
    ):
        """leave: called with batch and drafts when the engine has ended, unless the device failed."""
        self._llm = llm
        made: list[tuple[int, int, Worker]] = []  # not `self`: the lease may live until the process ends
        name, vocab_size = llm.model_name, llm.model.config.vocab_size

        def hold() -> Iterator[None]:
            batch = make_batch()
            rows, of_prompts = max_step_tokens, 0
            beside = None
            if rows is None:
                on_cpu = llm.device.is_cpu
                beside = tokens_beside if on_cpu and not batch.cell_tokens else None
                of_prompts = 0 if on_cpu else batch.max_rows
                rows = max(batch.max_sequences + batch.cell_tokens, STEP_TOKENS if on_cpu else STEP_TOKENS_GPU)
            make_drafts = drafts_on(batch)
            scheduler = Scheduler(
                batch.cache,
                batch.max_sequences,
                rows,
                batch.cell_tokens,
                max_prompt_tokens=of_prompts,
                tokens_beside=beside,
            )
            loop = StepLoop(batch, scheduler, make_drafts())
            worker = Worker(loop, name, vocab_size, partial(leave, batch, make_drafts))
            made.append((scheduler.max_context, batch.cell_tokens, worker))
            return _until_closed(worker)

        self._lease = llm.leases.begin(hold, wait=wait, kept=True)
        next(self._lease)
        finalize(self, self._lease.end)  # if nobody calls close
        ((self.max_context, self._cell_tokens, self._worker),) = made

    # ---- requests -----------------------------------------------------------------------------------

    def submit(self, prompt: Any, *, priority: int = 0, **options: Any) -> Request:
        """Begins an answer and returns at once. priority: higher first among waiting requests.

        prompt_logprobs: the first piece carries the log-probability of each prompt token given the tokens before (None
        for the first), with 0 to 20 alternatives. The whole prompt is then computed, cached or not. prompt, options: as
        for `LLM.stream`. A seed draws the same random numbers regardless of other requests, even after a preemption;
        the probabilities may be rounded differently.

        Raises UsageError for a value out of range and after `close`, ContextLengthError for too long a prompt.
        """
        return self.ask(self.question(prompt, priority=priority, **options))

    def stream(self, prompt: Any, **options: Any) -> PieceStream:
        """For `async for piece in engine.stream(...)`. Arguments and errors are as for `submit`. Errors appear when the
        loop begins, or at once for token ids.

        Leaving the loop, or cancelling its task, cancels the request.
        """
        are_ids = isinstance(prompt, list) and {*map(type, prompt)} <= {int}
        if are_ids and all(options.get(name) is None for name in ("schema", "regex", "grammar", "choices")):
            return PieceStream(self.submit(prompt, **options))
        return PieceStream(lambda: self.submit(prompt, **options))

    def expect(self) -> Callable[[], None]:
        """Announces a request, for a server that reads and checks several requests concurrently. An idle engine then
        waits briefly (`worker.GATHER_S`), so that announced requests share the first step. The returned function is
        called right after the request was begun or given up.
        """
        return self._worker.expect()

    def generate(self, prompts: Sequence[Any], **options: Any) -> list[Generation]:
        """Returns the whole answers to several prompts, in order. Options: as for `submit`, applied to each prompt."""
        requests = [self.ask(question) for question in self.questions(prompts, **options)]
        return [request.result() for request in requests]

    def stream_each(self, prompts: Sequence[Any], **options: Any) -> Generator[tuple[int, Piece], None, None]:
        """Yields (prompt index, piece) as pieces arrive. Options: as for `submit`, applied to each prompt."""
        return self.stream_questions(self.questions(prompts, **options))

    def questions(self, prompts: Sequence[Any], **options: Any) -> list[Question]:
        """Checks several prompts. An error names the first bad prompt by index."""
        if not are_prompts(prompts):
            raise UsageError(
                f"the prompts are {shown(prompts)}; expected a list of prompts (`submit` takes a single one)"
            )
        images = options.pop("images", None)
        if images is not None and (not is_list(images) or len(images) != len(prompts)):
            raise UsageError(
                f"images is {shown(images)} with {len(prompts)} prompts; expected a list of pictures for each prompt"
            )
        checked = []
        for i, prompt in enumerate(prompts):
            try:
                checked.append(self.question(prompt, **options, images=None if images is None else images[i]))
            except LlmclError as error:
                raise type(error)(f"prompt {i}: {error}") from error
        return checked

    def question(
        self,
        prompt: Any,
        *,
        priority: int = 0,
        raw: bool = False,
        system_prompt: str | None = None,
        images: Sequence[Picture] | None = None,
        prompt_logprobs: int | None = None,
        **options: Any,
    ) -> Question:
        """Encodes and checks a request without beginning it; `ask` begins it. Arguments and errors: as for `submit`."""
        answer = answer_options(**options)
        if not isinstance(priority, WHOLE):
            raise UsageError(f"priority is {shown(priority)}; expected a whole number")
        check_alternatives("prompt_logprobs", prompt_logprobs)
        ids = self._llm.encode(prompt, raw=raw, system_prompt=system_prompt, images=images, most=self.max_context)
        self._llm.check_prompt(ids)
        if answer.logit_bias:
            self._llm.model.check_vocabulary(list(answer.logit_bias))
        if len(ids) > self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the engine room for {self.max_context}; shorten the prompt, or "
                "open the engine with a larger max_context or more pages (kv_pages)"
            )
        if images_of(ids):
            self._check_images(images_of(ids), prompt_logprobs)
        grammar = self._llm.compiled(answer)
        adapters, is_shown = self._llm.model.adapters.choice(answer.lora), is_chat(prompt, raw=raw)
        return Question(ids, answer, int(priority), grammar, prompt_logprobs, is_shown, adapters)

    def _check_images(self, images: Sequence[PlacedImage], prompt_logprobs: int | None) -> None:
        """Raises UsageError for images that the engine cannot read as asked."""
        if prompt_logprobs is not None:
            raise UsageError("prompt_logprobs is for prompts of text; leave the images out, or prompt_logprobs")
        if self._cell_tokens and any(placed.image.two_way for placed in images):
            raise UsageError(
                "the model reads an image at once, which batch_invariant (--batch-invariant) would divide; leave one "
                "of the two out"
            )

    def ask(self, question: Question) -> Request:
        """Begins the answer to a checked request."""
        mailbox = Mailbox()
        answering = self._begin(question, mailbox.give, mailbox.wake)
        worker = self._worker
        return Request(question.prompt_token_ids, mailbox, lambda: worker.cancel(answering), answering.job.progress)

    def stream_questions(
        self, questions: Sequence[Question], *, are_same: bool = False
    ) -> Generator[tuple[int, Piece], None, None]:
        """Begins the answers to all questions. Yields (question index, piece) as pieces arrive.

        are_same: all have one prompt. The first reads it before the others begin, which then share its full pages.
        """
        items: SimpleQueue[tuple[int, Piece | End]] = SimpleQueue()
        begun: list[Answering] = []

        def begin(most: int) -> None:
            for i, question in [*enumerate(questions)][len(begun) : most]:
                begun.append(self._begin(question, lambda item, i=i: items.put((i, item))))  # type: ignore[misc]

        try:
            begin(1 if are_same else len(questions))
            left = len(questions)
            while left:
                i, item = items.get()
                begin(len(questions))
                if isinstance(item, Piece):
                    yield i, item
                elif item is None:
                    left -= 1
                else:
                    raise item
        finally:
            for answering in begun:
                self._worker.cancel(answering)

    def _begin(
        self, question: Question, give: Callable[[Piece | End], None], wake: Callable[[], None] = nothing
    ) -> Answering:
        """Begins an answer: `give` receives the pieces and then the End. wake: see Answering."""
        driver_calls.check()
        options, llm, worker = question.options, self._llm, self._worker
        prompt, images = keyed(question.prompt_token_ids, images_of(question.prompt_token_ids))
        n_tokens = token_budget(self.max_context, len(prompt), options.max_tokens)
        tokenizer = llm.tokenizer if llm.has_tokenizer else None
        matcher = None if question.grammar is None else question.grammar.matcher()
        job = Job(
            prompt,
            with_breakers(options.sampling.seeded(), options.dry_sequence_breakers, tokenizer),
            n_tokens,
            question.priority,
            matcher,
            prompt_logprobs=question.prompt_logprobs,
            processor=options.logits_processor,
            adapters=question.adapters,
            images=images,
        )
        recorder, device, load_ms = Recorder(len(prompt)), llm.device, llm.load_ms

        def stats() -> GenerationStats:
            recorder.prefilled_tokens, recorder.begun_ns = len(prompt) - job.n_found, job.begun_ns
            # Traffic and launches are shared by all rows in a step, so no request reports them.
            return recorder.finish(
                load_ms=load_ms,
                compile_ms=1e3 * device.compile_s,
                decode_steps=max(0, recorder.n_tokens - 1 - job.verified.tokens),
                verified=job.verified if job.verified.steps else None,
                peak_device_bytes=device.peak_bytes,
            )

        writer = PieceWriter(tokenizer, options, n_tokens, recorder, stats, shown=question.shown)
        answering = Answering(job, writer, give, wake)
        worker.submit(answering)
        return answering

    @property
    def metrics(self) -> EngineMetrics:
        """Returns the live counters since the engine was opened. The object keeps counting."""
        return self._worker.metrics

    @property
    def n_preempted(self) -> int:
        """Returns how often a request gave up its pages and was read again later. Often means too few pages."""
        return self.metrics.preemptions

    @property
    def totals(self) -> StepTotals:
        """Returns the work and time of all steps so far."""
        return self._worker.totals

    # ---- adapters ------------------------------------------------------------------------------------

    def load_lora(self, lora: str) -> str:
        """Loads a LoRA adapter, [NAME=]PATH, between two steps, in place of an older one with its name. Returns the
        name, for the option `lora` of requests. Running answers wait. Raises the errors of `LLM.load_lora`.
        """
        opened = self._llm.open_lora(lora)
        self._worker.call(lambda loop: self._llm.put_lora(opened, loop.adapters))
        return opened.name

    def unload_lora(self, name: str) -> None:
        """Unloads an adapter. Running answers go on with it. Raises UsageError for an unknown name."""
        self._worker.call(lambda loop: self._llm.model.adapters.unload(name))

    @property
    def loras(self) -> AdapterSet:
        """Returns the loaded adapters."""
        return self._llm.model.adapters

    # ---- the prefix cache in a file -----------------------------------------------------------------

    def store_prefixes(self, file: str | Path, max_bytes: int) -> int:
        """Writes the prefix cache to a file, most recently used pages first, at most max_bytes. Returns the tokens
        written. Runs between two steps, so running answers wait. Raises OSError, and UsageError after `close`.
        """
        file = expanded(file, "the file of the prefix cache")
        check_whole("max_bytes", max_bytes, 0)
        return self._worker.call(lambda loop: prefix_file.store(loop.cache, file, self._origin(loop), max_bytes))

    def restore_prefixes(self, file: str | Path) -> int:
        """Reads a file from `store_prefixes` into free pages. Returns the tokens read; 0 without a file.

        Raises PrefixFileError, and changes nothing, for a damaged file, another model's file or another file type.
        """
        file = expanded(file, "the file of the prefix cache")
        return self._worker.call(lambda loop: prefix_file.restore(loop.cache, file, self._origin(loop)))

    def _origin(self, loop: StepLoop) -> prefix_file.Origin:
        cache = loop.cache
        return prefix_file.Origin.of(self._llm.model, cache.shape, batch_invariant=loop.cell_tokens > 0)

    # ---- life ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all answers after the running step and releases the model. Their readers get UsageError."""
        while not self._lease.end():  # another thread is closing it
            time.sleep(RECHECK_S)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)


def _until_closed(worker: Worker) -> Iterator[None]:
    try:
        yield
        yield
    finally:
        worker.stop()
