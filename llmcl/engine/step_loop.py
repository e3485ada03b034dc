"""The engine's loop: runs the scheduler's plans on the device and hands out tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from llmcl.checkpoint.lora import Adapter
from llmcl.engine.engine_metrics import EngineMetrics
from llmcl.engine.logits_processor import process_logits
from llmcl.engine.matching import masks_of
from llmcl.engine.scheduler import Chunk, Job, Plan, Scheduler
from llmcl.engine.speculation import NoDrafts, StepDrafts
from llmcl.errors import LlmclError
from llmcl.models.batch import PromptChunk
from llmcl.models.image_rows import on_device
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import SamplingParams


class StepBatch(Protocol):
    """Sequences extended together on the device."""

    @property
    def model(self) -> Model: ...  # its `act.logits` hold the logits of a step
    @property
    def max_sequences(self) -> int: ...  # slots
    @property
    def cache(self) -> PagedKVCache: ...
    @property
    def max_context(self) -> int: ...  # tokens per sequence
    @property
    def max_rows(self) -> int: ...  # per step
    @property
    def reads_together(self) -> bool: ...  # False: a step holds decoding rows or one chunk, never both
    @property
    def runs_ahead(self) -> bool: ...  # the next step should be enqueued before the last step's ids are read
    @property
    # 0, or cell size for invariant results: prompts are read in cells from the beginning, each cell in its own step,
    # and a row then has the same bits regardless of other rows
    def cell_tokens(self) -> int: ...
    def start(self, sequence: SequenceState, params: SamplingParams) -> None:
        """Gives the sequence a slot. Its next token is number sequence.n_sampled sampled with `params`."""

    def step(
        self,
        decode: Sequence[SequenceState],
        chunks: Sequence[PromptChunk],
        before_sampling: Callable[[], None] | None = None,
    ) -> Callable[[], list[int]]:
        """Extends each of `decode` by its last sampled token and other sequences by prompt chunks. Samples the next
        tokens: for `decode`, then for the last chunks. The returned function waits for the ids.

        before_sampling: called while the device computes the logits.
        """
        ...

    def allow(self, tokens: Mapping[SequenceState, np.ndarray | None]) -> None:
        """Restricts the next token of each sequence to a mask (see `LogitBias.allow`). None removes the restriction."""

    def logprobs(self, sequences: Sequence[SequenceState]) -> Callable[[], list[LogProb | None]]:
        """Enqueues the read of log-probabilities, right after sampling. The returned function waits."""
        ...

    def prepare_scores(self) -> None:
        """Prepares `score`. Raises OutOfDeviceMemoryError if its buffers do not fit."""

    def score(
        self, sequence: SequenceState, token_ids: Sequence[int], following: Sequence[int], top: int
    ) -> Callable[[], list[LogProb]]:
        """Reads prompt tokens in a separate step. The returned function waits for the log-probabilities of `following`,
        the next token after each token, with `top` alternatives.
        """
        ...

    def end(self, sequence: SequenceState) -> None:
        """Frees the sequence's slot."""


class Sampled(NamedTuple):
    """A token in a job's answer."""

    job: Job
    token: int
    logprob: LogProb | None


@dataclass(frozen=True)
class Reading:
    """The pending results of a step. Both functions wait."""

    jobs: list[Job]
    tokens: Callable[[], list[list[int]]]  # per job: one token, or 1 to k if a draft was verified
    logprobs: Callable[[], Sequence[LogProb | None]]
    n_rows: Sequence[int] = ()  # per job: draft tokens + 1; 0 or 1 without a draft; () if no job has a draft


@dataclass(frozen=True)
class PromptReading:
    """The pending log-probabilities of prompt tokens. `position`: the first token read. Each result belongs to the next
    token.
    """

    job: Job
    position: int
    logprobs: Callable[[], list[LogProb]]


