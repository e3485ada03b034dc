"""Vector functions of common.cl (exp16, tanh16 ...): largest relative error, and what they make of limits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyopencl as cl
import pytest

from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

TOLERANCE = {"exp": 3e-7, "exp2_below": 2e-7, "exp2_short": 8e-5, "tanh": 1e-6}
TWINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "exp2_below": np.exp2,  # of numbers below 127
    "exp2_short": np.exp2,
    "tanh": np.tanh,
}


def on_device(device: Device, name: str, x: np.ndarray) -> np.ndarray:
    source = read_source("common/common.cl") + (
        "__kernel void f(__global const float* x, __global float* y) {"
        f"const size_t i = get_global_id(0) * 16; store16_f32({name}16(load16_f32(x + i)), y + i); }}"
    )
    program = cl.Program(device.context, source).build(["-cl-std=CL1.2", "-cl-denorms-are-zero", "-w"], cache_dir=False)
    argument, result = device.upload(x, "x"), device.alloc(x.nbytes, "y")
    cl.Kernel(program, "f")(device.queue, (x.size // 16,), (1,), argument.cl, result.cl)
    return device.read(result, np.float32, x.shape)


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("name", TWINS)
def test_relative_error(device: Device, name: str) -> None:
    near, far = np.linspace(-1, 1, 1 << 14), np.linspace(-86, 88.6, 1 << 14)
    x = np.concatenate([near, far, np.geomspace(1e-20, 1, 1 << 10)]).astype(np.float32)
    expected = TWINS[name](x.astype(np.float64))
    found = on_device(device, name, x)
    error = np.abs(found - expected) / np.maximum(np.abs(expected), 1e-36)
    assert error.max() < TOLERANCE[name]


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("name", ["exp2_below", "exp2_short"])
def test_exp2_of_hidden_scores_is_zero(device: Device, name: str) -> None:
    """A key that is not seen has the weight 0, so that a row without keys sums to 0."""
    if not device.is_cpu:
        pytest.skip("only CPU variants use these functions; a GPU's maximum drops NaN")
    x = np.array([-np.inf, -1e30, -1000, -127, -125, 0, np.nan, *[-np.inf] * 9], np.float32)
    found = on_device(device, name, x)
    assert found[:4].tolist() == [0] * 4 and found[4] > 0 and abs(found[5] - 1) <= TOLERANCE[name]
    assert np.isnan(found[6]) and not found[7:].any()


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize(("name", "limits"), [("exp", (0, np.inf, 1)), ("tanh", (-1, 1, 0))], ids=str)
def test_limits(device: Device, name: str, limits: tuple[float, float, float]) -> None:
    if not device.is_cpu:
        pytest.skip("only CPU variants use these functions; a GPU's maximum drops NaN")
    x = np.array([-np.inf, np.inf, 0, np.nan, -1e30, 1e30, *[0] * 10], np.float32)
    found = on_device(device, name, x)
    np.testing.assert_allclose(found[[0, 1, 2, 4, 5]], [*limits, *limits[:2]], rtol=TOLERANCE[name], atol=0)
    assert np.isnan(found[3])
