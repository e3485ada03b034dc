"""Attention on the device: weights and launches of a block with its own keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.architectures.families.blocks import Heads, Rotation
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.weight import Weight
from llmcl.models.attention_ops import LayerAttention
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class AttentionWeights(BlockWeights):
    qkv: Weight  # [(n_q_heads + 2 n_kv_heads) head_dim, hidden]
    output: Weight  # [hidden, n_q_heads head_dim]
    bias: Buffer | None  # float32 [(n_q_heads + 2 n_kv_heads) head_dim]
    head_norms: Buffer | None  # float32 [2, head_dim]: query heads, key heads
    q_norm: Buffer | None  # float32 [n_q_heads head_dim]
    k_norm: Buffer | None  # float32 [n_kv_heads head_dim]
    output_bias: Buffer | None  # float32 [hidden]
    sinks: Buffer | None  # float32 [n_q_heads]
    gate: Weight | None = None  # [n_q_heads head_dim, hidden]


@dataclass(frozen=True)
class AttentionBlock(BoundBlock):
    """k, v: the layer's keys and values for `heads`, in KV cache layout. mods: rules beside the causal mask. rotation:
    see `families.blocks.Attention`.
    """

    keeps = True
    weights: AttentionWeights
    k: Buffer
    v: Buffer
    mods: Mods
    rotation: Rotation
    heads: Heads
    value_norms: bool = False
    norms_after_rotation: bool = False
    has_post_norm_eps: bool = False  # see `ModelConfig.post_norm_eps`

    @property
    def first_product(self) -> Weight | None:
        return self.weights.qkv if self.weights.gate is None else None

    @property
    def why_separate(self) -> str | None:
        if self.norms_after_rotation:
            return "its heads are normalised after their rotation"
        if self.has_post_norm_eps:
            return "its norms after blocks have an eps of their own"
        return "its values are normalised" if self.value_norms else None

    def kept(self, ops: LayerOps) -> tuple[Buffer, int]:
        return ops.act.qkv, self.weights.qkv.rows

    @property
    def attention(self) -> LayerAttention:
        rotation = "none" if self.norms_after_rotation else self.rotation
        return LayerAttention(self.k, self.v, self.mods, rotation, self.weights.sinks)

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        weights, attention = self.weights, ops.attention.for_heads(self.heads)
        yield from ops.norm_linear(weights.norm, weights.qkv, ops.act.qkv)
        rope = ops.act.rope_of(self.rotation) if self.norms_after_rotation else None
        yield from attention.adjust(weights.bias, weights.head_norms, value_norms=self.value_norms, rope=rope)
        yield from attention.norm_rows(weights.q_norm, weights.k_norm)
        yield from attention.append(self.attention)

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, gate, ops = self.weights, self.weights.gate, ops.for_heads(self.heads)
        attended = ops.attended(weights.output) if gate is None else ops.act.attended
        yield from ops.attention.attend(self.attention, attended)
        if gate is not None:
            yield from ops.gate_attention(weights.norm, gate)
        yield from ops.add_linear(attended, weights.output, weights.post_norm, weights.output_bias)
