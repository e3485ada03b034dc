"""What the products of experts share on every device class: operands and their cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from llmcl.kernels.common.dtype import TILE_ROWS, kernel_name
from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Buffer, Cost, CostModel, Device, Groups, Launch

BLOCK_ROWS = 64  # slots of an expert that a work-group multiplies with its rows in prefill, unless it says otherwise
FEW_BLOCK_ROWS = 8  # the same in a step of few tokens

Size = tuple[Mapping[str, object], Groups, tuple[int, ...]]
"""Build constants of an implementation's own, work-groups, and work-items of a group."""


@dataclass(frozen=True)
class ExpertProduct:
    """A product of each token's rows with the experts that it goes to, with one part of their weight.

    tiles_at_once: 2 where the tiles of gate and up alternate, else 1.
    """

    weight: Weight
    part: WeightPart
    tiles_at_once: int

    @property
    def top_k(self) -> int:
        return self.weight.top_k

    @property
    def tiles(self) -> int:
        """Tiles of an expert."""
        return self.weight.rows // self.weight.n_experts // TILE_ROWS

    @property
    def units(self) -> int:
        """What a work-group can compute of an expert by itself: tiles, or pairs of a gate and an up tile."""
        return self.tiles // self.tiles_at_once

    @property
    def slots(self) -> int:
        """Slots that share a row of x: those of a token before a gate."""
        return self.top_k if self.tiles_at_once == 2 else 1

    @property
    def first_expert(self) -> int:
        return self.part.first_tile // self.tiles

    def constants(self) -> dict[str, object]:
        return {
            "WEIGHT": kernel_name(self.part.dtype),
            "K": self.weight.k,
            "N": self.units * TILE_ROWS,
            "N_EXPERTS": self.part.n_tiles // self.tiles,
            "TOP_K": self.top_k,
        }

    def cost(self, values: int) -> CostModel:
        """values: of a token that are read and written. Each chosen expert counts once, and tokens choose different
        ones as far as there are such.
        """
        share = self.part.n_tiles / (self.weight.n_experts * self.tiles)
        flops = 2.0 * self.top_k * self.tiles * TILE_ROWS * self.weight.k * share

        def cost(n: int, position: int) -> Cost:
            chosen = min(1.0, n * self.top_k / self.weight.n_experts)
            return Cost(self.part.buffer.nbytes * chosen + 4 * n * values, flops * n)

        return cost


@dataclass(frozen=True)
class ExpertRows:
    """Rows of slots for experts_prefill in a storage type of its kernel's: [n top_k, k]."""

    buffer: Buffer
    dtype: str


def bias_constants(bias: Buffer | None) -> dict[str, object]:
    """Build constants of a kernel with these biases (kernels/common/expert_bias.cl)."""
    return {} if bias is None else {"BIAS": True}


def block_count(n_tokens: int, n_experts: int, top_k: int, rows: int = BLOCK_ROWS) -> int:
    """Blocks of `rows` slots or fewer that a step can have, at most: see portable/group_by_expert.cl."""
    slots = n_tokens * top_k
    return (slots + (rows - 1) * min(n_experts, slots)) // rows


def most_blocks(max_tokens: int, n_experts: int, top_k: int) -> int:
    """Of any step; in one of few tokens blocks may be as small as a slot."""
    few = min(max_tokens, FEW_ROWS[-1])
    return max(block_count(max_tokens, n_experts, top_k), few * top_k)


class ExpertsGateUp(Implementation):
    """What the chosen experts make of each token: a product with their gate and up tiles, and the gate."""

    @abstractmethod
    def size(self, device: Device, product: ExpertProduct) -> Size: ...


class ExpertsDown(Implementation):
    """The weighted sum of the chosen experts' outputs, added to each token's row."""

    @abstractmethod
    def size(self, device: Device, product: ExpertProduct) -> Size: ...


class ExpertsOfRows(Implementation):
    """A product of a step's tokens, in blocks of those that go to the same expert.

    kernel: its function in the file. block_rows: slots of a block.
    """

    kernel = "experts_prefill"
    block_rows = BLOCK_ROWS

    @abstractmethod
    def size(self, device: Device, product: ExpertProduct) -> Size:
        """Work-groups: for each block of a step those that share an expert's tiles."""

    def kernel_file(self, device: Device, product: ExpertProduct) -> str:
        return self.file

    def pack(
        self, device: Device, product: ExpertProduct, x: Buffer, order: Buffer, blocks: Buffer, step: StepState
    ) -> tuple[Buffer, list[Launch]]:
        """x as the kernel takes it, and the launches that make it so."""
        return x, []

    def rows(self, device: Device, weight: Weight, dtype: str, step: StepState) -> ExpertRows | None:
        """Where a product with `dtype` before it may leave what the product with this weight takes as it is.

        None: float32 is what it takes.
        """
        return None

    def output_dtype(self, dtype: str) -> str:
        """The storage type that it would rather leave outputs of a weight of `dtype` in, for their sum."""
        return "float32"

    def leaves(self, dtype: str) -> bool:
        """Whether it can leave ExpertRows of this type."""
        return False

    def suits_single_slots(self, device: Device, weight: Weight, dtype: str) -> bool:
        """Whether blocks of one slot are no slower than a pair of token and expert after the other."""
        return False

    def scratch(self, device: Device, dtype: str, k: int, exact_activations: bool, n_blocks: int) -> Mapping[str, int]:
        """Bytes of working memory of `pack` by name, equal names shared: for the forecast of memory."""
        return {}


class ExpertsPrefill(ExpertsOfRows):
    """Of many tokens. block_rows: BLOCK_ROWS or more."""


class ExpertsFewRows(ExpertsOfRows):
    """Of a step of at most FEW_ROWS[-1] tokens (kernels/common/linear.py), where a device has a kernel of its own for
    them: blocks are small, and each reads its expert's weights once.
    """

    kernel = "experts_few_rows"
    block_rows = FEW_BLOCK_ROWS

    def in_chains(self, device: Device) -> bool:
        """Whether it is part of a longer launch there where nothing else stands between the norm and the sum of the
        experts: then it is faster than a pair of token and expert after the other for any number of tokens.
        """
        return False
