#!/usr/bin/env python
"""Prints the five tables of attention's reference systems with llmcl's figures beside theirs, on any OpenCL device, and
two more: large calls of flex_attention, and decode with a page table, beside PyTorch's compiled one.

Every contestant is checked against float64 before it is timed. Times are medians of rounds in which the contestants
take turns, warm, with half the interquartile range as the spread. Keys and values are float32 unless stated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from attention_bench.baselines import host_fallback, three_phase, torch_sdpa, unfused
from attention_bench.large_calls import table_decode_calls, table_large_calls
from attention_bench.measuring import (
    BOUND,
    Bench,
    Table,
    WrongResultError,
    as_csv,
    as_json,
    check,
    expected_rows,
    markdown,
    measure,
    processor_seconds,
    random_arrays,
    some_rows,
)
from attention_bench.ours import ours_causal, ours_decode, ours_flex, ours_on_host_arrays
from attention_bench.results import as_result, check_comparable, write_result

import llmcl
from llmcl.attention import and_masks, create_block_mask, flex_attention, masks
from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.cli.text_files import check_writable
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.runtime.device import Device
from llmcl.tools.tune import tune_prefill

# ---- the tables --------------------------------------------------------------------------------------------------


def table_decode(bench: Bench) -> None:
    """Table 1: one query, 32 query heads, 8 KV heads of 64; TBT in the shape of Llama 3.2 1B, which has these heads."""
    lengths = [128, 512] if bench.quick else [128, 512, 2048, 8192]
    layers = 16
    table = bench.table(
        1,
        "Decode attention and TBT, 32 query heads, 8 KV heads of 64",
        "Milliseconds a token: attention of 16 layers, and TBT of random weights in the shape of Llama 3.2 1B, which "
        "has these heads (bfloat16 weights). TBT is measured with our float16 cache; for the others it is that, less "
        "our attention, plus theirs. The host fallback reads Q, K and V back and computes with NumPy. Ours also "
        "rotates and appends. Reference (its device and model, 32/8 heads): host fallback attention 18, TBT 26.16; "
        "three-phase attention 2, TBT 19.19.",
    )
    steps = {} if bench.quick else decode_steps_ms(bench.device, lengths)
    for length in lengths:
        q, k, v = random_arrays((32, 64), (length, 8, 64), (length, 8, 64))
        halves = [x.astype(np.float16).astype(np.float32) for x in (k, v)]
        contestants = {
            "host fallback": host_fallback(bench.device, q, k, v),
            "three-phase": three_phase(bench.device, q, k, v),
            "ours, float32 KV": ours_decode(bench.device, q, k, v),
            "ours, float16 KV": ours_decode(bench.device, q, k, v, "float16"),
        }
        errors = {}
        for name, contestant in contestants.items():
            kv = halves if "float16" in name else [k, v]
            expected = _float64_decode(q, *kv)
            errors[name] = check(f"{name} at {length}", contestant, expected)
        times = measure(bench, contestants)
        engine = times["ours, float16 KV"].ms
        for name, timing in times.items():
            row = {
                "cached": length,
                "attention": name,
                "ms a layer": str(timing),
                "ms a token": f"{layers * timing.ms:.3g}",
                "against three-phase": f"{times['three-phase'].ms / timing.ms:.2f}x",
                "against host": f"{times['host fallback'].ms / timing.ms:.2f}x",
            }
            if steps:
                row["TBT ms"] = f"{steps[length] + layers * (timing.ms - engine):.2f}"
            table.rows.append({**row, "error": f"{errors[name]:.0e}"})
        if length >= 2048:
            for name in ("ours, float32 KV", "ours, float16 KV"):
                ratio = times["three-phase"].ms / times[name].ms
                bench.target(f"{name}, against three-phase at {length} >= 5x", ratio, ratio >= 5)
            if not bench.device.is_cpu:
                ratio = times["host fallback"].ms / engine
                bench.target(f"ours against the host fallback at {length} >= 10x", ratio, ratio >= 10)


def _float64_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    arrays = [x.swapaxes(0, 1)[None] for x in (q[None], k, v)]
    return expected_rows(arrays, np.array([0]))[0, :, 0]


def decode_steps_ms(device: Device, lengths: Sequence[int]) -> dict[int, float]:
    """Median time of a decode step at each depth: random weights, a cache full of ones, no sampling."""
    result = {}
    with llmcl.load_random("llama-3.2-1b", device=device.entry.index, max_context=max(lengths) + 16) as llm:
        for buffer in llm.model.cache.buffers():
            llm.device.fill(buffer, np.uint32(0x3C003C00))
        for length in lengths:
            llm.reset()
            llm.sequence.token_ids[:] = [1] * (length - 1)
            times = []
            for _ in range(9):
                llm.model.cache.truncate(llm.sequence, length - 1)
                llm.device.finish()
                start = time.perf_counter()
                llm.model.decode_token(llm.sequence, 1)
                llm.device.finish()
                times.append(1e3 * (time.perf_counter() - start))
            result[length] = statistics.median(times[1:])
    return result


def table_combinations(bench: Bench) -> None:
    """Table 2: the eight combinations of tile sizes and the default, as `llmcl tune` measures them."""
    n, heads, kv_heads = (256, 4, 1) if bench.quick else (1024, 8, 2)
    table = bench.table(
        2,
        f"Prefill tiles: {n} tokens, {heads} query heads, {kv_heads} KV heads of 128, causal, float16 KV",
        "The fastest of several runs each. Reference (phone GPU): 1.5-5x over G expected. `llmcl` names the constant "
        "to lower where a combination does not fit.",
    )
    shape = AttentionShape(heads, kv_heads, 128, CAPACITY_MULTIPLE, "float16", exact_queries=True)
    tuning = tune_prefill(bench.device, shape, n, search=False)
    for one in tuning.rows:
        row: dict[str, Any] = {"": f"{one.label} (winner)" if one is tuning.winner else one.label}
        row |= one.constants
        if one.ms is not None and tuning.baseline_ms is not None:
            speedup = f"{tuning.baseline_ms / one.ms:.2f}x"
            row |= {"ms": f"{one.ms:.4g}", "against G": speedup, "error": f"{one.error:.0e}"}
        else:
            row |= {"ms": one.refused, "against G": "", "error": ""}
        table.rows.append(row)


def table_sdpa(bench: Bench) -> None:
    """Table 3: PyTorch's scaled_dot_product_attention."""
    table = bench.table(
        3,
        "Against torch SDPA, float32",
        "Whole calls of flex_attention on arrays that are on the device, torch's too; beside it ours on NumPy arrays, "
        "with the copies to the device and back. Reference (A40): its best kernel against SDPA.",
    )
    cases: list[tuple[tuple[int, ...], bool, str]] = [
        ((2, 8, 64, 64), False, "0.0095 ms, SDPA 0.0158: 1.66x"),
        ((2, 8, 256, 64), False, "0.0215 ms, SDPA 0.0480: 2.23x"),
        ((2, 8, 512, 64), False, "0.0449 ms, SDPA 0.1289: 2.87x"),
    ]
    if not bench.quick:
        cases.append(((1, 32, 2048, 128), True, ""))
    for shape, causal, reference in cases:
        q, k, v = random_arrays(shape, shape, shape)
        length, rows = shape[2], some_rows(shape[2])
        mask = create_block_mask(masks.causal, None, None, length, length) if causal else None
        expected = expected_rows((q, k, v), rows, mask_mod=masks.causal if causal else None)
        contestants = {
            "ours": ours_flex(bench.device, q, k, v, whole=True, block_mask=mask),
            "host arrays": ours_on_host_arrays(bench.device, q, k, v, block_mask=mask),
        }
        sdpa = torch_sdpa(not bench.device.is_cpu, q, k, v, causal)
        if sdpa is not None:
            contestants[sdpa[0]] = sdpa[1]
        name = f"{list(shape)}{' causal' if causal else ''}"
        errors = {who: check(f"{who} {name}", c, expected, np.s_[:, :, rows]) for who, c in contestants.items()}
        times = measure(bench, contestants, 4.0)
        row = {"shape": name, "ours ms": str(times["ours"]), "SDPA ms": "torch is not installed", "ratio": ""}
        row["ours, NumPy arrays, ms"] = str(times["host arrays"])
        if sdpa is not None:
            ratio = times[sdpa[0]].ms / times["ours"].ms
            row |= {"SDPA ms": str(times[sdpa[0]]), "ratio": f"{ratio:.2f}x", "SDPA": sdpa[0]}
            least = 1.0 if bench.device.is_cpu else 0.8
            bench.target(f"{name} against torch SDPA >= {least}x", ratio, ratio >= least)
        table.rows.append({**row, "reference": reference, "error": f"{errors['ours']:.0e}"})


