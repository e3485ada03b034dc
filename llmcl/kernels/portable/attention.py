"""Attention with work-groups and local memory, for any device."""

from __future__ import annotations

from llmcl.errors import UsageError
from llmcl.kernels.common.attention import (
    DECODE_BLOCK_N,
    AttentionDecode,
    AttentionPrefill,
    AttentionShape,
    PackKeys,
    PrefillTiles,
    RopeAppend,
    TileRequest,
    check_block_sizes,
)
from llmcl.kernels.common.dtype import ITEM_BYTES
from llmcl.kernels.common.sizes import (
    has_few_registers,
    largest_divisor,
    local_size,
    power_of_two_at_least,
    power_of_two_at_most,
)
from llmcl.kernels.implementation import Size
from llmcl.runtime.device import Device

FEW_ROWS, MANY_ROWS = 4, 8  # per work-item in portable/attention_prefill.cl
MANY_ROWS_BLOCK = 64  # queries per work-group when work-items have many


class PortableAttentionDecode(AttentionDecode):
    name, file = "portable", "portable/attention_decode.cl"

    one_split_keys = 256

    def default_block_n(self, device: Device) -> int:
        return 32 if has_few_registers(device) else 64

    def size(self, device: Device, shape: AttentionShape, block_n: int) -> tuple[dict[str, object], int]:
        # Enough work-items to give each only a few loads per block, all in flight at once. With wider groups Intel's
        # compiler fits two work-items into the registers for one.
        most = power_of_two_at_most(min(256 if has_few_registers(device) else 512, device.entry.max_work_group_size))
        width = min(most, max(64, power_of_two_at_least(2 * shape.head_dim)))
        while decode_local_bytes(shape, width, block_n) > device.entry.local_mem_bytes:
            if width > max(block_n, power_of_two_at_least(shape.head_dim // 4)):
                width //= 2
            elif block_n > DECODE_BLOCK_N[0]:
                block_n //= 2
            else:
                needed, limit = decode_local_bytes(shape, width, block_n), device.entry.local_mem_bytes
                raise UsageError(
                    f"attention with {shape.group_size} query heads of {shape.head_dim} for a KV head needs "
                    f"{needed:,} bytes of local memory, {device.name} has {limit:,}; use another --device"
                )
        return {"GROUP_SIZE": shape.group_size, "BLOCK_N": block_n, "LOCAL_SIZE": width}, width


class PortableAttentionPrefill(AttentionPrefill):
    name, file = "portable", "portable/attention_prefill.cl"
    is_bidirectional = True

    def supports_tiles(self, head_dim: int, dtype: str, request: TileRequest) -> bool:
        return request.q_block is None or request.q_block % 8 == 0

    def tiles(self, device: Device, head_dim: int, dtype: str, request: TileRequest) -> PrefillTiles:
        # On a device with little local memory the default shrinks until it fits; a requested size stays.
        fixed = request.block_m is not None or request.block_n is not None
        block_n = request.block_n or (32 if device.entry.is_software else 64)
        dv_tile = min(request.dv_tile or 16 * largest_divisor(head_dim // 16, 8), head_dim)
        if has_many_rows(device, head_dim, dtype, block_n, dv_tile, request):
            block_m = MANY_ROWS_BLOCK
            check_block_sizes(head_dim, block_m, block_n, dv_tile, request.q_block)
            local = (16, block_m // MANY_ROWS, 1)
            return PrefillTiles(self, block_m, block_n, dv_tile, {"ITEM_ROWS": MANY_ROWS}, local=local)
        block_m = request.block_m or 8 * largest_divisor((request.q_block or 32) // 8, 4)
        limit, key_dims = device.entry.local_mem_bytes, head_dim
        while not fixed and local_bytes(head_dim, dtype, block_m, block_n) > limit:
            if block_n > 32:
                block_n //= 2
            elif block_m % 16 == 0:
                block_m //= 2
            elif block_n > 16:
                block_n //= 2
            else:
                break
        if block_m % 8:
            raise UsageError(f"BLOCK_M is {block_m}; expected a multiple of 8")
        # Then keys and values are staged in slices along the head dimension.
        while not fixed and local_bytes(head_dim, dtype, block_m, block_n, max(key_dims, dv_tile)) > limit:
            smaller = 16 * largest_divisor(head_dim // 16, max(1, max(key_dims, dv_tile) // 32))
            if max(key_dims, dv_tile) == smaller or (dv_tile > smaller and request.dv_tile is not None):
                break
            key_dims, dv_tile = smaller, min(dv_tile, smaller)
        needed = local_bytes(head_dim, dtype, block_m, block_n, max(key_dims, dv_tile))
        if needed > limit:
            larger = "BLOCK_M" if block_m >= block_n else "BLOCK_N"
            raise UsageError(
                f"attention tiles of BLOCK_M {block_m} and BLOCK_N {block_n} need {needed:,} bytes of local memory, "
                f"{device.name} has {limit:,}; lower {larger}"
            )
        check_block_sizes(head_dim, block_m, block_n, dv_tile, request.q_block)
        items = 16 * block_m // FEW_ROWS
        if items > device.entry.max_work_group_size:
            raise UsageError(
                f"BLOCK_M is {block_m}, which takes groups of {items} work-items; {device.name} has at most "
                f"{device.entry.max_work_group_size}; lower BLOCK_M"
            )
        extra = {"ITEM_ROWS": FEW_ROWS} | ({"KEY_DIMS": key_dims} if key_dims < head_dim else {})
        return PrefillTiles(self, block_m, block_n, dv_tile, extra, local=(16, block_m // FEW_ROWS, 1))


def has_many_rows(device: Device, head_dim: int, dtype: str, block_n: int, dv_tile: int, request: TileRequest) -> bool:
    """Whether prefill work-items have MANY_ROWS queries each, the default on devices with many registers.

    Requires 16-bit values in whole vectors, 170 registers, and blocks of MANY_ROWS_BLOCK queries.
    """
    block, local_memory = MANY_ROWS_BLOCK, device.entry.local_mem_bytes
    suits = ITEM_BYTES.get(dtype) == 2 and dv_tile == head_dim and head_dim in (64, 128) and block_n >= 32
    fits = suits and many_rows_local_bytes(head_dim, block_n) <= local_memory
    is_default = (
        not has_few_registers(device) and not device.entry.is_software and (request.q_block or block) % block == 0
    )
    return fits and (request.block_m == block or (request.block_m is None and is_default))


def many_rows_local_bytes(head_dim: int, block_n: int) -> int:
    """Local memory in bytes for portable/attention_prefill.cl with MANY_ROWS and 16-bit values."""
    return 4 * head_dim * MANY_ROWS_BLOCK + block_n * max(2 * head_dim, 4 * MANY_ROWS_BLOCK)


def decode_local_bytes(shape: AttentionShape, width: int, block_n: int) -> int:
    """Local memory in bytes for portable/attention_decode.cl."""
    return 4 * shape.group_size * (4 * width + shape.head_dim + 2 * block_n + 1)


def local_bytes(head_dim: int, dtype: str, block_m: int, block_n: int, staged_dims: int | None = None) -> int:
    """Local memory in bytes for portable/attention_prefill.cl. staged_dims: head dimensions staged at a time; None:
    all."""
    staged = ITEM_BYTES.get(dtype, 4)  # quantised keys and values are staged as float32
    return 4 * (head_dim + block_n) * (block_m + 4) + block_n * (staged_dims or head_dim) * staged + 64 * block_m


class PortableRopeAppend(RopeAppend):
    name, file = "portable", "portable/rope_append.cl"

    def size(self, device: Device, shape: AttentionShape) -> tuple[dict[str, object], int, int]:
        width = local_size(device, 256)
        return {"LOCAL_SIZE": width}, 1, width


class PortablePackKeys(PackKeys):
    name, file = "portable", "portable/pack_keys.cl"

    def size(self, head_dim: int, n_tiles: int, heads: int) -> Size:
        return {}, (head_dim, n_tiles, heads), (16, 1, 1)
