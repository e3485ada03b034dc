"""What the kernels of latent attention share on every device class: shapes, and what an implementation says."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.linear import Size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Cost, CostModel, Device

MAX_ROPE = 256  # rotated numbers of a head, which a work-item holds


@dataclass(frozen=True)
class LatentShape:
    """Query heads that share rows of a latent of `rank` numbers and a rotated key of `rope` numbers.

    cache: of the rows; one KV head, whose head_dim is rank + rope. query: numbers of a query head before it is
    multiplied into the space of the latents, of which the last `rope` rotate. interleaved: rotary pairs are stored next
    to each other, otherwise half of rope apart.
    """

    cache: AttentionShape
    rank: int
    query: int
    interleaved: bool = True

    @property
    def n_heads(self) -> int:
        return self.cache.n_q_heads

    @property
    def width(self) -> int:
        return self.cache.head_dim

    @property
    def rope(self) -> int:
        return self.width - self.rank

    def constants(self, step: StepState) -> dict[str, object]:
        """Build constants of a kernel with the argument `state` of `step`."""
        return {**self.cache.constants(step), "RANK": self.rank, "QUERY": self.query, "ROPE": self.rope}

    def cost(self) -> CostModel:
        """Of attention: each row is read once for all heads."""

        def cost(n: int, position: int) -> Cost:
            pairs = n * position + n * (n + 1) // 2
            rows = self.cache.row_bytes * (position + n)
            return Cost(
                rows + 8.0 * n * self.n_heads * self.width, 2.0 * self.n_heads * (self.width + self.rank) * pairs
            )

        return cost


class LatentAttention(Implementation):
    """The query heads of each token of a step against the rows of its sequence."""

    @abstractmethod
    def size(self, device: Device, shape: LatentShape) -> tuple[Mapping[str, object], int]:
        """Build constants of its own, HEADS among them, which a work-group takes together; work-items of a group."""


class LinearHeads(Implementation):
    """The product of each head's numbers with the matrix of that head."""

    @abstractmethod
    def size(self, device: Device, weight: Weight, part: WeightPart) -> Size:
        """Build constants of its own, TOKENS among them, work-groups, and work-items of a group."""
