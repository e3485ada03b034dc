"""Attention on NVIDIA GPUs: mma.sync with single warps, and wgmma with four warps on Hopper."""

from __future__ import annotations

from collections.abc import Sequence

from llmcl.kernels.common.attention import (
    AttentionDecode,
    AttentionFewQueries,
    AttentionKernel,
    AttentionPrefill,
    AttentionShape,
    PrefillTiles,
    RopeAppend,
    TileRequest,
    check_block_sizes,
)
from llmcl.kernels.common.cache_copy import CacheCopy
from llmcl.kernels.common.dtype import QUANTIZED, is_16_bit, kernel_name
from llmcl.kernels.common.linear import ActivationLayout, ActivationOperand, PackedActivations
from llmcl.kernels.common.sizes import power_of_two_at_most
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.nvidia.linear import TensorCoreLayout, supports_ptx
from llmcl.kernels.nvidia.wgmma import has_tensor_maps, has_wgmma
from llmcl.runtime.device import Buffer, Device, Launch

ROWS_WARPS, ROWS_SPLIT_TILES = 8, 4  # for decode attention with several rows
TENSOR_DTYPES = ("float32", "float16", "bfloat16")
WIDENED = CacheCopy("nvidia/widen_cache.cl", "float16", 256, 128)  # a q8_0 cache, as prefill reads it


def decode_floats(shape: AttentionShape) -> tuple[int, int]:
    """Returns the local memory in floats for nvidia/attend.cl: (per warp, shared by the work-group)."""
    return _decode_floats(shape.head_dim, shape.group_size, shape.kv_dtype)


