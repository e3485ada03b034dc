"""The scores of a lane under a soft cap, near 0 and far from it: largest error relative to the capped score."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from llmcl.attention import masks
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

TOLERANCE = 1e-6  # that of tanh1; of near_tanh 1.1e-7
CAP = 20.0


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("unit", [1.0, 0.5])
def test_soft_cap(device: Device, unit: float) -> None:
    mods = bind_mods(device, *trace_mods(masks.soft_cap(CAP), None))
    files = ("common/common.cl", "common/attention_mods.cl", "common/kv_block_ranges.cl", "nvidia/fragment_scores.cl")
    source = "".join(
        (
            "#define KV_BLOCK_RANGES 0\n",
            mods.prelude,
            *map(read_source, files),
            "__kernel void f(__global float* x) {"
            "float s[8]; const int rows[2] = {100, 3}; x += 8 * get_global_id(0);"
            "for (int i = 0; i < 8; ++i) s[i] = x[i];"
            f"modify_scores(s, 8, {unit}f, 0, 0, rows, 0, 100, TILE_FULL, false);"
            "for (int i = 0; i < 8; ++i) x[i] = s[i]; }",
        )
    )
    rng = np.random.default_rng(0)
    # All 8 near 0, all far from it, and some of both; up to the edge of the polynomial, 0.75.
    near, far = rng.uniform(-0.75, 0.75, (512, 8)), rng.uniform(-12, 12, (512, 8))
    x = CAP / unit * np.concatenate([near, near * 1e-3, far, np.where(rng.random((512, 8)) < 0.2, far, near)])
    x[0, 0] = np.nan
    x = x.astype(np.float32)
    program = cl.Program(device.context, source).build(["-cl-std=CL1.2", "-cl-denorms-are-zero", "-w"], cache_dir=False)
    scores = device.upload(x, "scores")
    cl.Kernel(program, "f")(device.queue, (len(x),), (1,), scores.cl)
    found = device.read(scores, np.float32, x.shape).astype(np.float64)
    expected = CAP * np.tanh(x.astype(np.float64) * unit / CAP)
    # Scores 2, 3 and 6, 7 are of query 3, which does not see keys 8 and 9.
    assert np.isneginf(found[:, 6:]).all()
    assert np.isnan(found[0, 0]) and not np.isnan(found[1:]).any()
    error = np.abs(found / expected - 1)[1:, :6]
    assert error.max() < TOLERANCE
