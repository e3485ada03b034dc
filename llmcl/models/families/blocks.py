"""Blocks: what a layer can be made of. A family declares the blocks of its layers.

A block adds to the residual stream: x += output(norm(x)). It says which tensors of a checkpoint it is made of, and how
they lie on the device as matrices. `llmcl/models/blocks.py` computes it, and `llmcl/reference/model.py` is the twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import numpy as np

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
# What a router chooses experts by: the logits, or a score of each that is a sigmoid or the softmax of all.
Scoring = Literal["sigmoid", "softmax"]
# Which rotary frequencies: the model's, those of its layers with a window where they have others, none.
Rotation = Literal["main", "local", "none"]
Shapes = Mapping[str, tuple[int, ...]]


class Sizes(Protocol):
    """What blocks need to know of a model: `ModelConfig` has it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def n_q_heads(self) -> int: ...
    @property
    def n_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True)
class Heads:
    """Heads of an attention: how many of keys, and as many of values; the dimensions of each, of queries, too."""

    n_kv: int
    size: int


@dataclass(frozen=True)
class RowRuns:
    """Of each `period` rows of a tensor the `run` from `first` on."""

    period: int
    first: int
    run: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Where in the tensor rows start..stop-1 of these lie."""
        at = np.arange(start, stop)
        rows: np.ndarray = at // self.run * self.period + self.first + at % self.run
        return rows


def row_runs(*sizes: int) -> tuple[RowRuns, ...]:
    """The parts of a tensor whose rows are so many of the first part, so many of the second and so on, and again."""
    return tuple(RowRuns(sum(sizes), sum(sizes[:i]), size) for i, size in enumerate(sizes))


@dataclass(frozen=True)
class MatrixPlan:
    """One weight [rows, k] and the tensors it is made of, one below the other or tile by tile in turn.

    tensor_rows: how many rows of each; of a tensor that is named again, the next ones. alternate: the tiles of the
    first tensor and the second are in turn, then those of the third and the fourth, and so on. n_rotated: the first so
    many tensors are queries and keys, which rotate. n_experts, top_k: matrices below each other, and how many of them a
    token needs. row_runs: of each tensor the rows that there are, None for the next ones; (): None for all.
    """

    name: str
    k: int
    tensors: tuple[str, ...]
    tensor_rows: tuple[int, ...]
    alternate: bool = False
    n_rotated: int = 0
    n_experts: int = 1
    top_k: int = 1
    row_runs: tuple[RowRuns | None, ...] = ()

    @property
    def rows(self) -> int:
        return sum(self.tensor_rows)

    @property
    def runs_of_tensors(self) -> tuple[RowRuns | None, ...]:
        return self.row_runs or (None,) * len(self.tensors)

    def first_rows(self) -> list[int]:
        """The row at which the part of each tensor begins in that tensor."""
        first, taken = [], dict.fromkeys(self.tensors, 0)
        for name, n in zip(self.tensors, self.tensor_rows, strict=True):
            first.append(taken[name])
            taken[name] += n
        return first

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        rows: dict[str, int] = {}
        for name, n, runs in zip(self.tensors, self.tensor_rows, self.runs_of_tensors, strict=True):
            rows[name] = rows.get(name, 0) + n if runs is None else n // runs.run * runs.period
        return {name: (n, self.k) for name, n in rows.items()}

    def of_layer(self, i: int) -> MatrixPlan:
        """The plan with the full names of layer i's tensors."""
        tensors = tuple(layer_name(i, name) for name in self.tensors)
        return replace(self, name=f"layer {i} {self.name}", tensors=tensors)


def layer_name(i: int, tensor: str) -> str:
    """The full name of a tensor of layer i."""
    return f"model.layers.{i}.{tensor}"


