"""Persistent kernels: what a device class needs to know of a decode step to run it, or its layers, in one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmcl.kernels.common.attention import AttentionShape, Mods
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Buffer, Device, Launch


@dataclass(frozen=True)
class DecodeLayer:
    """Weights and cache of a layer.

    gate: "swiglu" or "geglu". is_plain: it is nothing but norm, QKV, attention, output, norm, gate and up, down.
    """

    attention_norm: Buffer | None
    qkv: Weight
    output: Weight
    mlp_norm: Buffer | None
    gate_up: Weight
    down: Weight
    k: Buffer
    v: Buffer
    mods: Mods
    gate: str
    is_plain: bool

    @property
    def products(self) -> tuple[Weight, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class DecodeLayers:
    """All layers of a decode step, from x float32 [hidden] to x.

    hidden, ffn: sizes of the residual stream and of the gated MLP; n_splits: KV splits of a head; rope float32
    [head_dim].
    """

    layers: Sequence[DecodeLayer]
    shape: AttentionShape
    step: StepState
    hidden: int
    ffn: int
    eps: float
    n_splits: int
    x: Buffer
    rope: Buffer


@dataclass(frozen=True)
class BoundLayers:
    """Persistent layers. intermediates: buffers by name that stand in for those of separate launches."""

    launches: list[Launch]
    intermediates: Mapping[str, Buffer] = field(default_factory=dict)


class PersistentLayers(Implementation):
    """All layers of a decode step in one kernel; the separate launches are its twin."""

    @abstractmethod
    def unsupported_reason(self, device: Device, step: DecodeLayers) -> str | None:
        """What keeps this device from running these layers in one kernel; None: nothing."""

    @abstractmethod
    def bind(self, device: Device, step: DecodeLayers) -> BoundLayers:
        """`unsupported_reason` must have said None."""


class BoundStep(Protocol):
    """Launches that do what a longer list does; it keeps alive what they use."""

    parts: list[Launch]


@dataclass(frozen=True)
class ListedStep:
    """Any list of launches that together are a step, such as all of decode before sampling.

    max_rows: tokens of a step at most, as `state` has them. max_position: the largest of a step.
    """

    launches: Sequence[Launch]
    state: StepState
    max_position: int
    max_rows: int = 1


class PersistentStep(Implementation):
    """A step's launches as few; the list is its twin."""

    @abstractmethod
    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        """What keeps these launches from being few on this device; None: nothing."""

    @abstractmethod
    def bind(self, device: Device, step: ListedStep) -> BoundStep:
        """`unsupported_reason` must have said None."""
