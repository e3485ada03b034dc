"""Slots: the records on the device of the sequences in a batch, and what a record is ready for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llmcl.errors import UsageError
from llmcl.kernels.common.step_state import StepState
from llmcl.models.image_rows import on_device
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.ops.sample import Sampler, SamplingParams


class Slots:
    """Gives sequences slots. A sequence decodes with its slot's record, or alone with the model's own step state; the
    last sampled token stays on the device as the next input.
    """

    def __init__(self, model: Model, step: StepState, sampler: Sampler):
        self._model = model
        self._step = step
        self._sampler = sampler
        self._slots: dict[SequenceState, int] = {}
        self._last: dict[SequenceState, Callable[[], int]] = {}  # waits for the last sampled token
        self._allowed: dict[SequenceState, np.ndarray | None] = {}
        self._ready: set[SequenceState] = set()  # sequences whose slot is ready for the next row
        self.alone: SequenceState | None = None  # the sequence that the model's own step state is ready for

    def __getitem__(self, sequence: SequenceState) -> int:
        return self._slots[sequence]

    @property
    def sequences(self) -> list[SequenceState]:
        return [*self._slots]

    def start(self, sequence: SequenceState, params: SamplingParams) -> None:
        """Gives a sequence a slot. Raises UsageError if all slots are taken."""
        n = self._step.n_sequences
        free = sorted({*range(n)} - {*self._slots.values()})
        if not free:
            raise UsageError(f"all {n} places are taken; end a sequence, or raise max_sequences")
        self._slots[sequence] = free[0]
        sequence.sampling = params
        self._sampler.configure(params, free[0], sequence.mu)

    def end(self, sequence: SequenceState) -> None:
        """Frees the sequence's slot, if any."""
        self._save_mu(sequence)
        for of_sequences in (self._slots, self._last, self._allowed):
            of_sequences.pop(sequence, None)
        self._ready.discard(sequence)
        if self.alone is sequence:
            self.alone = None

    def end_alone(self) -> None:
        """Gives up the model's own step state, which another sequence takes over."""
        self._save_mu(self.alone)
        self.alone = None

    def _save_mu(self, sequence: SequenceState | None) -> None:
        """Reads mirostat's state before another sequence or sampler takes the slot."""
        if sequence is None or sequence not in self._slots or not sequence.sampling.mirostat:
            return
        if sequence is self.alone:
            sequence.mu = self._model.sampler.read_mu()
        elif sequence in self._ready:
            sequence.mu = self._sampler.read_mu(self._slots[sequence])

    def sampled(self, sequence: SequenceState, last: Callable[[], int]) -> None:
        """Records the function that waits for the last sampled token."""
        self._last[sequence] = last

    def has_read(self, sequence: SequenceState, last: Sequence[int] = ()) -> None:
        """Records that the slot is ready, and gives the penalties their history. last: the answer's newest token, not
        yet in the cache.
        """
        params, slot = sequence.sampling, self._slots[sequence]
        if params.repeat_penalty != 1:
            self._sampler.remember(on_device(sequence.token_ids, sequence.images, 0), slot)
        if params.counts_tokens:
            self._sampler.count(sequence.answer(last), slot)
        if params.repels:
            self._sampler.dry.remember(on_device(sequence.token_ids, sequence.images, 0), slot)
        self._ready.add(sequence)

    def enter(self, sequence: SequenceState) -> None:
        """Updates a sequence's slot after decoding alone."""
        if sequence in self._ready:
            return
        self._save_mu(sequence)
        if self.alone is sequence:
            self.alone = None
        slot, last = self._slots[sequence], self._last[sequence]()
        if sequence.mu is not None:
            self._sampler.write_mu(sequence.mu, slot)
        self._step.write_sequence(slot, sequence.position, sequence.n_sampled)
        self._model.device.write(self._step.tokens, np.array([last], np.int32), 4 * slot)
        self.has_read(sequence, [last])

    def leave(self, sequence: SequenceState) -> None:
        """Updates the model's own step state for a sequence that runs alone from now on."""
        if self.alone is sequence:
            return
        self._save_mu(self.alone)
        self._save_mu(sequence)
        last, model = self._last[sequence](), self._model
        model.start_sampling(sequence, [last])
        model.sampler.bias.allow({0: self._allowed.get(sequence)})
        model.step.write_tokens([last], sequence.position)
        model.step.write_place(self._slots[sequence])
        self.alone = sequence
        self._ready.discard(sequence)

    def allow(self, tokens: Mapping[SequenceState, np.ndarray | None]) -> None:
        """Restricts the next token of each sequence to a mask (see `LogitBias.allow`). None removes the restriction."""
        self._allowed.update(tokens)
        self._sampler.bias.allow({self._slots[sequence]: mask for sequence, mask in tokens.items()})
        if self.alone is not None and self.alone in tokens:
            self._model.sampler.bias.allow({0: tokens[self.alone]})
