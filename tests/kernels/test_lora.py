"""lora: rows with different adapters in one launch; largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run, step_state_at, to_storage, with_poison

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.lora import LowRankWeight, lora
from llmcl.runtime.device import Device

K, SEGMENTS = 80, (48, 16, 32)  # columns of each tensor stacked in the weight
RANKS = 4, 8, 4


def low_rank_weight(device: Device, a: list, b: list, dtype: str, segments: list[int]) -> LowRankWeight:
    """The weight of lora.cl's picture. a: [adapter][segment] [rank, K]; b: [adapter] [rank, columns]."""
    totals = [len(ranks) * len(ranks[0]) for ranks in a]
    ranks = [len(values) for values in b]
    table = np.array([np.cumsum([0, *totals])[:-1], np.cumsum([0, *ranks])[:-1], ranks], np.int32).T.copy()
    columns = b[0].shape[1]
    return LowRankWeight(
        with_poison(device, to_storage(np.concatenate([rows for each in a for rows in each]), dtype)),
        with_poison(device, to_storage(np.concatenate(b), dtype)),
        with_poison(device, np.repeat(np.arange(len(a), dtype=np.int32), [n // 4 for n in totals])),
        with_poison(device, np.array(segments, np.int32)),
        with_poison(device, table),
        dtype,
        K,
        columns,
        sum(totals),
        len(a),
    )


def values(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    numbers = rng.standard_normal(shape).astype(np.float32)
    return {"float32": numbers, "float16": numbers.astype(np.float16).astype(np.float32)}.get(
        dtype, (numbers.view(np.uint32) & 0xFFFF0000).view(np.float32)
    )


def batch_state(device: Device, sequences: list[int]) -> StepState:
    state = StepState(device, 4, n_sequences=4)
    state.write_rows(sequences, 0)
    return state


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.oclgrind), "bfloat16"])
def test_rows_get_the_adapters_of_their_sequences(target: Device, dtype: str, with_norm: bool) -> None:
    rng = np.random.default_rng(3)
    a = [[values(rng, dtype, r, K) for _ in SEGMENTS] for r in RANKS]
    b = [values(rng, dtype, r, sum(SEGMENTS)) for r in RANKS]
    weight = low_rank_weight(target, a, b, dtype, [0, 0, 0, 1, 2, 2])
    scales = np.array([[0, 0, 0], [0, 2.0, 0], [0.5, 0, -1.0], [9, 9, 9]], np.float32)
    sequences = [1, 2, 0, 2]
    x = rng.standard_normal((4, K)).astype(np.float32)
    norm = rng.standard_normal(K).astype(np.float32)
    before = rng.standard_normal((4, sum(SEGMENTS))).astype(np.float32)
    out, state = with_poison(target, before), batch_state(target, sequences)
    given = {"norm": target.upload(norm, "norm"), "eps": 1e-5} if with_norm else {}
    run(lora(target, weight, with_poison(target, x), out, target.upload(scales, "scales"), state, **given), 4)
    rows = reference.rms_norm(x, norm, 1e-5) if with_norm else x
    expected = before.astype(np.float64)
    for adapter in range(len(RANKS)):
        first = 0
        for segment, columns in enumerate(SEGMENTS):
            part = slice(first, first + columns)
            first += columns
            of_rows = scales[sequences, adapter]
            expected[:, part] += reference.lora(rows, a[adapter][segment], b[adapter][:, part].T, of_rows)
    actual = read_guarded(target, out, np.float32, expected.shape)
    assert relative_error(actual, expected) < 2e-6
    np.testing.assert_array_equal(actual[2], before[2])  # without an adapter, not one bit changes


@pytest.mark.parametrize("gate", ["swiglu", "geglu"])
def test_a_gate_follows_the_addition(target: Device, gate: str) -> None:
    rng = np.random.default_rng(4)
    a = [[values(rng, "float32", 4, K) for _ in range(2)]]
    b = [values(rng, "float32", 4, 96)]
    weight = low_rank_weight(target, a, b, "float32", [0, 1] * 3)
    x, base = rng.standard_normal((5, K)).astype(np.float32), rng.standard_normal((5, 96)).astype(np.float32)
    out, scale = poisoned(target, (5, 48)), np.float32(0.25)
    state = step_state_at(target, position=7, n_tokens=5)
    scales = target.upload(np.array([[scale]]), "scales")
    run(
        lora(target, weight, with_poison(target, x), out, scales, state, base=with_poison(target, base), epilogue=gate),
        5,
    )
    tiles, of_b = base.reshape(5, 3, 2, 16), b[0].reshape(4, 3, 2, 16)
    sums = [
        tiles[:, :, i].reshape(5, 48) + reference.lora(x, a[0][i], of_b[:, :, i].reshape(4, 48).T, np.full(5, scale))
        for i in range(2)
    ]
    expected = reference.biased_gate(*sums, np.zeros((2, 48)), gate)
    assert relative_error(read_guarded(target, out, np.float32, (5, 48)), expected) < 2e-6
