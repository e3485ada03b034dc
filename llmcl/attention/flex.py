"""flex_attention: attention on arrays, with a score and a mask given as Python functions, under PyTorch's names."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from functools import cache
from numbers import Real
from operator import attrgetter
from typing import Any

import numpy as np

from llmcl.attention.arrays import (
    check_device_arrays,
    check_order,
    element_strides,
    new_device_array,
    on_device,
)
from llmcl.attention.block_mask import BlockMask, check_mod
from llmcl.attention.flex_plan import FlexPlan, PlanCache, Problem
from llmcl.attention.mods import ScoreMod
from llmcl.attention.tracing.fingerprint import fingerprint
from llmcl.attention.tracing.trace import trace_score_mod
from llmcl.errors import UsageError
from llmcl.kernels.common.attention import TileRequest
from llmcl.ops.attention import prefill_tiles
from llmcl.ops.attention_sizes import check_kernel_options
from llmcl.runtime.device import Device


@cache
def default_device() -> Device:
    """The device that `flex_attention` uses when none is given: the preferred one, opened once."""
    return Device.open()


def release_memory(device: Device | None = None) -> None:
    """Gives back the working memory that `flex_attention` keeps on a device (None: the preferred one) between calls."""
    plans = PlanCache.of(device or default_device())
    with plans.lock:
        plans.clear()


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, int] | None = None,
    *,
    device: Device | None = None,
    variant: str | None = None,
    out_dtype: str | None = None,
) -> Any:
    """softmax(score_mod(scale Q K^T)) V over the keys that block_mask shows, as torch.nn.attention.flex_attention.

    query [B, Hq, L, D]; key, value [B, Hkv, S, D]: NumPy arrays, floating point, or pyopencl.array.Array, float32 or
    float16, in C order, on device.context and device.queue. Where a GPU's kernels read arrays as they lie, other
    strides are taken as well, if rows are in one piece and begin at multiples of 16 bytes. Hq is a multiple of Hkv with
    enable_gqa, otherwise equal. score_mod(score, b, h, q_idx, kv_idx) -> score: a Python function that is traced, not
    run. block_mask: from create_block_mask; None shows every key. scale: None is 1/sqrt(D). kernel_options: tile sizes
    BLOCK_M, BLOCK_N, DV_TILE. device: an opened Device; None: the preferred one. variant: a kernel variant by name, for
    tests. out_dtype: float32 or float16; None: float16 for a float16 query, otherwise float32.

    Returns [B, Hq, L, D] of out_dtype, and with return_lse also the natural log of the sum of exponentials, float32
    [B, Hq, L]; a query without keys has output 0 and lse -inf. They are NumPy arrays, or arrays on the device if the
    inputs are: then the work is enqueued and not waited for. Keys and values are held as float16 if `key` is, else as
    float32; everything is computed in float32, matrix units round softmax weights to the 16 bits of the values.

    Kernels and working memory are kept for further calls of the same shapes and functions (`release_memory`).
    Raises UsageError for arrays, functions or options that do not fit. Source: Dong et al., "Flex Attention" (2024).
    """
    device = _opened(device)
    if not isinstance(scale, _USUAL_SCALES):
        _check_kinds(block_mask, scale, out_dtype)
    arrays = {"query": query, "key": key, "value": value}
    plans = PlanCache.of(device)
    # On what a plan depends; with small arrays looking it up is most of a call's time.
    mod = None if score_mod is None else fingerprint(score_mod)
    call: Hashable | None = None
    if score_mod is None or mod is not None:
        options = _chosen(device, kernel_options)
        rules = (mod, id(block_mask), scale, enable_gqa, return_lse, options, variant, out_dtype)
        call = (*rules, *map(_form, arrays.values()))

    def make() -> FlexPlan:
        return _new_plan(
            device, arrays, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, variant, out_dtype
        )

    with plans.lock:
        plan = plans.get(call, make)
        try:
            return _run_on_host_arrays(plan, arrays) if plan.problem.own_inputs else _run_on_device(plan, arrays)
        finally:
            if not plan.kept:
                plan.release()


def _chosen(device: Device, kernel_options: Any) -> Hashable:
    """The tile sizes that a call or the device's user asks for."""
    own = device.kernel_options
    if kernel_options is None and not own:
        return None
    return tuple(sorted(check_kernel_options(kernel_options or {}).items())), tuple(sorted(own.items()))


