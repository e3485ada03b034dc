"""The launches of a batch's steps that hold texts with adapters, bound at first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llmcl.kernels.common.step_state import StepState
from llmcl.models.adapted_model import Scales, check_bound
from llmcl.models.adapted_ops import adapted_prefill
from llmcl.models.adapters import DeviceAdapters
from llmcl.models.batch_launches import BatchLaunches
from llmcl.models.model import Model
from llmcl.models.ragged_launches import RaggedLaunches, bind_ragged
from llmcl.models.sequence import SequenceState
from llmcl.models.slots import Slots
from llmcl.runtime.device import Buffer


class BatchAdapters:
    """plain: the launches without adapters, for steps without and with prompts. last_seen: see `Sampler`."""

    def __init__(
        self,
        model: Model,
        step: StepState,
        slots: Slots,
        last_seen: Buffer,
        plain: tuple[BatchLaunches, RaggedLaunches | None],
        *,
        invariant: bool,
    ):
        self._model, self._step, self._slots, self._last_seen = model, step, slots, last_seen
        self._plain = self._launches = plain
        self._invariant = invariant
        self._bound: DeviceAdapters | None = None
        self._scales: Scales | None = None

    def launches(self, sequences: Sequence[SequenceState]) -> tuple[BatchLaunches, RaggedLaunches | None]:
        """Returns the launches for a step with these sequences, without and with prompts."""
        on_device = self._model.adapters.on_device
        if on_device is None or not any(sequence.adapters for sequence in sequences):
            return self._plain
        if self._bound is not on_device:
            self._bind(on_device)
        assert self._scales is not None
        for sequence in sequences:
            self._scales.write(sequence, self._slots[sequence])
        return self._launches

    def _bind(self, on_device: DeviceAdapters) -> None:
        model, (_, plain) = self._model, self._plain
        self._scales = scales = Scales(model.device, on_device, self._step.n_sequences)
        adapt = partial(adapted_prefill, adapters=on_device, scales=scales.buffer)
        decoding = BatchLaunches(model, self._step, self._last_seen, invariant=self._invariant, adapt=adapt)
        ragged = None
        if plain is not None:
            ragged = bind_ragged(model, plain.max_rows, decoding.ops, step=plain.step, adapt=adapt)
        check_bound(on_device)
        self._launches, self._bound = (decoding, ragged), on_device
