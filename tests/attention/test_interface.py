"""What flex_attention takes and returns beside float32 arrays of one length: dtypes, widths, pages, lse."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compilers.gpus import GPUS
from compilers.recording import RecordingDevice
from helpers import rounded_operands
from parameters import each_value
from pyopencl.array import to_device
from torch.nn.attention import flex_attention as torch_flex

from llmcl.attention import AuxOutput, AuxRequest, create_block_mask, flex_attention, masks, release_memory
from llmcl.attention.flex_plan import PlanCache
from llmcl.errors import UsageError
from llmcl.reference import round_bfloat16

TOLERANCE = 2e-5  # of float32 accumulation over some hundred keys, in an output of order 1
SIDES = ["host", "device"]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + 20 >= kv_idx


def made(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(shapes))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def bits(x: np.ndarray) -> np.ndarray:
    """bfloat16, as uint16."""
    return (round_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16)


def wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def by_torch(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask_mod: Any = None, score_mod: Any = None) -> np.ndarray:
    mask = mask_mod and torch_flex.create_block_mask(mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    arrays = (torch.from_numpy(x) for x in (q, k, v))
    out: np.ndarray = torch_flex.flex_attention(*arrays, score_mod=score_mod, block_mask=mask, enable_gqa=True).numpy()
    return out


def call(side: str, device: Any, *arrays: np.ndarray, page_table: Any = None, **options: Any) -> Any:
    """flex_attention on arrays of either side; results on the host."""
    if side == "host":
        return flex_attention(*arrays, page_table=page_table, enable_gqa=True, device=device, **options)
    moved = [to_device(device.queue, x, allocator=device.allocator) for x in arrays]
    if page_table is not None:
        page_table = to_device(device.queue, page_table.astype(np.int32))
    results = flex_attention(*moved, page_table=page_table, enable_gqa=True, device=device, **options)
    return tuple(x.get() for x in results) if isinstance(results, tuple) else results.get()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("width", [64, 40])
def test_bfloat16(device: Any, side: str, width: int) -> None:
    exact = made((1, 4, 33, width), (1, 2, 50, width), (1, 2, 50, width))
    arrays = [bits(x) for x in exact]
    mask = create_block_mask(causal, None, None, 33, 50)
    expected = by_torch(*(wide(x) for x in arrays), causal)
    out = call(side, device, *arrays, block_mask=mask, out_dtype="float32")
    assert out.dtype == np.float32
    assert np.abs(out - expected).max() < rounded_operands(device, "bfloat16", TOLERANCE, largest=4.0)
    rounded = call(side, device, *arrays, block_mask=mask)  # as PyTorch: of the query's dtype
    assert rounded.dtype == np.uint16 and np.array_equal(rounded, bits(out))


def test_bfloat16_keys_and_results_of_float32_queries(default_device: Any) -> None:
    q, k, v = made((1, 2, 20, 64), (1, 2, 50, 64), (1, 2, 50, 64))
    k, v = bits(k), bits(v)
    expected = by_torch(q, wide(k), wide(v))
    out = flex_attention(q, k, v, device=default_device)
    assert np.abs(out - expected).max() < rounded_operands(default_device, "bfloat16", TOLERANCE, largest=4.0)
    assert np.array_equal(flex_attention(q, k, v, device=default_device, out_dtype="bfloat16"), bits(out))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("width", "value_width"), [(64, 32), (32, 64), (72, 40), (192, 128)])
def test_values_of_another_width(default_device: Any, side: str, width: int, value_width: int) -> None:
    """Latent attention: keys have a part for positions that values have not."""
    arrays = made((1, 4, 33, width), (1, 2, 50, width), (1, 2, 50, value_width))
    mask = create_block_mask(causal, None, None, 33, 50)
    out = call(side, default_device, *arrays, block_mask=mask)
    assert out.shape == (1, 4, 33, value_width)
    assert np.abs(out - by_torch(*arrays, causal)).max() < TOLERANCE


@pytest.mark.parametrize("side", SIDES)
def test_auxiliary_output(default_device: Any, side: str) -> None:
    arrays = made((1, 2, 33, 32), (1, 2, 50, 32), (1, 2, 50, 32))
    out, lse = call(side, default_device, *arrays, return_lse=True)
    again, aux = flex_attention(*arrays, device=default_device, return_aux=AuxRequest(lse=True))
    assert isinstance(aux, AuxOutput) and aux.max_scores is None
    assert np.array_equal(again, out) and np.array_equal(aux.lse, lse)
    none = flex_attention(*arrays, device=default_device, return_aux=torch_flex.AuxRequest())
    assert np.array_equal(none[0], out) and none[1] == AuxOutput()


def test_what_a_call_says_of_pytorchs_own_kernels_has_no_effect(default_device: Any) -> None:
    arrays = made((1, 2, 33, 32), (1, 2, 50, 32), (1, 2, 50, 32))
    mask = create_block_mask(causal, None, None, 33, 50, device="cuda", _compile=True)
    options = {"num_warps": 8, "PRESCALE_QK": True, "fwd_num_stages": 2, "bwd_BLOCK_M1": 32, "BACKEND": "TRITON"}
    out = flex_attention(*arrays, block_mask=mask, kernel_options=options, device=default_device)
    assert np.array_equal(out, flex_attention(*arrays, block_mask=mask, device=default_device))
    with pytest.raises(UsageError, match="kernel_options has BLOCK_M 0; expected"):
        flex_attention(*arrays, kernel_options={"fwd_BLOCK_M": 0}, device=default_device)


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("n_queries", "dtype"), [(33, np.float32), (1, np.float16)])
def test_largest_scores(device: Any, side: str, n_queries: int, dtype: Any) -> None:
    """Of the keys that a query sees, as score_mod leaves them; PyTorch has them on GPUs alone."""
    arrays = [x.astype(dtype) for x in made((2, 4, n_queries, 64), (2, 2, 80, 64), (2, 2, 80, 64))]
    q, k = arrays[0].astype(np.float64), np.repeat(arrays[1], 2, 1).astype(np.float64)
    queries, keys = np.ogrid[:n_queries, :80]
    seen = np.broadcast_to((keys > 10) & (queries % 2 == 0), (n_queries, 80))
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: (kv_idx > 10) & (q_idx % 2 == 0), None, None, n_queries, 80)
    mods: dict[str, tuple[Any, Any]] = {
        "none": (None, lambda s: s),
        "along keys": (
            lambda s, b, h, q_idx, kv_idx: 2.0 * s + 0.1 * (kv_idx - q_idx),
            lambda s: 2 * s + 0.1 * (keys - queries),
        ),
        "soft cap": (masks.soft_cap(2.0), lambda s: 2 * np.tanh(s / 2)),
    }
    for name, (score_mod, twin) in mods.items():
        options: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": True, "device": device}
        given_arrays = arrays if side == "host" else [to_device(device.queue, x) for x in arrays]
        _, aux = flex_attention(*given_arrays, return_aux=AuxRequest(max_scores=True), **options)
        assert aux.lse is None
        found = aux.max_scores if side == "host" else aux.max_scores.get()
        expected = np.where(seen, twin(np.einsum("bhqd,bhkd->bhqk", q, k) / 8), -np.inf).max(-1)
        assert found.dtype == np.float32 and (np.isneginf(found) == np.isneginf(expected)).all()
        some = ~np.isneginf(expected)
        assert np.abs(found[some] - expected[some]).max() < (1e-4 if dtype == np.float32 else 5e-3), name


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("n_queries", [1, 33])
def test_sinks(device: Any, side: str, n_queries: int) -> None:
    q, k, v = made((2, 4, n_queries, 64), (2, 2, 50, 64), (2, 2, 50, 64))
    sinks = np.array([-3.0, 0.5, 2.0, 40.0], np.float32)  # the last one leaves the keys next to nothing
    mask = create_block_mask(causal, None, None, n_queries, 50)
    plain, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True, device=device)
    of_heads = sinks.astype(np.float64)[:, None]
    expected = plain / (1 + np.exp(of_heads - lse))[..., None]
    given_sinks = sinks if side == "host" else to_device(device.queue, sinks)
    out, with_sinks = call(side, device, q, k, v, block_mask=mask, return_lse=True, sinks=given_sinks)
    assert np.abs(out - expected).max() < TOLERANCE
    assert np.abs(with_sinks - np.logaddexp(lse, of_heads)).max() < 1e-4
    assert np.array_equal(call(side, device, q, k, v, block_mask=mask, return_lse=True)[0], plain)


def test_captured_arrays_on_the_device(default_device: Any) -> None:
    """They are read where they lie: a change is seen by the next call, which traces and copies nothing."""
    q, k, v = made((1, 4, 33, 32), (1, 4, 50, 32), (1, 4, 50, 32))
    slopes = np.array([0.1, 0.5, 0.0, -0.3], np.float32)
    on_device = to_device(default_device.queue, slopes)
    documents = to_device(default_device.queue, (np.arange(50) // 13).astype(np.int32))

    def distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + on_device[h] * (kv_idx - q_idx)

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    def expected(of_heads: np.ndarray) -> np.ndarray:
        tensor, ids = torch.from_numpy(of_heads), torch.from_numpy(documents.get())
        return by_torch(
            *(q, k, v),
            lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx],
            lambda score, b, h, q_idx, kv_idx: score + tensor[h] * (kv_idx - q_idx),
        )

    arrays = [to_device(default_device.queue, x) for x in (q, k, v)]
    mask = create_block_mask(same, None, None, 33, 50)
    options: dict[str, Any] = {"block_mask": mask, "device": default_device}
    assert np.abs(flex_attention(*arrays, distance, **options).get() - expected(slopes)).max() < TOLERANCE
    on_device.set(2 * slopes)
    before = default_device.traffic.copy()
    out = flex_attention(*arrays, distance, **options).get()
    assert default_device.traffic.since(before).host_to_device_bytes == 0
    assert np.abs(out - expected(2 * slopes)).max() < TOLERANCE
    release_memory(default_device)
    assert np.array_equal(on_device.get(), 2 * slopes)  # it is still the user's


def pages_of(x: np.ndarray, table: np.ndarray, page: int, n_pages: int) -> np.ndarray:
    """x [B, H, S, D] in the pages of a pool [n_pages, H, page, D]; NaN elsewhere."""
    pool = np.full((n_pages, x.shape[1], page, x.shape[3]), np.nan, np.float32)
    for b, j in np.ndindex(len(x), -(-x.shape[2] // page)):
        rows = x[b, :, j * page : (j + 1) * page]
        pool[table[b, j], :, : rows.shape[1]] = rows
    return pool


@each_value(
    ("side", SIDES),
    ("page,width,value_width,n_queries", [(64, 64, 64, 1), (16, 32, 32, 20), (64, 128, 128, 130), (48, 40, 24, 3)]),
)
def test_pages(device: Any, side: str, page: int, width: int, value_width: int, n_queries: int) -> None:
    n_keys, n_pages = 3 * page, 9
    q, k, v = made((2, 4, n_queries, width), (2, 2, n_keys, width), (2, 2, n_keys, value_width))
    lengths = np.array([n_keys - 5, page + 7])
    table = np.array([[7, 2, 5], [1, 8, -1]])  # the second sequence needs no third page

    def within(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < lengths[b]) & (kv_idx % 7 != h)

    def within_torch(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx < torch.from_numpy(lengths)[b]) & (kv_idx % 7 != h)

    def slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + 0.01 * (kv_idx - q_idx)

    mask = create_block_mask(within, 2, 4, n_queries, n_keys, BLOCK_SIZE=(128, page))
    pools = [np.nan_to_num(pages_of(x, np.where(table < 0, 0, table), page, n_pages), nan=1e30) for x in (k, v)]
    out = call(side, device, q, *pools, page_table=table, block_mask=mask, score_mod=slope)
    torch_mask = torch_flex.create_block_mask(within_torch, 2, 4, n_queries, n_keys, device="cpu")
    expected = torch_flex.flex_attention(
        *(torch.from_numpy(x) for x in (q, k, v)), score_mod=slope, block_mask=torch_mask, enable_gqa=True
    ).numpy()
    assert np.abs(out - expected).max() < TOLERANCE


def test_other_pages_need_no_other_plan(default_device: Any) -> None:
    q, k, v = made((1, 2, 5, 32), (1, 2, 64, 32), (1, 2, 64, 32))
    expected = by_torch(q, k, v)
    for table in (np.array([[0, 1]]), np.array([[3, 2]])):
        pools = [np.nan_to_num(pages_of(x, table, 32, 4)) for x in (k, v)]
        compiled = len(default_device.programs)
        out = flex_attention(q, *pools, page_table=table, device=default_device)
        assert np.abs(out - expected).max() < TOLERANCE
    assert len(default_device.programs) == compiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_table": np.zeros((2, 1), np.int32)}, r"page_table is int32 \[2, 1\]; expected integers \[1, pages"),
        ({"page_table": np.zeros((1, 1), np.float32)}, "page_table is float32"),
        ({"page_table": np.array([[3]])}, "page_table names page 3; expected 0 to 2"),
        ({"key": np.zeros((3, 2, 8, 32), np.float32), "value": np.zeros((3, 2, 8, 32), np.float32)}, "8 keys a page"),
        ({"value": np.zeros((3, 2, 32, 32), np.float32)}, "do not fit; expected .* keys of a page"),
        ({"block_mask": create_block_mask(masks.causal, None, None, 8, 50)}, "for 50 keys, page_table has room for 16"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks is float32 \[3\]; expected floats \[2\]"),
        ({"return_aux": True}, "return_aux is True; expected AuxRequest"),
        ({"return_aux": AuxRequest(), "return_lse": True}, "return_lse and return_aux are given"),
        ({"scale": float("nan")}, "scale is nan; expected a number that is finite"),
        ({"scale": 10**5000}, "scale is a number of 5001 digits; expected a number that is finite"),
        ({"enable_gqa": []}, r"enable_gqa is \[\]; expected True or False"),
        ({"return_lse": np.zeros(2)}, "return_lse is ndarray of 2 values; expected True or False"),
        ({"variant": {}}, r"variant is \{\}; expected the name of a kernel variant"),
        ({"out_dtype": []}, r"out_dtype is \[\]; expected float32"),
        ({"kernel_options": np.zeros(2)}, "kernel_options is ndarray of 2 values; expected a dict"),
        ({"score_mod": 10**5000}, "a score_mod is a function .* found a number of 5001 digits"),
    ],
)
def test_errors_name_what_is_wrong(default_device: Any, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"query": np.zeros((1, 2, 8, 32), np.float32), "page_table": np.array([[1]])}
    arguments |= dict.fromkeys(("key", "value"), np.zeros((3, 2, 16, 32), np.float32))
    with pytest.raises(UsageError, match=message):
        flex_attention(**({**arguments, "device": default_device} | change))


@pytest.mark.parametrize(
    "mask_mod", [masks.causal, masks.document(np.repeat(np.arange(16), 512))], ids=["causal", "documents"]
)
def test_working_memory_of_a_large_call(mask_mod: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels read arrays as they lie, a call needs less than 2% of their size beside them."""
    for probe in ("has_wgmma", "has_tensor_maps"):
        monkeypatch.setattr(f"llmcl.kernels.nvidia.attention.{probe}", lambda entry: True)
    hopper = replace(GPUS[0].entry, facts={"ptx_arch": 90}, compute_units=132, local_mem_bytes=48 << 10)
    device = RecordingDevice(hopper)
    shapes = (1, 32, 8192, 128), (1, 8, 8192, 128), (1, 8, 8192, 128)
    arrays = [np.broadcast_to(np.float16(0), shape) for shape in shapes]
    mask = create_block_mask(mask_mod, None, None, 8192, 8192)
    flex_attention(*arrays, block_mask=mask, enable_gqa=True, device=device)
    plan = PlanCache.of(device).take_latest()
    own = sum(buffer.nbytes for buffer in plan.own.values())
    assert own == 2 * sum(map(math.prod, (*shapes, shapes[0])))  # with the output
    assert [launch.name for launch in plan.launches] == ["attention_prefill"]
    assert plan.nbytes - own < 0.02 * own
