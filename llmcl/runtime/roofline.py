"""Measures a device's peak rates, the ceilings for decode and prefill."""

from __future__ import annotations

import time

import numpy as np

from llmcl.runtime.device import Device, Launch

CHAINS = 12  # independent sums: more than a multiply-add's latency in cycles


def read_bandwidth(device: Device) -> float:
    """Returns a streaming read's bytes per second, the ceiling for decode: the best pass over a large buffer."""
    nbytes = min(device.entry.max_alloc_bytes, device.entry.global_mem_bytes // 8, 1 << (29 if device.is_cpu else 32))
    nbytes -= nbytes % (1 << 20)
    best = float("inf")
    source = device.alloc(nbytes, "bandwidth probe", streamed=True)
    device.fill(source, np.uint32(0))
    # The best split of a stream differs between devices; the fastest split sets the ceiling.
    sizes = [(device.compute_units * f, 1) for f in (1, 2, 4)] if device.is_cpu else [(4096, 256), (16384, 256)]
    result = device.alloc(4 * max(g * w for g, w in sizes), "bandwidth probe result")
    try:
        for groups, width in sizes:
            launch = device.launch(
                "portable/read_bandwidth.cl",
                "read_bandwidth",
                {"LOCAL_SIZE": width},
                [source, result, np.uint64(nbytes // 64)],
                groups=(groups,),
                local=(width,),
            )
            best = min(best, _shortest(device, launch))
    finally:
        source.release()
        result.release()
    return nbytes / best


def arithmetic_peak(device: Device) -> float:
    """Returns float32 operations per second for independent multiply-adds in registers, the ceiling for prefill."""
    shapes = [(device.compute_units * f, 1) for f in (1, 4)] if device.is_cpu else [(device.compute_units * 32, 256)]
    wide, rounds = (16, 1 << 16) if device.is_cpu else (1, 1 << 12)
    best = 0.0
    for groups, width in shapes:
        width = min(width, device.entry.max_work_group_size)
        result = device.alloc(4 * groups * width, "arithmetic probe result")
        try:
            launch = device.launch(
                "portable/arithmetic_peak.cl",
                "arithmetic_peak",
                {"WIDTH": wide, "ROUNDS": rounds, "CHAINS": CHAINS},
                [result, np.float32(0.5), np.float32(1.0)],
                groups=(groups,),
                local=(width,),
            )
            flops = 2 * wide * rounds * CHAINS * groups * width
            best = max(best, flops / _shortest(device, launch))
        finally:
            result.release()
    return best


def _shortest(device: Device, launch: Launch) -> float:
    """Returns the seconds of the fastest of six runs."""
    seconds = []
    for _ in range(6):
        device.finish()
        start = time.perf_counter()
        launch.enqueue()
        device.finish()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
