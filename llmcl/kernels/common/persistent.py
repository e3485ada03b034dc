"""Persistent kernels: descriptions of decode steps that run as a whole, or with all layers, in one kernel."""

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
    """A layer's replacement for attention, with a state of fixed size (llmcl/reference/recurrent.py).

    buffers (float32): conv [length, channels] and conv_states [length - 1, channels]. A delta net adds scalars [2,
    n_v], gated_norm [d_v] and matrix_states [n_v, d_k, d_v]. Both kinds of states have several slots.
    """

    kind: str  # "delta_net" (a gated delta net) or "short_conv"
    sizes: Mapping[str, object]  # build constants, equal in all layers
    buffers: Mapping[str, Buffer]
    token_bytes: int  # bytes read and written per token


@dataclass(frozen=True)
class DecodeLayer:
    """Weights and cache of a layer: attention or another mixer, then a gated MLP or experts with a router.

    vectors (float32), only the names present in the layer: attention_norm, mlp_norm, attention_post_norm,
    mlp_post_norm, output_bias, down_bias [hidden], bias [rows of qkv], gate_up_bias [2, ffn], head_norms [2, head_dim],
    q_norm [n_q_heads head_dim], k_norm [n_kv_heads head_dim], router_bias [n_experts], sinks [n_q_heads]. With experts,
    gate_up_bias is [n_experts, 2, size] and down_bias is [n_experts, hidden].
    """

    qkv: Weight  # in a recurrent layer, the rows that the mixer mixes
    output: Weight
    gate_up: Weight
    down: Weight
    vectors: Mapping[str, Buffer]
    gate: str  # a key of `linear.EXPERT_GATES`
    router: Weight | None = None
    renormalize: bool = True  # see `families.blocks.ExpertSettings`
    k: Buffer | None = None  # attention only, like v, rope and mods
    v: Buffer | None = None
    rope: Buffer | None = None  # float32 [head_dim]
    mods: Mods | None = None
    attention_gate: Weight | None = None  # rows whose sigmoids scale attention's output
    mixer: RecurrentMixer | None = None

    @property
    def products(self) -> tuple[Weight, ...]:
        others = (weight for weight in (self.attention_gate, self.router) if weight is not None)
        return self.qkv, self.output, self.gate_up, self.down, *others

    @property
    def first_rows(self) -> int:
        """Returns the total rows of the products at the layer's beginning, with x as input."""
        return self.qkv.rows + (0 if self.attention_gate is None else self.attention_gate.rows)

    @property
    def n_experts(self) -> int:
        """Returns the number of experts, or 0 for an MLP."""
        return 0 if self.router is None else self.gate_up.n_experts

    @property
    def ffn(self) -> int:
        """Returns the intermediate size: the gated MLP's, or the total over the chosen experts."""
        return self.down.k * self.down.top_k

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        return self.n_experts, self.down.k, self.down.top_k, self.renormalize


@dataclass(frozen=True)
class DecodeLayers:
    """Consecutive layers of a decode step. They read and write x, float32 [hidden]."""

    layers: Sequence[DecodeLayer]
    shape: AttentionShape
    step: StepState
    hidden: int  # size of the residual stream
    eps: float  # for norms of x
    norm_eps: float  # for all other norms
    n_splits: int  # KV splits per head
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
    """Persistent layers."""

    launches: list[Launch]
    intermediates: Mapping[str, Buffer] = field(default_factory=dict)  # replace separate launches' buffers


class PersistentLayers(Implementation):
    """Runs consecutive layers of a decode step in a single kernel. Separate launches are the twin."""

    @abstractmethod
    def unsupported_reason(self, device: Device, step: DecodeLayers) -> str | None:
        """Returns why the device can't run the layers in a single kernel, or None."""

    @abstractmethod
    def bind(self, device: Device, step: DecodeLayers) -> BoundLayers:
        """Binds the layers. `unsupported_reason` must have returned None."""


class BoundStep(Protocol):
    """Launches that replace a longer list. Keeps all buffers in use alive.

    whole_steps: by step count, a launch for several steps in a row. Each step is the list plus `ListedStep.then`.
    """

    parts: list[Launch]
    whole_steps: Mapping[int, Launch]


@dataclass
class BoundChains:
    """A step's launches, with one launch per chain."""

    parts: list[Launch]
    whole_steps: Mapping[int, Launch] = field(default_factory=dict)


@dataclass(frozen=True)
class ListedStep:
    """Any list of launches that forms a step, for example all decode launches before sampling."""

    launches: Sequence[Launch]
    state: StepState
    max_position: int  # largest position of a step
    max_rows: int = 1  # maximum tokens per step, as held in `state`
    then: Sequence[Launch] = ()  # launches that may end the step and prepare the next input, like sampling


class PersistentStep(Implementation):
    """Replaces a step's launches by fewer launches. The list is the twin."""

    few_rows = False  # True: for few-row steps, with another order of sums; False: for any step, with equal bits

    @abstractmethod
    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        """Returns why the device can't fuse the launches, or None."""

    @abstractmethod
    def bind(self, device: Device, step: ListedStep) -> BoundStep:
        """Binds the launches. `unsupported_reason` must have returned None."""
