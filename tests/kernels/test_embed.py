"""embed: rows are copied exactly; the rotation has a float32 angle and the device's cos and sin."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, poisoned, read_guarded, run, small_config, weight_on_device, with_poison

from llmcl import reference
from llmcl.kernels.common.step_state import StepState
from llmcl.ops.embed import embed
from llmcl.runtime.device import Device

ROPE_TOLERANCE = 1e-6  # absolute, of cosines and sines

VOCAB, HIDDEN, HEAD_DIM = 131, 80, 64
small = pytest.mark.oclgrind


def check(
    device: Device,
    dtype: str,
    n: int,
    position: int,
    *,
    token_ids: np.ndarray | None = None,
    tiles_per_part: int = 0,
    scale: float = 1.0,
) -> None:
    rng = np.random.default_rng(n + position)
    table = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    rotation = small_config(head_dim=HEAD_DIM).rotations()["main"]
    rotation[1, ::3] = 1.25
    tokens = rng.integers(0, VOCAB, n) if token_ids is None else token_ids
    seen_before = np.where(np.arange(VOCAB) % 5 == 0, position - 1, -1).astype(np.int32)

    step = StepState(device, n)
    step.write_tokens(tokens, position)
    x, rope = poisoned(device, (n, HIDDEN)), poisoned(device, (n, HEAD_DIM))
    last_seen = with_poison(device, seen_before)
    weight = weight_on_device(device, table, dtype, tiles_per_part=tiles_per_part)
    run(embed(device, weight, step, device.upload(rotation, "frequencies"), x, rope, last_seen, scale=scale), n)

    rows = read_guarded(device, x, np.float32, (n, HIDDEN))
    np.testing.assert_array_equal(rows, scale * reference.embed(reference.round_to(table, dtype), tokens))
    cos, sin = reference.rope_table(position + np.arange(n), *rotation)
    rotation = read_guarded(device, rope, np.float32, (n, HEAD_DIM))
    np.testing.assert_allclose(rotation, np.concatenate([cos, sin], axis=1), rtol=0, atol=ROPE_TOLERANCE)
    latest = seen_before.copy()
    np.maximum.at(latest, tokens, position + np.arange(n))
    np.testing.assert_array_equal(read_guarded(device, last_seen, np.int32, (VOCAB,)), latest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 15, 16, pytest.param(17, marks=small), 577])
def test_embed(target: Device, dtype: str, n: int) -> None:
    check(target, dtype, n, position=0)


@pytest.mark.parametrize("position", [1, 577, 100_000])
def test_embed_after_a_cache(target: Device, position: int) -> None:
    check(target, "float32", 9, position)


@pytest.mark.parametrize("tiles_per_part", [2, 4])
def test_embed_of_a_split_table(target: Device, tiles_per_part: int) -> None:
    check(target, "bfloat16", 131, 3, token_ids=np.arange(VOCAB)[::-1], tiles_per_part=tiles_per_part)


def test_embed_scaled(target: Device) -> None:
    check(target, "bfloat16", 17, 3, scale=16.0)  # a power of two: exact


def test_a_token_again_keeps_its_latest_position(target: Device) -> None:
    check(target, "float16", 64, 7, token_ids=np.arange(64) % 3)
