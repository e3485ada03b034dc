"""What the attention kernels of every device class share: shapes, tile sizes, and a user's functions in a kernel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmcl.errors import UsageError
from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import attention_cost
from llmcl.kernels.common.dtype import kernel_name, kv_row_bytes
from llmcl.kernels.common.linear import ActivationLayout, ActivationOperand, PackedActivations, Size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Buffer, CostModel, Device, Launch

CAPACITY_MULTIPLE = 64  # every BLOCK_N divides it
DECODE_BLOCK_N = (16, 32, 64)
KERNEL_OPTIONS = ("BLOCK_M", "BLOCK_N", "DV_TILE")
MAX_ROWS = 128  # of a block of queries


@dataclass(frozen=True)
class AttentionShape:
    """n_q_heads a multiple of n_kv_heads; head_dim of 16, or of 32 with q8_0; capacity (keys) of 64.

    kv_dtype: one of dtype.KV_DTYPES; kernels/common/kv_cache.cl has the layouts.
    page_tokens: 0 where the cache is contiguous; else capacity is a pool of pages of that many keys (a multiple of 64).
    score_scale: factor of the scores; None for 1/sqrt(head_dim).
    exact_queries: attention is in float32 even where the device has it faster: in decode queries rounded to 8 bits
    beside a quantised cache; in prefill queries, keys and values rounded to bfloat16 beside any but one of float32.
    """

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int
    kv_dtype: str
    page_tokens: int = 0
    score_scale: float | None = None
    exact_queries: bool = False

    @property
    def group_size(self) -> int:
        return self.n_q_heads // self.n_kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.score_scale is None else float(self.score_scale)

    @property
    def row_bytes(self) -> int:
        """Bytes of a key or a value of one head."""
        return kv_row_bytes(self.head_dim, self.kv_dtype)

    def cost(self) -> CostModel:
        return attention_cost(self.n_q_heads, self.n_kv_heads, self.head_dim, self.row_bytes)

    def constants(self, step: StepState, slot: int = step_state.CAPACITY) -> dict[str, object]:
        """Build constants of a kernel with the argument `state` of `step`, which is to hold the capacity in `slot`."""
        return {
            **step.constants,
            "KV": kernel_name(self.kv_dtype),
            "N_Q_HEADS": self.n_q_heads,
            "N_KV_HEADS": self.n_kv_heads,
            "HEAD_DIM": self.head_dim,
            "CAPACITY": step.capacity(slot, self.capacity),
            **({"KV_PAGE": self.page_tokens, "STATE_PAGES": step_state.N_SLOTS} if self.page_tokens else {}),
        }


class AttentionKernel(Implementation):
    """What attention of one token and of many have in common."""

    def supports_output(self, layout: ActivationLayout) -> bool:
        """Whether it can leave its output in this layout."""
        return False

    def out_constants(self, out: ActivationOperand) -> dict[str, object]:
        """Build constants for rows in a layout that it leaves."""
        if isinstance(out, PackedActivations):
            raise TypeError(f"the {self.name} variant of {self.file} leaves float32 rows")
        return {}


class AttentionDecode(AttentionKernel):
    """One query token against the cache. merges: the kernel joins the states of its splits itself.

    one_split_keys: up to so many keys one split has all of them, and no states need joining.
    """

    merges = False
    one_split_keys = 0
    takes_queries_alone = True
    """Whether it attends to what another layer has appended (SHARED_KV)."""

    @abstractmethod
    def size(self, device: Device, shape: AttentionShape, block_n: int) -> tuple[Mapping[str, object], int]:
        """Build constants of its own, and work-items of a group."""

    def size_of_rows(
        self, device: Device, shape: AttentionShape, block_n: int, n_splits: int
    ) -> tuple[Mapping[str, object], int]:
        """The same for a step of several sequences, whose keys are cut into so many KV splits."""
        return self.size(device, shape, block_n)

    def default_block_n(self, device: Device) -> int:
        """Keys a step."""
        return 64

    def default_splits(self, device: Device, n_kv_heads: int) -> int:
        """KV splits of a head, such that every compute unit has an equal share."""
        return max(1, min(32, 2 * device.compute_units // n_kv_heads))

    @property
    def block_n_choices(self) -> Sequence[int]:
        """Keys a step that `llmcl tune` may try; () where the kernel has one size."""
        return DECODE_BLOCK_N


@dataclass(frozen=True)
class TileRequest:
    """Tile sizes that were asked for; None where the implementation chooses. q_block: a multiple of the query rows."""

    block_m: int | None = None
    block_n: int | None = None
    dv_tile: int | None = None
    q_block: int | None = None

    @classmethod
    def of(cls, constants: Mapping[str, int], q_block: int | None = None) -> TileRequest:
        """From build constants by name, such as a user's kernel_options."""
        block_m, block_n, dv_tile = (constants.get(name) for name in KERNEL_OPTIONS)
        return cls(block_m, block_n, dv_tile, q_block)

    @property
    def is_open(self) -> bool:
        return self.block_m is self.block_n is self.dv_tile is None


