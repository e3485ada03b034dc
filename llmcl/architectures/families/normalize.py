"""A block that normalises the residual stream itself."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.families.blocks import Block, MatrixPlan, Shapes, Sizes

WEIGHTS = "embedding_norm.weight"


@dataclass(frozen=True)
class Normalize(Block):
    """x = rms_norm(x): in the first layer, of embeddings. Checkpoints have no weights for it: they are ones."""

    norm: str | None = None

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        return {}

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        return super().vectors(sizes) | {"ones": {WEIGHTS: (sizes.hidden_size,)}}
