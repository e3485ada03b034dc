"""Base class for blocks on the device: weights, and launches in two stages.

`keep` stores the data for later tokens in the cache. `add` computes the block and adds the output to the residual
stream x. `add` may read activations that `keep` filled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from llmcl.kernels.common.weight import Weight
from llmcl.models.layer_ops import LayerOps
from llmcl.runtime.device import Buffer, Launch

# Epilogue of the gate-and-up product, by activation.
GATES = {"silu": "swiglu", "gelu_tanh": "geglu", "clamped_swiglu": "clamped_swiglu", "relu2": "relu2"}


@dataclass(frozen=True)
class BlockWeights:
    """Weights every block has. Both norms are float32 [hidden], or None if absent."""

    norm: Buffer | None
    post_norm: Buffer | None

    @property
    def matrices(self) -> list[Weight]:
        return [value for value in vars(self).values() if isinstance(value, Weight)]


class BoundBlock(ABC):
    """A block with weights, and with buffers in the cache if needed."""

    keeps: ClassVar[bool]  # whether later tokens need data from the current ones
    weights: BlockWeights

    @property
    def first_product(self) -> Weight | None:
        """Returns the only product that reads the norm's output. None if there is no norm or several readers."""
        return None

    @property
    def why_separate(self) -> str | None:
        """Names the feature that excludes the block from kernels for all layers. None: no such feature."""
        return None

    def kept(self, ops: LayerOps) -> tuple[Buffer, int]:
        """Returns the rows from `keep` for `add`, and the values per row. Only for blocks with `keeps`."""
        raise NotImplementedError

    def keep(self, ops: LayerOps) -> Iterator[Launch]:
        yield from ()

    @abstractmethod
    def add(self, ops: LayerOps) -> Iterator[Launch]: ...
