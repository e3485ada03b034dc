"""embed: rows are copied exactly; the rotation has a float32 angle and the device's cos and sin."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import DTYPES, poisoned, read_guarded, run, small_config, weight_on_device, with_poison

from llmcl import reference
from llmcl.architectures.config import RopeScaling
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


def test_tokens_of_steps_under_way_are_not_overwritten(target: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host goes on while steps wait: each reads its own tokens and position. One token waits for nothing."""
    lengths = [1] * 12 if target.is_cpu else [1, 3, 1, 1, 17, 2] * 2  # on a CPU several tokens are written at once
    rng = np.random.default_rng(3)
    table = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    rotation = small_config(head_dim=HEAD_DIM).rotations()["main"]
    step, weight = StepState(target, 17), weight_on_device(target, table, "float32")
    frequencies = target.upload(rotation, "frequencies")
    steps = [(rng.integers(0, VOCAB, n), int(rng.integers(0, 5000))) for n in lengths]
    outs = [(poisoned(target, (n, HIDDEN)), poisoned(target, (n, HEAD_DIM))) for n in lengths]
    seen = with_poison(target, np.full(VOCAB, -1, np.int32))
    launches = [embed(target, weight, step, frequencies, *out, seen) for out in outs]
    target.finish()
    with monkeypatch.context() as patch:
        patch.setattr(target, "write", lambda *args: pytest.fail("a write that waits for the steps under way"))
        for (tokens, position), launch in zip(steps, launches, strict=True):
            step.write_tokens(tokens, position)
            run(launch, len(tokens))
    for (tokens, position), (x, rope) in zip(steps, outs, strict=True):
        rows = read_guarded(target, x, np.float32, (len(tokens), HIDDEN))
        np.testing.assert_array_equal(rows, reference.embed(table, tokens))
        expected = np.concatenate(reference.rope_table(position + np.arange(len(tokens)), *rotation), axis=1)
        found = read_guarded(target, rope, np.float32, (len(tokens), HEAD_DIM))
        np.testing.assert_allclose(found, expected, rtol=0, atol=ROPE_TOLERANCE)


@small
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("text_length", [0, 70])
def test_frequencies_by_the_length_of_the_text(target: Device, kind: str, text_length: int) -> None:
    """longrope has one set for a text; dynamic raises theta with each token beyond the text's length, too."""
    short, long = (tuple(1.0 + by * i for i in range(HEAD_DIM // 2)) for by in (0.1, 1.0))
    scaling = RopeScaling(kind, 4.0, original_max_position=64, factors=short, long_factors=long, amplitude=1.2)
    config = small_config(head_dim=HEAD_DIM, rope_scaling=scaling)
    n, position = 12, 62
    step = StepState(target, n)
    step.write_tokens([3] * n, position)
    step.write_text_length(config.text_length(text_length))
    table = target.upload(config.device_rotations(512)["main"], "frequencies")
    x, rope = poisoned(target, (n, HIDDEN)), poisoned(target, (n, HEAD_DIM))
    weight = weight_on_device(target, np.zeros((VOCAB, HIDDEN), np.float32), "float32")
    last_seen = with_poison(target, np.zeros(VOCAB, np.int32))
    run(embed(target, weight, step, table, x, rope, last_seen, by_length=config.rope_by_length), n)
    found = read_guarded(target, rope, np.float32, (n, HEAD_DIM))
    for at, row in enumerate(found, position):
        length = max(1, text_length, at + 1 if kind == "dynamic" else 0)
        cos, sin = reference.rope_table(np.array([at]), *config.rotations(length)["main"])
        # Angles reach 73, and the powers of the excess are rounded to float32.
        np.testing.assert_allclose(row, np.concatenate([cos[0], sin[0]]), rtol=0, atol=5e-5)


def test_a_rotary_offset_moves_the_rotation_alone(target: Device) -> None:
    rotation = small_config(head_dim=HEAD_DIM).rotations()["main"]
    step = StepState(target, 5)
    step.write_tokens([7] * 5, 40)
    step.write_rotary_offset(-17)
    x, rope = poisoned(target, (5, HIDDEN)), poisoned(target, (5, HEAD_DIM))
    weight = weight_on_device(target, np.zeros((VOCAB, HIDDEN), np.float32), "float32")
    last_seen = with_poison(target, np.zeros(VOCAB, np.int32))
    run(embed(target, weight, step, target.upload(rotation, "frequencies"), x, rope, last_seen), 5)
    expected = np.concatenate(reference.rope_table(23 + np.arange(5), *rotation), axis=1)
    np.testing.assert_allclose(
        read_guarded(target, rope, np.float32, (5, HEAD_DIM)), expected, rtol=0, atol=ROPE_TOLERANCE
    )
    assert read_guarded(target, last_seen, np.int32, (VOCAB,))[7] == 44
