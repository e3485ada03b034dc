"""Shared parts of the attention kernels on every device class: shapes, tile sizes, and user functions in a kernel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmcl.errors import UsageError
from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import attention_cost
from llmcl.kernels.common.dtype import kernel_name, kv_row_bytes
from llmcl.kernels.common.linear import ActivationLayout, ActivationOperand, PackedActivations
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.implementation import Implementation, Size
from llmcl.runtime.device import Buffer, CostModel, Device, Launch

CAPACITY_MULTIPLE = 64  # must be a multiple of every BLOCK_N
DECODE_BLOCK_N = (16, 32, 64)
KERNEL_OPTIONS = ("BLOCK_M", "BLOCK_N", "DV_TILE")
MAX_ROWS = 128  # query rows per block


@dataclass(frozen=True)
class AttentionShape:
    """Head counts, head size and cache layout of an attention layer.

    exact_queries keeps attention in float32 even if the device has a faster way. Without it, decode may round queries
    to 8 bits beside a quantised cache, and prefill may round queries, keys and values to bfloat16 unless the cache is
    float32.
    """

    n_q_heads: int  # a multiple of n_kv_heads
    n_kv_heads: int
    head_dim: int  # a multiple of 16 (32 with q8_0)
    capacity: int  # in keys, a multiple of 64; with pages, the size of the page pool
    kv_dtype: str  # a name in dtype.KV_DTYPES; kernels/common/kv_cache.cl describes the layouts
    page_tokens: int = 0  # keys per page (a multiple of 64), 0 for a contiguous cache
    score_scale: float | None = None  # factor of the scores, None for 1/sqrt(head_dim)
    exact_queries: bool = False  # attention stays in float32, see above
    bidirectional: bool = False  # in prefill, queries also see the later keys of their step

    @property
    def group_size(self) -> int:
        return self.n_q_heads // self.n_kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.score_scale is None else float(self.score_scale)

    @property
    def row_bytes(self) -> int:
        """Returns the bytes per head for a key or a value."""
        return kv_row_bytes(self.head_dim, self.kv_dtype)

    def cost(self) -> CostModel:
        return attention_cost(self.n_q_heads, self.n_kv_heads, self.head_dim, self.row_bytes)

    def constants(self, step: StepState, slot: int = step_state.CAPACITY) -> dict[str, object]:
        """Returns the build constants with `step`'s state as an argument. slot: the state slot for the capacity."""
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
    """Shared base of decode and prefill attention."""

    def supports_output(self, layout: ActivationLayout) -> bool:
        """Tells whether the kernel can leave its output in `layout`."""
        return False

    def out_constants(self, out: ActivationOperand) -> dict[str, object]:
        """Returns the build constants for an output layout that the kernel supports."""
        if isinstance(out, PackedActivations):
            raise TypeError(f"the {self.name} variant of {self.file} leaves float32 rows")
        return {}


class AttentionDecode(AttentionKernel):
    """Attends a single query token to the cache.

    merges: the kernel merges its split states by itself.
    one_split_keys: up to this many keys a single split handles all keys, and no merge is needed.
    """

    merges = False
    one_split_keys = 0
    takes_queries_alone = True
    """Supports keys appended by another layer (SHARED_KV)."""

    @abstractmethod
    def size(self, device: Device, shape: AttentionShape, block_n: int) -> tuple[Mapping[str, object], int]:
        """Returns the kernel's own build constants and the work-items per group."""

    def size_of_rows(
        self, device: Device, shape: AttentionShape, block_n: int, n_splits: int
    ) -> tuple[Mapping[str, object], int]:
        """Returns `size` for a step with several sequences, whose keys are divided into n_splits KV splits."""
        return self.size(device, shape, block_n)

    def default_block_n(self, device: Device) -> int:
        """Returns the keys per loop step."""
        return 64

    def default_splits(self, device: Device, n_kv_heads: int) -> int:
        """Returns the KV splits per head for an equal share on every compute unit."""
        return max(1, min(32, 2 * device.compute_units // n_kv_heads))

    @property
    def block_n_choices(self) -> Sequence[int]:
        """Returns the keys per loop step that `llmcl tune` may try, or () if the kernel has a single size."""
        return DECODE_BLOCK_N


@dataclass(frozen=True)
class TileRequest:
    """Requested tile sizes. None lets the implementation choose."""

    block_m: int | None = None
    block_n: int | None = None
    dv_tile: int | None = None
    q_block: int | None = None  # a multiple of the query rows

    @classmethod
    def of(cls, constants: Mapping[str, int], q_block: int | None = None) -> TileRequest:
        """Takes the sizes from build constants by name, such as a user's kernel_options."""
        block_m, block_n, dv_tile = (constants.get(name) for name in KERNEL_OPTIONS)
        return cls(block_m, block_n, dv_tile, q_block)

    @property
    def is_open(self) -> bool:
        return self.block_m is self.block_n is self.dv_tile is None


@dataclass(frozen=True)
class PrefillTiles:
    """The tile sizes of an implementation."""

    implementation: AttentionPrefill
    block_m: int  # query rows
    block_n: int  # keys per loop step
    dv_tile: int  # output columns per pass
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)  # constants derived from the sizes
    local: tuple[int, int, int] = (1, 1, 1)

    def constants(self) -> dict[str, object]:
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "DV_TILE": self.dv_tile, **self.extra}