@dataclass(frozen=True)
class PrefillTiles:
    """BLOCK_M query rows, BLOCK_N keys a step, DV_TILE output columns a pass, and the implementation they are for."""

    implementation: AttentionPrefill
    block_m: int
    block_n: int
    dv_tile: int
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)  # constants that follow from the sizes
    local: tuple[int, int, int] = (1, 1, 1)

    def constants(self) -> dict[str, object]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "DV_TILE": self.dv_tile, **self.extra}


class AttentionPrefill(AttentionKernel):
    """Many query tokens against the cache, tile by tile."""

    takes_turns = False
    """Whether its work-groups take blocks of queries one after the other, in the order that ORDER gives."""

    array_file = ""
    """Where its kernel for attention on arrays stands, if that is another than `file`."""

    array_scratch_bytes = 0
    """Working memory of a work-group in attention on arrays, an argument after `ranges`; 0: it has none."""

    block_m_choices: Sequence[int] = (8, 16, 32, 64, 128)
    """Query rows that `llmcl tune` tries."""

    def operand_dtype(self, device: Device, shape: AttentionShape) -> str:
        """As what queries meet keys and values: the cache's dtype, or that of a copy which `prepare` makes."""
        return shape.kv_dtype

    def prepare(
        self, device: Device, shape: AttentionShape, step: StepState, k: Buffer, v: Buffer
    ) -> tuple[AttentionShape, Buffer, Buffer, dict[str, object], list[Launch]]:
        """The keys and values that the kernel reads: shape, buffers, build constants, and launches that make them."""
        return shape, k, v, shape.constants(step), []

    def scratch_bytes(self, device: Device, shape: AttentionShape) -> int:
        """Working memory of `prepare`, for the forecast of memory."""
        return 0

    def supports_tiles(self, head_dim: int, dtype: str, request: TileRequest) -> bool:
        """Whether it has tiles of the sizes that were asked for."""
        return True

    @abstractmethod
    def tiles(self, device: Device, head_dim: int, dtype: str, request: TileRequest) -> PrefillTiles:
        """Tile sizes, those of `request` where given. Raises UsageError for sizes that it cannot have."""

    def groups(self, device: Device, tiles: PrefillTiles, n_q_heads: int, n: int, batch: int = 1) -> tuple[int, ...]:
        """Work-groups of a launch for n query tokens."""
        return n_q_heads, -(-n // tiles.block_m), batch

    def reads_arrays(self, device: Device, dtype: str, width: int) -> bool:
        """Whether it has a layout for attention on arrays: queries, keys and values of one dtype [B, H, L, width] where
        they lie, the output of any dtype. Build constants are then ARRAYS, OUT and STRIDES, a slot of `state`: from it
        on lie how many elements apart batches, heads and rows of the queries, of the keys and of the values are."""
        return False


class AttentionFewQueries(Implementation):
    """A few query tokens, on arrays where they lie (as `AttentionPrefill.reads_arrays`), so that each key and value is
    read once for the query heads that share it. Its keys are in ranges of multiples of 16 keys."""

    kernel = "attention_few_queries"
    merge_kernel = "merge_splits"
    """What joins the states of the splits, if there are several."""
    range_keys = 64
    """Of a tile for which a mask is decided."""

    @abstractmethod
    def takes(self, rows: int) -> bool:
        """Whether it is the faster kernel for so many rows of a KV head: query tokens times heads that share it."""

    @abstractmethod
    def size(
        self, device: Device, rows: int, n_kv_heads: int, batch: int, n_keys: int
    ) -> tuple[dict[str, object], tuple[int, int, int], tuple[int, int, int]]:
        """Build constants of its own, N_SPLITS among them, groups and work-items of a group."""


def check_block_sizes(
    head_dim: int,
    block_m: int,
    block_n: int,
    dv_tile: int,
    q_block: int | None,
    largest_block_n: int = CAPACITY_MULTIPLE,
) -> None:
    """Raises UsageError, naming the constant to change, for tiles that no implementation can have."""
    if q_block is not None and q_block % block_m:
        raise UsageError(f"BLOCK_M is {block_m}; expected a divisor of the block mask's {q_block} queries a block")
    if block_n < 16 or block_n % 16 or largest_block_n % block_n:
        choices = [size for size in (16, 32, 64, 128) if largest_block_n % size == 0]
        raise UsageError(f"BLOCK_N is {block_n}; expected {', '.join(map(str, choices[:-1]))} or {choices[-1]}")
    if dv_tile < 16 or dv_tile % 16 or head_dim % dv_tile:
        options = [d for d in range(16, head_dim + 1, 16) if head_dim % d == 0]
        raise UsageError(f"DV_TILE is {dv_tile}; expected a divisor of head_dim {head_dim}: {options}")


class RopeAppend(Implementation):
    """Rotates the queries of a step and fills the cache with its keys and values.

    tile_rows: positions of a sequence that a work-group takes together, from a multiple of them on; 1: it takes a row.
    """

    tile_rows = 1

    @abstractmethod
    def size(self, device: Device, shape: AttentionShape) -> tuple[Mapping[str, object], int, int]:
        """Build constants of its own, work-groups of a tile or a row, and work-items of a group."""


class PackKeys(Implementation):
    """Keys [heads, rows, head_dim] into tiles of 16."""

    @abstractmethod
    def size(self, head_dim: int, n_tiles: int, heads: int) -> Size: ...