def _opened(device: Any) -> Device:
    if device is None:
        return default_device()
    if not isinstance(device, Device):
        raise UsageError(f"device is {device!r}; expected an open device: llmcl.Device.open({device!r})")
    return device


MAX_STRIDE = (1 << 31) - 1  # kernels read them as int32
_USUAL_SCALES: tuple[type, ...] = (type(None), float, int)
_place = attrgetter("shape", "dtype", "strides")


def _form(array: Any) -> Hashable:
    """What kernels depend on of an array; None for what is no array."""
    try:
        return type(array), _place(array)
    except AttributeError:
        return None


def _new_plan(
    device: Device,
    arrays: dict[str, Any],
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Mapping[str, int] | None,
    variant: str | None,
    out_dtype: str | None,
) -> FlexPlan:
    _check_kinds(block_mask, scale, out_dtype)
    options = check_kernel_options(kernel_options or {})
    query, key = arrays["query"], arrays["key"]
    given_on_device = on_device(arrays)
    batch, n_q_heads, n_queries, width = _checked_shapes(**arrays, enable_gqa=enable_gqa)
    if given_on_device:
        check_device_arrays(device, arrays)
    q_dtype = "float16" if query.dtype == np.float16 else "float32"
    problem = Problem(
        batch,
        n_q_heads,
        key.shape[1],
        n_queries,
        key.shape[2],
        width,
        q_dtype,
        "float16" if key.dtype == np.float16 else "float32",
        out_dtype or q_dtype,
        1.0 / math.sqrt(width) if scale is None else float(scale),
        return_lse,
        own_inputs=not given_on_device,
    )
    traced = None if score_mod is None else trace_score_mod(score_mod, prefix="score")
    tiles = prefill_tiles(
        device,
        problem.head_dim,
        problem.kv_dtype,
        variant=variant,
        request=TileRequest.of(options, None if block_mask is None else block_mask.BLOCK_SIZE[0]),
    )
    if traced is not None:
        check_mod(traced, batch, n_q_heads, n_queries, problem.n_keys)
    lie = [element_strides(array) for array in arrays.values()] if given_on_device else problem.strides()
    in_place = problem.read_in_place(tiles) and all(of is not None and max(of) <= MAX_STRIDE for of in lie)
    if given_on_device and not in_place:
        check_order(arrays)
    return FlexPlan(device, problem, tiles, traced, block_mask, lie if in_place else None)


def _check_kinds(block_mask: Any, scale: Any, out_dtype: Any) -> None:
    if not isinstance(block_mask, BlockMask | None):
        raise UsageError(
            f"block_mask is {block_mask!r}; expected a BlockMask: create_block_mask makes one of a mask_mod"
        )
    if not isinstance(scale, Real | None):
        raise UsageError(f"scale is {scale!r}; expected a number, or None for 1/sqrt(D)")
    if out_dtype not in (None, "float32", "float16"):
        raise UsageError(f"out_dtype is {out_dtype!r}; expected float32, float16 or None, which follows the query's")


def _run_on_host_arrays(plan: FlexPlan, arrays: dict[str, np.ndarray]) -> Any:
    device, shapes, dtypes = plan.device, plan.problem.shapes(), plan.dtypes
    for name, array in arrays.items():
        device.write(plan.own[name], np.asarray(array, dtypes[name]))
    plan.run({})
    out = device.read(plan.own["out"], dtypes["out"], shapes["out"]).astype(plan.problem.out_dtype, copy=False)
    return (out, device.read(plan.own["lse"], np.float32, shapes["lse"])) if plan.problem.return_lse else out


def _run_on_device(plan: FlexPlan, arrays: dict[str, Any]) -> Any:
    device, memory = plan.device, {}
    for name, array in arrays.items():
        if array.queue is not device.queue:
            check_device_arrays(device, arrays)
        if array.offset:  # the kernels have no argument for where in its memory an array begins
            check_order({name: array})
            array = array.copy()
        memory[name] = array.base_data
    allocator = arrays["query"].allocator or device.allocator
    results = [new_device_array(form, allocator) for form in plan.result_forms.values()]
    for name, result in zip(plan.result_forms, results, strict=True):
        memory[name] = result.base_data
    plan.run(memory)
    return tuple(results) if plan.problem.return_lse else results[0]


def _checked_shapes(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[int, int, int, int]:
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4 or array.dtype.kind != "f":
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
