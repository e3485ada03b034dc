"""Checks latent attention kernels against their NumPy twins, for `llmcl doctor`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcl import reference
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.latent import LatentShape
from llmcl.ops.latent_attention import latent_append, latent_attention
from llmcl.runtime.device import Device, Launch
from llmcl.tools.trials import cache_bytes, relative_error, state_at

HEADS, RANK, ROPE, QUERY = 6, 64, 32, 48
WIDTH = RANK + ROPE
N_TOKENS, CAPACITY, EPS = 37, 64, 1e-6


def latent_attention_error(device: Device, *, variant: str, dtype: str) -> float:
    """Returns the larger error from two runs: several tokens, and the last token alone with its keys in splits."""
    rng = np.random.default_rng(0)
    shape = LatentShape(AttentionShape(HEADS, 1, WIDTH, CAPACITY, dtype, score_scale=QUERY**-0.5), RANK, QUERY)
    rows = np.zeros((1, CAPACITY, WIDTH), np.float32)
    rows[0, :N_TOKENS] = reference.round_to(rng.standard_normal((N_TOKENS, WIDTH)), dtype)
    _, bits = cache_bytes(rows, rows, dtype)
    absorbed = rng.standard_normal((N_TOKENS, HEADS, RANK)).astype(np.float32)
    queries = rng.standard_normal((N_TOKENS, HEADS, QUERY)).astype(np.float32)
    expected = reference.latent_attention(absorbed, queries[..., -ROPE:], rows[0, :N_TOKENS], 0, shape.cache.scale)
    cache, out = device.upload(bits, "trial rows"), device.alloc(absorbed.nbytes, "trial sums")
    errors = []
    for first, n_splits in ((0, 1), (N_TOKENS - 1, 3)):
        n, step = N_TOKENS - first, state_at(device, first, N_TOKENS - first)
        inputs = device.upload(absorbed[first:], "trial queries"), device.upload(queries[first:], "trial queries"), step
        part_ml, part_acc = (device.alloc(4 * n * HEADS * n_splits * size, "trial parts") for size in (2, RANK))
        launches = latent_attention(
            device, shape, *inputs, cache, part_ml, part_acc, out, n_splits=n_splits, variant=variant
        )
        _run(launches, n)
        attended = device.read(out, np.float32, (n, HEADS, RANK))
        errors.append(relative_error(attended, expected[first:]))
    return max(errors)


def latent_append_error(device: Device) -> float:
    rng = np.random.default_rng(0)
    shape = LatentShape(AttentionShape(HEADS, 1, WIDTH, CAPACITY, "float32"), RANK, QUERY)
    latents = rng.standard_normal((N_TOKENS, WIDTH)).astype(np.float32)
    queries = rng.standard_normal((N_TOKENS, HEADS, QUERY)).astype(np.float32)
    norm = rng.standard_normal(RANK).astype(np.float32)
    angles = np.arange(N_TOKENS)[:, None] / np.arange(1.0, WIDTH // 2 + 1)
    rope = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    cos, sin = rope[:, : ROPE // 2], rope[:, WIDTH // 2 : WIDTH // 2 + ROPE // 2]
    rows, rotated = reference.latent_append(latents, norm, queries, cos, sin, EPS, interleaved=True)
    cache, query_buffer = device.zeros(4 * CAPACITY * WIDTH, "trial rows"), device.upload(queries, "trial queries")
    inputs = device.upload(latents, "trial latents"), device.upload(norm, "trial norm"), query_buffer
    step = state_at(device, 0, N_TOKENS)
    _run(latent_append(device, shape, *inputs, device.upload(rope, "trial angles"), step, cache, eps=EPS), N_TOKENS)
    return max(
        relative_error(device.read(cache, np.float32, rows.shape), rows),
        relative_error(device.read(query_buffer, np.float32, queries.shape), rotated),
    )


def _run(launches: Iterable[Launch], n: int) -> None:
    for launch in launches:
        launch.enqueue(n)