class StepLoop:
    """Runs one step after the other. On a device that runs ahead, ids arrive one step late.

    A sampled token is appended to the sequence once the id is known and the step reading the token is enqueued. For a
    job with a matcher, sampling waits until the previous step's ids are read and the mask is known. Meanwhile the
    device computes the step's logits, because logits depend on neither.
    """

    def __init__(self, batch: StepBatch, scheduler: Scheduler, drafts: StepDrafts | None = None):
        self._batch = batch
        self._scheduler = scheduler
        self._drafts = drafts or NoDrafts()
        self._readings: list[Reading | PromptReading] = []  # pending in the running step
        self._known: list[Sampled] = []
        self._failed: dict[Job, LlmclError] = {}
        self.metrics = EngineMetrics()

    @property
    def cache(self) -> PagedKVCache:
        return self._batch.cache

    @property
    def cell_tokens(self) -> int:
        return self._batch.cell_tokens

    @property
    def adapters(self) -> set[Adapter]:
        """Returns the adapters of waiting and running jobs."""
        jobs = (*self._scheduler.waiting, *self._scheduler.running)
        return {adapter for job in jobs for adapter, _ in job.adapters.adapters}

    @property
    def has_work(self) -> bool:
        return bool(self._readings) or self._scheduler.has_work

    @property
    def has_room(self) -> bool:
        """Returns whether a step with the waiting prompts has room for another prompt."""
        return self._scheduler.has_room

    def submit(self, job: Job) -> None:
        """Adds a job to the queue. Raises OutOfDeviceMemoryError if scoring its prompt needs too much memory."""
        if job.n_scored:
            self._batch.prepare_scores()
        job.submitted_ns = time.perf_counter_ns()
        self._scheduler.submit(job)

    def end(self, job: Job) -> None:
        self._scheduler.end(job)

    def step(self) -> list[Sampled]:
        """Enqueues a step and returns the tokens known now, for jobs that continue. The caller ends jobs that do not.

        A job's tokens arrive in order, several at once if a draft was verified. In that case the following call
        enqueues the next step.
        """
        start = time.perf_counter()
        if self._readings and self._drafts.must_be_read:
            self._read_all()
            return self._known_since(start)
        self._drafts.give_back()
        plan = self._scheduler.plan()
        self._count(plan)
        enqueued = self._enqueue(plan)
        for job in plan.decode:
            _append_inputs(job)  # their ids are known if no step was running
        if self._batch.runs_ahead:
            self._read_all()
            self._readings = enqueued
        else:
            self._readings = enqueued
            self._read_all()
        return self._known_since(start)

    def _known_since(self, start: float) -> list[Sampled]:
        """Returns the newly known tokens at the end of a `step` call that began at `start`."""
        known, self._known = self._known, []
        self.metrics.step_s += time.perf_counter() - start
        return known

    def failures(self) -> dict[Job, LlmclError]:
        """Returns the jobs whose matchers failed since the last call. The caller ends them."""
        failed, self._failed = self._failed, {}
        return failed

    def _count(self, plan: Plan) -> None:
        metrics = self.metrics
        metrics.preemptions = self._scheduler.n_preempted
        if plan.n_rows:
            metrics.steps += 1
            metrics.step_rows.observe(plan.n_rows)
            metrics.step_keys += plan.n_keys
            metrics.step_sequences += len(plan.decode) + len(plan.prefill)
        metrics.prompt_tokens += sum(len(chunk.token_ids) for chunk in plan.prefill)

    def _begin(self, job: Job) -> None:
        """Records when a job leaves the queue. A preempted job is not counted again."""
        if job.begun_ns is None:
            job.begun_ns = time.perf_counter_ns()
            self.metrics.queue_s.observe((job.begun_ns - (job.submitted_ns or job.begun_ns)) / 1e9)
            self.metrics.cached.observe(job.n_found)

    def _enqueue(self, plan: Plan) -> list[Reading | PromptReading]:
        batch = self._batch
        for sequence in plan.ended:
            batch.end(sequence)
        for job in plan.started:
            self._begin(job)
            if job.preempted is not None and job.sampled:
                _sequence(job).mu = job.preempted.mu
            batch.start(_sequence(job), job.params)
        drafted = self._drafted(plan)
        read = [chunk for chunk in plan.prefill if chunk.following is None]
        readings: list[Reading | PromptReading] = [*drafted]
        readings += [self._scoring(chunk) for chunk in plan.prefill if chunk.following is not None]
        steps = [([] if drafted else plan.decode, read)]
        if batch.cell_tokens or not batch.reads_together:
            steps = [(steps[0][0], []), *(([], [chunk]) for chunk in read)]
        for decode, prefill in steps:
            if decode or prefill:
                chunks = [PromptChunk(_sequence(chunk.job), chunk.token_ids, chunk.is_last) for chunk in prefill]
                jobs = [*decode, *(chunk.job for chunk in prefill if chunk.is_last)]
                wait = batch.step([_sequence(job) for job in decode], chunks, self._masking(jobs))
                wait = self._drafts.decoded(plan, wait)
                if jobs:
                    readings.append(self._reading(jobs, wait))
        return readings

    def _scoring(self, chunk: Chunk) -> PromptReading:
        job = chunk.job
        assert chunk.following is not None and job.prompt_logprobs is not None
        found = self._batch.score(_sequence(job), chunk.token_ids, chunk.following, job.prompt_logprobs)
        return PromptReading(job, chunk.position, found)

    def _drafted(self, plan: Plan) -> list[Reading]:
        """Enqueues the plan's step with drafts, if speculation handles it."""
        jobs = [*plan.decode]
        enqueued = self._drafts.enqueue(plan)
        if enqueued is None:
            return []
        n_rows, tokens = enqueued
        return [Reading(jobs, tokens, lambda: [None] * len(jobs), n_rows)]

    def _reading(self, jobs: list[Job], wait: Callable[[], list[int]]) -> Reading:
        def tokens() -> list[list[int]]:
            return [[token] for token in wait()]

        if all(job.params.logprobs is None for job in jobs):
            return Reading([*jobs], tokens, lambda: [None] * len(jobs))
        return Reading([*jobs], tokens, self._batch.logprobs([_sequence(job) for job in jobs]))

    def _masking(self, jobs: list[Job]) -> Callable[[], None] | None:
        """Returns a function that masks the jobs' next tokens and changes their logits, or None if no job needs it.

        jobs: in the order of the step's rows of logits.
        """
        if all(job.matcher is None and job.processor is None for job in jobs):
            return None

        def mask() -> None:
            self._read_all()
            matching = [(job, job.matcher) for job in jobs if not job.done and job not in self._failed]
            waiting = [(job, matcher) for job, matcher in matching if matcher is not None]
            allowed: dict[SequenceState, np.ndarray | None] = {}
            masks = masks_of([matcher for _, matcher in waiting])
            for (job, _), tokens in zip(waiting, masks, strict=True):
                if isinstance(tokens, LlmclError):
                    self._fail(job, tokens)
                else:
                    allowed[_sequence(job)] = tokens
            if allowed:
                self._batch.allow(allowed)
            for row, job in enumerate(jobs):
                if job.processor is not None and not job.done and job not in self._failed:
                    try:
                        prompt = on_device(job.prompt, job.images, 0)
                        process_logits(self._batch.model, row, job.processor, [*prompt, *job.sampled])
                    except LlmclError as error:
                        self._fail(job, error)

        return mask

    def _read_all(self) -> None:
        """Reads the running step's ids as soon as they arrive."""
        readings, self._readings = self._readings, []
        for reading in readings:
            if isinstance(reading, PromptReading):
                first, found = reading.position + 1, reading.logprobs()
                reading.job.scored[first : first + len(found)] = found
                continue
            jobs, tokens, logprobs = reading.jobs, reading.tokens(), reading.logprobs()
            n_rows = reading.n_rows or [0] * len(jobs)
            for job, of_job, logprob, rows in zip(jobs, tokens, logprobs, n_rows, strict=True):
                if rows > 1 and not job.done:
                    job.note_verified(rows, len(of_job))
                    self.metrics.note_draft(rows - 1, len(of_job) - 1)
                for token in of_job:
                    self._take(job, token, logprob)

    def _take(self, job: Job, token: int, logprob: LogProb | None) -> None:
        """Records a job's newly known token."""
        if job.done or job in self._failed:
            return
        if not job.sampled and job.begun_ns is not None:
            self.metrics.prompt_s += (time.perf_counter_ns() - job.begun_ns) / 1e9
        job.sampled.append(token)
        self._drafts.push(job, token)
        _append_inputs(job)
        if len(job.sampled) > job.n_given:  # otherwise the caller already has the token
            self._known.append(Sampled(job, token, logprob))
        try:
            if job.matcher is not None:
                job.matcher.accept([token])
        except LlmclError as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: LlmclError) -> None:
        """Stops a job. Tokens sampled by the running step are discarded."""
        self._failed[job] = error


def _sequence(job: Job) -> SequenceState:
    assert job.sequence is not None
    return job.sequence


def _append_inputs(job: Job) -> None:
    """Appends the known inputs of all enqueued steps: every sampled token except the last."""
    if job.sequence is not None:
        n_held = job.sequence.position - len(job.prompt)
        assert n_held >= 0
        job.sequence.token_ids += job.sampled[n_held : job.n_enqueued - 1]
