"""latent_append: rows of the cache and rotated queries, as largest difference over the largest expected magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import (
    from_storage,
    poisoned,
    read_guarded,
    relative_error,
    rotations,
    run,
    step_state_at,
    storage_type,
    with_poison,
)
from parameters import each_value

from llmcl import reference
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.latent import LatentShape
from llmcl.ops.latent_attention import latent_append
from llmcl.runtime.device import Device

EPS = 1e-5
CAPACITY = 64
TOLERANCE = {"float32": 1e-6, "float16": 2.0**-10, "bfloat16": 2.0**-7, "q8_0": 6e-3}


@each_value(
    ("dtype", TOLERANCE),
    ("interleaved", [True, False]),
    (
        "heads,rank,rope,nope,n,position",
        [
            (3, 32, 32, 16, 5, 14),
            pytest.param(2, 48, 16, 48, 3, 0, marks=pytest.mark.oclgrind),
            (20, 512, 64, 192, 1, 63),
        ],
    ),
)
def test_latent_append(
    target: Device, heads: int, rank: int, rope: int, nope: int, n: int, position: int, interleaved: bool, dtype: str
) -> None:
    rng = np.random.default_rng(rank)
    width, query = rank + rope, nope + rope
    latents, queries = rng.standard_normal((n, width)), rng.standard_normal((n, heads, query))
    norm = (1.0 + 0.2 * rng.standard_normal(rank)).astype(np.float32)
    shape = LatentShape(AttentionShape(heads, 1, width, CAPACITY, dtype), rank, query, interleaved)
    table = rotations(width, np.arange(position, position + n))
    cos, sin = table[:, : rope // 2], table[:, width // 2 : width // 2 + rope // 2]
    cache = poisoned(target, (CAPACITY * shape.cache.row_bytes,), 1)
    to = with_poison(target, queries.astype(np.float32))
    run(
        latent_append(
            target,
            shape,
            with_poison(target, latents.astype(np.float32)),
            with_poison(target, norm),
            to,
            with_poison(target, table),
            step_state_at(target, position=position, n_tokens=n),
            cache,
            eps=EPS,
        ),
        n,
    )
    rows, rotated = reference.latent_append(latents, norm, queries, cos, sin, EPS, interleaved=interleaved)
    assert relative_error(read_guarded(target, to, np.float32, queries.shape), rotated) < TOLERANCE["float32"]
    if dtype == "q8_0":
        stored = read_guarded(target, cache, np.uint8, (1, CAPACITY // 16, 17 * width))
        found = reference.unpack_values(stored)[0]
    else:
        found = from_storage(read_guarded(target, cache, storage_type(dtype), (CAPACITY, width)), dtype)
    assert relative_error(found[position : position + n], rows) < TOLERANCE[dtype]
