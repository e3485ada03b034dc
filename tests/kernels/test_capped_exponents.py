"""The exponents of softmax weights under a soft cap, near it and beyond; and where the polynomial is taken."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from llmcl.attention import masks
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

LOG2E = 1.4426950408889634
SOURCE = """
#define LOG2E 1.4426950408889634f
#define SCORE_SCALE ((float)(SCALE)*SCORE_UNIT)
#define SCALED_FIRST 0
#define quick_tanh tanh
"""
KERNEL = """
__kernel void f(__global const float* s, __global float4* out, const float from, const float before,
                const float least) {
    const int i = get_global_id(0);
    const float top[2] = {s[i], 1e-6f}, last[2] = {before, before};
    float m[2];
    const bool near = near_cap(m, last, top, least);
    out[i] = (float4)(near_exponent(s[i], from), far_exponent(s[i], from), m[0], near);
}
"""


def kernel_of(device: Device, cap: float, scale: float) -> cl.Kernel:
    mods = bind_mods(device, *trace_mods(masks.soft_cap(cap), None))
    macros = "".join(line for line in mods.prelude.splitlines(keepends=True) if "SCORE_" in line or "CAP" in line)
    source = f"#define SCALE {scale!r}f\n{macros}{SOURCE}{read_source('nvidia/capped_exponents.cl')}{KERNEL}"
    program = cl.Program(device.context, source).build(["-cl-std=CL1.2", "-cl-denorms-are-zero", "-w"], cache_dir=False)
    return cl.Kernel(program, "f")


def computed(
    device: Device,
    kernel: cl.Kernel,
    scores: np.ndarray,
    start: float,
    before: float = -np.inf,
    least: float = -1e9,
) -> np.ndarray:
    """[scores, 4] in float64: near exponent and far exponent less `start`; the near one or `before`, if that is larger;
    and whether the near one does for a row whose largest score that is, if its largest exponent is `least` or more."""
    given, out = device.upload(scores.astype(np.float32), "scores"), device.alloc(16 * len(scores), "exponents")
    numbers = [np.float32(x) for x in (start, before, least)]
    kernel(device.queue, scores.shape, None, given.cl, out.cl, *numbers)
    return device.read(out, np.float32, (len(scores), 4)).astype(np.float64)


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize(("cap", "scale"), [(30.0, 0.08838834764831845), (50.0, 0.125), (300.0, 0.05)])
def test_near_and_far(device: Device, cap: float, scale: float) -> None:
    x = np.concatenate([np.linspace(-8, 8, 2001), [1e-6, 1e3, -1e3, -np.inf]])
    scores = (x * cap / scale).astype(np.float32)
    kernel = kernel_of(device, cap, scale)
    near, far, largest, is_near = computed(device, kernel, scores, start=3.0).T
    x = scores.astype(np.float64) * scale / cap
    exponent = cap * LOG2E * np.tanh(x)
    rounding = 1e-6 * cap
    inside = np.abs(x) < 0.75
    assert np.abs(near[inside] - (exponent[inside] - 3.0)).max() < np.max(np.abs(exponent)) * 2.0**-12.1 + rounding
    assert (np.abs(near[inside] + 3.0) < np.abs(exponent[inside]) * (1 + 2.0**-12.1) + rounding).all()
    # Far below, the weight is smaller than it should be, and never too large.
    below = x < -0.75
    assert (near < -cap * LOG2E * 0.635 - 3.0)[below].all() and np.isneginf(near[-1])
    seen = np.isfinite(x)
    assert np.abs(far[seen] - (exponent[seen] - 3.0)).max() < rounding and np.isneginf(far[-1])
    assert np.abs(near[inside] + 3.0 - largest[inside]).max() < rounding  # so a row's largest weight is 1
    negligible = float(np.float32(cap * LOG2E * (17.0 / cap - 0.635)))
    assert np.array_equal(is_near, (x < 0.75) & (largest >= negligible) & seen)
    for before, least in ((-np.inf, 0.0), (1.0, 0.0), (-1.0, 0.0), (negligible - 1.0, -1e9), (negligible + 1.0, -1e9)):
        *_, largest, is_near = computed(device, kernel, scores, 3.0, before, least).T
        assert (largest >= np.float32(before)).all()
        assert np.array_equal(is_near, (x < 0.75) & (largest >= max(negligible, least)) & (seen | (before >= least)))


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize(("cap", "scale"), [(8.0, 0.125), (1e9, 0.001)])
def test_caps_without_a_polynomial(device: Device, cap: float, scale: float) -> None:
    """Small ones, where keys far below a row's largest score still count; and large ones, whose coefficients vanish."""
    scores = np.linspace(-10, 10, 401) * cap / scale
    _, far, _, is_near = computed(device, kernel_of(device, cap, scale), scores, start=0.0).T
    assert not is_near.any()
    assert np.abs(far / (cap * LOG2E) - np.tanh(scores * scale / cap)).max() < 1e-6


def test_what_negligible_means() -> None:
    """Keys below -0.75 of the cap weigh less than the least float16 of the largest where the polynomial is taken."""
    for cap in (14.0, 20.0, 30.0, 100.0):
        least = max(17.0 / cap - 0.635, -1.0)
        assert np.exp(-cap * (least - np.tanh(-0.75))) < 2.0**-24 or least == -1.0
