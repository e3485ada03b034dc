"""Tables 6 and 7: whole calls of flex_attention beside PyTorch's: many queries, and decode with a page table."""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from pyopencl.array import to_device

from attention_bench.measuring import (
    Bench,
    Call,
    bfloat16_bits,
    check,
    expected_rows,
    grid,
    measure,
    random_arrays,
    some_rows,
)
from attention_bench.ours import ours_flex, ours_profiled
from attention_bench.results import visible_pairs
from attention_bench.torch_flex import large_call_variants, torch_decode_calls, torch_large_calls
from llmcl.attention import create_block_mask, flex_attention, masks, where
from llmcl.reference import round_bfloat16


def table_large_calls(bench: Bench) -> None:
    """Table 6: whole calls of flex_attention, and torch.compile(flex_attention) on the same device."""
    heads, kv_heads, length = (4, 1, 256) if bench.quick else (8, 2, 2048) if bench.device.is_cpu else (32, 8, 8192)
    usual, where = ("float32", "cpu") if bench.device.is_cpu else ("float16", "cuda")
    table = bench.table(
        6,
        f"Whole calls on {usual} arrays on the device, [1, {heads}/{kv_heads}, {length}, 128]",
        "Milliseconds of calls in a row by the host's clock, medians of turns; beside them the device's own clock for "
        "one call (ours: its launches, torch: between two events). Ratios are their time over ours.",
    )
    exact = random_arrays(*[(1, n, length, 128) for n in (heads, kv_heads, kv_heads)])
    rows = some_rows(length)
    variants = [*large_call_variants(length, heads).items()]
    for name, variant in variants[:2] if bench.quick else variants:  # PyTorch compiles each for seconds
        q, k, v = (bfloat16_bits(x) if variant.bfloat16 else x.astype(usual) for x in exact)
        score_mod, mask_mod = variant.ours
        mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, length, length)
        options = {"score_mod": score_mod, "block_mask": mask}
        theirs = torch_large_calls(where, q, k, v, variant)
        contestants = {"ours": ours_flex(bench.device, q, k, v, whole=True, **options)}
        contestants |= {who: contestant for who, (contestant, _) in theirs.items()}
        rounded = [round_bfloat16(x) if variant.bfloat16 else x.astype(usual) for x in exact]
        expected = expected_rows(rounded, rows, score_mod, mask_mod)
        # Queries, keys, values and results have 16 bits, and matrix units round the weights to them.
        bound = 2.0 ** (-6 if variant.bfloat16 else -9)
        errors = {who: check(f"{who} {name}", c, expected, np.s_[:, :, rows], bound) for who, c in contestants.items()}
        times = measure(bench, contestants, 1.0)
        call = ours_profiled(bench.device, q, k, v, **options)
        profiles = [call() for _ in range(9)]
        launches = {launch: statistics.median(one[launch] for one in profiles) for launch in profiles[0]}
        pairs = heads * visible_pairs(mask_mod, length)
        bench.calls.append(Call(name, {who: timing.ms for who, timing in times.items()}, flops=4.0 * 128 * pairs))
        row = {"variant": name, "ours ms": str(times["ours"])}
        for who in times:
            if who != "ours":
                ratio = times[who].ms / times["ours"].ms
                row |= {f"{who} ms": str(times[who]), f"ratio to {who}": f"{ratio:.2f}x"}
                least = 0.9 if who == "SDPA" else 1.0
                if who != "SDPA" or variant.sdpa:
                    bench.target(f"{name} against {who} >= {least}x", ratio, ratio >= least)
        row["ours, device ms"] = f"{sum(launches.values()):.4g}"
        for who, (_, device_ms) in theirs.items():
            if device_ms is not None:
                row[f"{who}, device ms"] = f"{statistics.median(device_ms() for _ in range(9)):.4g}"
        row["launches"] = ", ".join(f"{launch} {ms:.4g}" for launch, ms in launches.items())
        table.rows.append({**row, "error": f"{errors['ours']:.0e}"})
        print(grid(table.rows[-1:]), file=sys.stderr, flush=True)  # PyTorch takes a while to compile the next
    own = {call.name: call.ms["ours"] for call in bench.calls}
    for name in own:
        if name.startswith(("ALiBi", "soft cap")):
            ratio = own[name] / own["causal"]
            bench.target(f"{name}, over causal's time <= 1.10x", ratio, ratio <= 1.1)
    if not bench.device.is_cpu:
        seconds = first_call_s(bench, [x.astype(usual) for x in exact])
        bench.target("first call of a new mod <= 0.6 s", seconds, seconds <= 0.6, " s")


