"""Blocks and settings of encoders: models of the BERT kind, whose tokens see the whole text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmcl.architectures.families.blocks import Block, MatrixPlan, Shapes, Sizes

POSITIONS, TYPES, EMBEDDING_NORM = "model.embed_positions.weight", "model.embed_types.weight", "model.embed_norm"
# A cross-encoder's head, as in `RankingHead`.
RANKING = "model.pooler.dense.weight", "model.pooler.dense.bias", "classifier.weight", "classifier.bias"


@dataclass(frozen=True)
class EncoderSettings:
    """Learned embeddings that are added to the tokens' embeddings, before a layer norm."""

    n_positions: int
    n_types: int  # token types: of one text, or of the two texts of a pair
    ranks: bool = False  # a cross-encoder, with a head that scores a pair

    def tensors(self, hidden: int) -> Mapping[str, tuple[int, ...]]:
        """Returns name and shape of the tensors beside the layers and the tokens' embeddings."""
        norm = {f"{EMBEDDING_NORM}.{part}": (hidden,) for part in ("weight", "bias")}
        shapes = {POSITIONS: (self.n_positions, hidden), TYPES: (self.n_types, hidden), **norm}
        ranking = zip(RANKING, ((hidden, hidden), (hidden,), (1, hidden), (1,)), strict=True)
        return shapes | (dict(ranking) if self.ranks else {})


@dataclass(frozen=True)
class LayerNorm(Block):
    """Normalises the residual stream itself, after another block was added. module: of its weight and bias."""

    norm: str | None = None
    module: str = "norm"

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        return {}

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        hidden = (sizes.hidden_size,)
        parts: dict[str, Shapes] = {part: {f"{self.module}.{part}": hidden} for part in ("weight", "bias")}
        return super().vectors(sizes) | parts


@dataclass(frozen=True)
class GeluMlp(Block):
    """down(gelu(up(x))), both with a bias. tanh: gelu's tanh approximation."""

    norm: str | None = None
    tanh: bool = False

    def rows(self, sizes: Sizes) -> int:
        return sizes.intermediate_size

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, ffn = sizes.hidden_size, sizes.intermediate_size
        return {
            "up": MatrixPlan("up", hidden, ("mlp.up_proj.weight",), (ffn,)),
            "down": MatrixPlan("down", ffn, ("mlp.down_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        rows = {"up": sizes.intermediate_size, "down": sizes.hidden_size}
        biases: dict[str, Shapes] = {f"{name}_bias": {f"mlp.{name}_proj.bias": (n,)} for name, n in rows.items()}
        return super().vectors(sizes) | biases
