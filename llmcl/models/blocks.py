"""Blocks on the device: weights and launches of every block that a family can declare (`bound_block.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families import blocks
from llmcl.architectures.families.encoder import GeluMlp, LayerNorm
from llmcl.architectures.families.latent import LatentAttention
from llmcl.architectures.families.normalize import Normalize
from llmcl.architectures.families.parallel import Center, ParallelAttention
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.architectures.families.recurrent import DeltaNet, Mamba, ShortConv
from llmcl.kernels.common.linear import ActivationOperand
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.weight import Weight
from llmcl.models.attention_block import AttentionBlock, AttentionWeights
from llmcl.models.attention_ops import LayerAttention
from llmcl.models.bound_block import GATES, BlockWeights, BoundBlock
from llmcl.models.encoder_blocks import GeluMlpBlock, GeluMlpWeights, LayerNormBlock, LayerNormWeights
from llmcl.models.expert_block import ExpertsBlock, ExpertsWeights
from llmcl.models.latent_block import LatentBlock, LatentWeights
from llmcl.models.layer_ops import LayerOps
from llmcl.models.normalize_block import NormalizeBlock, NormalizeWeights
from llmcl.models.parallel_block import CenterBlock, ParallelBlock, ParallelWeights
from llmcl.models.plain_mlp import PlainMlpBlock, PlainMlpWeights
from llmcl.models.recurrent_blocks import (
    DeltaNetBlock,
    DeltaNetWeights,
    MambaBlock,
    MambaWeights,
    ShortConvBlock,
    ShortConvWeights,
)
from llmcl.ops.layer_inputs import gate_inputs
from llmcl.ops.scale_rows import scale_rows
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class QueriesWeights(BlockWeights):
    queries: Weight  # [n_q_heads head_dim, hidden]
    output: Weight  # [hidden, n_q_heads head_dim]
    head_norms: Buffer | None  # float32 [head_dim]


@dataclass(frozen=True)
class LayerInputWeights(BlockWeights):
    gate: Weight  # [size, hidden]
    output: Weight  # [hidden, size]


@dataclass(frozen=True)
class FactorWeights(BlockWeights):
    factor: Buffer  # float32 [1]


@dataclass(frozen=True)
class MlpWeights(BlockWeights):
    gate_up: Weight  # [2 intermediate, hidden], tiles alternate
    down: Weight  # [hidden, intermediate]
    gate_up_bias: Buffer | None  # float32 [2, intermediate], gate and up
    down_bias: Buffer | None  # float32 [hidden]


@dataclass(frozen=True)
class QueriesBlock(BoundBlock):
    """Attention to another layer's k and v. The other fields are as in `AttentionBlock`."""

    keeps = False
    weights: QueriesWeights
    k: Buffer
    v: Buffer
    mods: Mods
    rotation: blocks.Rotation
    heads: blocks.Heads

    @property
    def first_product(self) -> Weight:
        return self.weights.queries

    @property
    def why_separate(self) -> str:
        return "it reads keys and values of another layer"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, attention = self.weights, ops.attention.for_heads(self.heads)
        layer = LayerAttention(self.k, self.v, self.mods, self.rotation, shared_kv=True)
        yield from ops.norm_linear(weights.norm, weights.queries, ops.act.qkv)
        yield from attention.adjust_queries(weights.head_norms)
        yield from attention.append(layer)
        yield from attention.attend(layer, ops.act.attended)
        yield from ops.add_linear(ops.act.attended, weights.output, weights.post_norm, None)


@dataclass(frozen=True)
class LayerInputBlock(BoundBlock):
    """gate: "swiglu" or "geglu". layer: index of the layer whose input embedding is used."""

    keeps = False
    weights: LayerInputWeights
    gate: str
    layer: int

    @property
    def why_separate(self) -> str:
        return "it has embeddings of its own"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, size = self.weights, ops.act, self.weights.gate.rows
        gate, inputs = act.of("layer_gate"), act.of("layer_inputs")
        yield from ops.product(act.x, None, weights.gate, gate)
        sizes = {"columns": size, "row": size * ops.config.n_layers, "first": size * self.layer}
        yield from gate_inputs(ops.device, gate, inputs, self.gate, **sizes)
        yield from ops.add_linear(gate, weights.output, weights.post_norm, None)


@dataclass(frozen=True)
class FactorBlock(BoundBlock):
    keeps = False
    weights: FactorWeights

    @property
    def why_separate(self) -> str:
        return "its output has a factor"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        yield from scale_rows(ops.device, ops.act.x, self.weights.factor, ops.config.hidden_size)


