"""Shared parts of expert products on every device class: operands and cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from llmcl.kernels.common.dtype import TILE_ROWS, kernel_name
from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Implementation, Size
from llmcl.runtime.device import Buffer, Cost, CostModel, Device, Launch

BLOCK_ROWS = 64  # slots per block and work-group in prefill, by default
FEW_BLOCK_ROWS = 8  # slots per block in a few-row step


@dataclass(frozen=True)
class ExpertProduct:
    """A product between each token's rows and the token's experts, for a single weight part."""

    weight: Weight
    part: WeightPart
    tiles_at_once: int  # 2 if gate and up tiles alternate, otherwise 1
    is_first: bool = False  # the experts' first product: a token's slots share a row of x

    @property
    def top_k(self) -> int:
        return self.weight.top_k

    @property
    def tiles(self) -> int:
        """Returns the tiles per expert."""
        return self.weight.rows // self.weight.n_experts // TILE_ROWS

    @property
    def units(self) -> int:
        """Returns the units per expert that a work-group can compute alone: tiles, or pairs of gate and up."""
        return self.tiles // self.tiles_at_once

    @property
    def slots(self) -> int:
        """Returns the number of slots per row of x."""
        return self.top_k if self.is_first else 1

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
        """Returns the cost. values: activations read and written per token.

        Each chosen expert counts once. Tokens choose different experts as long as unused experts remain.
        """
        share = self.part.n_tiles / (self.weight.n_experts * self.tiles)
        flops = 2.0 * self.top_k * self.tiles * TILE_ROWS * self.weight.k * share

        def cost(n: int, position: int) -> Cost:
            chosen = min(1.0, n * self.top_k / self.weight.n_experts)
            return Cost(self.part.buffer.nbytes * chosen + 4 * n * values, flops * n)

        return cost


@dataclass(frozen=True)
class ExpertRows:
    """Slot rows [n top_k, k] for experts_prefill, in a storage type chosen by the kernel."""

    buffer: Buffer
    dtype: str


def bias_constants(bias: Buffer | None) -> dict[str, object]:
    """Returns the build constants of a kernel with expert biases (kernels/common/expert_bias.cl)."""
    return {} if bias is None else {"BIAS": True}


def block_count(n_tokens: int, n_experts: int, top_k: int, rows: int = BLOCK_ROWS) -> int:
    """Returns the most blocks in a step with up to `rows` slots per block (portable/group_by_expert.cl)."""
    slots = n_tokens * top_k
    return (slots + (rows - 1) * min(n_experts, slots)) // rows


def most_blocks(max_tokens: int, n_experts: int, top_k: int) -> int:
    """Returns the maximum number of blocks in any step. In a few-row step, a block may be a single slot."""
    few = min(max_tokens, FEW_ROWS[-1])
    return max(block_count(max_tokens, n_experts, top_k), few * top_k)


class ExpertsGateUp(Implementation):
    """Computes the chosen experts' gate and up products for each token, and applies the gate."""

    @abstractmethod
    def size(self, device: Device, product: ExpertProduct) -> Size: ...


class ExpertsDown(Implementation):
    """Adds the weighted sum of the chosen experts' outputs to each token's row."""

    @abstractmethod
    def size(self, device: Device, product: ExpertProduct) -> Size: ...


class ExpertsOfRows(Implementation):
    """A product for a step's tokens, in blocks with a common expert.

    kernel: the kernel's function name. block_rows: slots per block.
    """

    kernel = "experts_prefill"
    block_rows = BLOCK_ROWS

    @abstractmethod
    def size(self, device: Device, product: ExpertProduct) -> Size:
        """Returns the sizes. For each block in a step, work-groups cover all tiles of the block's expert."""

    def kernel_file(self, device: Device, product: ExpertProduct) -> str:
        return self.file

    def pack(
        self, device: Device, product: ExpertProduct, x: Buffer, order: Buffer, blocks: Buffer, step: StepState
    ) -> tuple[Buffer, list[Launch]]:
        """Returns x in the kernel's input layout, and the launches to pack it."""
        return x, []

    def rows(self, device: Device, weight: Weight, dtype: str, step: StepState) -> ExpertRows | None:
        """Returns input rows that a previous product with `dtype` weights can fill directly.

        None: the product takes float32 rows.
        """
        return None

    def output_dtype(self, dtype: str) -> str:
        """Returns the preferred storage type for outputs before the sum, given a `dtype` weight."""
        return "float32"

    def leaves(self, dtype: str) -> bool:
        """Tells whether the kernel can leave ExpertRows in this dtype."""
        return False

    def suits_single_slots(self, device: Device, weight: Weight, dtype: str) -> bool:
        """Tells whether single-slot blocks are at least as fast as separate token-expert pairs."""
        return False

    def scratch(self, device: Device, dtype: str, k: int, exact_activations: bool, n_blocks: int) -> Mapping[str, int]:
        """Returns the scratch bytes of `pack` by name, for the memory forecast. Equal names share memory."""
        return {}


class ExpertsPrefill(ExpertsOfRows):
    """Expert products for many tokens. block_rows: at least BLOCK_ROWS."""


class ExpertsFewRows(ExpertsOfRows):
    """Expert products for at most FEW_ROWS[-1] tokens (kernels/common/linear.py), on devices with a special kernel.

    Blocks are small, and each block reads its expert's weights once.
    """

    kernel = "experts_few_rows"
    block_rows = FEW_BLOCK_ROWS

    def in_chains(self, device: Device) -> bool:
        """Tells whether the kernel can join a fused launch, if nothing else stands between the norm and the expert sum.

        A fused launch beats separate token-expert pairs for any number of tokens.
        """
        return False
