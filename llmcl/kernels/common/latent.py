"""Shared parts of latent attention kernels on every device class: shapes, and the interface of implementations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Implementation, Size
from llmcl.runtime.device import Cost, CostModel, Device

MAX_ROPE = 256  # rotated values per head, held by a work-item


@dataclass(frozen=True)
class LatentShape:
    """Query heads that share cache rows: a latent of `rank` values and a rotated key of `rope` values."""

    cache: AttentionShape  # the cached rows: one KV head with head_dim = rank + rope
    rank: int
    query: int  # values of a query head before the product into latent space; the last `rope` values rotate
    interleaved: bool = True  # rotary pairs are neighbours, otherwise half of rope apart

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
        """Returns the build constants for kernels with `step`'s state as an argument."""
        return {**self.cache.constants(step), "RANK": self.rank, "QUERY": self.query, "ROPE": self.rope}

    def cost(self) -> CostModel:
        """Returns the cost of attention. Each row is read once for all heads."""

        def cost(n: int, position: int) -> Cost:
            pairs = n * position + n * (n + 1) // 2
            rows = self.cache.row_bytes * (position + n)
            return Cost(
                rows + 8.0 * n * self.n_heads * self.width, 2.0 * self.n_heads * (self.width + self.rank) * pairs
            )

        return cost


class LatentAttentionKernel(Implementation):
    """Attends each token's query heads to the cached rows of the token's sequence."""

    @abstractmethod
    def size(self, device: Device, shape: LatentShape) -> tuple[Mapping[str, object], int]:
        """Returns the kernel's own build constants (with HEADS per work-group), and the work-items per group."""


class LinearHeads(Implementation):
    """Multiplies each head's values by the head's own matrix."""

    @abstractmethod
    def size(self, device: Device, weight: Weight, part: WeightPart) -> Size:
        """Returns the kernel's own build constants (with TOKENS), the work-groups, and the work-items per group."""
