"""flex_attention: attention on arrays with a score and a mask given as Python functions, following PyTorch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from llmcl.attention.arrays import (
    FIXED,
    HELD,
    PAGE_TABLE,
    SINKS,
    as_held,
    as_result,
    check_device_arrays,
    check_order,
    dtype_of,
    element_strides,
    new_device_array,
    on_device,
)
from llmcl.attention.block_mask import BlockMask, check_mod
from llmcl.attention.flex_plan import FlexPlan, PlanCache
from llmcl.attention.mods import ScoreMod
from llmcl.attention.problem import Problem, checked_shapes
from llmcl.attention.tracing.fingerprint import fingerprint
from llmcl.attention.tracing.trace import trace_score_mod
from llmcl.errors import UsageError, check_flags, shown
from llmcl.kernels.common.attention import AttentionFewQueries, TileRequest
from llmcl.ops.attention import few_queries_implementation, head_dim_for_arrays, prefill_tiles
from llmcl.ops.attention_sizes import check_kernel_options
from llmcl.runtime.device import Device


@cache
def default_device() -> Device:
    """Returns the default device for `flex_attention`: the preferred device, opened once."""
    return Device.open()


def release_memory(device: Device | None = None) -> None:
    """Frees the working memory that `flex_attention` keeps on a device (None: the preferred device) between calls."""
    plans = PlanCache.of(_opened(device))
    with plans.lock:
        plans.clear()


class AuxRequest(NamedTuple):
    """Extra outputs to request from flex_attention, as in PyTorch."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The outputs requested with an AuxRequest; None for the rest."""

    lse: Any = None
    max_scores: Any = None


@dataclass(frozen=True)
class Options:
    """The options of a call: everything except arrays, functions and the block mask."""

    scale: float | None
    enable_gqa: bool
    aux: AuxRequest
    kernel_options: Mapping[str, int] | None
    variant: str | None
    out_dtype: str | None


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
    return_aux: AuxRequest | None = None,
    page_table: Any = None,
    sinks: Any = None,
    device: Device | None = None,
    variant: str | None = None,
    out_dtype: str | None = None,
) -> Any:
    """softmax(score_mod(scale Q K^T)) V over the keys visible in block_mask, like torch.nn.attention.flex_attention.

    query [B, Hq, L, D]; key [B, Hkv, S, D]; value [B, Hkv, S, Dv]: floating point NumPy arrays, or pyopencl.array.Array
    in float32, float16 or bfloat16 (as uint16), in C order, on device.context and device.queue. If a GPU's kernels read
    arrays in place, any strides are accepted as long as rows are contiguous and start at multiples of 16 bytes. Hq
    equals Hkv, or is a multiple with enable_gqa.
    score_mod(score, b, h, q_idx, kv_idx) -> score: a Python function; it is traced, not run. block_mask: from
    create_block_mask; None shows every key. scale: None means 1/sqrt(D). kernel_options: tile sizes BLOCK_M, BLOCK_N,
    DV_TILE; options for PyTorch's kernels have no effect. device: an opened Device; None: the preferred device.
    variant: a kernel variant by name, for tests.
    out_dtype: float32, float16 or bfloat16. None: the query's dtype, with float32 for float64.

    page_table: integers [B, n], int32 if on the device. key and value are then page pools [pages, Hkv, P, D]: key j of
    sequence b is key j % P in page page_table[b, j // P]. Functions and masks only see j. S is n P, or KV_LEN of the
    block mask. The table may hold -1 for pages without visible keys. P is a multiple of 16.

    sinks: floats [Hq], float32 if on the device: an extra logit per head in the softmax, without a value.

    Returns [B, Hq, L, Dv] in out_dtype. With return_lse also float32 [B, Hq, L]: the natural log of the sum of
    exponentials. With return_aux an AuxOutput holds lse and max_scores, each query's largest modified score over its
    visible keys. A query without keys has output 0, and -inf for both. Results are NumPy arrays, or device arrays if
    the inputs are; device work is enqueued, and the call doesn't wait. Keys and values are stored as float16 or
    bfloat16 if `key` is, else as float32. All arithmetic is float32, but matrix units round softmax weights to the
    values' 16-bit type.

    Kernels and working memory are cached for further calls with the same shapes and functions (`release_memory`).
    Raises UsageError for invalid arrays, functions or options. Source: Dong et al., "Flex Attention" (2024).
    """
    device = _opened(device)
    if not (isinstance(scale, _USUAL_SCALES) and enable_gqa.__class__ is return_lse.__class__ is bool):
        _check_kinds(block_mask, scale)
        check_flags(enable_gqa=enable_gqa, return_lse=return_lse)
    if out_dtype is not None or variant is not None:
        _check_names(variant, out_dtype)
    if kernel_options is not None:
        kernel_options = _own_options(kernel_options)
    aux = _USUAL_REQUESTS[bool(return_lse)] if return_aux is None else _aux_request(return_aux, return_lse)
    arrays = {"query": query, "key": key, "value": value}
    if page_table is not None:
        arrays[PAGE_TABLE] = page_table
    if sinks is not None:
        arrays[SINKS] = sinks
    plans = PlanCache.of(device)
    # The plan's cache key. With small arrays the lookup takes most of a call's time.
    mod = None if score_mod is None else fingerprint(score_mod)
    call: Hashable | None = None
    if score_mod is None or mod is not None:
        tiles = _chosen(device, kernel_options)
        call = (mod, id(block_mask), scale, enable_gqa, aux, tiles, variant, out_dtype, *arrays, *_forms(arrays))
    with plans.lock:
        plan = plans.find(call)
        if plan is None:
            options = Options(scale, enable_gqa, aux, kernel_options, variant, out_dtype)
            plan = plans.add(call, partial(_new_plan, device, arrays, score_mod, block_mask, options))
        try:
            results = _run_on_host_arrays(plan, arrays) if plan.problem.own_inputs else _run_on_device(plan, arrays)
        finally:
            if not plan.kept:
                plan.release()
    if return_aux is not None:
        asked = [name for name, wanted in zip(AuxRequest._fields, aux, strict=True) if wanted]
        return results[0], AuxOutput(**dict(zip(asked, results[1:], strict=True)))
    return results if return_lse else results[0]


