"""Runs several sequences together: a step has rows from each sequence and reads the weights once for all rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from llmcl.errors import ContextLengthError, UsageError
from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.kernels.common.ragged_step import Run
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.kernels.common.step_state import StepState
from llmcl.models.adapted_batch import BatchAdapters
from llmcl.models.attention_block import AttentionBlock
from llmcl.models.batch_launches import BatchLaunches
from llmcl.models.batch_stages import BatchStages
from llmcl.models.memory import check_batch_memory
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache, pool_pages
from llmcl.models.ragged_launches import bind_ragged
from llmcl.models.scoring import Scoring
from llmcl.models.sequence import SequenceState, Step
from llmcl.models.slots import Slots
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.progress import Progress
from llmcl.runtime.device import Launch

MAX_SEQUENCES = FEW_ROWS[-1]
CELL_TOKENS, CELL_TOKENS_GPU = 64, 256  # for an invariant batch: on a CPU, and on other devices

BeforeSampling = Callable[[], None]
"""Called when the device computes a step, before the choice of its tokens is enqueued: the place for `Batch.allow`."""


def make_batch(
    model: Model,
    max_sequences: int,
    max_context: int,
    page_tokens: int,
    n_pages: int | None = None,
    progress: Progress | None = None,
    *,
    invariant: bool = False,
    max_rows: int | None = None,
) -> Batch:
    """Creates a batch that shares the weights of `model` and has its own paged KV cache and launches.

    max_context: tokens per sequence. n_pages: pages of page_tokens tokens, shared by all sequences; None allows
    max_sequences of max_context tokens. invariant: see `Batch`. max_rows: rows per step, prompt rows included; None
    lets the device decide.

    Raises UsageError for sizes out of range, OutOfDeviceMemoryError if device memory is too small.
    """
    if not 1 <= max_sequences <= MAX_SEQUENCES:
        raise UsageError(f"max_sequences is {max_sequences}; expected 1 to {MAX_SEQUENCES}")
    shape, most = model.cache.shape, max_sequences * pool_pages(max_context, page_tokens)
    kv_tokens = page_tokens * (most if n_pages is None else n_pages)
    rows = max(max_sequences, min(max_rows or prefill_chunk(model.device), max_sequences * max_context))
    for stage in model.stages:
        check_batch_memory(stage.device, model.config, shape.kv_dtype, kv_tokens, max_sequences, rows, span=stage.span)
    pool = PagedKVCache(
        [stage.device for stage in model.stages for _ in stage.span.layers],
        model.config,
        max_context,
        shape.kv_dtype,
        page_tokens,
        most if n_pages is None else n_pages,
        exact_queries=shape.exact_queries,
        n_sequences=max_sequences,
    )
    # With per-sequence mods, keys and values depend on the batch slot, so pages cannot be shared.
    pool.has_prefixes = not any(mods.per_sequence for mods in model.mods)
    step_rows = rows if reads_together(model) else 0
    batch_model = model.with_cache(pool, logit_rows=max_sequences, step_rows=step_rows, prepared=False)
    return Batch(batch_model, max_sequences, rows, progress, invariant=invariant)


def reads_together(model: Model) -> bool:
    """Returns whether a step may hold chunks from several sequences: only if every cached layer is attention with keys
    and values.
    """
    layers = (layer for stage in model.stages for layer in stage.layers)
    return all(isinstance(block, AttentionBlock) for layer in layers for block in layer if block.keeps)


@dataclass(frozen=True)
class PromptChunk:
    """Prompt tokens that one step reads. is_last: the step samples a token after the chunk."""

    sequence: SequenceState
    token_ids: Sequence[int]
    is_last: bool = True

    @property
    def has_image(self) -> bool:
        """Whether some of the tokens belong to an image."""
        return bool(Step(self.sequence, self.token_ids, self.sequence.position).images)


class Batch:
    """Launches bound once, and the sequences' slots on the device.

    model: with a paged cache, logits for max_sequences rows and activations for max_rows rows. The model also decodes
    when only one sequence runs. A sequence holds a slot from `start` to `end`. The last sampled token stays on the
    device as the next input.

    invariant: a decoded row has the same bits no matter which other rows are in the step. The same holds for a prompt
    read in cells of cell_tokens tokens, each cell in a separate step.
    """

    def __init__(
        self,
        model: Model,
        max_sequences: int,
        max_rows: int,
        progress: Progress | None = None,
        *,
        invariant: bool = False,
    ):
        assert isinstance(model.cache, PagedKVCache)
        self.model = model
        self.cache = model.cache
        self.max_sequences = max_sequences
        device, config = model.device, model.config
        self.step_state = StepState(device, max_sequences, model.cache.table_entries, max_sequences)
        self.invariant = invariant
        self.cell_tokens = (CELL_TOKENS if device.is_cpu else CELL_TOKENS_GPU) if invariant else 0
        self.n_steps = 0  # steps that sampled
        self.sampler = Sampler(device, model.act.logits, config.vocab_size, self.step_state, self.max_context)
        self._slots = Slots(model, self.step_state, self.sampler)
        self.decoding = BatchLaunches(model, self.step_state, self.sampler.last_seen, invariant=invariant)
        self.max_rows = max_rows  # per step
        self.reads_together = reads_together(model)  # False: a step holds decoding rows or one chunk, never both
        self.ragged = bind_ragged(model, max_rows, self.decoding.ops) if self.reads_together else None
        self._adapted = BatchAdapters(
            model,
            self.step_state,
            self._slots,
            self.sampler.last_seen,
            (self.decoding, self.ragged),
            invariant=invariant,
        )
        self._before = BatchStages(model, self.step_state, max_rows, invariant=invariant, ragged=self.ragged)
        self._scoring: Scoring | None = None
        separate = [launch for bound in self.decoding.bound.values() for launch in bound.separate]
        others = *(self.ragged.launches if self.ragged else ()), *self.sampler.every_launch
        for launch in (*separate, *others):
            launch.share_seldom_used()
        decode = [launch for bound in self.decoding.bound.values() for launch in bound.to_prepare]
        with device.compile_progress((*model.launches_to_prepare, *decode, *others), progress):
            model.prepare(None)
            self._before.prepare()
            for of_step in (*self.decoding.bound.values(), *others):
                of_step.prepare()

    @property
    def max_context(self) -> int:
        return self.cache.max_context

    @property
    def decode_launches(self) -> list[Launch]:
        """Returns the launches of steps without prompts, for every row count, up to the logits."""
        return [launch for bound in self.decoding.bound.values() for launch in bound.launches]

    @property
    def runs_ahead(self) -> bool:
        return self.model.device.runs_ahead

    def start(self, sequence: SequenceState, params: SamplingParams) -> None:
        """Gives a sequence a slot. Next tokens are sampled with params, which include a seed.

        Raises UsageError if all slots are taken.
        """
        self.cache.own(sequence)
        self._slots.start(sequence, params)

    def end(self, sequence: SequenceState) -> None:
        """Frees the sequence's slot, if any. The sequence keeps its tokens and pages."""
        self._slots.end(sequence)

    def forget_all(self) -> None:
        """Ends all sequences and clears the cache, so later results equal a new batch's results."""
        for sequence in self._slots.sequences:
            self.end(sequence)
        self.cache.forget_all()

    def step(
        self,
        decode: Sequence[SequenceState] = (),
        chunks: Sequence[PromptChunk] = (),
        before_sampling: BeforeSampling | None = None,
    ) -> Callable[[], list[int]]:
        """Extends sequences together: one row for each sequence in `decode` (its last sampled token) plus prompt
        chunks, at most max_rows rows in all. The returned function waits for the sampled ids: first for `decode`, then
        for the last chunks, in order. An id equal to vocab_size means that the logits held no number.

        Raises ContextLengthError for a full sequence, UsageError for too many rows or an id outside the vocabulary,
        OutOfDeviceMemoryError if the cache has too few pages. In the last case no row was computed.
        """
        if not chunks:
            return self.decode(decode, before_sampling) if decode else list
        for chunk in chunks:
            self.model.check_tokens(chunk.sequence, chunk.token_ids)
            self._choose_frequencies(chunk.sequence, chunk.token_ids)
        if self.ragged is None or any(chunk.has_image for chunk in chunks):
            return self._step_in_turn(decode, chunks, before_sampling)
        if (n := len(decode) + sum(len(chunk.token_ids) for chunk in chunks)) > self.max_rows:
            raise UsageError(f"a step of {n} rows; expected at most {self.max_rows} (max_rows of make_batch)")
        self._check_room(decode)
        for sequence in decode:
            self.cache.prepare(self.step_state, sequence, 1, self._slots[sequence])
            if sequence.images:  # read by the model's own step
                self.cache.prepare(self.ragged.step, sequence, 1, self._slots[sequence])
        for chunk in chunks:
            self.cache.prepare(self.ragged.step, chunk.sequence, len(chunk.token_ids), self._slots[chunk.sequence])
        for sequence in decode:
            self._slots.enter(sequence)
        runs = [Run(self._slots[sequence], sequence.position) for sequence in decode]
        wanted, sampled = [*range(len(decode))], [*decode]
        n_rows = len(decode)
        for chunk in chunks:
            sequence, slot = chunk.sequence, self._slots[chunk.sequence]
            runs.append(Run(slot, sequence.position, chunk.token_ids))  # without an image
            n_rows += len(chunk.token_ids)
            if chunk.is_last:
                wanted.append(n_rows - 1)
                sampled.append(sequence)
                self.step_state.write_pages(sequence.pages, slot)
                self.step_state.write_sequence(slot, sequence.position + len(chunk.token_ids) - 1, sequence.n_sampled)
        _, ragged = self._adapted.launches([*decode, *(chunk.sequence for chunk in chunks)])
        assert ragged is not None
        if sampled:
            self._begin_step(sampled)
        self._before.read(runs)
        ragged.run(self.model, runs, wanted)
        for chunk in chunks:
            chunk.sequence.token_ids.extend(chunk.token_ids)
            if chunk.is_last:
                self._slots.has_read(chunk.sequence)
        self._hand_over(before_sampling)
        if sampled:
            return self._sample(sampled)
        self.model.device.flush()
        return list

    def _step_in_turn(
        self, decode: Sequence[SequenceState], chunks: Sequence[PromptChunk], before_sampling: BeforeSampling | None
    ) -> Callable[[], list[int]]:
        """Does the work of `step` in separate launches, for layers that keep a state per sequence, and for images."""
        waits = [self.decode(decode, before_sampling)] if decode else []
        for chunk in chunks:
            self._slots.end_alone()
            sequence = chunk.sequence
            self.model.step.write_place(self._slots[sequence])
            if not chunk.is_last:
                self.model.extend(sequence, chunk.token_ids)
                continue
            self.model.prefill(sequence, chunk.token_ids)
            self._hand_over(before_sampling)
            self.step_state.write_sequence(self._slots[sequence], sequence.position - 1, sequence.n_sampled)
            self._slots.has_read(sequence)
            self._begin_step([sequence])
            waits.append(self._sample([sequence]))
        return lambda: [token for wait in waits for token in wait()]

    def read(self, prompts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[int]]:
        """Reads the rest of several prompts in as few steps as possible. The returned function waits for one sampled id
        per prompt.
        """
        waits, chunks, room = [], list[PromptChunk](), self.max_rows
        for sequence, token_ids in prompts:
            self._choose_frequencies(sequence, token_ids)
            start = 0
            while start < len(token_ids):
                taken = token_ids[start : start + room]
                start, room = start + len(taken), room - len(taken)
                chunks.append(PromptChunk(sequence, taken, start == len(token_ids)))
                if not room:
                    waits.append(self.step(chunks=chunks))
                    chunks, room = [], self.max_rows
        waits.append(self.step(chunks=chunks))
        return lambda: [token for wait in waits for token in wait()]

    def prepare_scores(self) -> None:
        """Binds the launches for `score` once. Raises OutOfDeviceMemoryError if they do not fit."""
        if self._scoring is None:
            self._scoring = Scoring(self.model)

    def score(
        self, sequence: SequenceState, token_ids: Sequence[int], following: Sequence[int], top: int
    ) -> Callable[[], list[LogProb]]:
        """Reads prompt tokens in a separate step. The returned function waits for the results of `Scoring.score`.

        Raises the errors of `step`.
        """
        self.prepare_scores()
        assert self._scoring is not None
        self._slots.end_alone()  # this sequence takes over the model's own step state
        self.model.step.write_place(self._slots[sequence])
        return self._scoring.score(sequence, token_ids, following, top)

    def decode(
        self, sequences: Sequence[SequenceState], before_sampling: BeforeSampling | None = None
    ) -> Callable[[], list[int]]:
        """Runs one row per sequence: reads the last sampled token and samples the next. The returned function waits for
        the ids, in the order of `sequences`. An id equal to vocab_size means that the logits held no number.

        Raises ContextLengthError for a full sequence, OutOfDeviceMemoryError if the cache has too few pages. In both
        cases no row was computed.
        """
        self._check_room(sequences)
        if len(sequences) == 1 and not self.invariant:
            return self._decode_alone(sequences[0], before_sampling)
        for sequence in sequences:
            self.cache.prepare(self.step_state, sequence, 1, self._slots[sequence])
            self._slots.enter(sequence)
        for sequence in sequences:
            self.cache.advance(sequence, 1)
        n = len(sequences)
        decoding, _ = self._adapted.launches(sequences)
        self._begin_step(sequences)
        self._before.decode(n)
        self.model.run(decoding.launches_for(n), n)
        self._hand_over(before_sampling)
        return self._sample(sequences)

    def allow(self, tokens: Mapping[SequenceState, np.ndarray | None]) -> None:
        """Restricts the next token of each sequence to a mask (see `LogitBias.allow`). None removes the restriction."""
        self._slots.allow(tokens)

    def logprobs(self, sequences: Sequence[SequenceState]) -> Callable[[], list[LogProb | None]]:
        """Enqueues the read of log-probabilities right after a step sampled a token for each sequence.

        The returned function waits. The entry is None if `SamplingParams.logprobs` is None.
        """
        if sequences[0] is self._slots.alone:
            return self.model.logprobs(sequences[0])
        return self.sampler.logprobs.read(self.n_steps, [self._slots[sequence] for sequence in sequences])

    def _check_room(self, sequences: Sequence[SequenceState]) -> None:
        if any(sequence.position >= self.max_context for sequence in sequences):
            raise ContextLengthError(f"a sequence has {self.max_context} tokens, which is its context; end it")

    def _choose_frequencies(self, sequence: SequenceState, token_ids: Sequence[int]) -> None:
        """Chooses rotary frequencies for a new text, unless the caller did. The caller reads a text again that outgrows
        them (`KVCache.frequencies_end`).
        """
        if sequence.text_length is None:
            self.cache.choose_frequencies(sequence, len(token_ids))

    def _begin_step(self, sequences: Sequence[SequenceState]) -> None:
        self.n_steps += 1
        self.step_state.write_rows([self._slots[sequence] for sequence in sequences], self.n_steps)

    def _sample(self, sequences: Sequence[SequenceState]) -> Callable[[], list[int]]:
        """Samples the next token of each sequence from the rows in `act.logits`."""
        launches = self.sampler.launches_for([self._slots[sequence] for sequence in sequences])
        self.model.run(launches, len(sequences))
        # read once, because the ring is overwritten later
        wait = cache(self.step_state.read_rows(self.n_steps, len(sequences)))
        for i, sequence in enumerate(sequences):
            sequence.n_sampled += 1
            self._slots.sampled(sequence, lambda i=i: wait()[i])  # type: ignore[misc]
        self.model.device.flush()
        return wait

    def _hand_over(self, before_sampling: BeforeSampling | None) -> None:
        if before_sampling is not None:
            self.model.device.flush()
            before_sampling()

    def _decode_alone(self, sequence: SequenceState, before_sampling: BeforeSampling | None) -> Callable[[], list[int]]:
        """Decodes with the faster one-token kernels and the model's own step state."""
        model = self.model
        self._slots.leave(sequence)
        model.decode(sequence)
        self._hand_over(before_sampling)
        wait = cache(model.sample(sequence))
        self._slots.sampled(sequence, wait)
        return lambda: [wait()]

    def verify(
        self, rows: Sequence[tuple[SequenceState, int]], enqueue: Callable[[], Callable[[], list[list[int]]]]
    ) -> Callable[[], list[list[int]]]:
        """Runs a step made by `enqueue` that verifies drafts: the hook for llmcl/speculation. rows: per sequence a row
        for its last sampled token and a row per draft token. enqueue: returns a function that waits for the tokens per
        sequence, the next input last.

        A single sequence continues with the model's own step state, several with their slots and the state of ragged
        steps. Raises OutOfDeviceMemoryError, before any row is computed, if the cache has too few pages.
        """
        if len(rows) == 1:
            self._slots.leave(rows[0][0])
        else:
            self._check_room([sequence for sequence, _ in rows])
            for sequence, n in rows:
                assert n == 1 or self.ragged is not None
                state = self.step_state if n == 1 or self.ragged is None else self.ragged.step
                self.cache.prepare(state, sequence, n, self._slots[sequence])
            for sequence, _ in rows:
                self._slots.enter(sequence)
            if decode := [sequence for sequence, n in rows if n == 1]:
                self._begin_step(decode)
        wait = cache(enqueue())
        for i, (sequence, _) in enumerate(rows):
            self._slots.sampled(sequence, lambda i=i: wait()[i][-1])  # type: ignore[misc]
        return wait

    def slot(self, sequence: SequenceState) -> int:
        """Returns the index of the sequence's record on the device."""
        return self._slots[sequence]
