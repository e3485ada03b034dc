"""Blocks that keep a state of fixed size of each sequence, in place of keys and values of every token."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from llmcl.models.families.blocks import Block, MatrixPlan, Shapes, Sizes


@dataclass(frozen=True)
class RecurrentBlock(Block):
    """A block whose later tokens need a state, which each token changes."""

    @abstractmethod
    def states(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """The arrays of a sequence's state, float32, by the names that the block on the device knows."""

    @abstractmethod
    def activations(self, sizes: Sizes) -> dict[str, int]:
        """Values of a token, float32, by field of `layer_ops.Activations`."""


@dataclass(frozen=True)
class ShortConvSettings:
    """What a checkpoint says of a short convolution. length: inputs that a token sees, itself included."""

    length: int = 3


@dataclass(frozen=True)
class ShortConv(RecurrentBlock):
    """out_proj(c conv(b x)) with b, c, x = in_proj(.): a causal convolution of each channel over few tokens."""

    norm: str | None = "input_layernorm"
    settings: ShortConvSettings = ShortConvSettings()

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden = sizes.hidden_size
        return {
            "projection": MatrixPlan("conv in", hidden, ("conv.in_proj.weight",), (3 * hidden,)),
            "output": MatrixPlan("conv out", hidden, ("conv.out_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        conv = {"conv.conv.weight": (sizes.hidden_size, self.settings.length)}
        return super().vectors(sizes) | {"conv": conv}

    def states(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.settings.length - 1, sizes.hidden_size)}

    def activations(self, sizes: Sizes) -> dict[str, int]:
        return {"mixer_in": 3 * sizes.hidden_size, "mixed": sizes.hidden_size}


RecurrentSettings = ShortConvSettings
"""Of the layers of a family that have no attention."""