def first_call_s(bench: Bench, arrays: list[np.ndarray]) -> float:
    """Seconds until a causal call is done whose score_mod no cache can hold, as its constant is the time of day."""
    moment = time.time() % 1000

    def new(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return where(q_idx - kv_idx > 100, score + moment, score * (1 + 1e-6 * kv_idx))

    mask = create_block_mask(masks.causal, None, None, arrays[0].shape[2], arrays[1].shape[2])
    q, k, v = (to_device(bench.device.queue, x, allocator=bench.device.allocator) for x in arrays)
    bench.device.finish()
    start = time.perf_counter()
    result = flex_attention(q, k, v, new, mask, enable_gqa=True, device=bench.device)
    bench.device.finish()
    seconds = time.perf_counter() - start
    del result
    return seconds


def table_decode_calls(bench: Bench) -> None:
    """Table 7: a query of each of several sequences, without and with a page table."""
    batch, heads, kv_heads, length, page = (3, 4, 1, 256, 64) if bench.quick else (32, 32, 8, 8192, 128)
    table = bench.table(
        7,
        f"Decode: whole calls on float16 device arrays, {batch} sequences of {length}, {heads}/{kv_heads} heads of 128",
        f"Keys and values contiguous, [B, H, S, D], and in shuffled pages of {page}. GB/s: their bytes over the time.",
    )
    q, one_k, one_v = random_arrays((batch, heads, 1, 128), (1, kv_heads, length, 128), (1, kv_heads, length, 128))
    q = q.astype(np.float16)
    # Sequences have the keys of the first one from different places on: numbers for all would take long to draw.
    k, v = (np.concatenate([np.roll(x.astype(np.float16), 7 * b, 2) for b in range(batch)]) for x in (one_k, one_v))
    n = length // page
    page_table = np.random.default_rng(1).permutation(batch * n).reshape(batch, n).astype(np.int32)
    pools = [np.empty((batch * n, kv_heads, page, 128), np.float16) for _ in range(2)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[page_table.reshape(-1)] = x.reshape(batch, kv_heads, n, page, 128).swapaxes(1, 2).reshape(pool.shape)
    contestants = {
        "ours, contiguous": ours_flex(bench.device, q, k, v, whole=True),
        "ours, page table": ours_flex(bench.device, q, *pools, whole=True, page_table=page_table),
        **torch_decode_calls(q, k, v, page_table, page),
    }
    expected = expected_rows((q[:2], k[:2], v[:2]), np.array([0]))
    errors = {who: check(who, one, expected, np.s_[:2], 2.0**-9) for who, one in contestants.items()}
    times = measure(bench, contestants, 4.0)
    for who, timing in times.items():
        gb_s = 2e-6 * k.nbytes / timing.ms
        row = {"": who, "ms": str(timing), "GB/s": f"{gb_s:.0f}"}
        ours = times["ours, " + who.partition(", ")[2]].ms
        if who.startswith("torch"):
            row["ratio"] = f"{timing.ms / ours:.2f}x"
        table.rows.append({**row, "error": f"{errors[who]:.0e}"})
    for kind in ("contiguous", "page table"):
        found = {who.partition(",")[0]: timing.ms for who, timing in times.items() if who.endswith(kind)}
        bench.calls.append(Call(f"decode, {kind}", found, nbytes=2.0 * k.nbytes))
    if not bench.device.is_cpu:
        ratio = times["ours, page table"].ms / times["ours, contiguous"].ms
        bench.target("decode, paged over contiguous <= 1.02x", ratio, ratio <= 1.02)
    if "torch compiled, page table" in times:
        ratio = times["torch compiled, page table"].ms / times["ours, page table"].ms
        bench.target("decode with a page table, against torch compiled with one >= 1.5x", ratio, ratio >= 1.5)
