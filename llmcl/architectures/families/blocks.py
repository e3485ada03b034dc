"""Blocks are the parts from which families build layers.

A block adds to the residual stream: x += output(norm(x)). Each block class lists checkpoint tensors and the matrix
layout on the device. `llmcl/models/blocks.py` computes blocks, and `llmcl/reference/model.py` is the twin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import numpy as np

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2", "xielu"]
# How a router scores experts when it does not use plain logits: a sigmoid per expert, or a softmax over all experts.
Scoring = Literal["sigmoid", "softmax"]
# Rotary frequencies: the model's main ones, separate ones for windowed layers, or none.
Rotation = Literal["main", "local", "none"]
Shapes = Mapping[str, tuple[int, ...]]


class Sizes(Protocol):
    """The model sizes that blocks need, implemented by `ModelConfig`."""

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
    """Attention heads of a layer."""

    n_kv: int  # key heads, and as many value heads
    size: int  # dimensions per head, query heads included


@dataclass(frozen=True)
class RowRuns:
    """Selects tensor rows: in each group with `period` rows, the `run` rows from `first` on."""

    period: int
    first: int
    run: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns the tensor row numbers of selected rows start..stop-1."""
        at = np.arange(start, stop)
        rows: np.ndarray = at // self.run * self.period + self.first + at % self.run
        return rows


def row_runs(*sizes: int) -> tuple[RowRuns, ...]:
    """Returns the row selections for a tensor with repeating parts: sizes[0] rows for part 0, sizes[1] rows for part 1,
    and so on.
    """
    return tuple(RowRuns(sum(sizes), sum(sizes[:i]), size) for i, size in enumerate(sizes))


@dataclass(frozen=True)
class MatrixPlan:
    """One weight [rows, k] and the source tensors, stacked or alternating tile by tile."""

    name: str
    k: int
    tensors: tuple[str, ...]
    tensor_rows: tuple[int, ...]  # rows per tensor; a repeated name takes the next rows
    alternate: bool = False  # tiles of tensors 1 and 2 alternate, then of 3 and 4, and so on
    n_rotated: int = 0  # the first n_rotated tensors are rotated queries and keys
    n_experts: int = 1  # stacked matrices
    top_k: int = 1  # matrices that a token uses
    # selected rows per tensor, None for the next rows; (): None for all tensors
    row_runs: tuple[RowRuns | None, ...] = ()

    @property
    def rows(self) -> int:
        return sum(self.tensor_rows)

    @property
    def runs_of_tensors(self) -> tuple[RowRuns | None, ...]:
        return self.row_runs or (None,) * len(self.tensors)

    def first_rows(self) -> list[int]:
        """Returns, for each entry, the first row taken from its tensor."""
        first, taken = [], dict.fromkeys(self.tensors, 0)
        for name, n in zip(self.tensors, self.tensor_rows, strict=True):
            first.append(taken[name])
            taken[name] += n
        return first

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor."""
        rows: dict[str, int] = {}
        for name, n, runs in zip(self.tensors, self.tensor_rows, self.runs_of_tensors, strict=True):
            rows[name] = rows.get(name, 0) + n if runs is None else n // runs.run * runs.period
        return {name: (n, self.k) for name, n in rows.items()}

    def of_layer(self, i: int) -> MatrixPlan:
        """Returns the plan with full tensor names for layer i."""
        tensors = tuple(layer_name(i, name) for name in self.tensors)
        return replace(self, name=f"layer {i} {self.name}", tensors=tensors)


def layer_name(i: int, tensor: str) -> str:
    """Returns the full name of a tensor in layer i."""
    return f"model.layers.{i}.{tensor}"


@dataclass(frozen=True)
class Block(ABC):
    """A layer part that adds to the residual stream."""

    norm: str | None  # module of the RMS norm before the block; None: no norm
    post_norm: str | None = None  # module of the RMS norm after the block; None: no norm

    @abstractmethod
    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        """Returns the weights by their names in `llmcl/models/blocks.py`. Tensor names lack the layer prefix."""

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        """Returns the float32 norms and biases: per vector the shapes to concatenate, or {} if absent."""
        hidden = (sizes.hidden_size,)
        norms = {"norm": self.norm, "post_norm": self.post_norm}
        return {name: {} if module is None else {f"{module}.weight": hidden} for name, module in norms.items()}

    def tensors(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of every tensor, without the layer prefix."""
        shapes = {name: shape for vector in self.vectors(sizes).values() for name, shape in vector.items()}
        for plan in self.matrices(sizes).values():
            shapes |= plan.shapes()
        return shapes