@dataclass(frozen=True)
class MlpBlock(BoundBlock):
    """gate: "swiglu" or "geglu"."""

    keeps = False
    weights: MlpWeights
    gate: str

    @property
    def first_product(self) -> Weight:
        return self.weights.gate_up

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights = self.weights
        gated: ActivationOperand
        if weights.gate_up_bias is None:
            gated = ops.gated(weights.gate_up, weights.down)
            yield from ops.norm_linear(weights.norm, weights.gate_up, gated, epilogue=self.gate)
        else:
            gated = ops.act.ffn
            yield from ops.biased_gate(weights.norm, weights.gate_up, weights.gate_up_bias, self.gate)
        yield from ops.add_linear(gated, weights.down, weights.post_norm, weights.down_bias)


def weights_of(block: blocks.Block, **arrays: Weight | Buffer | None) -> BlockWeights:
    """Builds a block's weights from arrays named as in its `matrices` and `vectors`."""
    kind = WEIGHTS[type(block)]
    if isinstance(block, blocks.Attention) and block.keys_of is not None:
        kind = QueriesWeights
        arrays = {name: arrays[name] for name in ("norm", "post_norm", "queries", "output", "head_norms")}
    block_weights: BlockWeights = kind(**arrays)
    return block_weights


WEIGHTS: dict[type[blocks.Block], Any] = {
    blocks.Attention: AttentionWeights,
    LatentAttention: LatentWeights,
    ParallelAttention: ParallelWeights,
    Center: BlockWeights,
    PlainMlp: PlainMlpWeights,
    Normalize: NormalizeWeights,
    blocks.Factor: FactorWeights,
    blocks.LayerInput: LayerInputWeights,
    blocks.GatedMlp: MlpWeights,
    blocks.Experts: ExpertsWeights,
    ShortConv: ShortConvWeights,
    DeltaNet: DeltaNetWeights,
    Mamba: MambaWeights,
    LayerNorm: LayerNormWeights,
    GeluMlp: GeluMlpWeights,
}


def bind_block(
    block: blocks.Block,
    weights: BlockWeights,
    config: ModelConfig,
    layer: int,
    k: Buffer | None,
    v: Buffer | None,
    mods: Mods,
    states: Mapping[str, Buffer],
) -> BoundBlock:
    """Binds a declared block to its weights. layer: index of the block's layer. k, v, mods: for attention (latent
    attention has k only). states: for a recurrent block.
    """
    if isinstance(block, LatentAttention) and isinstance(weights, LatentWeights):
        assert k is not None
        return LatentBlock(weights, block.settings, k, mods)
    if isinstance(block, blocks.Attention):
        heads = block.heads_in(config)
        assert k is not None and v is not None
        if isinstance(weights, QueriesWeights):
            return QueriesBlock(weights, k, v, mods, block.rotation, heads)
        assert isinstance(weights, AttentionWeights)
        if isinstance(weights, ParallelWeights):
            return ParallelBlock(weights, k, v, mods, block.rotation, heads)
        has_eps = config.post_norm_eps is not None
        flags = block.value_norms, block.norms_after_rotation, has_eps
        return AttentionBlock(weights, k, v, mods, block.rotation, heads, *flags)
    if isinstance(block, DeltaNet) and isinstance(weights, DeltaNetWeights):
        return DeltaNetBlock(weights, states, block.settings)
    if isinstance(block, Mamba) and isinstance(weights, MambaWeights):
        return MambaBlock(weights, states, block.settings)
    if isinstance(block, ShortConv) and isinstance(weights, ShortConvWeights):
        return ShortConvBlock(weights, states, block.settings)
    if isinstance(block, blocks.Experts) and isinstance(weights, ExpertsWeights):
        settings = block.settings
        chosen_by = settings.renormalize, block.has_shared_gate, settings.scores, block.scaled_inputs
        return ExpertsBlock(weights, GATES[block.activation], *chosen_by)
    if isinstance(block, PlainMlp) and isinstance(weights, PlainMlpWeights):
        return PlainMlpBlock(weights)
    if isinstance(block, Normalize) and isinstance(weights, NormalizeWeights):
        return NormalizeBlock(weights)
    if isinstance(block, Center):
        return CenterBlock(weights)
    if isinstance(block, blocks.Factor) and isinstance(weights, FactorWeights):
        return FactorBlock(weights)
    if isinstance(block, blocks.LayerInput) and isinstance(weights, LayerInputWeights):
        return LayerInputBlock(weights, GATES[block.activation], layer)
    if isinstance(block, LayerNorm) and isinstance(weights, LayerNormWeights):
        return LayerNormBlock(weights)
    if isinstance(block, GeluMlp) and isinstance(weights, GeluMlpWeights):
        return GeluMlpBlock(weights, block.tanh)
    assert isinstance(block, blocks.GatedMlp) and isinstance(weights, MlpWeights)
    return MlpBlock(weights, GATES[block.activation])
