"""What every block on the device has: weights, and launches of two kinds.

`keep` leaves in the cache what later tokens need of these tokens. `add` computes the block and adds its output to the
residual stream x; it may need what `keep` left in the activations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from llmcl.kernels.common.weight import Weight
from llmcl.models.layer_ops import LayerOps
from llmcl.runtime.device import Buffer, Launch

# By activation the epilogue of the product with gate and up.
GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "clamped_swiglu": "clamped_swiglu"}


@dataclass(frozen=True)
class BlockWeights:
    """norm, post_norm: float32 [hidden]; None: the block has none."""

    norm: Buffer | None
    post_norm: Buffer | None

    @property
    def matrices(self) -> list[Weight]:
        return [value for value in vars(self).values() if isinstance(value, Weight)]


class BoundBlock(ABC):
    """A block with its weights, and with its part of the cache if it has one."""

    keeps: ClassVar[bool]  # whether later tokens need something of these
    weights: BlockWeights

    @property
    def first_product(self) -> Weight | None:
        """The one product that takes what its norm leaves; None: there is no norm, or others take that, too."""
        return None

    @property
    def why_separate(self) -> str | None:
        """What it has that kernels which run all layers do not know; None: nothing."""
        return None

    def kept(self, ops: LayerOps) -> tuple[Buffer, int]:
        """Of a block that keeps: the rows that `keep` leaves for `add`, and the values of each."""
        raise NotImplementedError

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        yield from ()

    @abstractmethod
    def add(self, ops: LayerOps) -> Iterator[Launch]: ...
