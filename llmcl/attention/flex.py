"""flex_attention: attention on arrays, with a score and a mask given as Python functions, under PyTorch's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import numpy as np

from llmcl.attention.block_mask import BlockMask, check_mod
from llmcl.attention.kernels import CAPACITY_MULTIPLE, check_kernel_options, prefill_tiles
from llmcl.attention.mods import ScoreMod, bind_mods, trace_mods
from llmcl.errors import UsageError
from llmcl.ops import step_state
from llmcl.ops.dtype import ITEM_BYTES, KERNEL_NAMES
from llmcl.runtime.device import Buffer, Device

# The step state of attention on arrays; the lengths are no build constants, so no length compiles anew.
N_KEYS, CAPACITY = step_state.N_SLOTS, step_state.N_SLOTS + 1
EVERYTHING = 1 << 30  # a block that holds every query or key


@cache
def default_device() -> Device:
    """The device that `flex_attention` uses when none is given: the preferred one, opened once."""
    return Device.open()


def flex_attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, int] | None = None,
    *,
    device: Device | None = None,
    variant: str | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """softmax(score_mod(scale Q K^T)) V over the keys that block_mask shows, as torch.nn.attention.flex_attention.

    query [B, Hq, L, D]; key, value [B, Hkv, S, D], floating point; Hq is a multiple of Hkv with enable_gqa, otherwise
    equal. score_mod(score, b, h, q_idx, kv_idx) -> score: a Python function that is traced, not run. block_mask: from
    create_block_mask; None shows every key. scale: None is 1/sqrt(D). kernel_options: tile sizes BLOCK_M, BLOCK_N,
    DV_TILE. device: an opened Device; None: the preferred one. variant: a kernel variant by name, for tests.

    Returns float32 [B, Hq, L, D], and with return_lse also the natural log of the sum of exponentials, float32
    [B, Hq, L]; a query without keys has output 0 and lse -inf. Keys and values are held as float16 if `key` is, else
    as float32; everything is computed in float32.

    Raises UsageError for shapes, functions or options that do not fit. Source: Dong et al., "Flex Attention" (2024).
    """
    batch, n_q_heads, n_queries, width = _checked_shapes(query, key, value, enable_gqa)
    n_kv_heads, n_keys = key.shape[1], key.shape[2]
    device = device or default_device()
    kv_dtype = "float16" if key.dtype == np.float16 else "float32"
    head_dim = -(-width // 16) * 16
    options = check_kernel_options(kernel_options or {})

    q_block, kv_block, blocks = _block_lists(block_mask, batch, n_q_heads, n_queries, n_keys)
    tiles = prefill_tiles(
        device,
        head_dim,
        kv_dtype,
        variant=variant,
        block_m=options.get("BLOCK_M"),
        block_n=options.get("BLOCK_N"),
        dv_tile=options.get("DV_TILE"),
        q_block=q_block,
    )
    traced_score, traced_mask = trace_mods(score_mod, None if block_mask is None else block_mask.traced)
    if traced_score is not None:
        check_mod(traced_score, batch, n_q_heads, n_queries, n_keys)
    capacity = -(-n_keys // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE + CAPACITY_MULTIPLE
    constants: dict[str, object] = {
        **step_state.CONSTANTS,
        "KV": KERNEL_NAMES[kv_dtype],
        "N_Q_HEADS": n_q_heads,
        "N_KV_HEADS": n_kv_heads,
        "HEAD_DIM": head_dim,
        "CAPACITY": f"state[{CAPACITY}]",
    }
    buffers: list[Buffer] = []

    def kept(buffer: Buffer) -> Buffer:
        buffers.append(buffer)
        return buffer

    try:
        state = kept(device.upload(np.array([0, n_queries, 0, n_keys, capacity], np.int32), "attention state"))
        q, k, v = (kept(device.upload(_tokens_first(x, head_dim), "attention input")) for x in (query, key, value))
        cache_bytes = batch * n_kv_heads * capacity * head_dim * ITEM_BYTES[kv_dtype]
        k_cache, v_cache = (kept(device.alloc(cache_bytes, "attention keys and values")) for _ in range(2))
        out = kept(device.alloc(4 * batch * n_queries * n_q_heads * head_dim, "attention output"))
        lse = kept(device.alloc(4 * batch * n_q_heads * n_queries, "attention lse"))
        lists = kept(device.upload(blocks, "attention blocks"))
        mods = bind_mods(device, traced_score, traced_mask)
        buffers.extend(mods.buffers)
        device.launch(
            "pack_kv.cl",
            "pack_kv",
            constants,
            [k, v, state, k_cache, v_cache],
            groups=(n_kv_heads, n_keys, batch),
            local=(1, 1, 1),
        ).enqueue()
        device.launch(
            tiles.variant.file,
            "attention_prefill",
            {
                **constants,
                **tiles.constants(),
                "SCALE": 1.0 / math.sqrt(width) if scale is None else float(scale),
                "Q_STRIDE": n_q_heads * head_dim,
                "BLOCK_LISTS": True,
                "Q_BLOCK": q_block,
                "KV_BLOCK": kv_block,
                "N_KEYS": f"state[{N_KEYS}]",
                "LSE": return_lse,
            },
            [q, state, k_cache, v_cache, out, lse, lists, *mods.buffers],
            groups=(n_q_heads, -(-n_queries // tiles.block_m), batch),
            local=tiles.local,
            prelude=mods.prelude,
        ).enqueue()
        result = device.read(out, np.float32, (batch, n_queries, n_q_heads, head_dim))[..., :width]
        attended = np.ascontiguousarray(result.transpose(0, 2, 1, 3))
        if not return_lse:
            return attended
        return attended, device.read(lse, np.float32, (batch, n_q_heads, n_queries))
    finally:
        for buffer in buffers:
            buffer.release()


def _tokens_first(x: np.ndarray, head_dim: int) -> np.ndarray:
    """[B, H, L, D] -> float32 [B, L, H, head_dim], missing columns zero."""
    padded = np.zeros((x.shape[0], x.shape[2], x.shape[1], head_dim), np.float32)
    padded[..., : x.shape[3]] = x.transpose(0, 2, 1, 3)
    return padded


def _block_lists(
    block_mask: BlockMask | None, batch: int, n_heads: int, n_queries: int, n_keys: int
) -> tuple[int, int, np.ndarray]:
    """Queries and keys a block, and the lists as block_list.cl reads them."""
    if block_mask is None:
        return EVERYTHING, EVERYTHING, np.array([1, 1, 1, 1, 0, 1, 0], np.int32)
    b, h, q_len, kv_len = block_mask.shape
    if (q_len, kv_len) != (n_queries, n_keys) or b not in (1, batch) or h not in (1, n_heads):
        raise UsageError(
            f"the block mask is for [B, H, Q_LEN, KV_LEN] = {[b, h, q_len, kv_len]}; expected "
            f"{[batch, n_heads, n_queries, n_keys]}, with B and H either these or 1: create it with these lengths"
        )
    q_block, kv_block = block_mask.BLOCK_SIZE
    if kv_block % 16:
        raise UsageError(f"the block mask has {kv_block} keys a block; expected a multiple of 16")
    partial, full = block_mask.kv_num_blocks, block_mask.full_kv_num_blocks
    most = max(1, int((partial + full).max()))
    records = np.zeros((*partial.shape, 2 + most), np.int32)
    records[..., 0], records[..., 1] = partial, full
    for counts, indices, shift in (
        (partial, block_mask.kv_indices, np.zeros_like(partial)),
        (full, block_mask.full_kv_indices, partial),
    ):
        where = np.nonzero(np.arange(indices.shape[-1]) < counts[..., None])
        records[(*where[:3], 2 + where[3] + shift[where[:3]])] = indices[where]
    header = np.array([partial.shape[2], most, partial.shape[0], partial.shape[1]], np.int32)
    return q_block, kv_block, np.concatenate([header, records.reshape(-1)])


def _checked_shapes(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, enable_gqa: bool
) -> tuple[int, int, int, int]:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4 or not np.issubdtype(array.dtype, np.floating):
            raise UsageError(
                f"{name} is {array.dtype} {list(array.shape)}; expected a floating point array [B, H, L, D]"
            )
    batch, n_q_heads, n_queries, width = query.shape
    if key.shape != value.shape or key.shape[0] != batch or key.shape[3] != width or min(*query.shape, *key.shape) < 1:
        raise UsageError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit; expected "
            "[B, Hq, L, D] and twice [B, Hkv, S, D], no dimension 0"
        )
    n_kv_heads = key.shape[1]
    if n_q_heads != n_kv_heads and (not enable_gqa or n_q_heads % n_kv_heads):
        raise UsageError(
            f"query has {n_q_heads} heads, key {n_kv_heads}; expected equal numbers, or with enable_gqa=True a multiple"
        )
    return batch, n_q_heads, n_queries, width
