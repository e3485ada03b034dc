"""The noise of sampling: its definition in Python's integers, and that it looks like noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcl import reference

TOKENS = np.arange(1 << 16, dtype=np.uint32)


def noise_by_integers(seed: int, step: int, token: int) -> int:
    """The definition in reference.noise_bits, in Python integers."""

    def mix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
        x = ((x ^ (x >> 15)) * 0xD35A2D97) % 2**32
        return x ^ (x >> 15)

    token_key = mix32((seed % 2**32 + 0x9E3779B9) % 2**32)
    step_key = mix32(mix32((token_key + (seed >> 32) + 0x85EBCA6B) % 2**32) ^ step)
    return mix32((mix32(token ^ token_key) + step_key) % 2**32)


def test_noise_bits_definition() -> None:
    rng = np.random.default_rng(18)
    for _ in range(50):
        seed, step = int(rng.integers(0, 2**63)) * 2 + 1, int(rng.integers(0, 2**32))
        tokens = rng.integers(0, 2**32, 8, dtype=np.uint32)
        expected = [noise_by_integers(seed, step, int(token)) for token in tokens]
        assert reference.noise_bits(seed, step, tokens).tolist() == expected
    # Frozen, so that a seed gives the same text with every version.
    assert reference.noise_bits(0, 0, np.arange(3)).tolist() == [2872785435, 524320811, 3749098571]
    assert reference.noise_bits(0x123456789ABCDEF0, 41, np.array([0, 49151, 128255])).tolist() == [
        1552758473,
        2192267931,
        3297882378,
    ]
    assert np.array_equal(reference.noise_bits(-1, 5, TOKENS), reference.noise_bits(2**64 - 1, 5, TOKENS))


def test_uniform_is_open_and_exact() -> None:
    bits = reference.noise_bits(3, 4, TOKENS)
    u = reference.uniform(3, 4, TOKENS)
    assert u.dtype == np.float32
    assert np.array_equal(u.astype(np.float64), ((bits >> 9).astype(np.float64) + 0.5) / 2**23)
    smallest, largest = (np.float32(top + 0.5) * np.float32(2.0**-23) for top in (0, 2**23 - 1))
    assert smallest > 0.0 and largest < 1.0
    noise = reference.gumbel(3, 4, TOKENS)
    assert np.all((noise > -2.82) & (noise < 16.64))


def bin_deviation(u: NDArray[Any], bins: int) -> float:
    """Chi-square of the counts in equal bins, in standard deviations from its mean."""
    counts = np.bincount((u * bins).astype(np.int64), minlength=bins)
    chi_square = np.sum((counts - u.size / bins) ** 2) / (u.size / bins)
    return float((chi_square - (bins - 1)) / math.sqrt(2 * (bins - 1)))


@pytest.mark.parametrize("seed", [0, 1, 2, 42, 1 << 32, (1 << 64) - 1])
@pytest.mark.parametrize("step", [0, 1, 1000])
def test_uniform_moments_and_bins(seed: int, step: int) -> None:
    u = reference.uniform(seed, step, TOKENS).astype(np.float64)
    assert abs(u.mean() - 0.5) < 4.5 * math.sqrt(1 / 12 / u.size)
    assert abs(u.var() - 1 / 12) < 4.5 * math.sqrt(1 / 180 / u.size)
    assert abs(bin_deviation(u, 256)) < 4.5
    # One token over many steps is the other way through the same numbers.
    over_steps = np.concatenate([reference.uniform(seed, step + i, TOKENS[7:8]) for i in range(2000)])
    assert abs(bin_deviation(over_steps.astype(np.float64), 32)) < 4.5


def test_neighbouring_tokens_steps_and_seeds_are_independent() -> None:
    base = reference.uniform(42, 10, TOKENS).astype(np.float64)
    others = {
        "next token": np.roll(base, 1),
        "token ^ 1": base[TOKENS ^ 1],
        "next step": reference.uniform(42, 11, TOKENS),
        "far step": reference.uniform(42, 10 + 4096, TOKENS),
        "next seed": reference.uniform(43, 10, TOKENS),
        "seed + 2^32": reference.uniform(42 + (1 << 32), 10, TOKENS),
        "step and seed swapped": reference.uniform(10, 42, TOKENS),
    }
    for name, other in others.items():
        correlation = np.corrcoef(base, other)[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(base.size), name
        # Pairs over a 16 x 16 grid: dependence that a correlation does not see.
        grid = (np.floor(base * 16) * 16 + np.floor(other * 16)) / 256
        assert abs(bin_deviation(grid, 256)) < 6, name


@pytest.mark.slow
def test_no_two_steps_or_seeds_share_a_sequence() -> None:
    """Not even in another order, as with a single key (noise(token ^ key)) half of these would."""
    sets = [
        reference.noise_bits(seed, step, TOKENS)
        for seed, step in [(0, 0), (0, 1), (0, 2), (0, 255), (1, 0), (2, 0), (1 << 32, 0), (7 << 32, 1)]
    ]
    for i, one in enumerate(sets):
        assert np.unique(one).size > 0.9999 * TOKENS.size - 10
        for other in sets[:i]:
            assert np.intersect1d(one, other).size < 20  # one is what chance gives


@pytest.mark.parametrize("argument", ["seed", "step", "token"])
def test_every_input_bit_flips_every_output_bit_half_the_time(argument: str) -> None:
    rng = np.random.default_rng(19)
    trials = 2000
    for bit in range(64 if argument == "seed" else 32):
        if argument == "token":
            tokens = rng.integers(0, 2**32, trials, dtype=np.uint32)
            flips = reference.noise_bits(5, 6, tokens) ^ reference.noise_bits(5, 6, tokens ^ np.uint32(1 << bit))
        else:
            tokens = TOKENS[:trials]
            one, other = {"seed": ((9 ^ (1 << bit), 6), (9, 6)), "step": ((9, 6 ^ (1 << bit)), (9, 6))}[argument]
            flips = reference.noise_bits(*one, tokens) ^ reference.noise_bits(*other, tokens)
        share = np.mean((flips[:, None] >> np.arange(32, dtype=np.uint32)) & 1, axis=0)
        assert np.all(np.abs(share - 0.5) < 5 * 0.5 / math.sqrt(trials)), bit
