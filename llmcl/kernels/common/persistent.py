"""Persistent kernels: what a device class needs to know of a decode step to run it, or its layers, in one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Buffer, Device, Launch


@dataclass(frozen=True)
class RecurrentMixer:
    """What a layer has in place of attention, with a state of fixed size (llmcl/reference/recurrent.py).

    kind: "delta_net", a gated delta net, or "short_conv". sizes: its build constants, which are the same in all layers.
    buffers: float32, conv [length, channels], of a delta net scalars [2, n_v] and gated_norm [d_v]; its states, of
    several slots each: conv_states [length - 1, channels], of a delta net matrix_states [n_v, d_k, d_v]. token_bytes:
    what a token reads and writes of all that.
    """

    kind: str
    sizes: Mapping[str, object]
    buffers: Mapping[str, Buffer]
    token_bytes: int


@dataclass(frozen=True)
class DecodeLayer:
    """Weights and cache of a layer: attention or another mixer, then a gated MLP, or experts: then it has a router.

    qkv: of a recurrent layer the rows that its mixer mixes. attention_gate: rows whose sigmoids are factors of what
    attention gives. k, v, rope, mods: of attention alone.

    vectors: norms and biases, float32, by those of these names that the layer has: attention_norm, mlp_norm,
    attention_post_norm, mlp_post_norm, output_bias, down_bias [hidden], bias [rows of qkv], gate_up_bias [2, ffn],
    head_norms [2, head_dim], q_norm [n_q_heads head_dim], k_norm [n_kv_heads head_dim], router_bias [n_experts], sinks
    [n_q_heads]; of
    experts gate_up_bias [n_experts, 2, size], down_bias [n_experts, hidden]. rope float32 [head_dim].
    gate: one of `linear.EXPERT_GATES`. renormalize: see `families.blocks.ExpertSettings`.
    """

    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    vectors: Mapping[str, Buffer]
    gate: str
    router: Weight | None = None
    renormalize: bool = True
    k: Buffer | None = None
    v: Buffer | None = None
    rope: Buffer | None = None
    mods: Mods | None = None
    attention_gate: Weight | None = None
    mixer: RecurrentMixer | None = None

    @property
    def products(self) -> tuple[Weight, ...]:
        others = (weight for weight in (self.attention_gate, self.router) if weight is not None)
        return self.qkv, self.output, self.gate_up, self.down, *others

    @property
    def first_rows(self) -> int:
        """Rows of all products that take x at the layer's beginning."""
        return self.qkv.rows + (0 if self.attention_gate is None else self.attention_gate.rows)

    @property
    def n_experts(self) -> int:
        """0: it has an MLP."""
        return 0 if self.router is None else self.gate_up.n_experts

    @property
    def ffn(self) -> int:
        """What the gated MLP or the chosen experts together make of a token."""
        return self.down.k * self.down.top_k

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        return self.n_experts, self.down.k, self.down.top_k, self.renormalize


@dataclass(frozen=True)
class DecodeLayers:
    """Neighbouring layers of a decode step, from x float32 [hidden] to x.

    hidden: the size of the residual stream; eps: of the norms of x, norm_eps: of the others;
    n_splits: KV splits of a head.
    """

    layers: Sequence[DecodeLayer]
    shape: AttentionShape
    step: StepState
    hidden: int
    eps: float
    norm_eps: float
    n_splits: int
    x: Buffer

    @property
    def ffn(self) -> int:
        return self.layers[0].ffn

    @property
    def attention_layers(self) -> list[DecodeLayer]:
        return [layer for layer in self.layers if layer.mixer is None]

    @property
    def recurrent_layers(self) -> list[DecodeLayer]:
        return [layer for layer in self.layers if layer.mixer is not None]


@dataclass(frozen=True)
class BoundLayers:
    """Persistent layers. intermediates: buffers by name that stand in for those of separate launches."""

    launches: list[Launch]
    intermediates: Mapping[str, Buffer] = field(default_factory=dict)


class PersistentLayers(Implementation):
    """Neighbouring layers of a decode step in one kernel; the separate launches are its twin."""

    @abstractmethod
    def unsupported_reason(self, device: Device, step: DecodeLayers) -> str | None:
        """What keeps this device from running these layers in one kernel; None: nothing."""

    @abstractmethod
    def bind(self, device: Device, step: DecodeLayers) -> BoundLayers:
        """`unsupported_reason` must have said None."""


class BoundStep(Protocol):
    """Launches that do what a longer list does; it keeps alive what they use.

    whole_steps: by their number one launch for steps in a row, each the list and `ListedStep.then`; {}: there is none.
    """

    parts: list[Launch]
    whole_steps: Mapping[int, Launch]


@dataclass
class BoundChains:
    """A step's launches, of which those in chains are one for each chain."""

    parts: list[Launch]
    whole_steps: Mapping[int, Launch] = field(default_factory=dict)


@dataclass(frozen=True)
class ListedStep:
    """Any list of launches that together are a step, such as all of decode before sampling.

    max_rows: tokens of a step at most, as `state` has them. max_position: the largest of a step. then: what may end the
    step and leaves all that the next one takes, such as the choice of the token.
    """

    launches: Sequence[Launch]
    state: StepState
    max_position: int
    max_rows: int = 1
    then: Sequence[Launch] = ()


class PersistentStep(Implementation):
    """A step's launches as few; the list is its twin. few_rows: it is for steps of few rows, and has other sums than
    the list, in another order; else it is for any step, and the bits are the same. one_row: of those, for steps of one.
    """

    few_rows = False
    one_row = False

    @abstractmethod
    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        """What keeps these launches from being few on this device; None: nothing."""

    @abstractmethod
    def bind(self, device: Device, step: ListedStep) -> BoundStep:
        """`unsupported_reason` must have said None."""