class AttentionPrefill(AttentionKernel):
    """Attends many query tokens to the cache, tile by tile."""

    takes_turns = False
    """Work-groups take blocks of queries one after the other, in the order given by ORDER."""

    is_bidirectional = False
    """Supports `AttentionShape.bidirectional`."""

    array_file = ""
    """The kernel file for attention on arrays, if different from `file`."""

    array_scratch_bytes = 0
    """Scratch bytes per work-group in attention on arrays, an argument after `ranges`; 0: none."""

    block_m_choices: Sequence[int] = (8, 16, 32, 64, 128)
    """Query rows that `llmcl tune` tries."""

    def operand_dtype(self, device: Device, shape: AttentionShape) -> str:
        """Returns the dtype in which queries meet keys and values: the cache's, or that of `prepare`'s copy."""
        return shape.kv_dtype

    def prepare(
        self, device: Device, shape: AttentionShape, step: StepState, k: Buffer, v: Buffer
    ) -> tuple[AttentionShape, Buffer, Buffer, dict[str, object], list[Launch]]:
        """Returns what the kernel reads as keys and values: shape, buffers, constants, and launches for a copy."""
        return shape, k, v, shape.constants(step), []

    def scratch_bytes(self, device: Device, shape: AttentionShape) -> int:
        """Returns the scratch bytes for `prepare`, used in the memory forecast."""
        return 0

    def supports_tiles(self, head_dim: int, dtype: str, request: TileRequest) -> bool:
        """Tells whether the implementation has tiles of the requested sizes."""
        return True

    @abstractmethod
    def tiles(self, device: Device, head_dim: int, dtype: str, request: TileRequest) -> PrefillTiles:
        """Picks tile sizes, taking over the sizes in `request`. Raises UsageError for an unsupported size."""

    def groups(self, device: Device, tiles: PrefillTiles, n_q_heads: int, n: int, batch: int = 1) -> tuple[int, ...]:
        """Returns the work-groups of a launch for n query tokens."""
        return n_q_heads, -(-n // tiles.block_m), batch

    def reads_arrays(self, device: Device, dtype: str, width: int) -> bool:
        """Tells whether the implementation supports attention on arrays.

        Queries, keys and values are then arrays [B, H, L, width] of one dtype, read in place, and the output has any
        dtype. The build constants are ARRAYS, OUT and STRIDES. STRIDES is a slot of `state`: from this slot on, `state`
        holds the strides in elements between batches, heads and rows, for queries, keys and values in turn.
        """
        return False


class AttentionFewQueries(Implementation):
    """Attends a few query tokens on arrays, read in place (see `AttentionPrefill.reads_arrays`).

    Reads each key and value once for all query heads in the group. A key range is a multiple of 16 keys.
    """

    kernel = "attention_few_queries"
    range_keys = 64
    """Keys per mask decision."""

    @abstractmethod
    def takes(self, rows: int) -> bool:
        """Tells whether it is faster than prefill for `rows` rows per KV head: query tokens times query heads."""

    @abstractmethod
    def size(
        self, device: Device, rows: int, n_kv_heads: int, batch: int, n_keys: int
    ) -> tuple[dict[str, object], tuple[int, int, int], tuple[int, int, int]]:
        """Returns the kernel's own build constants (with N_SPLITS), the work-groups, and the work-items per group."""


def check_block_sizes(
    head_dim: int,
    block_m: int,
    block_n: int,
    dv_tile: int,
    q_block: int | None,
    largest_block_n: int = CAPACITY_MULTIPLE,
) -> None:
    """Raises UsageError for tile sizes that no implementation supports. The error names the constant to change."""
    if q_block is not None and q_block % block_m:
        raise UsageError(f"BLOCK_M is {block_m}; expected a divisor of the block mask's {q_block} queries a block")
    if block_n < 16 or block_n % 16 or largest_block_n % block_n:
        choices = [size for size in (16, 32, 64, 128) if largest_block_n % size == 0]
        raise UsageError(f"BLOCK_N is {block_n}; expected {', '.join(map(str, choices[:-1]))} or {choices[-1]}")
    if dv_tile < 16 or dv_tile % 16 or head_dim % dv_tile:
        options = [d for d in range(16, head_dim + 1, 16) if head_dim % d == 0]
        raise UsageError(f"DV_TILE is {dv_tile}; expected a divisor of head_dim {head_dim}: {options}")


class RopeAppend(Implementation):
    """Rotates a step's queries and appends the step's keys and values to the cache.

    tile_rows: sequence positions per work-group, beginning at a multiple of tile_rows. 1: a work-group takes a row.
    """

    tile_rows = 1

    @abstractmethod
    def size(self, device: Device, shape: AttentionShape) -> tuple[Mapping[str, object], int, int]:
        """Returns the kernel's own build constants, work-groups per tile or row, and work-items per group."""


class PackKeys(Implementation):
    """Packs keys [heads, rows, head_dim] into tiles of 16."""

    @abstractmethod
    def size(self, head_dim: int, n_tiles: int, heads: int) -> Size: ...
