"""Attention on a CPU: single work-item groups, register tiles of explicit vectors, and narrow dot products."""

from __future__ import annotations

import math

from llmcl.kernels.common.attention import (
    AttentionDecode,
    AttentionPrefill,
    AttentionShape,
    PackKeys,
    PrefillTiles,
    RopeAppend,
    TileRequest,
    check_block_sizes,
)
from llmcl.kernels.common.cache_copy import CacheCopy
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.sizes import largest_divisor
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.cpu.dot_product import bf16_dot_form, dot_form
from llmcl.kernels.cpu.linear import has_wide_registers
from llmcl.kernels.cpu.variant import CpuVariant
from llmcl.kernels.implementation import Size
from llmcl.runtime.device import Buffer, Device, Launch

SUMS, NARROW_SUMS = 24, 4  # vectors of 16 sums that fit beside the operands in 32 registers with 512 bits, 16 with 256
NARROW_BLOCK_N = 32
PAIRED = "bf16x2"  # keys and values rounded to bfloat16, two per word: see cpu/pair_cache.cl
# By dot product form (1: 32 registers with 512 bits, 2: 16 with 256): vectors of sums, and keys per step.
PAIRED_SUMS = {1: SUMS, 2: 6}
PAIRED_BLOCK_N = {1: 64, 2: 16}


def tile_constants(rows: int, block_n: int, dv_tile: int, sums: int = SUMS) -> dict[str, object]:
    """Build constants for cpu/attention_tile.cl: row blocks with at most `sums` vectors of sums, to fit the
    registers."""
    return {
        "ROWS": rows,
        "SCORE_ROWS": _rows_in_registers(rows, block_n // 16, sums),
        "VALUE_ROWS": _rows_in_registers(rows, dv_tile // 16, sums),
        "BLOCK_N": block_n,
        "DV_TILE": dv_tile,
    }


def _rows_in_registers(rows: int, vectors: int, sums: int) -> int:
    return largest_divisor(rows, max(1, sums // vectors))


def _sums(device: Device) -> int:
    return SUMS if has_wide_registers(device) else NARROW_SUMS


def dv_tile_for(head_dim: int, rows: int, sums: int = SUMS) -> int:
    """Returns the output columns with the most multiply-adds per operand loaded by a register block."""

    def reuse(vectors: int) -> float:
        height = _rows_in_registers(rows, vectors, sums)
        return height * vectors / (height + vectors)

    return 16 * max((n for n in range(1, head_dim // 16 + 1) if head_dim // 16 % n == 0), key=reuse)


def _dot_constant(device: Device, shape: AttentionShape) -> dict[str, object]:
    """Selects the dot product for queries with quantised keys: see cpu/q8_0_tile.cl."""
    return {"DOT": 0 if shape.exact_queries else dot_form(device)} if shape.kv_dtype in QUANTIZED else {}


class CpuAttentionDecode(CpuVariant, AttentionDecode):
    file = "cpu/attention_decode.cl"
    arguments = "N_Q_HEADS", "N_KV_HEADS", "N_SPLITS", "SCALE"

    def default_block_n(self, device: Device) -> int:
        return 16  # one key tile, so memory is read in a single sequential stream

    def default_splits(self, device: Device, n_kv_heads: int) -> int:
        return math.lcm(n_kv_heads, device.compute_units) // n_kv_heads

    def size(self, device: Device, shape: AttentionShape, block_n: int) -> tuple[dict[str, object], int]:
        rows = shape.group_size
        sums = _sums(device)
        constants = tile_constants(rows, block_n, dv_tile_for(shape.head_dim, rows, sums), sums)
        return constants | _dot_constant(device, shape), 1


def _pairs(device: Device) -> CacheCopy:
    return CacheCopy("cpu/pair_cache.cl", PAIRED, 1, 4 * device.compute_units)


class CpuAttentionPrefill(CpuVariant, AttentionPrefill):
    file = "cpu/attention_prefill.cl"
    arguments = "N_Q_HEADS", "N_KV_HEADS", "Q_STRIDE", "SCALE"
    is_bidirectional = True
    block_m_choices = (2, 4, 6, 8, 12, 16)  # the register tile favours few rows

    def operand_dtype(self, device: Device, shape: AttentionShape) -> str:
        exact = shape.exact_queries or shape.kv_dtype == "float32" or not bf16_dot_form(device)
        return shape.kv_dtype if exact else PAIRED

    def prepare(
        self, device: Device, shape: AttentionShape, step: StepState, k: Buffer, v: Buffer
    ) -> tuple[AttentionShape, Buffer, Buffer, dict[str, object], list[Launch]]:
        if self.operand_dtype(device, shape) != PAIRED:
            return shape, k, v, shape.constants(step) | _dot_constant(device, shape), []
        copied, keys, values, constants, launches = _pairs(device).bind(device, shape, step, k, v)
        return copied, keys, values, constants | {"DOT": bf16_dot_form(device)}, launches

    def scratch_bytes(self, device: Device, shape: AttentionShape) -> int:
        return _pairs(device).nbytes(shape) if self.operand_dtype(device, shape) == PAIRED else 0

    def tiles(self, device: Device, head_dim: int, dtype: str, request: TileRequest) -> PrefillTiles:
        # 6 rows by 4 vectors if operands are widened, else 4 by 4; 2 by 2 in narrow registers (notes/cpu.md).
        rows, keys = 16 if dtype in ("float32", PAIRED) else 12, 64 if head_dim <= 128 else 32
        sums = _sums(device)
        keys = keys if has_wide_registers(device) else NARROW_BLOCK_N
        if dtype == PAIRED:
            sums, keys = PAIRED_SUMS[bf16_dot_form(device)], min(keys, PAIRED_BLOCK_N[bf16_dot_form(device)])
        block_m, block_n = request.block_m or largest_divisor(request.q_block or rows, rows), request.block_n or keys
        dv_tile = min(request.dv_tile or dv_tile_for(head_dim, block_m, sums), head_dim)
        check_block_sizes(head_dim, block_m, block_n, dv_tile, request.q_block)
        return PrefillTiles(self, block_m, block_n, dv_tile, tile_constants(block_m, block_n, dv_tile, sums))


class CpuRopeAppend(CpuVariant, RopeAppend):
    file = "cpu/rope_append.cl"
    arguments = "N_Q_HEADS", "N_KV_HEADS"

    def supports(self, dtype: str, size: int) -> bool:
        return dtype not in QUANTIZED

    def size(self, device: Device, shape: AttentionShape) -> tuple[dict[str, object], int, int]:
        return {}, 1, 1


class CpuPackKeys(CpuVariant, PackKeys):
    file = "cpu/pack_keys.cl"

    def size(self, head_dim: int, n_tiles: int, heads: int) -> Size:
        return {}, (n_tiles, heads, 1), (1, 1, 1)
