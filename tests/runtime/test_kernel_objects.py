"""Kernel objects are made without pyopencl's invokers, and pyopencl is left as it was."""

from __future__ import annotations

import threading

import numpy as np
import pyopencl as cl
import pyopencl.invoker
import pytest

from llmcl.runtime.device import Device
from llmcl.runtime.kernel_objects import INVOKERS, new_kernel

SOURCE = "__kernel void put(__global float *out, float value) { out[get_global_id(0)] = value; }"


@pytest.fixture(scope="module")
def program(default_device: Device) -> cl.Program:
    return cl.Program(default_device.context, SOURCE).build(cache_dir=False)  # type: ignore[arg-type]


def test_no_invoker_is_looked_up(program: cl.Program, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[object] = []
    monkeypatch.setattr(pyopencl.invoker, INVOKERS, lambda *args, **options: looked_up.append(args))
    before = getattr(pyopencl.invoker, INVOKERS)
    kernels = [new_kernel(program, "put") for _ in range(3)]
    assert len({kernel.int_ptr for kernel in kernels}) == 3
    assert looked_up == [] and getattr(pyopencl.invoker, INVOKERS) is before


def test_the_kernel_can_be_called_as_any_of_pyopencl(program: cl.Program, default_device: Device) -> None:
    device, kernel = default_device, new_kernel(program, "put")
    out = device.alloc(16, "out")
    kernel(device.queue, (4,), (1,), out.cl, np.float32(3))
    assert device.read(out, np.float32, (4,)).tolist() == [3] * 4
    kernel.set_args(out.cl, np.float32(5))
    cl.enqueue_nd_range_kernel(device.queue, kernel, (4,), None)
    assert device.read(out, np.float32, (4,)).tolist() == [5] * 4
    with pytest.raises(TypeError, match="put takes 2 arguments; 1 were given"):
        kernel(device.queue, (4,), (1,), out.cl)
    kernel.set_scalar_arg_dtypes([None, np.float32])
    kernel(device.queue, (4,), (1,), out.cl, 7)  # pyopencl's own invoker packs a Python number
    assert device.read(out, np.float32, (4,)).tolist() == [7] * 4


def test_a_pyopencl_without_the_function_makes_its_own_invokers(
    program: cl.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmcl.runtime.kernel_objects.INVOKERS", "of_another_version")
    assert new_kernel(program, "put").num_args == 2
    assert not hasattr(pyopencl.invoker, "of_another_version")


def test_threads_leave_pyopencl_as_it_was(program: cl.Program) -> None:
    before = getattr(pyopencl.invoker, INVOKERS)
    threads = [threading.Thread(target=lambda: [new_kernel(program, "put") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert getattr(pyopencl.invoker, INVOKERS) is before


def test_an_unknown_kernel_is_an_error(program: cl.Program) -> None:
    before = getattr(pyopencl.invoker, INVOKERS)
    with pytest.raises(cl.Error):
        new_kernel(program, "get")
    assert getattr(pyopencl.invoker, INVOKERS) is before