def table_unfused(bench: Bench) -> None:
    """Table 4: the same device's three kernels with the scores in memory."""
    table = bench.table(
        4,
        "Against an unfused reference, head_dim 64, every key visible",
        "Unfused: S = Q K^T, softmax, P V as three OpenCL kernels on the same device, keys and values of the same "
        "dtype. Reference: A100, its own unfused implementation.",
    )
    cases = [(1, 1, 128, 3.0), (1, 1, 512, 4.0), (1, 1, 1024, 5.0), (1, 1, 2048, 5.2), (2, 8, 512, 4.0)]
    for dtype in [np.float32] if bench.device.is_cpu else [np.float32, np.float16]:
        for batch, heads, length, reference in cases[:2] if bench.quick else cases:
            shape = (batch, heads, length, 64)
            q, k, v = random_arrays(shape, shape, shape)
            k, v = k.astype(dtype), v.astype(dtype)
            rows = some_rows(length)
            expected = expected_rows((q, k, v), rows)
            contestants = {"ours": ours_flex(bench.device, q, k, v), "unfused": unfused(bench.device, q, k, v)}
            # Matrix units round queries and weights to half precision, too.
            bound = BOUND if dtype == np.float32 else 2.0**-10
            errors = [
                check(f"{name} {shape}", c, expected, np.s_[:, :, rows], bound) for name, c in contestants.items()
            ]
            times = measure(bench, contestants)
            ratio = times["unfused"].ms / times["ours"].ms
            kind = np.dtype(dtype).name
            if not bench.device.is_cpu:
                text = f"{list(shape)}, {kind} K and V: over unfused by more than the A100's {reference}x"
                bench.target(text, ratio, ratio > reference)
            table.rows.append(
                {
                    "S": length,
                    "batch, heads": f"{batch}, {heads}",
                    "K and V": kind,
                    "ours ms": str(times["ours"]),
                    "unfused ms": str(times["unfused"]),
                    "ratio": f"{ratio:.2f}x",
                    "A100 reference": f"{reference}x",
                    "error": f"{max(errors):.0e}",
                }
            )


