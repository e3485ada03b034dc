"""The scores of a lane under a soft cap, near 0 and far from it, and with a slope along the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyopencl as cl
import pytest

from llmcl.attention import masks
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

TOLERANCE = 1e-6  # relative to the score: that of tanh1; of near_tanh 1.1e-7
CAP = 20.0
ROWS = 100, 3
FILES = ("common/common.cl", "common/attention_mods.cl", "common/kv_block_ranges.cl", "nvidia/fragment_scores.cl")


def modified(device: Device, score_mod: Any, x: np.ndarray, unit: float, n_keys: int = 100) -> np.ndarray:
    """What becomes of a lane's scores unit * x [..., 8], of the queries ROWS and of keys 0, 1, 8 and 9; float64."""
    mods = bind_mods(device, *trace_mods(score_mod, None))
    source = "".join(
        (
            "#define KV_BLOCK_RANGES 0\n",
            mods.prelude,
            *map(read_source, FILES),
            "__kernel void f(__global float* x MOD_PARAMS) {"
            f"float s[8]; const int rows[2] = {{{ROWS[0]}, {ROWS[1]}}}; x += 8 * get_global_id(0);"
            "for (int i = 0; i < 8; ++i) s[i] = x[i];"
            f"const float unit = {unit}f * SCORE_UNIT;"
            "const row_terms terms = terms_of(unit, 0, 1, rows, 0 MOD_ARGS);"
            f"modify_scores(s, 8, terms, unit, SCORE_FACTOR, 0, 1, rows, 0, {n_keys}, TILE_FULL, false MOD_ARGS);"
            "for (int i = 0; i < 8; ++i)"
            " x[i] = (s[i] + terms.bias[i / 2 % 2]) * (HAS_KEY_SLOPE ? unit * SCORE_FACTOR : 1.0f); }",
        )
    )
    program = cl.Program(device.context, source).build(["-cl-std=CL1.2", "-cl-denorms-are-zero", "-w"], cache_dir=False)
    scores = device.upload(x, "scores")
    cl.Kernel(program, "f")(device.queue, (len(x),), (1,), scores.cl, *(buffer.cl for buffer in mods.buffers))
    found = device.read(scores, np.float32, x.shape).astype(np.float64)
    # Scores 2, 3 and 6, 7 are of query 3, which does not see keys 8 and 9.
    assert np.isneginf(found[:, 6:]).all()
    return found


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("unit", [1.0, 0.5])
def test_soft_cap(device: Device, unit: float) -> None:
    rng = np.random.default_rng(0)
    # All 8 near 0, all far from it, and some of both; up to the edge of the polynomial, 0.75.
    near, far = rng.uniform(-0.75, 0.75, (512, 8)), rng.uniform(-12, 12, (512, 8))
    x = CAP / unit * np.concatenate([near, near * 1e-3, far, np.where(rng.random((512, 8)) < 0.2, far, near)])
    x[0, 0] = np.nan
    x = x.astype(np.float32)
    found = modified(device, masks.soft_cap(CAP), x, unit)
    expected = CAP * np.tanh(x.astype(np.float64) * unit / CAP)
    assert np.isnan(found[0, 0]) and not np.isnan(found[1:]).any()
    error = np.abs(found / expected - 1)[1:, :6]
    assert error.max() < TOLERANCE


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("unit", [1.0, 0.5])
def test_slope_along_the_keys(device: Device, unit: float) -> None:
    x = np.random.default_rng(0).uniform(-8, 8, (64, 8)).astype(np.float32)
    slopes = np.array([0.5, 0.3], np.float32)
    queries, keys = np.array([ROWS[i // 2 % 2] for i in range(8)]), np.array([i // 4 * 8 + i % 2 for i in range(8)])

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (2.0 * score - slopes[h] * (q_idx - kv_idx)) * 3.0

    found = modified(device, mod, x, unit)
    expected = (2.0 * unit * x.astype(np.float64) - 0.3 * (queries - keys)) * 3.0
    assert np.abs(found - expected)[:, :6].max() < TOLERANCE * 100 * 3


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
def test_arrays_have_no_element_past_the_last_key(device: Device) -> None:
    x = np.random.default_rng(0).uniform(-8, 8, (64, 8)).astype(np.float32)
    table = np.array([2, 3, 0, 0, 0, 0, 0, 0, 5], np.float32)  # of 9 keys: the tenth is given the ninth's
    found = modified(device, lambda score, b, h, q_idx, kv_idx: score * table[kv_idx], x, 1.0, n_keys=9)
    assert np.abs(found - x.astype(np.float64) * np.array([2, 3, 2, 3, 5, 5, 0, 0]))[:, :6].max() < TOLERANCE * 100
