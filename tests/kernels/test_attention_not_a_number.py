"""What is not a number in a query, a key or a value: it shows where it is seen, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import key_tiles, poisoned, read_guarded, rotations, run, step_state_at, to_storage, with_poison

from llmcl import reference
from llmcl.kernels.common.attention import AttentionShape
from llmcl.ops.attention import attention_decode, attention_prefill
from llmcl.runtime.device import Buffer, Device

HEADS = N_Q, N_KV, HEAD_DIM = 6, 2, 32
GROUP = N_Q // N_KV
CAPACITY = 64
AT = 5  # the dimension

pytestmark = [
    pytest.mark.parametrize("operand", ["query", "key", "value"]),
    pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0"]),
]


class Operands:
    """Random queries of n tokens, keys and values, a number missing in the first head of one of them."""

    def __init__(self, operand: str, place: int, n: int = 1):
        rng = np.random.default_rng(place)
        self.qkv = rng.standard_normal((n, N_Q + 2 * N_KV, HEAD_DIM)).astype(np.float32)
        self.cached = {name: rng.standard_normal((N_KV, CAPACITY, HEAD_DIM)) for name in ("key", "value")}
        if operand == "query":
            self.qkv[place, 0, AT] = np.nan
        else:
            self.cached[operand][0, place, AT] = np.nan

    def caches(self, device: Device, dtype: str) -> tuple[Buffer, Buffer]:
        keys, values = self.cached.values()
        if dtype == "q8_0":
            return with_poison(device, reference.pack_keys(keys)), with_poison(device, reference.pack_values(values))
        return with_poison(device, key_tiles(to_storage(keys, dtype))), with_poison(device, to_storage(values, dtype))


def heads_with(operand: str) -> slice:
    return slice(0, 1 if operand == "query" else GROUP)


@pytest.mark.parametrize(("position", "n_splits", "place"), [(16, 1, 3), (33, 3, 3), (33, 3, 32)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_decode(
    target: Device, dtype: str, operand: str, position: int, n_splits: int, place: int, with_sinks: bool
) -> None:
    operands = Operands(operand, 0 if operand == "query" else place)
    parts = poisoned(target, (N_Q, n_splits, 2)), poisoned(target, (N_Q, n_splits, HEAD_DIM))
    out = poisoned(target, (N_Q, HEAD_DIM))
    launches = attention_decode(
        target,
        AttentionShape(*HEADS, CAPACITY, dtype),
        with_poison(target, operands.qkv),
        with_poison(target, rotations(HEAD_DIM, np.array([position]))),
        step_state_at(target, position=position, n_tokens=1),
        *operands.caches(target, dtype),
        *parts,
        out,
        n_splits=n_splits,
        sinks=with_poison(target, np.zeros(N_Q, np.float32)) if with_sinks else None,
    )
    run(launches)
    shows = np.isnan(read_guarded(target, out, np.float32, (N_Q, HEAD_DIM))).any(axis=1)
    expected = np.zeros_like(shows)
    expected[heads_with(operand)] = True
    np.testing.assert_array_equal(shows, expected)


@pytest.mark.parametrize("place", [3, 17])
def test_prefill(target: Device, dtype: str, operand: str, place: int) -> None:
    """17: of the last row of a block on a CPU. Scores of hundreds: without a block's maximum exp would overflow."""
    n = 20
    operands = Operands(operand, place, n)
    operands.qkv *= 100.0
    out = poisoned(target, (n, N_Q, HEAD_DIM))
    shape = AttentionShape(*HEADS, CAPACITY, dtype, exact_queries=True)
    step, queries = step_state_at(target, position=0, n_tokens=n), with_poison(target, operands.qkv)
    run(attention_prefill(target, shape, queries, step, *operands.caches(target, dtype), out), n)
    found = read_guarded(target, out, np.float32, (n, N_Q, HEAD_DIM))
    shows = np.isnan(found).any(axis=2)
    expected = np.zeros_like(shows)
    expected[place : place + 1 if operand == "query" else n, heads_with(operand)] = True
    assert np.all(shows[expected])
    if not target.is_cpu:  # whose tiles multiply what a row does not see by 0
        expected[:, heads_with(operand)] |= operand == "value"
    np.testing.assert_array_equal(shows & ~expected, False)
    keys, values = (reference.round_to(rows[:, :n], dtype).swapaxes(0, 1) for rows in operands.cached.values())
    twin = reference.attention(operands.qkv[:, :N_Q], np.nan_to_num(keys), np.nan_to_num(values), 0, HEAD_DIM**-0.5)
    assert np.abs(found - twin)[~expected].max() < 1e-3
