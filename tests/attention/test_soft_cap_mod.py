"""A soft cap on 16-bit arrays on the device: scores near it and beyond it, hidden keys, and what is returned beside the
output."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import rounded_operands
from parameters import each_value
from pyopencl.array import to_device

from llmcl.attention import AuxRequest, create_block_mask, flex_attention, masks
from llmcl.reference import round_bfloat16

N = 130
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.causal,
    "even queries": lambda b, h, q_idx, kv_idx: (q_idx % 2 == 0) & (kv_idx > 60),  # the others see no key
}


def expected_of(
    arrays: list[np.ndarray], scale: float, cap: float, seen: np.ndarray, sinks: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, lse and largest scores in float64."""
    q, k, v = (x.astype(np.float64) for x in arrays)
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = np.where(seen, cap * np.tanh(scale / cap * (q @ k.swapaxes(2, 3))), -np.inf)
    weights, of_sinks = np.exp(scores), 0.0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None]
    total = weights.sum(-1) + of_sinks
    with np.errstate(divide="ignore"):
        return weights @ v / np.where(total > 0, total, 1.0)[..., None], np.log(total), scores.max(-1)


@each_value(
    ("mask", MASKS),
    ("dtype", ["float16", "bfloat16"]),
    ("width", [64, 64, 128, 128]),
    (  # Near the cap; beyond it in some rows, and in all; a cap so small that all keys count; a scale below 0; all
        # scores below 0.
        "cap,size,below",
        [(30.0, 1.0, 0), (30.0, 14.0, 0), (30.0, 60.0, 0), (3.0, 1.0, 0), (30.0, -4.0, 0), (100.0, 1.0, 12)],
    ),
)
def test_soft_cap(default_device: Any, cap: float, size: float, below: int, width: int, dtype: str, mask: str) -> None:
    rng = np.random.default_rng(width)
    exact = [rng.standard_normal((1, heads, N, width)).astype(np.float32) for heads in (4, 2, 2)]
    exact[0] *= np.geomspace(0.1, 1.0, N, dtype=np.float32)[:, None]  # rows of small scores and of large ones
    if below:
        exact[0][..., 0], exact[1][..., 0] = below, -below
    arrays = given = [x.astype(dtype) if dtype == "float16" else round_bfloat16(x) for x in exact]
    if dtype == "bfloat16":
        given = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in arrays]
    scale, mask_mod = size / width**0.5, MASKS[mask]
    queries, keys = np.ogrid[:N, :N]
    seen = np.ones((N, N), bool) if mask_mod is None else np.broadcast_to(mask_mod(0, 0, queries, keys), (N, N))
    block_mask = mask_mod and create_block_mask(mask_mod, None, None, N, N)
    sinks = np.array([-2.0, 0.0, 1.0, 25.0], np.float32) if mask == "causal" else None
    out, aux = flex_attention(
        *(to_device(default_device.queue, x) for x in given),
        masks.soft_cap(cap),
        block_mask,
        scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True, max_scores=True),
        sinks=None if sinks is None else to_device(default_device.queue, sinks),
        device=default_device,
        out_dtype="float32",
    )
    expected = expected_of(arrays, scale, cap, seen, sinks)
    # Scores have an error of 2^-11 of themselves where operands are rounded, a weight that of its score as a factor.
    rounded = rounded_operands(default_device, "float16", 3e-6)
    of_scores = rounded * min(cap, 5 * abs(size) + below**2 / width**0.5)
    of_output = 4 * (of_scores + rounded_operands(default_device, dtype, 3e-6))
    bounds = {"out": of_output, "lse": of_scores, "max_scores": of_scores}
    for (name, bound), found, wanted in zip(bounds.items(), (out, *aux), expected, strict=True):
        values, some = found.get(), np.isfinite(wanted)
        assert np.array_equal(np.isfinite(values), some) and not np.isnan(values).any()
        assert np.abs(values[some] - wanted[some]).max() < bound, name
