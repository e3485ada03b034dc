"""mask_block in OpenCL C against every pair of the block: what it says is hidden or visible is so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmcl.attention import and_masks, masks, or_masks
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

LENGTH, BLOCK_Q, BLOCK_KV = 160, 8, 32
documents = np.repeat(np.arange(8, dtype=np.int32), 20)
limits = np.array([[3, 40], [90, 160]], np.int32)

FIXED: dict[str, Any] = {
    "causal": masks.causal,
    "window": masks.sliding_window(50),
    "prefix": masks.prefix_lm(37),
    "documents": and_masks(masks.causal, masks.document(documents)),
    "neighbours": masks.neighbourhood(16, 10, 2),
    "table": lambda b, h, q, k: (k < limits[b, h]) | (k >= q),
    "strided": lambda b, h, q, k: ((q - k) % 32 < 5) ^ (k // 16 == 2),
    "floats": lambda b, h, q, k: (q - k) * 0.5 < 20.0,
    # Bounds of a block leave int32, which no value does.
    "large": lambda b, h, q, k: np.maximum(q - k, 0) * (200 - np.maximum(q - k, 0)) * 200_000 < 1_900_000_000,
    "tanh": lambda b, h, q, k: q - k < 30 * np.tanh(h / 4),
    "where": lambda b, h, q, k: np.where(q < 80, k, -abs(q - k)) >= np.maximum(10, -30 + 8 * h),
}
DECIDES = {"causal", "window", "prefix", "documents", "table"}


def classes(device: Device, mod: Any, b: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel's function says of each block [n_q, n_kv], and the mask [LENGTH, LENGTH]."""
    _, traced = trace_mods(None, mod)
    assert traced is not None
    mods = bind_mods(device, None, traced)
    n_q, n_kv = LENGTH // BLOCK_Q, LENGTH // BLOCK_KV
    out = device.zeros(4 * n_q * n_kv, "classes")
    source = f"""{mods.prelude}{read_source("common/common.cl")}
    SCALAR_MODS
    __kernel void classify(__global int* out, const int b, const int h MOD_PARAMS) {{
        const int q = get_global_id(0) * {BLOCK_Q}, kv = get_global_id(1) * {BLOCK_KV};
        out[get_global_id(0) * {n_kv} + get_global_id(1)] =
            mask_block(b, h, q, q + {BLOCK_Q - 1}, kv, kv + {BLOCK_KV - 1} MOD_ARGS);
    }}"""
    import pyopencl as cl

    program = cl.Program(device.context, source).build(["-cl-std=CL1.2", "-w"], cache_dir=False)
    arguments = [buffer.cl for buffer in mods.buffers]
    cl.Kernel(program, "classify")(device.queue, (n_q, n_kv), None, out.cl, np.int32(b), np.int32(h), *arguments)
    q, k = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    return device.read(out, np.int32, (n_q, n_kv)), traced.evaluate(0, b, h, q, k, dtype=np.float32)


def check(device: Device, mod: Any, b: int, h: int) -> tuple[int, int]:
    """The number of decided blocks, and of those that could be."""
    found, mask = classes(device, mod, b, h)
    blocks = mask.reshape(LENGTH // BLOCK_Q, BLOCK_Q, LENGTH // BLOCK_KV, BLOCK_KV)
    some, every = blocks.any((1, 3)), blocks.all((1, 3))
    assert not some[found == 0].any()
    assert every[found == 2].all()
    return int((found != 1).sum()), int((every | ~some).sum())


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("name", FIXED)
def test_ready_made_masks(device: Device, name: str) -> None:
    for b, h in ((0, 0), (1, 1)):
        decided, could_be = check(device, FIXED[name], b, h)
        if name in DECIDES:
            assert decided == could_be


def positions() -> st.SearchStrategy[Any]:
    """Integer expressions in q and k as functions (q, k, h) -> value."""
    small = st.integers(-40, 170)
    leaf = st.one_of(
        st.just(lambda q, k, h: q),
        st.just(lambda q, k, h: k),
        st.just(lambda q, k, h: h),
        small.map(lambda c: lambda q, k, h: k + c),
    )

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        pairs = st.tuples(inner, inner)
        return st.one_of(
            pairs.map(lambda p: lambda q, k, h: p[0](q, k, h) + p[1](q, k, h)),
            pairs.map(lambda p: lambda q, k, h: p[0](q, k, h) - p[1](q, k, h)),
            pairs.map(lambda p: lambda q, k, h: np.minimum(p[0](q, k, h), p[1](q, k, h))),
            pairs.map(lambda p: lambda q, k, h: np.where(p[0](q, k, h) < p[1](q, k, h), p[0](q, k, h), 7)),
            st.tuples(inner, st.integers(1, 9)).map(lambda p: lambda q, k, h: p[0](q, k, h) // p[1]),
            st.tuples(inner, st.integers(1, 40)).map(lambda p: lambda q, k, h: p[0](q, k, h) % p[1]),
            st.tuples(inner, st.integers(-3, 3)).map(lambda p: lambda q, k, h: p[0](q, k, h) * p[1]),
            inner.map(lambda f: lambda q, k, h: abs(f(q, k, h))),
            inner.map(lambda f: lambda q, k, h: documents[np.minimum(np.maximum(f(q, k, h), 0), 159)]),
        )

    return st.recursive(leaf, grow, max_leaves=4)


def mask_mods() -> st.SearchStrategy[Any]:
    compared = st.one_of(
        st.tuples(positions(), positions()).map(lambda p: lambda b, h, q, k: p[0](q, k, h) <= p[1](q, k, h)),
        st.tuples(positions(), positions()).map(lambda p: lambda b, h, q, k: p[0](q, k, h) == p[1](q, k, h)),
    )
    return st.recursive(
        compared,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda p: and_masks(*p)),
            st.tuples(inner, inner).map(lambda p: or_masks(*p)),
            st.tuples(inner, inner).map(lambda p: lambda b, h, q, k: p[0](b, h, q, k) ^ p[1](b, h, q, k)),
            inner.map(lambda f: lambda b, h, q, k: ~f(b, h, q, k)),
        ),
        max_leaves=3,
    )


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(mod=mask_mods())
def test_any_mask(default_device: Device, mod: Any) -> None:
    check(default_device, mod, 0, 1)
