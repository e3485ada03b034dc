"""Several pairs of mods in one program: each call gets those that `rules` names."""

from __future__ import annotations

import numpy as np
import pyopencl as cl
import pytest

from llmcl.attention.masks import alibi, document, sliding_window, soft_cap
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.kernels.common.mods import one_of
from llmcl.runtime.device import Device
from llmcl.runtime.program import read_source

LENGTH, BLOCK, HEADS = 96, 16, 2
DOCUMENTS = document(np.repeat(np.arange(6, dtype=np.int32), 16))
CHOICES = [
    trace_mods(alibi(HEADS), sliding_window(40)),
    trace_mods(soft_cap(3.0), None),
    trace_mods(None, None),
    trace_mods(alibi(HEADS), DOCUMENTS),  # arrays of the same names as those of the first
]
SOURCE = f"""
#include "common/common.cl"
#include "common/attention_mods.cl"
__kernel void call(__global float* scores, __global int* seen, __global int* blocks, const int rules MOD_BUFFERS) {{
    const int h = get_global_id(2), q = get_global_id(1), k = get_global_id(0);
    const int i = (h * {LENGTH} + q) * {LENGTH} + k;
    scores[i] = score_mod(0.01f * (q - k), 0, h, q, k MOD_ARGS);
    seen[i] = mask_mod(0, h, q, k MOD_ARGS);
    blocks[i] = mask_block(0, h, q, q, k / {BLOCK} * {BLOCK}, k / {BLOCK} * {BLOCK} + {BLOCK - 1} MOD_ARGS);
}}
"""


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
def test_each_call_gets_its_mods(device: Device) -> None:
    choices = [bind_mods(device, *traced) for traced in CHOICES]
    text = SOURCE
    for file in ("common/common.cl", "common/attention_mods.cl"):
        text = text.replace(f'#include "{file}"', read_source(file))
    program = cl.Program(device.context, one_of(choices) + text).build(["-cl-std=CL1.2", "-w"], cache_dir=False)
    shape = HEADS, LENGTH, LENGTH
    h, q, k = np.ogrid[:HEADS, :LENGTH, :LENGTH]
    for rules, (score_mod, mask_mod) in enumerate(CHOICES):
        outputs = [device.zeros(4 * h.size * q.size * k.size, name) for name in ("scores", "seen", "blocks")]
        arrays = [buffer.cl for mods in choices for buffer in mods.buffers]
        buffers = [buffer.cl for buffer in outputs]
        cl.Kernel(program, "call")(device.queue, shape[::-1], None, *buffers, np.int32(rules), *arrays)
        scores = device.read(outputs[0], np.float32, shape)
        seen, blocks = (device.read(output, np.int32, shape) for output in outputs[1:])
        given = np.float32(0.01) * (q - k)
        expected = given + 0 * h if score_mod is None else score_mod.evaluate(given, 0, h, q, k)
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        visible = np.ones(shape, bool) if mask_mod is None else mask_mod.evaluate(0, 0, h, q, k)
        np.testing.assert_array_equal(seen.astype(bool), visible)
        in_blocks = visible.reshape(HEADS, LENGTH, -1, BLOCK)
        assert not in_blocks[blocks.reshape(in_blocks.shape)[..., 0] == 0].any()
        assert in_blocks[blocks.reshape(in_blocks.shape)[..., 0] == 2].all()
        assert ({2} if mask_mod is None else {0, 2}) <= {*np.unique(blocks)}
