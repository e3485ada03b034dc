"""A norm of the residual stream on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class NormalizeWeights(BlockWeights):
    ones: Buffer  # float32 [hidden]


@dataclass(frozen=True)
class NormalizeBlock(BoundBlock):
    keeps = False
    weights: NormalizeWeights

    @property
    def why_separate(self) -> str:
        return "its embeddings are normalised"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        yield from rms_norm(ops.device, ops.act.x, self.weights.ones, ops.act.x, ops.config.stream_eps)
