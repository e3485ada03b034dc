"""The launches of a single text with adapters, bound beside a model's plain launches at first use."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcl.errors import UnsupportedModelError, UsageError
from llmcl.models.adapted_ops import adapted_decode, adapted_prefill
from llmcl.models.adapters import DeviceAdapters
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Device
from llmcl.runtime.staging import send

# What a model binds anew for texts with adapters.
_BOUND = (
    *("decode_ops", "prefill_ops", "persistent_intermediates", "_persistent"),
    *("_prefill", "_last_token", "_head", "_decode", "_all_needed_from", "_all_logits", "_unprepared"),
    "_image_steps",
)


class Scales:
    """The scales of each sequence's adapters on the device: float32 [sequences, adapters]."""

    def __init__(self, device: Device, adapters: DeviceAdapters, n_sequences: int):
        self._device = device
        self._numbers = {adapter: i for i, adapter in enumerate(adapters.adapters)}
        self._written: dict[int, bytes] = {}  # per sequence, what the device holds
        self.buffer = device.zeros(4 * n_sequences * len(self._numbers), "scales of adapters")

    def write(self, sequence: SequenceState, slot: int = 0) -> None:
        """Sets the scales of a sequence. Raises UsageError if the device does not hold one of its adapters."""
        key = sequence.adapters.key
        if self._written.get(slot, b"") == key:
            return
        row = np.zeros(len(self._numbers), np.float32)
        for adapter, scale in sequence.adapters.adapters:
            if adapter not in self._numbers:
                raise UsageError(f"adapter {adapter.name} was unloaded; choose another one")
            row[self._numbers[adapter]] += scale
        self._written.pop(slot, None)  # after an interruption, the device's values are unknown
        send(self._device, self.buffer, row.view(np.int32), 4 * slot * len(row))
        self._written[slot] = key


class ModelAdapters:
    """Switches a model between its plain launches and those with adapters."""

    def __init__(self) -> None:
        self._plain = self._adapted = dict[str, Any]()
        self._bound: DeviceAdapters | None = None
        self._scales: Scales | None = None
        self._is_adapted = False

    def choose(self, model: Any, sequence: SequenceState) -> None:
        """Makes the model's launches those that the sequence needs.

        Raises UsageError if one of its adapters was unloaded.
        """
        if not sequence.adapters:
            if self._is_adapted:
                self._switch(model, adapted=False)
            return
        on_device = model.adapters.on_device
        assert on_device is not None
        if self._bound is not on_device:
            self._bind(model, on_device)
        elif not self._is_adapted:
            self._switch(model, adapted=True)
        assert self._scales is not None
        self._scales.write(sequence)

    def _switch(self, model: Any, *, adapted: bool) -> None:
        now = {name: getattr(model, name) for name in _BOUND}
        if self._is_adapted:
            self._adapted = now
        else:
            self._plain = now
        model.__dict__.update(self._adapted if adapted else self._plain)
        self._is_adapted = adapted

    def _bind(self, model: Any, on_device: DeviceAdapters) -> None:
        if self._is_adapted:
            self._switch(model, adapted=False)
        self._plain = {name: getattr(model, name) for name in _BOUND}
        scales = Scales(model.device, on_device, 1)
        try:
            model.decode_ops = adapted_decode(model.decode_ops, on_device, scales.buffer)
            model.prefill_ops = adapted_prefill(model.prefill_ops, on_device, scales.buffer)
            model._persistent &= model.device.is_cpu  # other persistent kernels do not know adapters
            model._unprepared, model._all_logits = set(), None
            model.bind(prompts=bool(self._plain["_prefill"]))
            check_bound(on_device)
        except BaseException:
            model.__dict__.update(self._plain)
            raise
        self._scales, self._bound, self._is_adapted = scales, on_device, True


def check_bound(on_device: DeviceAdapters) -> None:
    """Raises UnsupportedModelError if a weight has adapters that no launch applies."""
    if missing := on_device.weights.keys() - on_device.bound:
        raise UnsupportedModelError(
            f"an adapter changes the {min(missing)}, which llmcl changes only while it loads BF16, F16 or F32 weights "
            "(llmcl.load(lora=...))"
        )
