"""Blocks of Cohere's models on the device: attention beside an MLP, and the mean of a layer norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.kernels.common.weight import Weight
from llmcl.models.attention_block import AttentionBlock, AttentionWeights
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.center_rows import center_rows
from llmcl.runtime.device import Launch


@dataclass(frozen=True, kw_only=True)
class ParallelWeights(AttentionWeights):
    gate_up: Weight  # [2 intermediate, hidden], tiles alternate
    down: Weight  # [hidden, intermediate]


@dataclass(frozen=True)
class ParallelBlock(AttentionBlock):
    weights: ParallelWeights

    @property
    def first_product(self) -> None:
        return None

    @property
    def why_separate(self) -> str:
        return "its MLP is beside attention"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        # The MLP's first product reads x before attention's output is added.
        weights, ffn = self.weights, ops.act.ffn
        yield from ops.norm_linear(weights.norm, weights.gate_up, ffn, epilogue="swiglu")
        yield from super().add(ops)
        yield from ops.add_linear(ffn, weights.down, None, None)


@dataclass(frozen=True)
class CenterBlock(BoundBlock):
    keeps = False
    weights: BlockWeights

    @property
    def why_separate(self) -> str:
        return "it has layer norms"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        yield from center_rows(ops.device, ops.act.x, ops.config.hidden_size)
