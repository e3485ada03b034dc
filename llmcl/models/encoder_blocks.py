"""An encoder's blocks on the device, and its embeddings of positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.add_positions import add_positions
from llmcl.ops.bias_gelu import bias_gelu
from llmcl.ops.layer_norm import layer_norm
from llmcl.runtime.device import Buffer, Launch

ONE_TEXT = (1 << 31) - 1  # a value of `second` behind every position


@dataclass(frozen=True)
class EncoderTensors:
    """See `families.encoder.EncoderSettings`."""

    second: Buffer  # int32 [1]: where the second text of a pair begins
    positions: Buffer  # float32 [n_positions, hidden]
    types: Buffer  # float32 [n_types, hidden]
    norm: Buffer  # float32 [hidden]
    bias: Buffer  # float32 [hidden]

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        """Yields the launches from the tokens' embeddings to the first layer's input, in act.x."""
        x, hidden = ops.act.x, ops.config.hidden_size
        yield from add_positions(ops.device, ops.step, x, self.positions, self.types, self.second, hidden)
        yield from layer_norm(ops.device, x, self.norm, self.bias, ops.config.rms_norm_eps)


@dataclass(frozen=True)
class LayerNormWeights(BlockWeights):
    weight: Buffer  # float32 [hidden]
    bias: Buffer  # float32 [hidden]


@dataclass(frozen=True)
class GeluMlpWeights(BlockWeights):
    up: Weight  # [intermediate, hidden]
    down: Weight  # [hidden, intermediate]
    up_bias: Buffer  # float32 [intermediate]
    down_bias: Buffer  # float32 [hidden]


@dataclass(frozen=True)
class LayerNormBlock(BoundBlock):
    keeps = False
    weights: LayerNormWeights

    @property
    def why_separate(self) -> str:
        return "it has a layer norm"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        yield from layer_norm(ops.device, ops.act.x, self.weights.weight, self.weights.bias, ops.config.rms_norm_eps)


@dataclass(frozen=True)
class GeluMlpBlock(BoundBlock):
    keeps = False
    weights: GeluMlpWeights
    tanh: bool

    @property
    def why_separate(self) -> str:
        return "its MLP has no gate"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, ffn = self.weights, ops.act.ffn
        yield from ops.norm_linear(None, weights.up, ffn)
        yield from bias_gelu(ops.device, ffn, weights.up_bias, tanh=self.tanh)
        yield from ops.add_linear(ffn, weights.down, None, weights.down_bias)