def variants(length: int, heads: int) -> dict[str, tuple[Any, Any]]:
    """name -> (score_mod, mask_mod) for a text of this length."""
    documents = (np.arange(length) // max(1, length // 7)).astype(np.int32)
    side = 1 << ((length.bit_length() - 1) // 2)
    window, cap = masks.sliding_window(length // 8), masks.soft_cap(20.0)
    return {
        "plain": (None, None),
        "causal": (None, masks.causal),
        "ALiBi": (masks.alibi(heads), None),
        "soft cap": (cap, None),
        f"sliding window {length // 8}": (None, window),
        f"prefix LM {length // 4}": (None, masks.prefix_lm(length // 4)),
        "7 documents": (None, masks.document(documents)),
        f"neighbourhood {side}x{length // side}, radius 4": (None, masks.neighbourhood(side, length // side, 4)),
        "causal and documents": (None, and_masks(masks.causal, masks.document(documents))),
        "ALiBi, causal": (masks.alibi(heads), masks.causal),
        "soft cap, sliding window": (cap, window),
    }


def table_flex(bench: Bench) -> None:
    """Table 5: the flex variants, and pages."""
    heads, kv_heads = (4, 1) if bench.device.is_cpu else (32, 8)
    length = 256 if bench.quick else 2048
    table = bench.table(
        5,
        f"Flex variants, {length} tokens, {heads} query heads, {kv_heads} KV heads of 64, float32",
        "Time of the attention kernel against plain (every key visible), and over the share of blocks (128 x 128) that "
        "it visits: 1.00x would be no overhead. Reference (A100): 1.0-1.22x FlashAttention-2, paged below 1%.",
    )
    shapes = (1, heads, length, 64), (1, kv_heads, length, 64)
    q, k, v = random_arrays(shapes[0], shapes[1], shapes[1])
    rows = some_rows(length)
    contestants, errors, visited = {}, {}, {}
    for name, (score_mod, mask_mod) in variants(length, heads).items():
        mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, length, length)
        contestants[name] = ours_flex(bench.device, q, k, v, score_mod=score_mod, block_mask=mask)
        expected = expected_rows((q, k, v), rows, score_mod, mask_mod)
        errors[name] = check(name, contestants[name], expected, np.s_[:, :, rows])
        visited[name] = 1.0 if mask is None else 1 - mask.sparsity() / 100
    built_in = "causal, built in (the model's kernel)"
    tokens_first = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    contestants[built_in] = ours_causal(bench.device, *tokens_first)
    expected = expected_rows((q, k, v), rows, mask_mod=masks.causal)[0].swapaxes(0, 1)
    errors[built_in], visited[built_in] = check(built_in, contestants[built_in], expected, rows), visited["causal"]
    times = measure(bench, contestants, 12.0)
    for name, timing in times.items():
        ratio = timing.ms / times["plain"].ms
        table.rows.append(
            {
                "variant": name,
                "ms": str(timing),
                "against plain": f"{ratio:.2f}x",
                "visited": f"{visited[name]:.0%}",
                "over visited": f"{ratio / visited[name]:.2f}x",
                "error": f"{errors[name]:.0e}",
            }
        )
    ratio = times["causal"].ms / times[built_in].ms
    bench.target("causal as mask_mod within 5% of the built-in", ratio, ratio <= 1.05)
    for name in ("ALiBi", "soft cap"):
        ratio = times[name].ms / times["plain"].ms
        bench.target(f"{name} within 15% of plain", ratio, ratio <= 1.15)
    if not bench.quick:
        long_window(bench, table)
    pages(bench, table)
    compile_time(bench)


def long_window(bench: Bench, table: Table) -> None:
    heads, kv_heads, length = *((2, 1) if bench.device.is_cpu else (32, 8)), 16384
    q, k, v = random_arrays((1, heads, length, 64), (1, kv_heads, length, 64), (1, kv_heads, length, 64))
    rows = some_rows(length)
    contestants, errors = {}, {}
    for name, mod in {"causal, 16k": masks.causal, "window 1024, 16k": masks.sliding_window(1024)}.items():
        mask = create_block_mask(mod, None, None, length, length)
        contestants[name] = ours_flex(bench.device, q, k, v, block_mask=mask)
        expected = expected_rows((q, k, v), rows, mask_mod=mod)
        errors[name] = check(name, contestants[name], expected, np.s_[:, :, rows])
    times = measure(bench, contestants, 4.0)
    ratio = times["causal, 16k"].ms / times["window 1024, 16k"].ms
    for name, timing in times.items():
        faster = f"{ratio:.2f}x faster than causal" if "window" in name else ""
        table.rows.append({"variant": name, "ms": str(timing), "against plain": faster, "error": f"{errors[name]:.0e}"})
    bench.target("a 1k window over 16k tokens >= 6x faster than causal", ratio, ratio >= 6)


def pages(bench: Bench, table: Table) -> None:
    """Shuffled pages of 64 tokens against a contiguous cache, float16."""
    heads, kv_heads = (8, 2) if bench.device.is_cpu else (32, 8)
    for length in [512] if bench.quick else [2048, 8192]:
        q, k, v = random_arrays((256, heads, 64), (length, kv_heads, 64), (length, kv_heads, 64))
        for kind, make in (("decode", ours_decode), ("prefill of 256", ours_causal)):
            queries = q[0] if kind == "decode" else q
            pair = {
                "contiguous": make(bench.device, queries, k, v, "float16"),
                "paged": make(bench.device, queries, k, v, "float16", pages=True),
            }
            for contestant in pair.values():
                contestant.run(1)
            if not np.array_equal(pair["paged"].result(), pair["contiguous"].result()):
                raise WrongResultError(f"{kind} at {length}: pages change the result; expected the same bits")
            times = measure(bench, pair, 4.0)
            ratio = times["paged"].ms / times["contiguous"].ms
            what = f"{kind} at {length}, {heads}/{kv_heads} heads"
            for name, timing in times.items():
                against = f"{ratio:.3f}x of contiguous" if name == "paged" else ""
                row = {"variant": f"{what}, {name}", "ms": str(timing), "against plain": against, "error": "same bits"}
                table.rows.append(row)
            bench.target(f"paged {kind} at {length} within 3% of contiguous", ratio, ratio <= 1.03)


def compile_time(bench: Bench) -> None:
    """A variant that no cache can hold: its constant is the time of day."""
    moment = time.time() % 1000
    q, k, v = random_arrays(*[(1, 2, 64, 64)] * 3)
    before = bench.device.compile_s

    def new(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + moment * (q_idx - kv_idx)

    flex_attention(q, k, v, score_mod=new, device=bench.device)
    seconds = bench.device.compile_s - before
    bench.target("compiling a new variant < 3 s", seconds, seconds < 3, " s")


TABLES: dict[int, Callable[[Bench], None]] = {
    1: table_decode,
    2: table_combinations,
    3: table_sdpa,
    4: table_unfused,
    5: table_flex,
    6: table_large_calls,
    7: table_decode_calls,
}


def chosen_tables(text: Any) -> tuple[int, ...]:
    one = opt.number(int, "numbers from 1 to 7, separated by commas", lambda n: n in TABLES)
    return tuple(one(part) for part in str(text).split(","))


def bench_attention(
    device: opt.Device = None,
    tables: Annotated[
        Any, opt.measurement("-t", "--tables", metavar="N,...", parser=chosen_tables, help="Which of the seven tables.")
    ] = "1,2,3,4,5",
    quick: Annotated[bool, opt.measurement("--quick", help="Small shapes and few rounds: does it work here?")] = False,
    processor_time: Annotated[
        bool, opt.measurement("--processor-time", help="Seconds of processors, for a CPU with other work.")
    ] = False,
    markdown_file: Annotated[Path | None, opt.written("--markdown", "the tables")] = None,
    csv_file: Annotated[Path | None, opt.written("--csv", "a line for each figure")] = None,
    json_file: Annotated[Path | None, opt.written("--json", "an object")] = None,
    result_file: Annotated[Path | None, opt.written("--result", "tables 6 and 7 for scripts/plot_results.py")] = None,
) -> None:
    """Seven tables of attention: decode, tiles, torch SDPA, unfused, flex variants and pages, large calls and decode
    with a page table beside torch's compiled flex_attention; then the targets."""
    outputs = {"--markdown": (markdown_file, markdown), "--csv": (csv_file, as_csv), "--json": (json_file, as_json)}
    for option, path in [*((option, path) for option, (path, _) in outputs.items()), ("--result", result_file)]:
        check_writable(option, path)
    opened = Device.open(device)
    if result_file is not None:
        check_comparable(opened, tables)
    bench = Bench(opened, quick, processor_seconds if processor_time else time.perf_counter)
    for number in tables:
        TABLES[number](bench)
    print(markdown(bench), end="", flush=True)
    for path, write in outputs.values():
        if path is not None:
            path.write_text(write(bench), encoding="utf-8")
    if result_file is not None:
        command = f"python scripts/bench_attention.py --device {device} -t {','.join(map(str, tables))}"
        command += " --processor-time" if processor_time else ""
        text = write_result(as_result(bench, command))
        result_file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_script(bench_attention)
