"""Divides a model's layers among several devices, before anything is loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from llmcl.architectures.config import ModelConfig
from llmcl.engine.prompts import is_list
from llmcl.errors import OutOfDeviceMemoryError, UnsupportedModelError, UsageError, counted, shown
from llmcl.models.kv_cache import kv_bytes_per_position
from llmcl.models.layer_span import LayerSpan, whole_span
from llmcl.models.memory import forecast
from llmcl.models.weights import WeightTypes
from llmcl.runtime.device import Device
from llmcl.runtime.roofline import read_bandwidth

_log = logging.getLogger(__name__)

SPLITS = "auto", "layer", "tensor"
Devices = Device | str | int | Sequence[Device | str | int] | None
HOST = "the host"


@dataclass(frozen=True)
class SplitRequest:
    """On which devices a model runs, and how they divide it: `device`, `split` and `split_shares` of `load`."""

    devices: tuple[Device | str | int | None, ...]
    split: str
    shares: tuple[float, ...] | None

    @classmethod
    def of(cls, device: Devices, split: str | None, shares: Sequence[float] | None) -> SplitRequest:
        """Names separated by commas are several devices. Raises UsageError for values that do not fit together."""
        if isinstance(device, str) and "," in device:
            device = re.split(r"\s*,\s*", device.strip())
        devices = tuple(device) if is_list(device) else (device,)
        n_devices = len(devices)
        if not devices or (n_devices > 1 and any(each is None or each == "" for each in devices)):
            raise UsageError(f"device (--device) is {shown(device)}; expected one device or several, e.g. 0,1")
        if split == "tensor":
            raise UsageError(
                "split (--split) 'tensor', which divides every layer among the devices, is not supported yet; use "
                "'layer'"
            )
        if split is not None and split not in SPLITS:
            raise UsageError(f"split (--split) is {shown(split)}; expected 'auto' or 'layer'")
        if n_devices == 1 and (split == "layer" or shares is not None):
            what = "split_shares (--split-shares)" if shares is not None else "split (--split) 'layer'"
            raise UsageError(f"{what} needs several devices, and there is one; name them, e.g. --device 0,1")
        if shares is None:
            return cls(devices, split or "auto", None)
        if not is_list(shares) or not all(_is_share(share) for share in shares):
            raise UsageError(f"split_shares (--split-shares) is {shown(shares)}; expected numbers above 0, e.g. 3,1")
        if len(shares) != n_devices:
            raise UsageError(
                f"split_shares (--split-shares) has {counted(len(shares), 'share')} for {n_devices} devices; give one "
                "per device"
            )
        if split == "auto":
            raise UsageError("split (--split) 'auto' chooses the shares; leave split_shares out, or use 'layer'")
        return cls(devices, "layer", tuple(map(float, shares)))

    def open(self) -> list[Device]:
        """Opens the devices. A device named twice is opened twice. Raises DeviceError."""
        return [Device.open(device) for device in self.devices]


def _is_share(share: Any) -> bool:
    return isinstance(share, int | float) and not isinstance(share, bool) and 0 < share < float("inf")


@dataclass(frozen=True)
class Stage:
    """Layers on a device, with the forecast of their memory."""

    device: Device
    span: LayerSpan
    needed: dict[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in self.needed.items())
        return f"{self.span} on {self.device.entry.label}: {sum(self.needed.values()) / 2**30:.2f} GiB ({parts})"


@dataclass(frozen=True)
class Splitter:
    """What a model needs on a device, for `divide`. kv_tokens, n_sequences: as in `forecast`."""

    config: ModelConfig
    types: WeightTypes
    kv_dtype: str
    max_context: int
    kv_tokens: int
    n_sequences: int | None

    def stage(self, device: Device, span: LayerSpan) -> Stage:
        sizes = self.kv_dtype, self.max_context, device, self.kv_tokens, self.n_sequences
        needed = forecast(self.config, self.types, *sizes, span)
        if device.allocated_bytes > 0:
            needed["held already"] = device.allocated_bytes
        return Stage(device, span, needed)

    def divide(self, devices: Sequence[Device], request: SplitRequest) -> list[Stage]:
        """Returns the stages in order: as many as devices, or one for the whole model. Logs several devices' choice.

        Raises UsageError or UnsupportedModelError if the model cannot be divided like this, OutOfDeviceMemoryError if
        it does not fit.
        """
        if len(devices) == 1:
            return [self.stage(devices[0], whole_span(self.config))]
        if request.split == "auto":
            best = min(devices, key=lambda device: device.entry.index)
            alone = self.stage(best, whole_span(self.config))
            if not too_large([alone]):
                _log.info("split auto: %s alone, because the model fits: %s", best.entry.label, alone)
                return [alone]
            _log.info("split auto: by layers, because %s alone has too little memory", best.entry.label)
        self._check(len(devices))
        stages = self._by_shares(devices, request.shares) if request.shares else self._by_bandwidth(devices)
        for stage in stages:
            _log.info("%s", stage)
        if full := too_large(stages):
            where, needed, limit = full[0]
            raise OutOfDeviceMemoryError(
                f"the layers on {where} need {needed / 2**30:.2f} GiB, but it has {limit / 2**30:.2f} GiB ("
                f"{'; '.join(map(str, stages))}); use other shares (--split-shares), a smaller --ctx-size, --dtype or "
                "--kv-dtype, or more devices"
            )
        return stages

    def _check(self, n_devices: int) -> None:
        config = self.config
        if n_devices > config.n_layers:
            raise UsageError(
                f"{n_devices} devices for {counted(config.n_layers, 'layer')}; name at most as many devices as layers"
            )
        if config.bidirectional:
            raise UnsupportedModelError("an encoder's layers cannot be on several devices yet; load it on one device")
        if config.keeps_early:
            raise UnsupportedModelError(
                "this model's last layers read the keys of earlier layers, or an embedding per layer, so its layers "
                "cannot be on several devices yet; load it on one device"
            )

    def _by_shares(self, devices: Sequence[Device], shares: Sequence[float]) -> list[Stage]:
        return self._stages(devices, cut(self._layer_bytes(), shares))

    def _by_bandwidth(self, devices: Sequence[Device]) -> list[Stage]:
        """Gives each device as many layers as the speed of its memory allows, then moves layers off full devices."""
        rates = memory_rates(devices)
        for device, rate in zip(devices, rates, strict=True):
            _log.info("%s reads %.0f GB/s", device.entry.label, rate / 1e9)
        head = self.config.top_matrices()
        n_bytes = self._layer_bytes()
        n_bytes[-1] += self.types.n_bytes(head.get("head") or head["embedding"])
        counts = cut(n_bytes, rates)
        stages = self._stages(devices, counts)
        while full := [i for i, stage in enumerate(stages) if _room(stage) < 0 and counts[i] > 1]:
            largest = max(range(len(stages)), key=lambda i: _room(stages[i]))
            if _room(stages[largest]) < max(n_bytes):
                break
            counts[full[0]] -= 1
            counts[largest] += 1
            stages = self._stages(devices, counts)
        return stages

    def _layer_bytes(self) -> list[int]:
        config, n_bytes = self.config, []
        for i, blocks in enumerate(config.layers):
            plans = [plan.of_layer(i) for block in blocks for plan in block.matrices(config).values()]
            keys = kv_bytes_per_position(config, self.kv_dtype, LayerSpan(i, i + 1, config.n_layers))
            n_bytes.append(sum(map(self.types.n_bytes, plans)) + keys * self.kv_tokens)
        return n_bytes

    def _stages(self, devices: Sequence[Device], counts: Sequence[int]) -> list[Stage]:
        ends = [0, *accumulate(counts)]
        spans = [LayerSpan(first, end, self.config.n_layers) for first, end in pairwise(ends)]
        return [self.stage(device, span) for device, span in zip(devices, spans, strict=True)]


def memory_rates(devices: Sequence[Device]) -> list[float]:
    """Measures the memory speed of each device in bytes per second. Equal devices have equal speeds."""
    kinds = [(device.entry.label, device.entry.driver_version) for device in devices]
    rate_of = {kind: read_bandwidth(device) for kind, device in dict(zip(kinds, devices, strict=True)).items()}
    return [rate_of[kind] for kind in kinds]


def cut(n_bytes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Returns how many consecutive layers each device gets, so that their bytes are as near to the shares as possible.
    Each device gets a layer or more.
    """
    totals, counts, first = [0, *accumulate(n_bytes)], [], 0
    for i, part in enumerate([*accumulate(shares)][:-1], 1):
        wanted = part / sum(shares) * totals[-1]
        ends = range(first + 1, len(n_bytes) - len(shares) + i + 1)
        end = min(ends, key=lambda end: abs(totals[end] - wanted))
        counts.append(end - first)
        first = end
    return [*counts, len(n_bytes) - first]


def _room(stage: Stage) -> int:
    return stage.device.memory_bytes - sum(stage.needed.values())


@dataclass(frozen=True)
class Memory:
    """What a model needs in one memory. CPU devices share the host's, and a device opened several times has one."""

    where: str
    needs: int  # bytes
    limit: int  # bytes
    is_measured: bool  # whether the limit was measured just now, and so leaves out what other programs hold


def memories(stages: Sequence[Stage]) -> list[Memory]:
    """Returns the memories of all stages."""
    by_place: dict[str, Memory] = {}
    for stage in stages:
        entry, needs, limit = stage.device.entry, sum(stage.needed.values()), stage.device.memory_bytes
        where = HOST if entry.kind == "cpu" else f"device {entry.index}, {entry.label}"
        if (before := by_place.get(where)) is not None:
            needs, limit = needs + before.needs, min(limit, before.limit)
        by_place[where] = Memory(where, needs, limit, entry.host_available_bytes is not None)
    return [*by_place.values()]


def too_large(stages: Sequence[Stage]) -> list[tuple[str, int, int]]:
    """Returns (where, bytes needed, bytes there are) for each memory that is too small."""
    return [(each.where, each.needs, each.limit) for each in memories(stages) if each.needs > each.limit]
