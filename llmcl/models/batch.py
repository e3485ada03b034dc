"""Several sequences that are extended together: a step has rows of each, and reads the weights once for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from llmcl.errors import ContextLengthError, UsageError
from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.common.ragged_step import Run
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.kernels.common.step_state import StepState
from llmcl.models.activations import Activations, split_values, splits_of
from llmcl.models.batch_verification import BatchVerification
from llmcl.models.blocks import AttentionBlock
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.layer_ops import BatchOps
from llmcl.models.memory import check_batch_memory
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache, pool_pages
from llmcl.models.ragged_launches import bind_ragged
from llmcl.models.scoring import Scoring
from llmcl.models.sequence import SequenceState
from llmcl.models.stack import head, stack
from llmcl.ops.linear import rows_are_decoded
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.progress import Progress
from llmcl.runtime.device import Launch

MAX_SEQUENCES = FEW_ROWS[-1]
CELL_TOKENS, CELL_TOKENS_GPU = 64, 256  # of an invariant batch: on a CPU, and on other devices

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
    """A batch with the weights of `model`, and a paged KV cache and launches of its own.

    max_context: tokens of a sequence. n_pages: of page_tokens tokens, for all sequences together; None: enough for
    max_sequences of max_context tokens. invariant: see `Batch`. max_rows: of a step, those of prompts included; None: a
    choice for the device.

    Raises UsageError for sizes out of range, OutOfDeviceMemoryError where the device has no room.
    """
    if not 1 <= max_sequences <= MAX_SEQUENCES:
        raise UsageError(f"max_sequences is {max_sequences}; expected 1 to {MAX_SEQUENCES}")
    shape, most = model.cache.shape, max_sequences * pool_pages(max_context, page_tokens)
    kv_tokens = page_tokens * (most if n_pages is None else n_pages)
    rows = max(max_sequences, min(max_rows or prefill_chunk(model.device), max_sequences * max_context))
    check_batch_memory(model.device, model.config, shape.kv_dtype, kv_tokens, max_sequences, rows)
    pool = PagedKVCache(
        model.device,
        model.config,
        max_context,
        shape.kv_dtype,
        page_tokens,
        most if n_pages is None else n_pages,
        exact_queries=shape.exact_queries,
        n_sequences=max_sequences,
    )
    # Of another place, keys and values would be others.
    pool.has_prefixes = not any(mods.per_sequence for mods in model.mods)
    own = Model(
        model.device,
        model.config,
        model.weights,
        pool,
        chunk=model.chunk,
        logit_rows=max_sequences,
        step_rows=rows if reads_together(model) else 0,
        mods=model.mods,
        prepared=False,
    )
    return Batch(own, max_sequences, rows, progress, invariant=invariant)


def reads_together(model: Model) -> bool:
    """Whether a step may have chunks of several sequences: where layers keep keys and values alone."""
    return all(isinstance(block, AttentionBlock) for layer in model.layers for block in layer if block.keeps)


@dataclass(frozen=True)
class PromptChunk:
    """Tokens of a prompt that a step reads; after the last of them a token is sampled."""

    sequence: SequenceState
    token_ids: Sequence[int]
    is_last: bool = True


class Batch:
    """Launches bound once, and the places of the sequences on the device.

    model: with a paged cache, logits of max_sequences rows and activations of max_rows. It decodes a sequence that is
    alone. A sequence has a place from `start` to `end`; what it sampled last is its next input, on the device.

    invariant: a decoded row has the same bits whatever other rows the step has, none included. So has a prompt that is
    read in cells of cell_tokens, each in a step of its own.
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
        self.n_steps = 0  # that sampled
        self._places: dict[SequenceState, int] = {}
        self._params: dict[SequenceState, SamplingParams] = {}
        self._last: dict[SequenceState, Callable[[], int]] = {}  # the token sampled last
        self._allowed: dict[SequenceState, np.ndarray | None] = {}
        self._ready: set[SequenceState] = set()  # whose place has what the device needs for the next row
        self._alone: SequenceState | None = None  # whom the model's own step state has so
        self.sampler = Sampler(device, model.act.logits, config.vocab_size, self.step_state)
        # A row alone has the products for one token where it keeps its bits.
        bounds = [1] if invariant and rows_are_decoded(device, model.weights.matrices) else []
        bounds += few_rows(max_sequences) if max_sequences > 1 or not bounds else []
        self._decode = {rows: self._bind(rows) for rows in bounds}
        self.max_rows = max_rows  # of a step
        self.reads_together = reads_together(model)  # else a step has rows that decode, or one chunk
        self._ragged = bind_ragged(model, max_rows, self._ops) if self.reads_together else None
        self._verification: BatchVerification | None = None
        self._scoring: Scoring | None = None
        separate = [launch for bound in self._decode.values() for launch in bound.separate]
        others = *(self._ragged.launches if self._ragged else ()), *self.sampler.every_launch
        for launch in (*separate, *others):
            launch.share_seldom_used()
        decode = [launch for bound in self._decode.values() for launch in bound.to_prepare]
        with device.compile_progress((*model.launches_to_prepare, *decode, *others), progress):
            model.prepare(None)
            for of_step in (*self._decode.values(), *others):
                of_step.prepare()

    @property
    def max_context(self) -> int:
        return self.cache.max_context

    @property
    def decode_launches(self) -> list[Launch]:
        """Those of steps without prompts, for all numbers of rows, up to the logits."""
        return [launch for bound in self._decode.values() for launch in bound.launches]

    @property
    def runs_ahead(self) -> bool:
        return self.model.device.runs_ahead

    def start(self, sequence: SequenceState, params: SamplingParams) -> None:
        """Gives a sequence of the cache a place; its next tokens are chosen as params, which have a seed, say.

        Raises UsageError where all places are taken.
        """
        self.cache.own(sequence)
        free = sorted({*range(self.max_sequences)} - {*self._places.values()})
        if not free:
            raise UsageError(f"all {self.max_sequences} places are taken; end a sequence, or raise max_sequences")
        self._places[sequence] = free[0]
        self._params[sequence] = params
        sequence.sampling = params
        self.sampler.configure(params, free[0])

    def end(self, sequence: SequenceState) -> None:
        """Takes the place back; the sequence keeps its tokens and pages. Without a place nothing happens."""
        for of_sequences in (self._places, self._params, self._last, self._allowed):
            of_sequences.pop(sequence, None)
        self._ready.discard(sequence)
        if self._alone is sequence:
            self._alone = None

    def forget_all(self) -> None:
        """Ends all sequences and forgets their texts: what follows is computed as with a new batch."""
        for sequence in [*self._places]:
            self.end(sequence)
        self.cache.forget_all()

    def step(
        self,
        decode: Sequence[SequenceState] = (),
        chunks: Sequence[PromptChunk] = (),
        before_sampling: BeforeSampling | None = None,
    ) -> Callable[[], list[int]]:
        """Extends sequences together: a row of each of `decode`, which takes what it sampled last, and chunks of the
        prompts of others, max_rows rows at most. The function returned waits for the ids of what was sampled: of
        `decode`, then of the last chunks, in their order. An id of vocab_size says that the logits had no number.

        Raises ContextLengthError for a sequence that is full, UsageError for too many rows or an id that is not in the
        vocabulary, OutOfDeviceMemoryError where the cache has too few pages: then no row was computed.
        """
        if not chunks:
            return self.decode(decode, before_sampling) if decode else list
        for chunk in chunks:
            self.model.check_tokens(chunk.sequence, chunk.token_ids)
        if self._ragged is None:
            return self._step_in_turn(decode, chunks, before_sampling)
        if (n := len(decode) + sum(len(chunk.token_ids) for chunk in chunks)) > self.max_rows:
            raise UsageError(f"a step of {n} rows; expected at most {self.max_rows} (max_rows of make_batch)")
        self._check_room(decode)
        for sequence in decode:
            self.cache.prepare(self.step_state, sequence, 1, self._places[sequence])
        for chunk in chunks:
            self.cache.prepare(self._ragged.step, chunk.sequence, len(chunk.token_ids), self._places[chunk.sequence])
        for sequence in decode:
            self._enter(sequence)
        runs = [Run(self._places[sequence], sequence.position) for sequence in decode]
        wanted, sampled = [*range(len(decode))], [*decode]
        n_rows = len(decode)
        for chunk in chunks:
            sequence, place = chunk.sequence, self._places[chunk.sequence]
            runs.append(Run(place, sequence.position, chunk.token_ids))
            n_rows += len(chunk.token_ids)
            if chunk.is_last:
                wanted.append(n_rows - 1)
                sampled.append(sequence)
                self.step_state.write_pages(sequence.pages, place)
                self.step_state.write_sequence(place, sequence.position + len(chunk.token_ids) - 1, sequence.n_sampled)
        if sampled:
            self._begin_step(sampled)
        self._ragged.run(self.model, runs, wanted)
        for chunk in chunks:
            chunk.sequence.token_ids.extend(chunk.token_ids)
            if chunk.is_last:
                self._remember(chunk.sequence)
                self._ready.add(chunk.sequence)
        self._hand_over(before_sampling)
        if sampled:
            return self._sample(sampled)
        self.model.device.flush()
        return list

    def _step_in_turn(
        self, decode: Sequence[SequenceState], chunks: Sequence[PromptChunk], before_sampling: BeforeSampling | None
    ) -> Callable[[], list[int]]:
        """The same in launches apart, for layers that keep a state of each sequence."""
        waits = [self.decode(decode, before_sampling)] if decode else []
        for chunk in chunks:
            sequence, self._alone = chunk.sequence, None
            self.model.step.write_place(self._places[sequence])
            if not chunk.is_last:
                self.model.extend(sequence, chunk.token_ids)
                continue
            self.model.prefill(sequence, chunk.token_ids)
            self._hand_over(before_sampling)
            self.step_state.write_sequence(self._places[sequence], sequence.position - 1, sequence.n_sampled)
            self._remember(sequence)
            self._begin_step([sequence])
            waits.append(self._sample([sequence]))
            self._ready.add(sequence)
        return lambda: [token for wait in waits for token in wait()]

    def read(self, prompts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[int]]:
        """Whole prompts, what is left of each, in as few steps as there may be. The function returned waits for the id
        that each samples.
        """
        waits, chunks, room = [], list[PromptChunk](), self.max_rows
        for sequence, token_ids in prompts:
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
        """Binds what `score` needs, if that was not done. Raises OutOfDeviceMemoryError where there is no room."""
        if self._scoring is None:
            self._scoring = Scoring(self.model)

    def score(
        self, sequence: SequenceState, token_ids: Sequence[int], following: Sequence[int], top: int
    ) -> Callable[[], list[LogProb]]:
        """Reads tokens of a prompt in a step of its own; the function returned waits for what `Scoring.score` finds.

        Raises as `step`.
        """
        self.prepare_scores()
        assert self._scoring is not None
        self._alone = None  # the model's own step state is that of this sequence now
        self.model.step.write_place(self._places[sequence])
        return self._scoring.score(sequence, token_ids, following, top)

    def decode(
        self, sequences: Sequence[SequenceState], before_sampling: BeforeSampling | None = None
    ) -> Callable[[], list[int]]:
        """A row of each: takes what it sampled last and samples what follows. The function returned waits for the ids,
        in the order of the sequences; an id of vocab_size says that the logits had no number.

        Raises ContextLengthError for a sequence that is full, OutOfDeviceMemoryError where the cache has too few pages:
        then no row was computed.
        """
        self._check_room(sequences)
        if len(sequences) == 1 and not self.invariant:
            return self._decode_alone(sequences[0], before_sampling)
        for sequence in sequences:
            self.cache.prepare(self.step_state, sequence, 1, self._places[sequence])
            self._enter(sequence)
        for sequence in sequences:
            self.cache.advance(sequence, 1)
        n = len(sequences)
        launches = next(bound.launches for rows, bound in self._decode.items() if n <= rows)
        self._begin_step(sequences)
        self.model.run(launches, n)
        self._hand_over(before_sampling)
        return self._sample(sequences)

    def allow(self, tokens: Mapping[SequenceState, np.ndarray | None]) -> None:
        """Of these sequences the tokens that may come next: see `LogitBias.allow`. None: all may come."""
        self._allowed.update(tokens)
        self.sampler.bias.allow({self._places[sequence]: mask for sequence, mask in tokens.items()})
        if self._alone is not None and self._alone in tokens:
            self.model.sampler.bias.allow({0: tokens[self._alone]})

    def logprobs(self, sequences: Sequence[SequenceState]) -> Callable[[], list[LogProb | None]]:
        """Right after the step that sampled a token of each of these: enqueues the reading of its log-probabilities.

        The function returned waits; None for a sequence whose `SamplingParams.logprobs` is None.
        """
        if sequences[0] is self._alone:
            return self.model.logprobs(sequences[0])
        return self.sampler.logprobs.read(self.n_steps, [self._places[sequence] for sequence in sequences])

    def _ops(self, max_rows: int, act: Activations) -> BatchOps:
        """Of up to max_rows rows, one of each sequence."""
        model, shape = self.model, self.cache.shape
        # Rows are work-groups as well: the more of them, the fewer parts the keys of each are cut into.
        filling = FEW_ROWS[0] if self.invariant else max_rows
        splits = splits_of(model.device, model.config, shape.kv_dtype, filling)
        states, sums = (4 * self.max_sequences * values for values in split_values(model.config, splits))
        part_ml = self.step_state.scratch(f"states of splits, {states} bytes", states)
        part_acc = self.step_state.scratch(f"sums of splits, {sums} bytes", sums)
        act = replace(act, part_ml=part_ml, part_acc=part_acc)
        return BatchOps(
            model.device,
            model.config,
            self.step_state,
            act,
            shape,
            splits,
            model.rotations,
            self.sampler.last_seen,
            max_rows,
            experts_for=FEW_ROWS[0] if self.invariant else max_rows,
        )

    def _bind(self, max_rows: int) -> BoundLaunches:
        model = self.model
        ops = self._ops(max_rows, model.act)
        launches = [*stack(model.weights, model.layers, ops), *head(model.weights, ops, model.act.logits)]
        listed = ListedStep(launches, self.step_state, self.max_context, max_rows)
        return BoundLaunches(model.device, listed, same_bits=self.invariant)

    def _check_room(self, sequences: Sequence[SequenceState]) -> None:
        if any(sequence.position >= self.max_context for sequence in sequences):
            raise ContextLengthError(f"a sequence has {self.max_context} tokens, which is its context; end it")

    def _begin_step(self, sequences: Sequence[SequenceState]) -> None:
        self.n_steps += 1
        self.step_state.write_rows([self._places[sequence] for sequence in sequences], self.n_steps)

    def _sample(self, sequences: Sequence[SequenceState]) -> Callable[[], list[int]]:
        """Chooses the next token of each from the rows of `act.logits`, which are those of the step."""
        launches = self.sampler.launches_for([self._places[sequence] for sequence in sequences])
        self.model.run(launches, len(sequences))
        wait = cache(self.step_state.read_rows(self.n_steps, len(sequences)))  # read once: the ring goes on
        for i, sequence in enumerate(sequences):
            sequence.n_sampled += 1
            self._last[sequence] = lambda i=i: wait()[i]  # type: ignore[misc]
        self.model.device.flush()
        return wait

    def _remember(self, sequence: SequenceState, last: Sequence[int] = ()) -> None:
        """What the penalties need to know. last: the token of the answer that the cache does not hold yet."""
        params, place = self._params[sequence], self._places[sequence]
        if params.repeat_penalty != 1:
            self.sampler.remember(sequence.token_ids, place)
        if params.counts_tokens:
            self.sampler.count(sequence.answer(last), place)

    def _enter(self, sequence: SequenceState) -> None:
        """Brings the place of a sequence that was alone up to date."""
        if sequence in self._ready:
            return
        if self._alone is sequence:
            self._alone = None
        place, last = self._places[sequence], self._last[sequence]()
        self.step_state.write_sequence(place, sequence.position, sequence.n_sampled)
        self.model.device.write(self.step_state.tokens, np.array([last], np.int32), 4 * place)
        self._remember(sequence, [last])
        self._ready.add(sequence)

    def _hand_over(self, before_sampling: BeforeSampling | None) -> None:
        if before_sampling is not None:
            self.model.device.flush()
            before_sampling()

    def _decode_alone(self, sequence: SequenceState, before_sampling: BeforeSampling | None) -> Callable[[], list[int]]:
        """With the kernels for one token, which are the fastest for it, and the model's own step state."""
        model = self.model
        self._leave_others(sequence)
        model.decode(sequence)
        self._hand_over(before_sampling)
        wait = cache(model.sample(sequence))
        self._last[sequence] = wait
        return lambda: [wait()]

    def verify(
        self, sequence: SequenceState, enqueue: Callable[[SequenceState], Callable[[], list[int]]]
    ) -> Callable[[], list[int]]:
        """A step that `enqueue` enqueues, of several rows of a sequence that is alone (models/verification.py).

        The function returned waits for the tokens that were sampled, the last of which is the next input.
        """
        self._leave_others(sequence)
        wait = cache(enqueue(sequence))
        self._last[sequence] = lambda: wait()[-1]
        return wait

    def prepare_drafts(self, progress: Progress | None = None) -> None:
        """Binds what `verify_drafts` needs, if steps with runs of several sequences can be."""
        if self._ragged is not None and not self.invariant:
            self._verification = BatchVerification(self.model, self._ragged.step, self.sampler, self._ops, progress)

    @property
    def max_draft_rows(self) -> int:
        """Rows that a step of `verify_drafts` may have; 0: it is not prepared, or cannot be."""
        return 0 if self._verification is None else self._verification.max_rows

    def verify_drafts(self, drafts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[list[int]]]:
        """A step of several sequences: of each a row that takes what it sampled last, and the rows of its draft, which
        may be empty; max_draft_rows at most. The function returned waits for the tokens of each: those of its draft
        that are accepted, and one more. The caller appends those that the cache now holds to the sequences. Their
        parameters have neither a bias nor log-probabilities.

        Raises OutOfDeviceMemoryError where the cache has too few pages: then no row was computed.
        """
        verification, ragged = self._verification, self._ragged
        assert verification is not None and ragged is not None
        order = sorted(range(len(drafts)), key=lambda i: len(drafts[i][1]) > 0)
        decode = [drafts[i][0] for i in order if not drafts[i][1]]
        self._check_room([sequence for sequence, _ in drafts])
        for sequence, draft in drafts:
            state = ragged.step if draft else self.step_state
            self.cache.prepare(state, sequence, 1 + len(draft), self._places[sequence])
        for sequence, _ in drafts:
            self._enter(sequence)
        if decode:
            self._begin_step(decode)
        wait = verification.verify(
            [
                (self._places[sequence], sequence.position, draft, self._params[sequence])
                for sequence, draft in (drafts[i] for i in order)
            ]
        )

        @cache
        def sampled() -> list[list[int]]:
            tokens: list[list[int]] = [[] for _ in drafts]
            for i, of_text in zip(order, wait(), strict=True):
                tokens[i] = of_text
                drafts[i][0].n_sampled += len(of_text)
            return tokens

        for i, (sequence, _) in enumerate(drafts):
            self._last[sequence] = lambda i=i: sampled()[i][-1]  # type: ignore[misc]
        return sampled

    def _leave_others(self, sequence: SequenceState) -> None:
        """Brings the model's own step state up to date with a sequence that is alone from now on."""
        if self._alone is sequence:
            return
        last, model = self._last[sequence](), self.model
        model.start_sampling(sequence, [last])
        model.sampler.bias.allow({0: self._allowed.get(sequence)})
        model.step.write_tokens([last], sequence.position)
        model.step.write_place(self._places[sequence])
        self._alone = sequence
        self._ready.discard(sequence)