@dataclass(frozen=True)
class QueryScale:
    """A factor on a query's scores: 1 + beta log(1 + floor((position + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


@dataclass(frozen=True)
class Attention(Block):
    """Causal attention with rotary embeddings over the KV cache."""

    norm: str | None = "input_layernorm"
    fused: bool = False  # queries, keys and values are projected by one tensor
    gated: bool = False  # output times sigmoid of a second projection, whose rows follow the query rows of each head
    gate_module: str | None = None  # the same, with a projection of its own; None: see gated
    bias: bool = False  # bias on the query, key and value projections
    output_bias: bool = False  # bias on the output projection
    head_norms: bool = False  # RMS norm of each query and key head before rotation
    norms_after_rotation: bool = False  # head norms follow the rotation
    row_norms: bool = False  # RMS norm over all query heads together, and over all key heads together
    rotation: Rotation = "main"  # of queries and keys
    window: int | None = None  # tokens visible to a query, itself included; None: all
    chunk: int | None = None  # a query sees the keys of its own chunk of so many tokens; None: all
    soft_cap: float | None = None  # c in c tanh(score / c)
    query_scale: QueryScale | None = None  # applied before the soft cap
    sinks: bool = False  # a logit per query head that only enters the softmax sum
    heads: Heads | None = None  # None: the model's heads
    keys_as_values: bool = False  # values are the key projection before norm and rotation
    value_norms: bool = False  # RMS norm of each value head, without weights
    keys_of: int | None = None  # reads another layer's keys and values; None: has its own

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
        if self.gate_module is not None:
            plans["gate"] = MatrixPlan("attention gate", sizes.hidden_size, (f"{self.gate_module}.weight",), (q,))
        return plans

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        q, kv = self._rows(sizes)
        biases = {f"self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (q, kv, kv), strict=True)}
        normed = "qk" if self.keys_of is None else "q"
        norms = {f"self_attn.{name}_norm.weight": (self.heads_in(sizes).size,) for name in normed}
        rows = {name: {f"self_attn.{name}_norm.weight": (n,)} for name, n in (("q", q), ("k", kv))}
        block_vectors: dict[str, Shapes] = {
            "q_norm": rows["q"] if self.row_norms else {},
            "k_norm": rows["k"] if self.row_norms else {},
            "bias": biases if self.bias else {},
            "head_norms": norms if self.head_norms else {},
            "output_bias": {"self_attn.o_proj.bias": (sizes.hidden_size,)} if self.output_bias else {},
            "sinks": {"self_attn.sinks": (sizes.n_q_heads,)} if self.sinks else {},
        }
        return super().vectors(sizes) | block_vectors

    @property
    def _projections(self) -> str:
        """Returns the projections for queries, keys and values, as letters."""
        return "qkk" if self.keys_as_values else "qkv"

    def _rows(self, sizes: Sizes) -> tuple[int, int]:
        heads = self.heads_in(sizes)
        return sizes.n_q_heads * heads.size, heads.n_kv * heads.size


@dataclass(frozen=True)
class GatedMlp(Block):
    """down(activation(gate(x)) * up(x))."""

    norm: str | None = "post_attention_layernorm"
    activation: Activation = "silu"
    fused: bool = False  # one tensor holds gate and up
    bias: bool = False  # bias on all three projections
    width: int = 1  # multiple of the model's intermediate_size

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
        block_vectors: dict[str, Shapes] = {
            "gate_up_bias": gate_up if self.bias else {},
            "down_bias": {"mlp.down_proj.bias": (sizes.hidden_size,)} if self.bias else {},
        }
        return super().vectors(sizes) | block_vectors


@dataclass(frozen=True)
class LayerInput(Block):
    """x += post_norm(output(activation(gate(x)) * per-layer token embedding)): see `ModelConfig`."""

    norm: str | None = None
    size: int = 16  # size of the per-layer embedding
    activation: Activation = "gelu_tanh"

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        gate, output = "per_layer_input_gate.weight", "per_layer_projection.weight"
        return {
            "gate": MatrixPlan("gate of its input", sizes.hidden_size, (gate,), (self.size,)),
            "output": MatrixPlan("output of its input", self.size, (output,), (sizes.hidden_size,)),
        }


@dataclass(frozen=True)
class Factor(Block):
    """Multiplies x by a layer scalar. tensor: name of the scalar, shape [1]."""

    norm: str | None = None
    tensor: str = "layer_scalar"

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        return {}

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        return super().vectors(sizes) | {"factor": {self.tensor: (1,)}}


@dataclass(frozen=True)
class Scores:
    """A router's choice when it is not by the largest logits (`ops.choose_experts.choose_scored_experts`)."""

    scoring: Scoring = "sigmoid"
    n_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0  # factor on the expert weights
    corrected: bool = True  # a bias per expert is added to the scores for the choice

    @property
    def per_group(self) -> int:
        """Returns how many top experts rank a group."""
        return 2 if self.scoring == "sigmoid" else 1


