"""Mods in OpenCL C, evaluated on a device at every position of a grid."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyopencl as cl

from llmcl.attention.tracing.trace import TracedMod, trace_mask_mod, trace_score_mod
from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

B, H, Q, KV = 2, 3, 40, 48
LANES = (1, 4, 16)


def grid() -> tuple[Any, ...]:
    """score float64 [B, H, Q, KV] and the indices, shaped to broadcast."""
    score = np.random.default_rng(2).standard_normal((B, H, Q, KV)) * 3
    return (
        score,
        np.arange(B)[:, None, None, None],
        np.arange(H)[:, None, None],
        np.arange(Q)[:, None],
        np.arange(KV),
    )


class ModsOnDevice:
    """Mods by name, each with its kind. What was compiled and computed is kept."""

    def __init__(self, mods: Mapping[str, tuple[str, Any]]):
        self._mods = mods
        self.traced = functools.cache(self._traced)
        self.run = functools.cache(self._run)
        self._program = functools.cache(self._built)

    def _traced(self, name: str) -> TracedMod:
        kind, mod = self._mods[name]
        return trace_mask_mod(mod, prefix=name) if kind == "mask_mod" else trace_score_mod(mod, prefix=name)

    def _built(self, device: Device, names: tuple[str, ...]) -> cl.Program:
        text = read_source("common/common.cl") + "".join(kernel_of(name, self.traced(name)) for name in names)
        return cl.Program(device.context, text).build(["-cl-std=CL1.2", "-w"])

    def _run(self, device: Device, name: str) -> dict[int, np.ndarray[Any, Any]]:
        """The mod's OpenCL C at each (b, h, q, kv) of the grid: float32 [B, H, Q, KV] for each of LANES."""
        context, queue = device.context, device.queue
        # A CPU's compilers take longer to begin than for most mods; Mesa's goes through all kernels for each of them.
        program = self._program(device, (name,) if device.entry.is_software else (*self._mods,))
        flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
        result = np.empty((len(LANES), B, H, Q, KV), np.float32)
        out = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, size=result.nbytes)
        inputs = [grid()[0].astype(np.float32), *(capture.array for capture in self.traced(name).captures)]
        buffers = [cl.Buffer(context, flags, hostbuf=array) for array in inputs]
        cl.Kernel(program, f"mod_{name}")(queue, (B * H * Q,), (1,), buffers[0], out, *buffers[1:])
        cl.enqueue_copy(queue, result, out)
        return dict(zip(LANES, result, strict=True))


def kernel_of(name: str, traced: TracedMod) -> str:
    """Functions of the mod for each of LANES, and a kernel of its name that writes their values one after the other."""
    value_type = "int" if traced.kind == "mask_mod" else "float"
    captures = "".join(
        f", __global const {'float' if c.dtype == 'float32' else 'int'}* {c.name}" for c in traced.captures
    )
    names = "".join(f", {c.name}" for c in traced.captures)

    def function(lanes: int) -> str:
        vector = "" if lanes == 1 else str(lanes)
        return f"""inline {value_type}{vector} mod_{name}_of{lanes}(const float{vector} score, const int b, const int h,
            const int q_idx, const int{vector} kv_idx{captures}) {{ {traced.body(lanes)} }}"""

    def loop(lanes: int) -> str:
        vector = "" if lanes == 1 else str(lanes)
        lane_list = ", ".join(str(lane) for lane in range(lanes))
        return f"""{{
        for (int first = 0; first < {KV}; first += {lanes}) {{
            const int{vector} kv_idx = first + (int{vector})({lane_list});
            float{vector} score;
            for (int i = 0; i < {lanes}; ++i) ((float*)&score)[i] = scores[row * {KV} + first + i];
            const {value_type}{vector} value = mod_{name}_of{lanes}(score, b, h, q_idx, kv_idx{names});
            for (int i = 0; i < {lanes}; ++i) out[row * {KV} + first + i] = ((const {value_type}*)&value)[i];
        }}
        out += {B * H * Q * KV};
        }}"""

    return f"""
    {" ".join(function(lanes) for lanes in LANES)}
    __kernel void mod_{name}(__global const float* scores, __global float* out{captures}) {{
        const int row = get_global_id(0), q_idx = row % {Q}, h = row / {Q} % {H}, b = row / {Q * H};
        {" ".join(loop(lanes) for lanes in LANES)}
    }}"""
