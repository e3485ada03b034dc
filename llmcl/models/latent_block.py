"""Latent attention on the device: queries enter the latent space, and weighted sums of latents become values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.architectures.families.latent import LatentSettings
from llmcl.kernels.common.latent import LatentShape
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.add_bias import add_bias
from llmcl.ops.latent_attention import latent_append, latent_attention
from llmcl.ops.linear_heads import linear_heads
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class LatentWeights(BlockWeights):
    queries: Weight  # [n_heads query, query_rank or hidden]
    latents: Weight  # [rank + rope, hidden]
    keys: Weight  # per head, the transposed key matrix
    values: Weight  # [n_heads value, rank]
    output: Weight  # [hidden, n_heads value]
    latent_norm: Buffer  # float32 [rank]
    query_norm: Buffer | None = None  # float32 [query_rank]
    query_down: Weight | None = None  # [query_rank, hidden]
    query_bias: Buffer | None = None  # float32 [query_rank]
    latent_bias: Buffer | None = None  # float32 [rank + rope]
    output_bias: Buffer | None = None  # float32 [hidden]


@dataclass(frozen=True)
class LatentBlock(BoundBlock):
    """cache: the layer's rows (kernels/common/latent_row.cl). mods: rules beside the causal mask."""

    keeps = True
    weights: LatentWeights
    settings: LatentSettings
    cache: Buffer
    mods: Mods

    @property
    def why_separate(self) -> str | None:
        return "its attention has latents in place of keys and values"

    def kept(self, ops: LayerOps) -> tuple[Buffer, int]:
        return ops.act.of("head_rows"), ops.config.n_q_heads * self.settings.query

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, device, eps = self.weights, ops.act, ops.device, ops.config.rms_norm_eps
        queries, latents, shape = act.of("head_rows"), act.of("latents"), self._shape(ops)
        x, norm, launches = ops.normed_rows(weights.norm)
        yield from launches
        if weights.query_down is None or weights.query_norm is None:
            yield from ops.product(x, norm, weights.queries, queries)
        else:
            low = act.of("query_latents")
            yield from ops.product(x, norm, weights.query_down, low)
            if weights.query_bias is not None:
                yield from add_bias(device, low, weights.query_bias)
            yield from rms_norm(device, low, weights.query_norm, low, eps)
            yield from ops.linear(low, weights.queries, queries)
        yield from ops.product(x, norm, weights.latents, latents)
        if weights.latent_bias is not None:
            yield from add_bias(device, latents, weights.latent_bias)
        operands = latents, weights.latent_norm, queries, act.rope, ops.step, self.cache
        yield from latent_append(device, shape, *operands, eps=eps)

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, device, step, shape = self.weights, ops.act, ops.device, ops.step, self._shape(ops)
        rows, heads = act.of("head_rows"), shape.n_heads
        attention = ops.attention
        n_splits = attention.n_splits if attention.each_alone else 1  # many tokens fill the device without splits
        yield from linear_heads(device, weights.keys, rows, act.qkv, step, n_heads=heads, x_stride=shape.query)
        operands = act.qkv, rows, step, self.cache, act.part_ml, act.part_acc, act.attended
        yield from latent_attention(device, shape, *operands, n_splits=n_splits, mods=self.mods)
        yield from linear_heads(device, weights.values, act.attended, rows, step, n_heads=heads, x_stride=shape.rank)
        yield from ops.add_linear(rows, weights.output, weights.post_norm, weights.output_bias)

    def _shape(self, ops: LayerOps) -> LatentShape:
        settings = self.settings
        return LatentShape(ops.attention.shape, settings.rank, settings.query, settings.interleaved)