@dataclass(frozen=True)
class ExpertSettings:
    """Expert settings from a checkpoint."""

    n_experts: int = 1
    top_k: int = 1  # experts per token
    size: int = 16  # rows of an expert's gate
    renormalize: bool = True  # weights of the chosen experts sum to 1; False: weights of all experts do
    shared_size: int = 0  # rows of the shared expert's gate; 0: no shared expert
    scores: Scores | None = None  # None: the largest logits win


@dataclass(frozen=True)
class OwnNorms:
    """The norms in a mixture with a separate norm per part:

        x += post_norm(after_shared(shared expert(norm of `shared`)) + after_chosen(chosen experts(norm)))

    All fields but router are modules.
    """

    router: str  # tensor [hidden] of the router's norm, divided by sqrt(hidden)
    shared: str
    after_shared: str
    after_chosen: str


@dataclass(frozen=True)
class Experts(Block):
    """A mixture of experts: sums weight_e(x) down_e(activation(gate_e(x)) * up_e(x)) over the chosen experts.

    In module names {} stands for the expert's number.
    """

    norm: str | None = "post_attention_layernorm"
    settings: ExpertSettings = ExpertSettings()
    activation: Activation = "silu"
    bias: bool = False  # bias on router and experts
    router: str = "mlp.gate"
    gate: str | None = "mlp.experts.{}.gate_proj"  # None: experts, and the shared one, have no gate
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    shared: str = "mlp.shared_expert"  # module of the shared expert, used by every token
    shared_gate: str | None = None  # module of a scalar gate, whose sigmoid scales the shared expert's output
    own_norms: OwnNorms | None = None  # separate norms per part; None: `norm` for all
    scaled_inputs: bool = False  # a token has one expert, and its score multiplies the expert's input
    scales: str | None = None  # tensor [n_experts] of output factors per expert
    correction: str = "mlp.gate.e_score_correction_bias"  # tensor for `Scores.corrected`

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, settings = sizes.hidden_size, self.settings
        numbers = range(settings.n_experts)
        first = tuple(f"{module.format(i)}.weight" for i in numbers for module in self.first_modules)
        downs = tuple(f"{self.down.format(i)}.weight" for i in numbers)
        several = partial(MatrixPlan, n_experts=settings.n_experts, top_k=settings.top_k)
        plans = {
            "router": MatrixPlan("router", hidden, self._routers(), (settings.n_experts, 1)[: len(self._routers())]),
            "gate_up": several(
                "gate and up of experts", hidden, first, (settings.size,) * len(first), alternate=self.gate is not None
            ),
            "down": several("down of experts", settings.size, downs, (hidden,) * len(downs)),
        }
        if settings.shared_size:
            shared, down = settings.shared_size, f"{self.shared}.down_proj.weight"
            names = ("up",) if self.gate is None else ("gate", "up")
            first = tuple(f"{self.shared}.{name}_proj.weight" for name in names)
            plans["shared_gate_up"] = MatrixPlan(
                "shared gate, up", hidden, first, (shared,) * len(first), alternate=self.gate is not None
            )
            plans["shared_down"] = MatrixPlan("shared down", shared, (down,), (hidden,))
        return plans

    @property
    def first_modules(self) -> tuple[str, ...]:
        """Returns the modules that read an expert's input."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    @property
    def has_shared_gate(self) -> bool:
        return self.shared_gate is not None and self.settings.shared_size > 0

    def _routers(self) -> tuple[str, ...]:
        """Returns the router's tensors. The shared expert's gate is the last row, so a single product computes both."""
        modules = (self.router, self.shared_gate) if self.has_shared_gate else (self.router,)
        return tuple(f"{module}.weight" for module in modules)

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        n, settings = range(self.settings.n_experts if self.bias else 0), self.settings
        block_vectors: dict[str, Shapes] = {
            "router_bias": {f"{self.router}.bias": (settings.n_experts,)} if self.bias else {},
            "gate_up_bias": {f"{module.format(i)}.bias": (settings.size,) for i in n for module in self.first_modules},
            "down_bias": {f"{self.down.format(i)}.bias": (sizes.hidden_size,) for i in n},
            "scales": {} if self.scales is None else {self.scales: (settings.n_experts,)},
            "correction": {self.correction: (settings.n_experts,)}
            if settings.scores and settings.scores.corrected
            else {},
        }
        hidden = (sizes.hidden_size,)
        if (norms := self.own_norms) is not None:
            block_vectors["router_norm"] = {norms.router: hidden}
            block_vectors["shared_norm"] = {f"{norms.shared}.weight": hidden}
            block_vectors["shared_post_norm"] = {f"{norms.after_shared}.weight": hidden}
            block_vectors["chosen_post_norm"] = {f"{norms.after_chosen}.weight": hidden}
        return super().vectors(sizes) | block_vectors


Layer = tuple[Block, ...]
