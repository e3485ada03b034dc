"""flex_attention on arrays that are on the device, and what it keeps between calls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from pyopencl.array import Array, to_device

import llmcl
from llmcl.attention import create_block_mask, flex_attention, masks, release_memory
from llmcl.attention.arrays import element_strides
from llmcl.attention.flex_plan import MAX_PLANS, PlanCache
from llmcl.errors import UsageError


def arrays(length: int = 70, width: int = 32, dtype: Any = np.float32, n_keys: int | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(length)
    shapes = [(2, 4, length, width), *[(2, 2, n_keys or length, width)] * 2]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def moved(device: Any, host: list[np.ndarray]) -> list[Any]:
    return [to_device(device.queue, x, allocator=device.allocator) for x in host]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(np.float32, "portable", id="float32-portable"),
        pytest.param(np.float32, None, id="float32-chosen"),
        pytest.param(np.float16, None, id="float16-chosen"),  # the one of a second CPU's driver
    ],
)
def test_equal_those_of_the_host(device: Any, dtype: Any, form: Any) -> None:
    for length, width, n_keys in ((64, 32, 64), (33, 40, 70)):  # in place; and with columns and rows filled up
        host = arrays(length, width, dtype, n_keys)
        mask = create_block_mask(masks.prefix_lm(20), None, None, length, n_keys, BLOCK_SIZE=32)
        options = {"block_mask": mask, "enable_gqa": True, "return_lse": True, "device": device, "variant": form}
        expected, expected_lse = flex_attention(*host, **options)
        out, lse = flex_attention(*moved(device, host), **options)
        assert isinstance(out, Array) and isinstance(lse, Array) and lse.dtype == np.float32
        assert out.dtype == expected.dtype == dtype
        assert np.array_equal(out.get(), expected) and np.array_equal(lse.get(), expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 40, 72, 96, 104])
@pytest.mark.parametrize("out_dtype", [None, "float32"])
def test_heads_of_other_sizes(device: Any, width: int, out_dtype: str | None) -> None:
    """A Hopper GPU reads these in place and fills up rows itself."""
    q, k, v = host = arrays(260, width, np.float16)
    mask = create_block_mask(masks.causal, None, None, 260, 260)
    out = flex_attention(*moved(device, host), block_mask=mask, enable_gqa=True, device=device, out_dtype=out_dtype)
    k, v = (np.repeat(x.astype(np.float64), 2, axis=1) for x in (k, v))
    scores = np.where(np.tri(260, dtype=bool), q.astype(np.float64) @ k.swapaxes(2, 3) / width**0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    assert np.abs(out.get() - expected).max() < 2e-3


def test_the_documented_example() -> None:
    device = llmcl.Device.open()
    q, k, v = (to_device(device.queue, x, allocator=device.allocator) for x in arrays())
    out = flex_attention(q, k, v, enable_gqa=True, device=device)  # enqueued; out is an array on the device
    again = flex_attention(out, k, v, enable_gqa=True, device=device)  # needs no copy
    assert again.get().shape == (2, 4, 70, 32)


def test_no_copy_to_or_from_the_host(default_device: Any) -> None:
    on_device = moved(default_device, arrays())
    flex_attention(*on_device, enable_gqa=True, device=default_device)
    before = default_device.traffic.copy()
    flex_attention(*on_device, enable_gqa=True, device=default_device).get()
    since = default_device.traffic.since(before)
    assert (since.host_to_device_bytes, since.device_to_host_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x, (4 * 6 * 8, 6 * 8, 8)),
        (lambda x: x.transpose((0, 2, 1, 3)), (4 * 6 * 8, 8, 6 * 8)),
        (lambda x: x[:, :, ::2], (4 * 6 * 8, 6 * 8, 16)),
        (lambda x: x.transpose((0, 1, 3, 2)), None),  # a row in pieces
        (lambda x: x[..., :6], (4 * 6 * 8, 6 * 8, 8)),
        (lambda x: x.reshape((2, 4, 16, 3)), None),  # rows of 6 bytes
    ],
)
def test_how_far_rows_are_apart(change: Any, expected: Any) -> None:
    assert element_strides(change(np.zeros((2, 4, 6, 8), np.float16))) == expected


def test_an_array_within_another(default_device: Any) -> None:
    host = arrays()
    on_device = moved(default_device, [np.concatenate([np.zeros_like(x[:1]), x]) for x in host])
    out = flex_attention(*(x[1:] for x in on_device), enable_gqa=True, device=default_device)
    assert np.array_equal(out.get(), flex_attention(*host, enable_gqa=True, device=default_device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, q, k, v: (q, k.get(), v), "query on the device, key on the host"),
        (lambda d, q, k, v: (q, k, to_device(d.queue, v.get().astype(np.float16))), "key is float32, value float16"),
        (lambda d, q, k, v: (q.astype(np.float64), k, v), "query is float64; expected float32, float16 or bfloat16"),
        (lambda d, q, k, v: (q.transpose((0, 1, 3, 2)), k, v), "do not fit"),
        (lambda d, q, k, v: (q[:, :, ::2], k, v), "query has strides"),
        (lambda d, q, k, v: (q, k.with_queue(None), v), "key is bound to no queue"),
        (lambda d, q, k, v: (q, k.with_queue(cl.CommandQueue(d.context)), v), "key is bound to another queue"),
        (lambda d, q, k, v: ([1.0], k, v), "query is list; expected a NumPy array or"),
    ],
)
def test_errors_name_the_array_and_the_remedy(default_device: Any, change: Any, message: str) -> None:
    on_device = moved(default_device, arrays())
    with pytest.raises(UsageError, match=message):
        flex_attention(*change(default_device, *on_device), enable_gqa=True, device=default_device)


def test_another_context_is_refused(default_device: Any) -> None:
    other = llmcl.Device.open(default_device.entry)
    with pytest.raises(UsageError, match="belongs to another OpenCL context"):
        flex_attention(*moved(other, arrays()), enable_gqa=True, device=default_device)


def test_a_mod_is_traced_again_when_what_it_reaches_changes(default_device: Any) -> None:
    host = arrays()
    slopes = np.zeros(4, np.float32)

    class Slope:
        value = 0.0

    def by_array(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + slopes[h] * kv_idx

    def by_object(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + Slope.value * kv_idx

    for mod in (by_array, by_object):
        first = flex_attention(*host, mod, enable_gqa=True, device=default_device)
        assert np.array_equal(first, flex_attention(*host, mod, enable_gqa=True, device=default_device))
        slopes[:], Slope.value = 0.1, 0.1
        assert not np.allclose(first, flex_attention(*host, mod, enable_gqa=True, device=default_device))
        slopes[:], Slope.value = 0.0, 0.0


def test_what_is_compiled_is_logged(default_device: Any, caplog: pytest.LogCaptureFixture) -> None:
    moment, seconds = time.time() % 1000, default_device.compile_s  # a constant that no cache on disk holds
    with caplog.at_level("INFO", logger="llmcl"):
        for _ in range(2):
            flex_attention(*arrays(), lambda s, b, h, q, k: s + moment * q, enable_gqa=True, device=default_device)
    compiled = [line for line in caplog.messages if line.startswith("compiled attention_prefill for ")]
    assert len(compiled) == 1 and compiled[0].endswith(" s") and default_device.compile_s > seconds


def test_equal_calls_share_a_plan_and_many_stay_within_bounds(default_device: Any) -> None:
    release_memory(default_device)
    plans, before = PlanCache.of(default_device), default_device.allocated_bytes
    host = arrays()
    for _ in range(3):  # a closure made anew each time, with the same values
        flex_attention(*host, masks.soft_cap(20.0), enable_gqa=True, device=default_device)
    assert len(plans) == 1
    for length in range(1, MAX_PLANS + 10):
        flex_attention(*arrays(length), enable_gqa=True, device=default_device)
    assert len(plans) == MAX_PLANS and default_device.allocated_bytes - before == plans.nbytes
    release_memory(default_device)
    assert len(plans) == 0 and default_device.allocated_bytes == before