def _decode_floats(head_dim: int, group_size: int, kv_dtype: str) -> tuple[int, int]:
    state = -(-group_size * (head_dim + 2) // 4) * 4
    queries = -(-group_size // 4) * 4 * head_dim
    new_rows = 2 * head_dim if kv_dtype in QUANTIZED else head_dim // 2
    return max(8 * head_dim, state), queries + new_rows


def unit_bytes(head_dim: int, group_size: int, kv_dtype: str, warps: int, n_states: int) -> int:
    """Returns MEMORY_FLOATS of nvidia/attention_decode.cl in bytes. n_states: number of KV splits plus sink states."""
    per_warp, shared = _decode_floats(head_dim, group_size, kv_dtype)
    return 4 * (shared + max(warps * per_warp, -(-2 * n_states * group_size // 4) * 4) + 4)


def prompt_unit_bytes(head_dim: int, max_rows: int, warps: int) -> int:
    """Returns the local memory in bytes for nvidia/attention_short_prompt.cl."""
    return head_dim * (512 + 16 * warps + 64 * -(-max_rows // 16))


class LeavesBlocks(AttentionKernel):
    """Attention kernels with an optional 16-bit, blocked output layout for the next product."""

    def supports_output(self, layout: ActivationLayout) -> bool:
        return isinstance(layout, TensorCoreLayout) and layout.blocks

    def out_constants(self, out: ActivationOperand) -> dict[str, object]:
        if not isinstance(out, PackedActivations):
            return {}
        assert isinstance(out.layout, TensorCoreLayout)
        return {"PACKED_OUT": True, "OUT": kernel_name(out.layout.dtype)}


class NvidiaAttentionDecode(LeavesBlocks, AttentionDecode):
    name, file = "nvidia", "nvidia/attention_decode.cl"
    rounds_to_16_bits = True
    runs_anywhere = False
    merges = True
    takes_queries_alone = False
    block_n_choices: Sequence[int] = ()

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype == "q8_0") and size in (64, 128, 256)

    def size(self, device: Device, shape: AttentionShape, block_n: int) -> tuple[dict[str, object], int]:
        """Picks the largest warp count (up to 4) that local memory allows (see nvidia/attention_decode.cl)."""
        per_warp, shared = decode_floats(shape)
        warps = min(4, power_of_two_at_most((device.entry.local_mem_bytes // 4 - shared) // per_warp))
        return {"GROUP_SIZE": shape.group_size, "WARPS": warps}, 32 * warps

    def size_of_rows(
        self, device: Device, shape: AttentionShape, block_n: int, n_splits: int
    ) -> tuple[dict[str, object], int]:
        """Picks the sizes for steps with several rows.

        With several KV splits, a work-group gets more warps and each split covers more keys, because merging splits
        costs more time than a few more keys.
        """
        per_warp, shared = decode_floats(shape)
        constants, width = self.size(device, shape, block_n)
        fits = ROWS_WARPS * per_warp + shared <= device.entry.local_mem_bytes // 4
        if n_splits == 1 or shape.group_size > 4 or not fits:  # in a larger group a warp needs too many accumulators
            return constants, width
        return {**constants, "WARPS": ROWS_WARPS, "SPLIT_TILES": ROWS_SPLIT_TILES}, 32 * ROWS_WARPS


class NvidiaAttentionPrefill(AttentionPrefill):
    """Computes all output columns in one pass. Keys and values of a step are in local memory (at least 48 KiB)."""

    name, file = "nvidia", "nvidia/attention_prefill.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        if dtype == "q8_0":
            return self.supports("float16", size)
        return (dtype in TENSOR_DTYPES and size in (64, 128)) or (is_16_bit(dtype) and size == 256)

    def operand_dtype(self, device: Device, shape: AttentionShape) -> str:
        return WIDENED.dtype if shape.kv_dtype == "q8_0" else shape.kv_dtype

    def prepare(
        self, device: Device, shape: AttentionShape, step: StepState, k: Buffer, v: Buffer
    ) -> tuple[AttentionShape, Buffer, Buffer, dict[str, object], list[Launch]]:
        if shape.kv_dtype != "q8_0":
            return super().prepare(device, shape, step, k, v)
        return WIDENED.bind(device, shape, step, k, v)

    def scratch_bytes(self, device: Device, shape: AttentionShape) -> int:
        return WIDENED.nbytes(shape) if shape.kv_dtype == "q8_0" else 0

    def supports_tiles(self, head_dim: int, dtype: str, request: TileRequest) -> bool:
        rows, keys = _rows(head_dim, dtype), _keys(head_dim, dtype)
        fits = request.block_m in (None, rows) and request.block_n in (None, *keys)
        return fits and request.dv_tile in (None, head_dim) and (request.q_block or rows) % rows == 0

    def tiles(self, device: Device, head_dim: int, dtype: str, request: TileRequest) -> PrefillTiles:
        block_m = request.block_m or _rows(head_dim, dtype)
        block_n, dv_tile = request.block_n or _keys(head_dim, dtype)[-1], min(request.dv_tile or head_dim, head_dim)
        check_block_sizes(head_dim, block_m, block_n, dv_tile, request.q_block)
        # float32 products run in three parts and are slow: use more warps, with the same rows but different keys.
        splits = block_n // 16 if dtype == "float32" else 1
        local = (32 * block_m // 16 * splits, 1, 1)
        return PrefillTiles(self, block_m, block_n, dv_tile, {"KEY_SPLITS": splits}, local)

    def reads_arrays(self, device: Device, dtype: str, width: int) -> bool:
        return self.supports(dtype, width)


def _rows(head_dim: int, dtype: str) -> int:
    if head_dim > 128:
        return 128  # enough rows per tile to use every work-item for copying
    return 32 if dtype == "float32" and head_dim <= 64 else 64


def _keys(head_dim: int, dtype: str) -> tuple[int, ...]:
    if dtype != "float32":
        return (16, 32, 64) if head_dim <= 128 else (16, 32)
    return (32, 64) if head_dim <= 64 else (32,)


class HopperAttentionPrefill(LeavesBlocks, NvidiaAttentionPrefill):
    """Computes all output columns in one pass, with tiles of 128 query rows and 128 keys."""

    name, file = "hopper", "nvidia/attention_prefill_wgmma.cl"
    takes_turns = True
    array_file = "nvidia/attention_prefill_arrays_wgmma.cl"
    array_scratch_bytes = 384  # three tensor maps

    def supports_device(self, device: Device) -> bool:
        return has_wgmma(device.entry)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype == "q8_0") and size in (64, 128)

    def supports_tiles(self, head_dim: int, dtype: str, request: TileRequest) -> bool:
        fits = {request.block_m, request.block_n} <= {None, 128} and request.dv_tile in (None, head_dim)
        return fits and (request.q_block or 128) % 128 == 0

    def tiles(self, device: Device, head_dim: int, dtype: str, request: TileRequest) -> PrefillTiles:
        block_m, block_n = request.block_m or 128, request.block_n or 128
        dv_tile = min(request.dv_tile or head_dim, head_dim)
        check_block_sizes(head_dim, block_m, block_n, dv_tile, request.q_block, largest_block_n=128)
        return PrefillTiles(self, block_m, block_n, dv_tile, local=(384, 1, 1))

    def groups(self, device: Device, tiles: PrefillTiles, n_q_heads: int, n: int, batch: int = 1) -> tuple[int, ...]:
        """Launches one work-group per compute unit. Each work-group loops over parts of the work."""
        return min(device.compute_units, n_q_heads * -(-n // tiles.block_m)), 1, batch

    def reads_arrays(self, device: Device, dtype: str, width: int) -> bool:
        return is_16_bit(dtype) and width % 8 == 0 and width <= 128 and has_tensor_maps(device.entry)


class NvidiaAttentionFewQueries(AttentionFewQueries):
    """Gives each warp 8 rows. Splits each head's keys until the work-groups fill the device nearly evenly."""

    name, file = "nvidia", "nvidia/attention_few_queries.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return is_16_bit(dtype) and size in (64, 128, 256)

    def takes(self, rows: int) -> bool:
        return rows <= 32

    def size(
        self, device: Device, rows: int, n_kv_heads: int, batch: int, n_keys: int
    ) -> tuple[dict[str, object], tuple[int, int, int], tuple[int, int, int]]:
        warps, groups = 4, n_kv_heads * -(-rows // 8)
        most = max(1, min(32, n_keys // (self.range_keys * warps)))

        def cost(splits: int) -> float:
            """Estimates the time on the busiest compute unit. Registers limit a unit to 3 work-groups at once."""
            on_one = -(-groups * batch * splits // device.compute_units)
            return (on_one if on_one <= 3 else -(-on_one // 3) * 3) / splits * (1.0 + 0.01 * splits)

        splits = min(range(1, most + 1), key=cost)
        return {"WARPS": warps, "N_SPLITS": splits}, (splits, groups, batch), (32 * warps, 1, 1)


class NvidiaRopeAppend(RopeAppend):
    """Uses one work-group per head and 16 positions."""

    name, file = "nvidia", "nvidia/rope_append.cl"
    runs_anywhere = False
    tile_rows = 16

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return is_16_bit(dtype)

    def size(self, device: Device, shape: AttentionShape) -> tuple[dict[str, object], int, int]:
        return {"LOCAL_SIZE": 128}, shape.n_q_heads + 2 * shape.n_kv_heads, 128
