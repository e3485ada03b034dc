"""Blocks of Cohere's models: attention and MLP beside each other, and layer norms without biases."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.families.blocks import Attention, Block, GatedMlp, MatrixPlan, Sizes

MLP = GatedMlp(None)


@dataclass(frozen=True)
class ParallelAttention(Attention):
    """Attention and a gated MLP that read the same normalised input: x += attention(norm(x)) + mlp(norm(x))."""

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        return super().matrices(sizes) | MLP.matrices(sizes)


@dataclass(frozen=True)
class Center(Block):
    """Subtracts the mean: x -= mean(x).

    A layer norm without a bias is this and an RMS norm. The residual stream itself may lose its mean, because only
    such norms read it.
    """

    norm: str | None = None

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        return {}