def _aux_request(aux: Any, return_lse: bool) -> AuxRequest:
    if return_lse:
        raise UsageError("return_lse and return_aux are given; expected one: return_aux=AuxRequest(lse=True)")
    if not isinstance(getattr(aux, "lse", None), bool) or not isinstance(getattr(aux, "max_scores", None), bool):
        raise UsageError(f"return_aux is {shown(aux)}; expected AuxRequest(lse=True)")
    return AuxRequest(aux.lse, aux.max_scores)


# kernel_options for PyTorch's own kernels; none changes a result.
OF_PYTORCH = {
    *("num_warps", "num_stages", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ"),
    *("FORCE_USE_FLEX_ATTENTION", "USE_TMA", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"),
    *("kpack", "matrix_instr_nonkdim", "waves_per_eu", "BACKEND"),
}


def _own_options(kernel_options: Any) -> Any:
    """Drops options for PyTorch's kernels and options of the backward pass, and strips the prefix fwd_."""
    if not isinstance(kernel_options, Mapping):
        return kernel_options
    forward = {str(name).removeprefix("fwd_"): x for name, x in kernel_options.items() if str(name)[:4] != "bwd_"}
    return {name: value for name, value in forward.items() if name not in OF_PYTORCH}


def _chosen(device: Device, kernel_options: Any) -> Hashable:
    """Returns the tile sizes requested by the call and by the device's user."""
    user_options = device.kernel_options
    if kernel_options is None and not user_options:
        return None
    asked = {} if kernel_options is None else check_kernel_options(kernel_options)
    return tuple(sorted(asked.items())), tuple(sorted(user_options.items()))


def _opened(device: Any) -> Device:
    if device is None:
        return default_device()
    if not isinstance(device, Device):
        raise UsageError(f"device is {shown(device)}; expected an open device: llmcl.Device.open({shown(device)})")
    return device


_USUAL_REQUESTS = {False: AuxRequest(), True: AuxRequest(lse=True)}
_NUMBERS = int, float, np.integer, np.floating
_MAX_SCALE = 1e30  # a product with it stays finite in float32
_USUAL_SCALES: tuple[type, ...] = (type(None), float, int)
_form = attrgetter("__class__", "shape", "dtype", "strides")


def _forms(arrays: dict[str, Any]) -> Iterable[Hashable]:
    """Returns the array properties that kernels depend on. For a value that isn't an array, returns the type: the call
    will fail before a plan is built."""
    try:
        return [*map(_form, arrays.values())]
    except AttributeError:
        return map(type, arrays.values())


def _new_plan(
    device: Device,
    arrays: dict[str, Any],
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    options: Options,
) -> FlexPlan:
    _check_kinds(block_mask, options.scale)
    sizes = check_kernel_options(options.kernel_options or {})
    given_on_device = on_device(arrays)
    mask_length = None if block_mask is None else block_mask.seq_lengths[1]
    shapes = checked_shapes(arrays, options.enable_gqa, mask_length)
    if given_on_device:
        check_device_arrays(device, arrays)
    q_dtype, kv_dtype = dtype_of(arrays["query"]) or "", dtype_of(arrays["key"]) or ""
    width = max(shapes["width"], shapes["value_width"])
    problem = Problem(
        **shapes,
        head_dim=head_dim_for_arrays(device, width, kv_dtype, options.variant),
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        out_dtype=options.out_dtype or q_dtype,
        scale=1.0 / math.sqrt(shapes["width"]) if options.scale is None else float(options.scale),
        return_lse=options.aux.lse,
        return_max_scores=options.aux.max_scores,
        own_inputs=not given_on_device,
    )
    traced = None if score_mod is None else trace_score_mod(score_mod, prefix="score")
    tiles = prefill_tiles(
        device,
        problem.head_dim,
        problem.kv_dtype,
        variant=options.variant,
        request=TileRequest.of(sizes, None if block_mask is None else block_mask.BLOCK_SIZE[0]),
    )
    if traced is not None:
        check_mod(traced, problem.batch, problem.n_q_heads, problem.n_queries, problem.n_keys)
    lie = problem.strides()
    if given_on_device:
        lie = [element_strides(arrays[name]) for name in ("query", "key", "value")]
    mask_keys = 0 if block_mask is None else block_mask.BLOCK_SIZE[1]
    few = None
    in_place = problem.lie_alike(lie)
    if in_place:
        few = _for_few_queries(device, problem, block_mask, options)
        in_place = few is not None or problem.read_in_place(device, tiles, mask_keys)
    if given_on_device and not in_place:
        check_order(arrays)
    return FlexPlan(device, problem, tiles, traced, block_mask, lie if in_place else None, few)


def _for_few_queries(
    device: Device, problem: Problem, block_mask: BlockMask | None, options: Options
) -> AttentionFewQueries | None:
    """Returns the kernel for few queries if it supports the call: all queries must see the same key blocks."""
    if options.variant is not None or options.kernel_options or device.kernel_options:
        return None
    if block_mask is not None:
        differs_by_head = block_mask.shape[1] > 1 and block_mask.kv_num_blocks.strides[1] != 0
        if differs_by_head or problem.n_queries > block_mask.BLOCK_SIZE[0]:
            return None
    return few_queries_implementation(device, problem.kv_dtype, problem.width, problem.group_rows)


def _check_kinds(block_mask: Any, scale: Any) -> None:
    if not isinstance(block_mask, BlockMask | None):
        raise UsageError(
            f"block_mask is {shown(block_mask)}; expected a BlockMask: create_block_mask makes one of a mask_mod"
        )
    if not (scale is None or (isinstance(scale, _NUMBERS) and -_MAX_SCALE <= scale <= _MAX_SCALE)):
        raise UsageError(f"scale is {shown(scale)}; expected a number that is finite, or None for 1/sqrt(D)")


def _check_names(variant: Any, out_dtype: Any) -> None:
    if not isinstance(variant, str | None):
        raise UsageError(f"variant is {shown(variant)}; expected the name of a kernel variant, or None")
    if out_dtype is not None and (not isinstance(out_dtype, str) or out_dtype not in HELD):
        raise UsageError(
            f"out_dtype is {shown(out_dtype)}; expected {', '.join(HELD)} or None, which follows the query's"
        )


def _run_on_host_arrays(plan: FlexPlan, arrays: dict[str, np.ndarray]) -> tuple[Any, ...]:
    device, problem, shapes, dtypes = plan.device, plan.problem, plan.problem.shapes(), plan.dtypes
    for name, array in arrays.items():
        device.write(plan.own[name], array.astype(FIXED[name]) if name in FIXED else as_held(array, dtypes[name]))
    plan.run({})
    out = as_result(device.read(plan.own["out"], HELD[dtypes["out"]], shapes["out"]), problem.out_dtype)
    if problem.out_dtype == problem.q_dtype == "bfloat16":
        out = out.view(arrays["query"].dtype)
    return out, *(device.read(plan.own[name], np.float32, shapes[name]) for name in problem.results()[1:])


def _run_on_device(plan: FlexPlan, arrays: dict[str, Any]) -> tuple[Any, ...]:
    device, memory = plan.device, {}
    queue = device.queue
    for name, array in arrays.items():
        if array.queue is not queue:
            check_device_arrays(device, arrays)
        if array.offset:  # kernels take no offset into an array's memory
            check_order({name: array})
            array = array.copy()
        memory[name] = array.base_data
    allocator = arrays["query"].allocator or device.allocator
    results = []
    for name, form in plan.result_forms.items():
        result = new_device_array(form, allocator)
        memory[name] = result.base_data
        results.append(result)
    plan.run(memory)
    return tuple(results)
