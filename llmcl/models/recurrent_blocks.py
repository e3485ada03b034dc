"""Recurrent blocks on the device: projections, and launches that combine a step's rows with a state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Block
from llmcl.architectures.families.latent import LatentAttention
from llmcl.architectures.families.recurrent import (
    DeltaNet,
    DeltaSettings,
    Mamba,
    MambaSettings,
    ShortConv,
    ShortConvSettings,
)
from llmcl.kernels.common.persistent import RecurrentMixer
from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.add_bias import add_bias
from llmcl.ops.delta_net import DeltaBuffers, delta_net
from llmcl.ops.delta_shape import DeltaShape, MambaShape
from llmcl.ops.mamba import MambaBuffers, mamba_mixer
from llmcl.ops.short_conv import short_conv
from llmcl.runtime.device import Buffer, Launch


def checked_ops(config: ModelConfig) -> list[str]:
    """Returns the ops with one variant that `llmcl doctor` checks and that only some models need."""
    ops: dict[type[Block], str] = {ShortConv: "short_conv", DeltaNet: "delta_rule", Mamba: "mamba_inputs"}
    ops[LatentAttention] = "latent_append"
    kinds = {type(block) for layer in config.layers for block in layer}
    return [op for kind, op in ops.items() if kind in kinds]


@dataclass(frozen=True)
class MixerWeights(BlockWeights):
    projection: Weight
    output: Weight
    projection_bias: Buffer | None  # float32 [rows of the projection]
    output_bias: Buffer | None  # float32 [hidden]


@dataclass(frozen=True)
class MixerBlock(BoundBlock):
    """A projection, a mixer that combines the rows with a state, and an output projection.

    states: float32 [slots, ...] by the names in the declared block's `states`.
    """

    keeps = True
    weights: MixerWeights
    states: Mapping[str, Buffer]

    @property
    def first_product(self) -> Weight:
        return self.weights.projection

    @property
    def mixer(self) -> RecurrentMixer:
        """Describes the mixer between the projections, for kernels that run whole layers."""
        raise NotImplementedError

    @property
    def why_separate(self) -> str | None:
        return None if self.weights.projection_bias is None else "its projections have biases"

    def project(self, ops: LayerOps) -> Iterator[Launch]:
        """Fills act.mixer_in with the projection of the normalised rows."""
        weights, rows = self.weights, ops.act.of("mixer_in")
        yield from ops.norm_linear(weights.norm, weights.projection, rows)
        if weights.projection_bias is not None:
            yield from add_bias(ops.device, rows, weights.projection_bias)

    def kept(self, ops: LayerOps) -> tuple[Buffer, int]:
        return ops.act.of("mixed"), self.weights.output.k

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights = self.weights
        yield from ops.add_linear(ops.act.of("mixed"), weights.output, weights.post_norm, weights.output_bias)


@dataclass(frozen=True)
class ShortConvWeights(MixerWeights):
    """projection [3 hidden, hidden], output [hidden, hidden]."""

    conv: Buffer  # float32 [length, hidden], oldest input first; with a bias, it is one more row


@dataclass(frozen=True)
class ShortConvBlock(MixerBlock):
    weights: ShortConvWeights
    settings: ShortConvSettings

    @property
    def mixer(self) -> RecurrentMixer:
        channels, length = self.weights.output.k, self.settings.length
        buffers = {"conv": self.weights.conv, "conv_states": self.states["conv"]}
        sizes = {"CHANNELS": channels, "LENGTH": length}
        return RecurrentMixer("short_conv", sizes, buffers, 4 * channels * (3 * length + 2))

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act = self.weights, ops.act
        yield from self.project(ops)
        yield from short_conv(
            ops.device,
            act.of("mixer_in"),
            weights.conv,
            ops.step,
            self.states["conv"],
            act.of("mixed"),
            channels=weights.output.k,
            length=self.settings.length,
            bias=self.settings.bias,
            each_alone=ops.attention.each_alone,
        )


@dataclass(frozen=True)
class DeltaNetWeights(MixerWeights):
    """projection [channels + n_v d_v + 2 n_v, hidden], output [hidden, n_v d_v]."""

    conv: Buffer  # float32 [length, channels], oldest input first
    scalars: Buffer  # float32 [2, n_v]: A, then the decay bias
    gated_norm: Buffer  # float32 [d_v]


def delta_shape(of: DeltaSettings) -> DeltaShape:
    return DeltaShape(of.n_k, of.n_v, of.d_k, of.d_v, of.length, of.in_turn)


@dataclass(frozen=True)
class DeltaNetBlock(MixerBlock):
    weights: DeltaNetWeights
    settings: DeltaSettings

    @property
    def mixer(self) -> RecurrentMixer:
        weights, shape = self.weights, delta_shape(self.settings)
        buffers = {"conv": weights.conv, "scalars": weights.scalars, "gated_norm": weights.gated_norm}
        buffers |= {"conv_states": self.states["conv"], "matrix_states": self.states["matrix"]}
        sizes = {**shape.constants, "LENGTH": shape.length, "HEADS_IN_TURN": shape.heads_in_turn}
        return RecurrentMixer("delta_net", sizes, buffers, shape.token_bytes)

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, step = self.weights, ops.act, ops.step
        rows, qkv, gates, mixed = (act.of(name) for name in ("mixer_in", "mixer_qkv", "mixer_gates", "mixed"))
        yield from self.project(ops)
        layer_buffers = weights.conv, weights.scalars, weights.gated_norm, self.states["conv"], self.states["matrix"]
        buffers = DeltaBuffers(*layer_buffers, rows, qkv, gates, mixed)
        shape, eps = delta_shape(self.settings), ops.config.rms_norm_eps
        yield from delta_net(ops.device, shape, buffers, step, eps=eps, each_alone=ops.attention.each_alone)


@dataclass(frozen=True)
class MambaWeights(MixerWeights):
    """projection [channels + inner + n_heads, hidden], output [hidden, inner]."""

    conv: Buffer  # float32 [length, channels], oldest input first; with a bias, it is one more row
    scalars: Buffer  # float32 [3, n_heads]: A, the bias of the time steps, D
    gated_norm: Buffer  # float32 [inner]


def mamba_shape(settings: MambaSettings) -> MambaShape:
    sizes = settings.n_heads, settings.d_head, settings.n_groups, settings.d_state, settings.length
    return MambaShape(*sizes, settings.conv_bias, settings.least_step, settings.most_step)


@dataclass(frozen=True)
class MambaBlock(MixerBlock):
    weights: MambaWeights
    settings: MambaSettings

    @property
    def why_separate(self) -> str:
        return "it is a Mamba-2 mixer"

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, shape = self.weights, ops.act, mamba_shape(self.settings)
        yield from self.project(ops)
        layer_buffers = weights.conv, weights.scalars, weights.gated_norm, self.states["conv"], self.states["matrix"]
        rows, xbc, gates, mixed = (act.of(name) for name in ("mixer_in", "mixer_qkv", "mixer_gates", "mixed"))
        buffers = MambaBuffers(*layer_buffers, rows, xbc, gates, mixed)
        eps, each_alone = ops.config.rms_norm_eps, ops.attention.each_alone
        yield from mamba_mixer(ops.device, shape, buffers, ops.step, eps=eps, each_alone=each_alone)
