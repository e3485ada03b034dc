"""What llmcl's attention is measured against: the host, two OpenCL baselines, and PyTorch.

Every contestant is a `Contestant`: it can be run any number of times, and what it computed can be read.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl

from llmcl.runtime.device import Buffer, Device, Launch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Contestant:
    """run(k): enqueues the work k times. finish(): waits for it. result(): the output."""

    run: Callable[[int], None]
    finish: Callable[[], None]
    result: Callable[[], np.ndarray]

    def seconds(self, k: int, clock: Callable[[], float] = time.perf_counter) -> float:
        self.finish()
        start = clock()
        self.run(k)
        self.finish()
        return (clock() - start) / k


def repeated(launches: Sequence[Launch], n_tokens: int = 1) -> Callable[[int], None]:
    def run(k: int) -> None:
        for _ in range(k):
            for launch in launches:
                launch.enqueue(n_tokens)

    return run


def build(device: Device, file: str, constants: dict[str, object]) -> cl.Program:
    source = (HERE / file).read_text(encoding="utf-8")
    program: cl.Program = cl.Program(device.context, source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # drivers chat about what they vectorised
        program.build([f"-D{name}={value}" for name, value in constants.items()])
    return program


def softmax_rows(scores: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def decode_arrays(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [n_q_heads, head_dim], k and v [kv_len, n_kv_heads, head_dim] -> [n_q_heads, head_dim]."""
    groups = q.reshape(k.shape[1], -1, q.shape[1])
    weights = softmax_rows(np.matmul(groups, k.transpose(1, 2, 0)) * q.dtype.type(q.shape[1] ** -0.5))
    out: np.ndarray = np.matmul(weights, v.transpose(1, 0, 2)).reshape(q.shape)
    return out


def host_fallback(device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Contestant:
    """Reads Q, K and V of the layer back, computes on the host (NumPy, float32) and writes the result to the device."""
    buffers = [device.upload(x, "host fallback") for x in (q, k, v)]
    out = device.alloc(q.nbytes, "host fallback output")

    def run(n: int) -> None:
        for _ in range(n):
            arrays = [device.read(buffer, np.float32, x.shape) for buffer, x in zip(buffers, (q, k, v), strict=True)]
            device.write(out, decode_arrays(*arrays))

    return Contestant(run, device.finish, lambda: device.read(out, np.float32, q.shape))


def three_phase(device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Contestant:
    """The three-phase kernel, float32, one work-group of 64 a query head."""
    n_q_heads, head_dim = q.shape
    constants: dict[str, object] = {"N_Q_HEADS": n_q_heads, "N_KV_HEADS": k.shape[1], "HEAD_DIM": head_dim}
    kernel = build(device, "three_phase_decode.cl", constants).three_phase_decode
    out = device.alloc(q.nbytes, "three-phase output")
    inputs = [device.upload(x, "three-phase input") for x in (q, k, v)]
    launch = Launch(device, kernel, [*inputs, out, np.int32(len(k))], (n_q_heads,), (64,))
    return Contestant(repeated([launch]), device.finish, lambda: device.read(out, np.float32, q.shape))


def unfused(device: Device, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Contestant:
    """Three kernels with the scores in global memory: [batch, heads, length, head_dim], every key visible."""
    batch, heads, length, head_dim = q.shape
    width = 1 if device.is_cpu else 256
    constants: dict[str, object] = {"LENGTH": length, "HEAD_DIM": head_dim, "ROWS": 8, "WIDTH": width}
    constants["HALF"] = int(k.dtype == np.float16)
    program = build(device, "unfused.cl", constants)
    inputs: list[Buffer] = [device.upload(x, "unfused input") for x in (q, k.swapaxes(2, 3), v)]
    s = device.alloc(4 * batch * heads * length * length, "unfused scores")
    out = device.alloc(q.nbytes, "unfused output")
    local = (64, 1, 1)
    launches = [
        Launch(device, program.scores, [inputs[0], inputs[1], s], (length // 64, length // 8, batch * heads), local),
        Launch(device, program.softmax, [s], (length, batch * heads), (width, 1)),
        Launch(
            device, program.weighted_values, [s, inputs[2], out], (head_dim // 64, length // 8, batch * heads), local
        ),
    ]
    return Contestant(repeated(launches), device.finish, lambda: device.read(out, np.float32, q.shape))


def torch_sdpa(
    on_gpu: bool, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool
) -> tuple[str, Contestant] | None:
    """PyTorch's scaled_dot_product_attention, float32, on a GPU if it can; None if not installed."""
    try:
        import torch
    except ImportError:
        return None
    where = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    query, key, value = (torch.from_numpy(x).to(where) for x in (q, k, v))
    last: list[Any] = []

    def run(n: int) -> None:
        with torch.no_grad():
            for _ in range(n):
                last[:] = [torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)]

    def finish() -> None:
        if where == "cuda":
            torch.cuda.synchronize()

    def result() -> np.ndarray:
        array: np.ndarray = last[0].cpu().numpy()
        return array

    name = f"torch {torch.__version__} {where}" + (f", {torch.get_num_threads()} threads" if where == "cpu" else "")
    return name, Contestant(run, finish, result)
