"""Combinations of mods, masks, shapes, dtypes and pages: flex_attention against PyTorch's own.

Random calls in which each value meets each value of every other parameter; those in which each value occurs once are in
`make test`. Each call compiles a program, so that more of them take minutes: LLMCL_TEST_RANDOM_CALLS=200 adds as many.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering
from helpers import rounded_operands
from torch.nn.attention import flex_attention as torch_flex

from llmcl.attention import create_block_mask, flex_attention
from llmcl.reference import round_bfloat16

TOLERANCE = 3e-5  # of float32 sums; operands are the same on both sides
POSITIONS = 128
MORE_CALLS = int(os.environ.get("LLMCL_TEST_RANDOM_CALLS", "0"))
BIAS = np.random.default_rng(5).standard_normal(2 * POSITIONS).astype(np.float32)
DOCUMENTS = np.repeat(np.arange(8, dtype=np.int32), POSITIONS // 8)
WINDOWS = np.array([3, 10, 40, 200, 5, 17, 1, 60], np.int32)
# What the functions look up, as arrays for us and as tensors for PyTorch, which indexes nothing else.
OURS = {"bias": BIAS, "documents": DOCUMENTS, "windows": WINDOWS}
THEIRS = {name: torch.from_numpy(x) for name, x in OURS.items()}


def score_mods(tables: dict[str, Any]) -> dict[str, Any]:
    bias = tables["bias"]
    return {
        "none": None,
        "distance": lambda score, b, h, q_idx, kv_idx: score - 0.05 * (h + 1) * (q_idx - kv_idx),
        "soft cap": lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score / 2.0),
        "bias": lambda score, b, h, q_idx, kv_idx: score + bias[q_idx - kv_idx + POSITIONS],
        "where": lambda score, b, h, q_idx, kv_idx: torch.where(q_idx % 3 == b, score * 0.5, score + 1.0),
    }


def mask_mods(tables: dict[str, Any]) -> dict[str, Any]:
    documents, windows = tables["documents"], tables["windows"]
    return {
        "none": None,
        "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        "window of the head": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < windows[h]),
        "documents": lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx],
        "prefix or causal": lambda b, h, q_idx, kv_idx: (kv_idx < 20 + 30 * b) | (kv_idx <= q_idx),
        "few": lambda b, h, q_idx, kv_idx: (kv_idx > 60) & (q_idx % 2 == 0),
    }


VALUES: dict[str, list[Any]] = {
    "batch": [1, 2],
    "kv_heads": [1, 2],
    "group": [1, 2, 4],
    "n_queries": [1, 2, 17, 64, 100],
    "n_keys": [1, 16, 33, 100, 128],
    "width": [32, 40, 64, 128],
    "value_width": [None, 48],
    "dtype": ["float32", "float16", "bfloat16"],
    "score": sorted(score_mods(OURS)),
    "mask": sorted(mask_mods(OURS)),
    "block": [128, 32, (16, 48), (64, 16)],
    "page": [0, 16, 64],
    "scale": [None, 0.3],
}


def random_calls(seed: int, count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{name: values[rng.integers(len(values))] for name, values in VALUES.items()} for _ in range(count)]


@cache
def calls(seed: int, tries: int = 5) -> list[dict[str, Any]]:
    """Few that have each pair of values: each the one of some tries that has most of those still missing.

    A try starts with a missing pair. The other parameters, in random order, get the value that adds most.
    """
    rng = np.random.default_rng(seed)
    items = [[(name, value) for value in values] for name, values in VALUES.items()]
    missing = [frozenset(pair) for one, other in combinations(items, 2) for pair in product(one, other)]
    found = []
    while missing:
        left = frozenset(missing)
        candidates = []
        for _ in range(tries):
            call = dict(missing[rng.integers(len(missing))])
            for i in rng.permutation(len(items)):
                if items[i][0][0] not in call:
                    added = [sum(frozenset((item, met)) in left for met in call.items()) for item in items[i]]
                    best = np.flatnonzero(np.equal(added, max(added)))
                    call.update([items[i][rng.choice(best)]])
            candidates.append({name: call[name] for name in VALUES})
        found.append(max(candidates, key=lambda call: len(left.intersection(pairs_of(call)))))
        met_now = pairs_of(found[-1])
        missing = [pair for pair in missing if pair not in met_now]
    return found


def pairs_of(call: dict[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in combinations(call.items(), 2)}


def with_each_value() -> set[int]:
    """Of those calls the few that have each value."""
    return covering({i: {*call.items()} for i, call in enumerate(calls(0))})


def in_pages(x: np.ndarray, table: np.ndarray, page: int) -> np.ndarray:
    """x [B, H, S, D] in a pool [pages, H, page, D]."""
    pool = np.zeros((table.size, x.shape[1], page, x.shape[3]), x.dtype)
    for b, j in np.ndindex(*table.shape):
        rows = x[b, :, j * page : (j + 1) * page]
        pool[table[b, j], :, : rows.shape[1]] = rows
    return pool


def test_every_pair_of_values_is_met() -> None:
    met = {pair for call in calls(0) for pair in combinations(call.items(), 2)}
    sizes = [len(values) for values in VALUES.values()]
    assert len(met) == sum(n * m for n, m in combinations(sizes, 2)) and len(calls(0)) < 60


@pytest.mark.parametrize(
    ("c", "seed"),
    [
        pytest.param(c, i, id=str(i), marks=() if i in with_each_value() else pytest.mark.slow)
        for i, c in enumerate(calls(0))
    ]
    + [pytest.param(c, i, id=f"random-{i:03}") for i, c in enumerate(random_calls(2, MORE_CALLS))],
)
def test_equals_pytorch(default_device: Any, c: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_heads, value_width = c["kv_heads"] * c["group"], c["value_width"] or c["width"]
    shapes = [
        (n_heads, c["n_queries"], c["width"]),
        *((c["kv_heads"], c["n_keys"], w) for w in (c["width"], value_width)),
    ]
    exact = [rng.standard_normal((c["batch"], *shape)).astype(np.float32) for shape in shapes]
    arrays = given_ = [x.astype(c["dtype"]) if c["dtype"] != "bfloat16" else round_bfloat16(x) for x in exact]
    if c["dtype"] == "bfloat16":
        given_ = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in arrays]
    lengths = c["n_queries"], c["n_keys"]
    mask_mod, score_mod = mask_mods(OURS)[c["mask"]], score_mods(OURS)[c["score"]]
    mask = mask_mod and create_block_mask(mask_mod, c["batch"], n_heads, *lengths, BLOCK_SIZE=c["block"])
    options: dict[str, Any] = {"block_mask": mask, "scale": c["scale"], "enable_gqa": True, "out_dtype": "float32"}
    query, *kv = given_
    if c["page"] and (mask is not None or c["n_keys"] % c["page"] == 0):
        n_pages = -(-c["n_keys"] // c["page"])
        options["page_table"] = rng.permutation(c["batch"] * n_pages).reshape(c["batch"], n_pages)
        kv = [in_pages(x, options["page_table"], c["page"]) for x in kv]
    out, lse = flex_attention(query, *kv, score_mod, return_lse=True, device=default_device, **options)

    theirs = mask_mods(THEIRS)[c["mask"]]
    torch_mask = theirs and torch_flex.create_block_mask(theirs, c["batch"], n_heads, *lengths, device="cpu")
    expected, expected_lse = torch_flex.flex_attention(
        *(torch.from_numpy(x.astype(np.float32)) for x in arrays),
        score_mod=score_mods(THEIRS)[c["score"]],
        block_mask=torch_mask,
        scale=c["scale"],
        enable_gqa=True,
        return_lse=True,
    )
    tolerance = TOLERANCE
    if c["dtype"] != "float32":
        tolerance = rounded_operands(default_device, c["dtype"], tolerance, largest=4.0)
    assert np.abs(out - expected.numpy()).max() < tolerance
    seen = ~np.isneginf(expected_lse.numpy())
    assert (np.isneginf(lse) == ~seen).all()
    assert np.abs(lse[seen] - expected_lse.numpy()[seen]).max(initial=0) < 10 * tolerance
