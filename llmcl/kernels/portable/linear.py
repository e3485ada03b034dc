"""Products with work-groups and local memory, for any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmcl.kernels.common.dtype import ITEM_BYTES, QUANTIZED, TILE_ROWS
from llmcl.kernels.common.linear import ActivationLayout, LinearDecode, LinearFewRows, LinearPrefill, Product
from llmcl.kernels.common.sizes import has_few_registers, power_of_two_at_most
from llmcl.kernels.implementation import Size
from llmcl.runtime.device import Device

MAX_ITEMS = 512  # per work-group
UNIT_ITEMS = 3584  # per compute unit, more than run at once, so the last work-groups are small
LARGE_BLOCK_BYTES = 33 << 10  # for portable/linear_prefill.cl with 128 tokens by 128 rows
FEW_ROW_SUMS = 8  # tokens times tiles per work-item in portable/linear_few_rows.cl; the sums stay in registers
FEW_ROWS_ITEMS = 256  # per work-group for pieces with several vectors; more would exceed the registers
LOCAL_BYTES = 40  # most bytes per work-item in portable/linear_decode.cl


class PortableLinearDecode(LinearDecode):
    name, file = "portable", "portable/linear_decode.cl"
    most_vectors = 4  # per piece of quantised weights

    def choices(self, device: Device, product: Product) -> Mapping[str, Sequence[int]]:
        dtype, k, n_tiles = product.part.dtype, product.weight.k, product.part.n_tiles
        default = large_pieces(device, dtype, k, n_tiles, product.tiles_at_once, self.most_vectors)
        most = min(MAX_ITEMS, device.entry.max_work_group_size, device.entry.local_mem_bytes // LOCAL_BYTES)
        widths = [16 << i for i in range(6) if 16 << i <= most]
        turns = [turn for turn in (1, 2, 4, 8) if turn % product.tiles_at_once == 0]
        values = {"LOCAL_SIZE": widths, "AT_ONCE": turns, "AHEAD": [0, 1], "VECTORS": [1, 2, 4]}
        return {name: _first(value, values[name]) for name, value in default.items()}

    def size(self, device: Device, product: Product) -> Size:
        constants = self.chosen(device, product)
        return constants, (product.units,), (constants["LOCAL_SIZE"],)


class PortableLinearPrefill(LinearPrefill):
    name, file = "portable", "portable/linear_prefill.cl"

    def choices(self, device: Device, product: Product) -> Mapping[str, Sequence[int]]:
        is_small = has_small_blocks(device)
        fitting = [4, 8] if device.entry.local_mem_bytes >= LARGE_BLOCK_BYTES else [4]
        return {
            "ITEM_TOKENS": _first(4 if is_small else 8, fitting),
            "ITEM_ROWS": _first(4 if is_small or has_few_registers(device) else 8, fitting),
        }

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        constants, n_tiles = self.chosen(device, product), product.part.n_tiles
        tokens, rows = constants["ITEM_TOKENS"], constants["ITEM_ROWS"]
        constants |= register_limit(device, product.part.dtype, tokens * rows)
        return constants, lambda n: (-(-n_tiles // rows), -(-n // (16 * tokens))), (16, 16)


class PortableLinearFewRows(LinearFewRows):
    name, file = "portable", "portable/linear_few_rows.cl"
    kernel = "linear_few_rows"
    most_vectors = 4  # per super-block piece

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        dtype, k = product.part.dtype, product.weight.k
        width, rows = group_width(device, dtype, k, product.part.n_tiles), FEW_ROW_SUMS // product.tiles_at_once
        constants = {}
        if dtype in QUANTIZED and QUANTIZED[dtype].block > 32:
            if rows < FEW_ROW_SUMS:
                rows //= 2  # two super-block pieces, with scales, need as many registers as the sums
            if self.most_vectors > 1 and not has_few_registers(device):
                constants["VECTORS"] = self.most_vectors
                width = min(width, FEW_ROWS_ITEMS, power_of_two_at_most(k // 16))
        constants |= {"LOCAL_SIZE": width, "ROWS": rows}
        return constants, lambda n: (-(-n // rows), product.units), (width, 1)


def _first(default: int, values: Sequence[int]) -> list[int]:
    """Returns the default, then the remaining values."""
    return [default, *(value for value in values if value != default)]


def decode_size(device: Device, dtype: str, k: int, n_tiles: int) -> dict[str, int]:
    """Returns build constants, with the work-group size, for n_tiles tiles with k columns
    (portable/tile_product.cl)."""
    width = group_width(device, dtype, k, n_tiles)
    ahead = wanted_items(device, n_tiles) < MAX_ITEMS
    return {"LOCAL_SIZE": width, "AT_ONCE": 2 if dtype in QUANTIZED else 4, "AHEAD": int(ahead)}


def large_pieces(
    device: Device, dtype: str, k: int, n_tiles: int, tiles_at_once: int = 1, most_vectors: int = 4
) -> dict[str, int]:
    """Like `decode_size`, but with several vectors per piece for quantised weights. Formats with more scale data per
    group gain more. A single piece in flight per tile is enough.
    """
    if dtype not in QUANTIZED:
        return decode_size(device, dtype, k, n_tiles)
    few = has_few_registers(device)
    vectors = 1 if dtype == "q8_0" or (few and tiles_at_once > 1) else 2
    if QUANTIZED[dtype].block > 32 and wanted_items(device, 2 * n_tiles) < MAX_ITEMS and not few:
        vectors = most_vectors
    if vectors == 1:
        return {**decode_size(device, dtype, k, n_tiles), "VECTORS": 1}
    width = group_width(device, dtype, k, n_tiles, vectors)
    return {"LOCAL_SIZE": width, "AT_ONCE": tiles_at_once, "AHEAD": 1, "VECTORS": vectors}


def group_width(device: Device, dtype: str, k: int, n_tiles: int, vectors: int = 1) -> int:
    """Returns work-items per tile with k columns. vectors: vectors per piece for quantised weights.

    With fewer tiles more work-items share a tile, so that all compute units have loads in flight. Larger pieces need
    fewer work-items.
    """
    pieces = k * TILE_ROWS // (32 * vectors if dtype in QUANTIZED else 16 // ITEM_BYTES[dtype])
    fitting = min(device.entry.max_work_group_size, device.entry.local_mem_bytes // LOCAL_BYTES)
    wanted = wanted_items(device, n_tiles) if vectors == 1 else wanted_items(device, 2 * n_tiles)
    return max(16, power_of_two_at_most(min(wanted, MAX_ITEMS, fitting, pieces // 4)))


def wanted_items(device: Device, n_tiles: int) -> int:
    """Returns the work-items per tile that keep all compute units busy with n_tiles tiles."""
    return max(128, UNIT_ITEMS * device.compute_units // n_tiles)


def register_limit(device: Device, dtype: str, sums: int) -> dict[str, int]:
    """Caps registers for a many-token product with `sums` sums per work-item. With 64 sums and quantised weights,
    NVIDIA's compiler takes a few registers too many for two work-groups per compute unit.
    """
    is_above = sums == 64 and dtype in QUANTIZED and "cl_nv_compiler_options" in device.entry.extensions
    return {"MAX_REGISTERS": 128} if is_above else {}


def has_small_blocks(device: Device) -> bool:
    """Whether a work-item in a many-token product computes 4 by 4 sums instead of 8 by 8.

    8 by 8 sums fill a GPU's registers. A software renderer has few registers, and some devices have little local
    memory.
    """
    return device.entry.is_software or device.entry.local_mem_bytes < LARGE_BLOCK_BYTES
