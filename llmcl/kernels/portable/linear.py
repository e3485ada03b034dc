"""Products in work-groups and local memory, for any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmcl.kernels.common.dtype import ITEM_BYTES, QUANTIZED, TILE_ROWS
from llmcl.kernels.common.linear import ActivationLayout, LinearDecode, LinearFewRows, LinearPrefill, Product, Size
from llmcl.kernels.common.sizes import has_few_registers, power_of_two_at_most
from llmcl.runtime.device import Device

MAX_ITEMS = 512  # of a group
UNIT_ITEMS = 3584  # of a compute unit, in all: more than run at once, so that the last groups are small
LARGE_BLOCK_BYTES = 33 << 10  # of portable/linear_prefill.cl with 128 tokens by 128 rows
FEW_ROW_SUMS = 8  # tokens times tiles whose sums a work-item of portable/linear_few_rows.cl keeps in registers
LOCAL_BYTES = 40  # of a work-item of portable/linear_decode.cl, at most


class PortableLinearDecode(LinearDecode):
    name, file = "portable", "portable/linear_decode.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def choices(self, device: Device, product: Product) -> Mapping[str, Sequence[int]]:
        default, width = decode_size(device, product.part.dtype, product.weight.k, product.part.n_tiles)
        most = min(MAX_ITEMS, device.entry.max_work_group_size, device.entry.local_mem_bytes // LOCAL_BYTES)
        widths = [16 << i for i in range(6) if 16 << i <= most]
        turns = [turn for turn in (2, 4, 8) if turn % product.tiles_at_once == 0]
        return {
            "LOCAL_SIZE": _first(width, widths),
            "AT_ONCE": _first(default["AT_ONCE"], turns),
            "AHEAD": _first(default["AHEAD"], (0, 1)),
        }

    def size(self, device: Device, product: Product) -> Size:
        own = self.chosen(device, product)
        return own, (product.units,), (own["LOCAL_SIZE"],)


class PortableLinearPrefill(LinearPrefill):
    name, file = "portable", "portable/linear_prefill.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def choices(self, device: Device, product: Product) -> Mapping[str, Sequence[int]]:
        is_small = has_small_blocks(device)
        fitting = [4, 8] if device.entry.local_mem_bytes >= LARGE_BLOCK_BYTES else [4]
        return {
            "ITEM_TOKENS": _first(4 if is_small else 8, fitting),
            "ITEM_ROWS": _first(4 if is_small or has_few_registers(device) else 8, fitting),
        }

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        own, n_tiles = self.chosen(device, product), product.part.n_tiles
        tokens, rows = own["ITEM_TOKENS"], own["ITEM_ROWS"]
        return own, lambda n: (-(-n_tiles // rows), -(-n // (16 * tokens))), (16, 16)


class PortableLinearFewRows(LinearFewRows):
    name, file = "portable", "portable/linear_few_rows.cl"
    kernel = "linear_few_rows"

    def supports_device(self, device: Device) -> bool:
        return True

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        constants, width = decode_size(device, product.part.dtype, product.weight.k, product.part.n_tiles)
        block = QUANTIZED.get(product.part.dtype)
        rows = FEW_ROW_SUMS // product.tiles_at_once
        if rows < FEW_ROW_SUMS and block is not None and block.block > 32:
            rows //= 2  # two pieces of a super-block, with their factors, take as many registers as the sums
        own = {"LOCAL_SIZE": constants["LOCAL_SIZE"], "ROWS": rows}
        return own, lambda n: (-(-n // rows), product.units), (width, 1)


def _first(default: int, values: Sequence[int]) -> list[int]:
    """The default, then the other values."""
    return [default, *(value for value in values if value != default)]


def decode_size(device: Device, dtype: str, k: int, n_tiles: int) -> tuple[dict[str, int], int]:
    """Build constants and work-items of a group for n_tiles tiles of k columns (portable/tile_product.cl).

    The fewer the tiles, the more work-items share one: enough that all compute units have bytes on their way.
    """
    is_quantized = dtype in QUANTIZED
    pieces = k * TILE_ROWS // (32 if is_quantized else 16 // ITEM_BYTES[dtype])
    wanted = max(128, UNIT_ITEMS * device.compute_units // n_tiles)
    fitting = min(device.entry.max_work_group_size, device.entry.local_mem_bytes // LOCAL_BYTES)
    width = max(16, power_of_two_at_most(min(wanted, MAX_ITEMS, fitting, pieces // 4)))
    return {"LOCAL_SIZE": width, "AT_ONCE": 2 if is_quantized else 4, "AHEAD": int(wanted < MAX_ITEMS)}, width


def has_small_blocks(device: Device) -> bool:
    """Whether a work-item of a product of many tokens computes few sums: 4 by 4.

    8 by 8 fill the registers of a GPU; a software renderer has few, and some local memories are small.
    """
    return device.entry.is_software or device.entry.local_mem_bytes < LARGE_BLOCK_BYTES