@dataclass(frozen=True)
class Block(ABC):
    """norm: the module of the RMS norm before the block. post_norm: that of its output. None: there is none."""

    norm: str | None
    post_norm: str | None = None

    @abstractmethod
    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        """Its weights by the names that `llmcl/models/blocks.py` knows; tensors without the layer's prefix."""

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        """Its norms and biases, float32: the shapes of the tensors that each is joined from, {} for none."""
        hidden = (sizes.hidden_size,)
        norms = {"norm": self.norm, "post_norm": self.post_norm}
        return {name: {} if module is None else {f"{module}.weight": hidden} for name, module in norms.items()}

    def tensors(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor, without the layer's prefix."""
        shapes = {name: shape for vector in self.vectors(sizes).values() for name, shape in vector.items()}
        for plan in self.matrices(sizes).values():
            shapes |= plan.shapes()
        return shapes


@dataclass(frozen=True)
class QueryScale:
    """A factor of a query's scores: 1 + beta log(1 + floor(position / length))."""

    beta: float
    length: int


@dataclass(frozen=True)
class Attention(Block):
    """Causal attention with rotary embeddings over the KV cache.

    fused: queries, keys and values are projected by one tensor. gated: the output is multiplied by the sigmoid of a
    further projection, whose rows of a head follow those of its query. bias: the projections of queries, keys and
    values add one; output_bias: the output projection does. head_norms: an RMS norm of every query and key head before
    the rotation; row_norms: one of all query heads together, and one of all key heads. rotation: of queries and keys.
    window: tokens that a query sees back, itself included; None for all. soft_cap: c in c tanh(score / c). query_scale:
    before the soft cap. sinks: a logit of each query head that counts in the sum of the softmax alone. heads: of its
    own; None: the model's. keys_as_values: values are what the projection of the keys gives, without a norm of the keys
    and without rotation. value_norms: an RMS norm of every value head, without weights. keys_of: the layer whose keys
    and values it reads in place of its own; None: it has its own.
    """

    norm: str | None = "input_layernorm"
    fused: bool = False
    gated: bool = False
    bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    row_norms: bool = False
    rotation: Rotation = "main"
    window: int | None = None
    soft_cap: float | None = None
    query_scale: QueryScale | None = None
    sinks: bool = False
    heads: Heads | None = None
    keys_as_values: bool = False
    value_norms: bool = False
    keys_of: int | None = None

    def heads_in(self, sizes: Sizes) -> Heads:
        return self.heads or Heads(sizes.n_kv_heads, sizes.head_dim)

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        q, kv = self._rows(sizes)
        names = tuple(f"self_attn.{'qkv' if self.fused else name}_proj.weight" for name in self._projections)
        of_query, of_gate = row_runs(self.heads_in(sizes).size, self.heads_in(sizes).size)
        runs: tuple[RowRuns | None, ...] = (of_query, None, None) if self.gated else ()
        if self.keys_as_values:  # the rows of the keys a second time, a small part of a model
            runs = (of_query if self.gated else None, None, RowRuns(kv, 0, kv))
        if self.keys_of is not None:
            return {
                "queries": MatrixPlan("queries", sizes.hidden_size, names[:1], (q,), n_rotated=1),
                "output": MatrixPlan("output", q, ("self_attn.o_proj.weight",), (sizes.hidden_size,)),
            }
        plans = {
            "qkv": MatrixPlan("qkv", sizes.hidden_size, names, (q, kv, kv), n_rotated=2, row_runs=runs),
            "output": MatrixPlan("output", q, ("self_attn.o_proj.weight",), (sizes.hidden_size,)),
        }
        if self.gated:
            plans["gate"] = MatrixPlan("attention gate", sizes.hidden_size, names[:1], (q,), row_runs=(of_gate,))
        return plans

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        q, kv = self._rows(sizes)
        biases = {f"self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (q, kv, kv), strict=True)}
        normed = "qk" if self.keys_of is None else "q"
        norms = {f"self_attn.{name}_norm.weight": (self.heads_in(sizes).size,) for name in normed}
        rows = {name: {f"self_attn.{name}_norm.weight": (n,)} for name, n in (("q", q), ("k", kv))}
        own: dict[str, Shapes] = {
            "q_norm": rows["q"] if self.row_norms else {},
            "k_norm": rows["k"] if self.row_norms else {},
            "bias": biases if self.bias else {},
            "head_norms": norms if self.head_norms else {},
            "output_bias": {"self_attn.o_proj.bias": (sizes.hidden_size,)} if self.output_bias else {},
            "sinks": {"self_attn.sinks": (sizes.n_q_heads,)} if self.sinks else {},
        }
        return super().vectors(sizes) | own

    @property
    def _projections(self) -> str:
        """Of queries, keys and values, by their letters."""
        return "qkk" if self.keys_as_values else "qkv"

    def _rows(self, sizes: Sizes) -> tuple[int, int]:
        heads = self.heads_in(sizes)
        return sizes.n_q_heads * heads.size, heads.n_kv * heads.size


@dataclass(frozen=True)
class GatedMlp(Block):
    """down(activation(gate(x)) * up(x)). fused: one tensor has gate and up. bias: all three projections add one. width:
    how many times as many rows as the model's its gate has.
    """

    norm: str | None = "post_attention_layernorm"
    activation: Activation = "silu"
    fused: bool = False
    bias: bool = False
    width: int = 1

    def rows(self, sizes: Sizes) -> int:
        return self.width * sizes.intermediate_size

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, ffn = sizes.hidden_size, self.rows(sizes)
        gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        if self.fused:
            gate_up = ("mlp.gate_up_proj.weight",) * 2
        return {
            "gate_up": MatrixPlan("gate and up", hidden, gate_up, (ffn, ffn), alternate=True),
            "down": MatrixPlan("down", ffn, ("mlp.down_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        gate_up = {f"mlp.{name}_proj.bias": (self.rows(sizes),) for name in ("gate", "up")}
        own: dict[str, Shapes] = {
            "gate_up_bias": gate_up if self.bias else {},
            "down_bias": {"mlp.down_proj.bias": (sizes.hidden_size,)} if self.bias else {},
        }
        return super().vectors(sizes) | own


@dataclass(frozen=True)
class LayerInput(Block):
    """x += post_norm(output(activation(gate(x)) * what the layer is given of the token)): see `ModelConfig`.

    size: of what it is given.
    """

    norm: str | None = None
    size: int = 16
    activation: Activation = "gelu_tanh"

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        gate, output = "per_layer_input_gate.weight", "per_layer_projection.weight"
        return {
            "gate": MatrixPlan("gate of its input", sizes.hidden_size, (gate,), (self.size,)),
            "output": MatrixPlan("output of its input", self.size, (output,), (sizes.hidden_size,)),
        }


@dataclass(frozen=True)
class Factor(Block):
    """x is multiplied by a number of the layer's. tensor: where it stands, [1]."""

    norm: str | None = None
    tensor: str = "layer_scalar"

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        return {}

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        return super().vectors(sizes) | {"factor": {self.tensor: (1,)}}


@dataclass(frozen=True)
class Scores:
    """How a router chooses experts where it is not by the largest logits (`ops.choose_experts.choose_scored_experts`).

    corrected: a number of each expert is added to its score for the choice. scale: factor of the weights.
    """

    scoring: Scoring = "sigmoid"
    n_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    corrected: bool = True

    @property
    def per_group(self) -> int:
        """How many of its best experts a group counts by."""
        return 2 if self.scoring == "sigmoid" else 1


@dataclass(frozen=True)
class ExpertSettings:
    """What a checkpoint says of the experts of a layer.

    top_k: how many a token goes to. size: rows of an expert's gate. renormalize: the weights of the chosen experts
    add up to 1; otherwise those of all would. shared_size: the same as size of the expert that every token goes to; 0:
    there is none. scores: None: the largest logits are chosen.
    """

    n_experts: int = 1
    top_k: int = 1
    size: int = 16
    renormalize: bool = True
    shared_size: int = 0
    scores: Scores | None = None


@dataclass(frozen=True)
class OwnNorms:
    """Norms of a mixture in which each part has its own:

        x += post_norm(after_shared(shared expert(norm of `shared`)) + after_chosen(chosen experts(norm)))

    router: the tensor [hidden] of a norm before the router, which is divided by sqrt(hidden). The others are modules.
    """

    router: str
    shared: str
    after_shared: str
    after_chosen: str


@dataclass(frozen=True)
class Experts(Block):
    """A mixture of experts: the sum of weight_e(x) down_e(activation(gate_e(x)) * up_e(x)) of those that the router
    chooses.

    router, gate, up, down: their modules, {} for the number of an expert. bias: all of them add one. shared: the module
    of the expert that every token goes to; shared_gate: that of a number for each token, by whose sigmoid the output of
    that expert is multiplied; None: there is none. own_norms: of its parts; None: `norm` is for all. scales: the tensor
    [n_experts] of factors of the experts' outputs; None: there are none. correction: the tensor of `Scores.corrected`.
    """

    norm: str | None = "post_attention_layernorm"
    settings: ExpertSettings = ExpertSettings()
    activation: Activation = "silu"
    bias: bool = False
    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate: str | None = None
    own_norms: OwnNorms | None = None
    scales: str | None = None
    correction: str = "mlp.gate.e_score_correction_bias"

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, of = sizes.hidden_size, self.settings
        numbers = range(of.n_experts)
        pairs = tuple(f"{module.format(i)}.weight" for i in numbers for module in (self.gate, self.up))
        downs = tuple(f"{self.down.format(i)}.weight" for i in numbers)
        several = partial(MatrixPlan, n_experts=of.n_experts, top_k=of.top_k)
        plans = {
            "router": MatrixPlan("router", hidden, self._routers(), (of.n_experts, 1)[: len(self._routers())]),
            "gate_up": several("gate and up of experts", hidden, pairs, (of.size,) * len(pairs), alternate=True),
            "down": several("down of experts", of.size, downs, (hidden,) * len(downs)),
        }
        if of.shared_size:
            gate, up, down = (f"{self.shared}.{name}_proj.weight" for name in ("gate", "up", "down"))
            shared = of.shared_size
            plans["shared_gate_up"] = MatrixPlan("shared gate, up", hidden, (gate, up), (shared,) * 2, alternate=True)
            plans["shared_down"] = MatrixPlan("shared down", shared, (down,), (hidden,))
        return plans

    @property
    def has_shared_gate(self) -> bool:
        return self.shared_gate is not None and self.settings.shared_size > 0

    def _routers(self) -> tuple[str, ...]:
        """The gate of the shared expert is the last row of the router's matrix: one product gives both."""
        modules = (self.router, self.shared_gate) if self.has_shared_gate else (self.router,)
        return tuple(f"{module}.weight" for module in modules)

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        n, of = range(self.settings.n_experts if self.bias else 0), self.settings
        own: dict[str, Shapes] = {
            "router_bias": {f"{self.router}.bias": (of.n_experts,)} if self.bias else {},
            "gate_up_bias": {f"{module.format(i)}.bias": (of.size,) for i in n for module in (self.gate, self.up)},
            "down_bias": {f"{self.down.format(i)}.bias": (sizes.hidden_size,) for i in n},
            "scales": {} if self.scales is None else {self.scales: (of.n_experts,)},
            "correction": {self.correction: (of.n_experts,)} if of.scores and of.scores.corrected else {},
        }
        hidden = (sizes.hidden_size,)
        if (norms := self.own_norms) is not None:
            own["router_norm"] = {norms.router: hidden}
            own["shared_norm"] = {f"{norms.shared}.weight": hidden}
            own["shared_post_norm"] = {f"{norms.after_shared}.weight": hidden}
            own["chosen_post_norm"] = {f"{norms.after_chosen}.weight": hidden}
        return super().vectors(sizes) | own


Layer = tuple[Block, ...]
