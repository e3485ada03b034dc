"""An MLP without a gate on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.squared_relu import squared_relu
from llmcl.ops.xielu import xielu
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class PlainMlpWeights(BlockWeights):
    up: Weight  # [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    curve: Buffer | None  # float32 [4], see `ops.xielu`; None: max(x, 0)^2


@dataclass(frozen=True)
class PlainMlpBlock(BoundBlock):
    keeps = False
    weights: PlainMlpWeights

    @property
    def first_product(self) -> Weight:
        return self.weights.up

    @property
    def why_separate(self) -> str:
        return "its MLP has no gate"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, ffn = self.weights, ops.act.ffn
        yield from ops.norm_linear(weights.norm, weights.up, ffn)
        if weights.curve is None:
            yield from squared_relu(ops.device, ffn, weights.up.rows)
        else:
            yield from xielu(ops.device, ffn, weights.curve, weights.up.rows)
        yield from ops.add_linear(ffn, weights.down, weights.post_norm, None)
