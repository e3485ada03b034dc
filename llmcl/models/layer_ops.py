"""Layer ops as launches, in two layouts: for one token (decode) and for many tokens (prefill)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Heads, Rotation
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.linear import ActivationOperand, SplitNorm
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.models.activations import Activations, Splits
from llmcl.ops.add_bias import add_bias
from llmcl.ops.attention import (
    attention_decode,
    attention_prefill,
    attention_supports_output,
    decode_supports_output,
    rope_append,
)
from llmcl.ops.biased_gate import biased_gate
from llmcl.ops.embed import embed
from llmcl.ops.experts import (
    block_rows,
    experts_down,
    experts_gate_up,
    experts_prefill,
    experts_sum,
    gated_rows,
    group_by_expert,
    has_few_rows,
    slot_outputs,
    suits_single_slots,
)
from llmcl.ops.last_token import last_row, last_token
from llmcl.ops.layer_inputs import layer_inputs
from llmcl.ops.linear import input_layout, linear_decode, linear_prefill, linear_supports_output, split_norm
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.ops.rms_norm import rms_norm
from llmcl.ops.rope_table import rope_table
from llmcl.ops.sigmoid_gate import sigmoid_gate
from llmcl.runtime.device import Buffer, Device, Launch

Biases = tuple[Buffer | None, Buffer | None]


@dataclass(frozen=True)
class LayerOps(ABC):
    """Builds the launches of each op. shape: the KV cache's. splits: for decode. rotations: see
    `ModelConfig.rotations`. last_seen int32 [vocab]: see `Sampler`.
    """

    device: Device
    config: ModelConfig
    step: StepState
    act: Activations
    shape: AttentionShape
    splits: Splits
    rotations: Mapping[Rotation, Buffer]
    last_seen: Buffer

    @property
    def each_alone(self) -> bool:
        """Returns True if each row in a step belongs to a different sequence, False if rows are consecutive tokens of a
        sequence.
        """
        return True

    def before(self, norm: Buffer | None, weight: Weight | None) -> LayerOps:
        """Returns the ops for a block that is followed by `norm` and the product with `weight`. None: not followed by
        both.
        """
        return self

    def that_keeps_last(self) -> LayerOps:
        """Returns the ops for the last block that writes to the cache."""
        return self

    def of_heads(self, heads: Heads) -> LayerOps:
        """Returns the ops for a layer with `heads`."""
        if heads == self.heads:
            return self
        return replace(self, shape=replace(self.shape, n_kv_heads=heads.n_kv, head_dim=heads.size))

    @property
    def heads(self) -> Heads:
        return Heads(self.shape.n_kv_heads, self.shape.head_dim)

    @property
    def n_splits(self) -> int:
        return self.splits[self.heads]

    def embed(self, table: Weight) -> list[Launch]:
        act, scale = self.act, self.config.stream_scale
        rotations = self.rotations
        rows = embed(self.device, table, self.step, rotations["main"], act.x, act.rope, self.last_seen, scale=scale)
        if act.local_rope is None:
            return rows
        return rows + rope_table(self.device, self.step, rotations["local"], act.local_rope)

    def layer_inputs(self, table: Weight, projection: Weight, norm: Buffer) -> list[Launch]:
        """act.layer_inputs = per-layer embeddings of the step's tokens. act.x holds the token embeddings."""
        inputs, n_layers = self.act.of("layer_inputs"), self.config.n_layers
        # The projection is divided by sqrt(hidden). The norm cancels the factor, except in eps.
        eps = self.config.rms_norm_eps * self.config.hidden_size
        product = self.product(self.act.x, None, projection, inputs)
        return product + layer_inputs(self.device, table, norm, self.step, inputs, n_layers=n_layers, eps=eps)

    @abstractmethod
    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        """out = W rms_norm(x). Without a norm: out = W x."""

    @abstractmethod
    def linear(self, x: ActivationOperand, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]: ...

    @abstractmethod
    def normed_rows(self, norm: Buffer | None) -> tuple[Buffer, Buffer | None, list[Launch]]:
        """Prepares rms_norm(x) for several products. Returns rows, the norm that `product` still has to apply, and
        launches.
        """

    @abstractmethod
    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        """out = W x, with x and norm from `normed_rows`."""

    def chosen_experts(
        self,
        x: Buffer,
        norm: Buffer | None,
        gate_up: Weight,
        down: Weight,
        gate: str,
        to: Buffer,
        biases: Biases = (None, None),
        *,
        is_plain: bool = False,
    ) -> list[Launch]:
        """to += the output of the experts in act.expert_ids for x, token by token. x, norm: from `normed_rows`. biases:
        for gate_up and down. is_plain: nothing runs between router, choice and experts.
        """
        act, device, eps = self.act, self.device, self.config.stream_eps
        assert act.expert_ids is not None and act.expert_rows is not None and act.expert_weights is not None
        return [
            *experts_gate_up(
                device, gate_up, x, act.expert_ids, act.expert_rows, gate=gate, norm=norm, eps=eps, bias=biases[0]
            ),
            *experts_down(device, down, act.expert_rows, act.expert_ids, act.expert_weights, to, bias=biases[1]),
        ]

    def add_linear(
        self, x: ActivationOperand, weight: Weight, post_norm: Buffer | None, bias: Buffer | None
    ) -> list[Launch]:
        """act.x += W x + bias. With a post norm: act.x += rms_norm(W x + bias)."""
        act, target = self.act, self.act.x if post_norm is None else self.act.normed
        launches = self.linear(x, weight, target, epilogue="add" if post_norm is None else "store")
        if bias is not None:
            launches += add_bias(self.device, target, bias)
        if post_norm is not None:
            launches += rms_norm(self.device, target, post_norm, act.x, self.config.rms_norm_eps, add=True)
        return launches

    def biased_gate(self, norm: Buffer | None, weight: Weight, bias: Buffer, gate: str) -> list[Launch]:
        """act.ffn = gate(W_gate rms_norm(x) + b_gate) (W_up rms_norm(x) + b_up)."""
        gate_up = self.act.gate_up
        assert gate_up is not None
        product = self.norm_linear(norm, weight, gate_up)
        return product + biased_gate(self.device, gate_up, bias, self.act.ffn, gate)

    def adjust(self, bias: Buffer | None, head_norms: Buffer | None, *, value_norms: bool) -> list[Launch]:
        """Adds the bias to queries, keys and values, and normalises query and key heads. value_norms: also normalises
        value heads.
        """
        heads = {"n_q_heads": self.shape.n_q_heads, "n_kv_heads": self.shape.n_kv_heads}
        return qkv_adjust(
            self.device,
            self.act.qkv,
            bias,
            head_norms,
            **heads,
            head_dim=self.shape.head_dim,
            eps=self.config.rms_norm_eps,
            value_norms=value_norms,
        )

    def adjust_queries(self, head_norms: Buffer | None) -> list[Launch]:
        """Runs `adjust` on queries alone, where act.qkv is float32 [n, n_q_heads, head_dim]."""
        alone = replace(self, shape=replace(self.shape, n_kv_heads=0))
        return alone.adjust(None, head_norms, value_norms=False)

    def rotate_queries(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        """Rotates queries alone before attention to k and v, which another layer filled."""
        return []

    def norm_rows(self, q_norm: Buffer | None, k_norm: Buffer | None) -> list[Launch]:
        """Normalises all query heads as one row, and all key heads as one row."""
        if q_norm is None or k_norm is None:
            return []
        qkv, eps, size = self.act.qkv, self.config.rms_norm_eps, self.shape.head_dim
        row = (self.shape.n_q_heads + 2 * self.shape.n_kv_heads) * size
        return [
            *rms_norm(self.device, qkv, q_norm, qkv, eps, row=row),
            *rms_norm(self.device, qkv, k_norm, qkv, eps, row=row, first=self.shape.n_q_heads * size),
        ]

    def append(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        """Appends keys and values to the cache before attention."""
        return []

    def collected(self, name: str, columns: int) -> list[Launch]:
        """Collects the rows that need logits, from x and from an activation that the last cached block kept."""
        return []

    @abstractmethod
    def attention(
        self,
        k: Buffer,
        v: Buffer,
        out: ActivationOperand,
        mods: Mods,
        rotation: Rotation,
        sinks: Buffer | None,
        *,
        shared_kv: bool = False,
    ) -> list[Launch]:
        """Attends. shared_kv: only queries are new; another layer wrote the keys and values to the cache."""

    def attend_cache(
        self,
        k: Buffer,
        v: Buffer,
        out: ActivationOperand,
        mods: Mods,
        rotation: Rotation,
        sinks: Buffer | None,
        n_rows: Callable[[], int] | None = None,
        *,
        shared_kv: bool = False,
    ) -> list[Launch]:
        """Rotates, appends and attends one token, or one token for each sequence (n_rows tokens)."""
        act = self.act
        return attention_decode(
            self.device,
            self.shape,
            act.qkv,
            act.rope_of(rotation),
            self.step,
            k,
            v,
            act.part_ml,
            act.part_acc,
            out,
            n_splits=self.n_splits,
            mods=mods,
            n_rows=n_rows,
            sinks=sinks,
            shared_kv=shared_kv,
        )

    def gate_attention(self, norm: Buffer | None, weight: Weight) -> list[Launch]:
        """act.attended *= sigmoid(W rms_norm(x))."""
        act, gate = self.act, self.act.of("attention_gate")
        x, norm, launches = self.normed_rows(norm)
        product = self.product(x, norm, weight, gate)
        return [*launches, *product, *sigmoid_gate(self.device, act.attended, gate, columns=weight.rows)]

    def attended(self, output: Weight) -> ActivationOperand:
        """Returns the output buffer for attention, in the layout that the product with `output` reads."""
        return self.act.attended

    def gated(self, gate_up: Weight, down: Weight) -> ActivationOperand:
        """Returns the output buffer for the gate-and-up product, in the layout that the product with `down` reads."""
        return self.act.ffn


class DecodeOps(LayerOps):
    """Ops for one token: normalisation, rotation and cache append are fused into the kernels that need them."""

    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        assert isinstance(out, Buffer)
        eps = self.config.stream_eps
        return linear_decode(self.device, weight, self.act.x, out, self.step, norm=norm, eps=eps, epilogue=epilogue)

    def normed_rows(self, norm: Buffer | None) -> tuple[Buffer, Buffer | None, list[Launch]]:
        return self.act.x, norm, []

    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        eps = self.config.stream_eps
        return linear_decode(self.device, weight, x, out, self.step, norm=norm, eps=eps, epilogue=epilogue)

    def linear(self, x: ActivationOperand, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]:
        assert isinstance(x, Buffer)
        return linear_decode(self.device, weight, x, out, self.step, epilogue=epilogue)

    def attention(
        self,
        k: Buffer,
        v: Buffer,
        out: ActivationOperand,
        mods: Mods,
        rotation: Rotation,
        sinks: Buffer | None,
        *,
        shared_kv: bool = False,
    ) -> list[Launch]:
        return self.attend_cache(k, v, out, mods, rotation, sinks, shared_kv=shared_kv)


@dataclass(frozen=True)
class PrefillOps(LayerOps):
    """Ops for many tokens: each op is its own kernel. A kernel writes packed rows for the next product if it can.

    max_rows: limit of tokens per step for few-row kernels (see `linear_prefill`). experts_for: the row limit that
    chooses expert kernels; 0 means max_rows. following: the norm and the weight after this block. split: norms begun by
    earlier products, keyed by the norm's identity and max_rows.
    """

    max_rows: int = 0
    experts_for: int = 0
    following: tuple[Buffer, Weight] | None = None
    split: dict[tuple[int, int], SplitNorm] = field(default_factory=dict)

    @property
    def each_alone(self) -> bool:
        return False

    def before(self, norm: Buffer | None, weight: Weight | None) -> LayerOps:
        return self if norm is None or weight is None else replace(self, following=(norm, weight))

    def attended(self, output: Weight) -> ActivationOperand:
        layout = input_layout(self.device, output, self.max_rows)
        if layout is None or not attention_supports_output(self.device, self.shape, layout):
            return self.act.attended
        return layout.packed(self.step, output.k)

    def gated(self, gate_up: Weight, down: Weight) -> ActivationOperand:
        layout = input_layout(self.device, down, self.max_rows)
        if layout is None or not linear_supports_output(self.device, gate_up, layout, self.max_rows):
            return self.act.ffn
        # Even if the product packs its rows itself, as few-row steps may, it uses the same memory.
        return layout.packed(self.step, down.k, "gated" if gate_up.k == down.k else "input")

    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        return linear_prefill(
            self.device,
            weight,
            self.act.x,
            out,
            self.step,
            norm=norm,
            normed=self.act.normed,
            eps=self.config.stream_eps,
            epilogue=epilogue,
            max_rows=self.max_rows,
            ends=self.split.get((id(norm), self.max_rows)),
        )

    def normed_rows(self, norm: Buffer | None) -> tuple[Buffer, Buffer | None, list[Launch]]:
        if norm is None:
            return self.act.x, None, []
        normed = self.act.normed
        return normed, None, rms_norm(self.device, self.act.x, norm, normed, self.config.stream_eps)

    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        return self.linear(x, weight, out, epilogue)

    def chosen_experts(
        self,
        x: Buffer,
        norm: Buffer | None,
        gate_up: Weight,
        down: Weight,
        gate: str,
        to: Buffer,
        biases: Biases = (None, None),
        *,
        is_plain: bool = False,
    ) -> list[Launch]:
        act, device, n_experts, top_k = self.act, self.device, gate_up.n_experts, gate_up.top_k
        most_alone = 0 < (self.experts_for or self.max_rows) * top_k <= n_experts  # most experts get a single slot
        few = all(has_few_rows(device, weight, self.max_rows, in_chains=most_alone) for weight in (gate_up, down)) and (
            not most_alone or (is_plain and self.experts_for in (0, self.max_rows))
        )
        if most_alone and not few and not all(suits_single_slots(device, weight) for weight in (gate_up, down)):
            return super().chosen_experts(x, norm, gate_up, down, gate, to, biases)
        of_slots, most = act.expert_rows, self.max_rows if few else 0
        ids, order, shares = act.expert_ids, act.expert_order, act.expert_weights
        blocks, outputs = act.expert_blocks, act.expert_outputs
        assert norm is None and ids is not None and of_slots is not None
        assert order is not None and blocks is not None and outputs is not None
        sizes = [block_rows(device, weight, most) for weight in (gate_up, down)]
        groupings = [
            group_by_expert(device, ids, order, blocks, self.step, n_experts=n_experts, top_k=top_k, block_rows=size)
            for size in dict.fromkeys(sizes)
        ]
        gated = gated_rows(device, gate_up, down, self.step, most) or of_slots
        summands = slot_outputs(device, down, outputs, most)
        how: dict[str, Any] = {"max_rows": most}
        return [
            *groupings[0],
            *experts_prefill(device, gate_up, x, order, blocks, gated, self.step, gate=gate, bias=biases[0], **how),
            *(launch for grouping in groupings[1:] for launch in grouping),
            *experts_prefill(
                device, down, gated, order, blocks, summands, self.step, weights=shares, bias=biases[1], **how
            ),
            *experts_sum(device, summands, to, top_k=top_k, columns=self.config.hidden_size),
        ]

    def add_linear(
        self, x: ActivationOperand, weight: Weight, post_norm: Buffer | None, bias: Buffer | None
    ) -> list[Launch]:
        if self.following is None or post_norm is not None or bias is not None:
            return super().add_linear(x, weight, post_norm, bias)
        norm, after = self.following
        eps, rows = self.config.stream_eps, self.max_rows
        begins = split_norm(self.device, weight, norm, after, self.step, eps=eps, max_rows=rows)
        if begins is not None:
            self.split[id(norm), rows] = begins
        target, step = self.act.x, self.step
        return linear_prefill(self.device, weight, x, target, step, epilogue="add", max_rows=rows, begins=begins)

    def linear(
        self, x: ActivationOperand, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        return linear_prefill(self.device, weight, x, out, self.step, epilogue=epilogue, max_rows=self.max_rows)

    def attention(
        self,
        k: Buffer,
        v: Buffer,
        out: ActivationOperand,
        mods: Mods,
        rotation: Rotation,
        sinks: Buffer | None,
        *,
        shared_kv: bool = False,
    ) -> list[Launch]:
        how: dict[str, Any] = {"mods": mods, "sinks": sinks, "shared_kv": shared_kv}
        return attention_prefill(self.device, self.shape, self.act.qkv, self.step, k, v, out, **how)

    def rotate_queries(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        alone = replace(self.shape, n_kv_heads=0)  # without KV heads the cache stays unchanged
        return rope_append(self.device, alone, self.act.qkv, self.act.rope_of(rotation), self.step, k, v)

    def append(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        return rope_append(self.device, self.shape, self.act.qkv, self.act.rope_of(rotation), self.step, k, v)

    def last_token(self, kept: Buffer, columns: int) -> list[Launch]:
        """Moves the step's last token to the front of x and kept float32 [n, columns], the inputs of the launches that
        follow.
        """
        act, config = self.act, self.config
        launches: list[Launch] = []
        if config.keeps_early:  # later layers need more than the residual stream
            for rows, size in (
                (act.rope, config.rotated_size("main")),
                (act.local_rope, config.rotated_size("local")),
                (act.layer_inputs, config.n_layers * config.layer_input_size),
            ):
                launches += [] if rows is None else last_row(self.device, self.step, rows, size)
        return launches + last_token(self.device, self.step, act.x, kept, hidden=config.hidden_size, columns=columns)


class BatchOps(PrefillOps):
    """Ops for one row per sequence: products as in prefill, attention as in decode, including rotation and append."""

    @property
    def each_alone(self) -> bool:
        return True

    def attended(self, output: Weight) -> ActivationOperand:
        layout = input_layout(self.device, output, self.max_rows)
        if layout is None or not decode_supports_output(self.device, self.shape, layout):
            return self.act.attended
        return layout.packed(self.step, output.k)

    def append(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        return []

    def rotate_queries(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        return []

    def attention(
        self,
        k: Buffer,
        v: Buffer,
        out: ActivationOperand,
        mods: Mods,
        rotation: Rotation,
        sinks: Buffer | None,
        *,
        shared_kv: bool = False,
    ) -> list[Launch]:
        return self.attend_cache(k, v, out, mods, rotation, sinks, shared_kv=shared_kv)
