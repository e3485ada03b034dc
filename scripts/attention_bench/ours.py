"""llmcl's attention kernels on arrays that lie on the device, ready to be run again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pyopencl.array import to_device

from attention_bench.baselines import Contestant, repeated
from llmcl.attention import flex_attention
from llmcl.attention.flex_plan import PlanCache
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.models.kv_cache import capacity_for
from llmcl.ops.attention import attention_decode, attention_prefill, decode_splits
from llmcl.runtime.device import Buffer, Device
from llmcl.runtime.profiler import ProfilingDevice

PAGE = 64


def shuffled_pages(n_tokens: int) -> np.ndarray:
    return np.random.default_rng(7).permutation(-(-n_tokens // PAGE)).astype(np.int32)


def cache_buffers(
    device: Device, k: np.ndarray, v: np.ndarray, dtype: str, table: np.ndarray | None
) -> tuple[Buffer, Buffer]:
    """k, v [kv_len, heads, head_dim] in the cache's layout, in the pages of `table` if there is one."""
    kv_len, heads, head_dim = k.shape
    padded = np.zeros((2, heads, capacity_for(kv_len), head_dim), dtype)
    padded[:, :, :kv_len] = np.stack([k, v]).swapaxes(1, 2)
    if table is not None:
        pages = padded.reshape(2, heads, -1, PAGE, head_dim).copy()
        placed = np.empty_like(pages)
        placed[:, :, table] = pages
        padded = placed.reshape(padded.shape)
    tiles = padded[0].reshape(heads, -1, 16, head_dim).swapaxes(2, 3)
    return device.upload(tiles, "benchmark keys"), device.upload(padded[1], "benchmark values")


def step_at(device: Device, position: int, n_tokens: int, table: np.ndarray | None) -> StepState:
    step = StepState(device, 1, 0 if table is None else len(table))
    device.write(step.state, np.array([position, n_tokens], np.int32))
    if table is not None:
        step.write_pages([int(page) for page in table])
    return step


def shape_of(q_heads: int, k: np.ndarray, dtype: str, pages: bool) -> AttentionShape:
    """Attention is in float32, as that of the baselines."""
    kv_len, kv_heads, head_dim = k.shape
    capacity = capacity_for(kv_len)
    return AttentionShape(q_heads, kv_heads, head_dim, capacity, dtype, PAGE if pages else 0, exact_queries=True)


def ours_decode(
    device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str = "float32", *, pages: bool = False
) -> Contestant:
    """attention_decode (and merge): q [n_q_heads, head_dim]; appends the last of k, v [kv_len, heads, head_dim]."""
    table = shuffled_pages(len(k)) if pages else None
    k_cache, v_cache = cache_buffers(device, k, v, dtype, table)
    n_splits = decode_splits(device, k.shape[1], k.shape[2], dtype)
    unrotated = np.repeat(np.array([1, 0], np.float32), q.shape[1] // 2)
    out = device.alloc(q.nbytes, "benchmark output")
    launches = attention_decode(
        device,
        shape_of(len(q), k, dtype, pages),
        device.upload(np.concatenate([q, k[-1], v[-1]]), "benchmark queries"),
        device.upload(unrotated, "benchmark rotation"),
        step_at(device, len(k) - 1, 1, table),
        k_cache,
        v_cache,
        device.alloc(8 * len(q) * n_splits, "benchmark states"),
        device.alloc(q.nbytes * n_splits, "benchmark accumulators"),
        out,
        n_splits=n_splits,
    )
    return Contestant(repeated(launches), device.finish, lambda: device.read(out, np.float32, q.shape))


def ours_causal(
    device: Device,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dtype: str = "float32",
    *,
    pages: bool = False,
    **tiles: Any,
) -> Contestant:
    """attention_prefill: q [n, n_q_heads, head_dim], the last n of the kv_len tokens of k, v."""
    n, q_heads, head_dim = q.shape
    table = shuffled_pages(len(k)) if pages else None
    k_cache, v_cache = cache_buffers(device, k, v, dtype, table)
    qkv = np.zeros((n, q_heads + 2 * k.shape[1], head_dim), np.float32)
    qkv[:, :q_heads] = q
    out = device.alloc(q.nbytes, "benchmark output")
    launches = attention_prefill(
        device,
        shape_of(q_heads, k, dtype, pages),
        device.upload(qkv, "benchmark queries"),
        step_at(device, len(k) - n, n, table),
        k_cache,
        v_cache,
        out,
        **tiles,
    )
    return Contestant(repeated(launches, n), device.finish, lambda: device.read(out, np.float32, q.shape))


def ours_flex(
    device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, *, whole: bool = False, **options: Any
) -> Contestant:
    """flex_attention on [B, H, L, D] arrays that are on the device: its attention kernel alone, or whole calls."""
    arrays: list[Any] = [to_device(device.queue, x, allocator=device.allocator) for x in (q, k, v)]
    options |= {"enable_gqa": True, "device": device}
    if "page_table" in options:
        options["page_table"] = to_device(device.queue, options["page_table"], allocator=device.allocator)
    result = [flex_attention(*arrays, **options), *arrays]  # the launches go on reading the arrays

    def calls(n: int) -> None:
        for _ in range(n):
            result[0] = flex_attention(*arrays, **options)

    if whole:
        return Contestant(calls, device.finish, lambda: result[0].get())
    launches = [one for one in PlanCache.of(device).take_latest().launches if one.name == "attention_prefill"]
    return Contestant(repeated(launches), device.finish, lambda: result[0].get())


def ours_profiled(
    device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> Callable[[], dict[str, float]]:
    """A function that makes a whole call of flex_attention on device arrays and gives each launch's milliseconds on the
    device's clock."""
    profiling = ProfilingDevice(device.entry)
    arrays: list[Any] = [to_device(profiling.queue, x, allocator=profiling.allocator) for x in (q, k, v)]
    options |= {"enable_gqa": True, "device": profiling}
    flex_attention(*arrays, **options)

    def call() -> dict[str, float]:
        profiling.phase = "call"
        result = flex_attention(*arrays, **options)
        milliseconds: dict[str, float] = {}
        for record in profiling.records():
            milliseconds[record.name] = milliseconds.get(record.name, 0.0) + record.duration / 1e6
        profiling.phase = ""
        del result
        return milliseconds

    return call


def ours_on_host_arrays(device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> Contestant:
    """Whole calls of flex_attention on NumPy arrays: every call copies them to the device and the result back."""
    result: list[np.ndarray] = [q]

    def calls(n: int) -> None:
        for _ in range(n):
            result[0] = flex_attention(q, k, v, enable_gqa=True, device=device, **options)

    return Contestant(calls, device.finish, lambda: result[0])
