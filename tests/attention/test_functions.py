"""Every function that a mod may use: what it computes on each device, beside PyTorch, and between which bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from traced_mods import KV, LANES, B, H, ModsOnDevice, Q, grid

from llmcl.attention import flex_attention
from llmcl.attention.tracing.builders import BUILDERS
from llmcl.attention.tracing.intervals import bounds
from llmcl.attention.tracing.trace import trace_score_mod
from llmcl.runtime.device import Device

# For each function of `builders`, of a float x, a positive float p, and ints i, j with j > 0.
CASES: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "add": lambda x, p, i, j: torch.add(x, p) + torch.add(i, j),
    "sub": lambda x, p, i, j: torch.sub(x, p) + torch.sub(i, j),
    "mul": lambda x, p, i, j: torch.mul(x, p) + torch.mul(i, j),
    "div": lambda x, p, i, j: torch.div(x, p) + torch.div(i, j) + torch.div(x, p, rounding_mode="trunc"),
    "floor_divide": lambda x, p, i, j: torch.floor_divide(i, j) + torch.floor_divide(i, 4) + torch.floor_divide(i, -3),
    "remainder": lambda x, p, i, j: torch.remainder(i, j) + torch.remainder(i, -3) + torch.remainder(x, 64.0) / 64,
    "pow": lambda x, p, i, j: torch.pow(p, x) + torch.pow(x, 3) + torch.pow(i, 2) + torch.pow(p, 0.5),
    "rsub": lambda x, p, i, j: torch.rsub(x, p) + torch.rsub(i, j),
    "rdiv": lambda x, p, i, j: 3 / p + 2.5 / j,
    "rpow": lambda x, p, i, j: 2**x + 1.5 ** (x / 4),
    "neg": lambda x, p, i, j: torch.neg(x) + torch.neg(i),
    "abs": lambda x, p, i, j: torch.abs(x) + torch.abs(i),
    "sign": lambda x, p, i, j: torch.sign(x) + torch.sign(i),
    "square": lambda x, p, i, j: torch.square(x) + torch.square(i),
    "reciprocal": lambda x, p, i, j: torch.reciprocal(p) + torch.reciprocal(j),
    "minimum": lambda x, p, i, j: torch.minimum(x, p) + torch.minimum(i, j),
    "maximum": lambda x, p, i, j: torch.maximum(x, p) + torch.maximum(i, j),
    "clamp": lambda x, p, i, j: torch.clamp(x, -1, 2.5) + torch.clamp(i, min=3) + torch.clamp(x, max=0),
    "lt": lambda x, p, i, j: torch.where(torch.lt(x, p - 2), 1.0, 2.0) + torch.lt(i, j),
    "le": lambda x, p, i, j: torch.where(torch.le(x, p - 2), 1.0, 2.0) + torch.le(i, j),
    "gt": lambda x, p, i, j: torch.where(torch.gt(x, p - 2), 1.0, 2.0) + torch.gt(i, j),
    "ge": lambda x, p, i, j: torch.where(torch.ge(x, p - 2), 1.0, 2.0) + torch.ge(i, j),
    "eq": lambda x, p, i, j: torch.eq(x, x) + torch.eq(i, j) * 2.0,
    "ne": lambda x, p, i, j: torch.ne(x, x) + torch.ne(i, j) * 2.0,
    "and": lambda x, p, i, j: (i & 12) + ((x > 0) & (i > j)) * x,
    "or": lambda x, p, i, j: (i | 5) + ((x > 0) | (i > j)) * x,
    "xor": lambda x, p, i, j: (i ^ 9) + ((x > 0) ^ (i > j)) * x,
    "not": lambda x, p, i, j: ~i + ~(x > 0) * x,
    "logical_and": lambda x, p, i, j: torch.logical_and(x > 0, i) * x,
    "logical_or": lambda x, p, i, j: torch.logical_or(x > 0, i) * x,
    "logical_xor": lambda x, p, i, j: torch.logical_xor(x > 0, i) * x,
    "logical_not": lambda x, p, i, j: torch.logical_not(i) * x,
    "lshift": lambda x, p, i, j: (i << 3) + x,
    "rshift": lambda x, p, i, j: (i >> 2) + x,
    "where": lambda x, p, i, j: torch.where(i > j, x, p) + torch.where(x > 0, i, j),
    "isnan": lambda x, p, i, j: torch.isnan(torch.sqrt(x)) * 1.0 + torch.isnan(x),
    "zeros_like": lambda x, p, i, j: torch.zeros_like(x) + x,
    "ones_like": lambda x, p, i, j: torch.ones_like(x) + x,
    "full_like": lambda x, p, i, j: torch.full_like(x, 2.5) + x,
    "clone": lambda x, p, i, j: torch.clone(x),
    "contiguous": lambda x, p, i, j: x.contiguous(),
    "detach": lambda x, p, i, j: x.detach(),
    "exp": lambda x, p, i, j: torch.exp(x),
    "exp2": lambda x, p, i, j: torch.exp2(x),
    "expm1": lambda x, p, i, j: torch.expm1(x),
    "log": lambda x, p, i, j: torch.log(p),
    "log2": lambda x, p, i, j: torch.log2(p),
    "log10": lambda x, p, i, j: torch.log10(p),
    "log1p": lambda x, p, i, j: torch.log1p(p),
    "sqrt": lambda x, p, i, j: torch.sqrt(p),
    "rsqrt": lambda x, p, i, j: torch.rsqrt(p),
    "tanh": lambda x, p, i, j: torch.tanh(x),
    "sin": lambda x, p, i, j: torch.sin(x),
    "cos": lambda x, p, i, j: torch.cos(x),
    "floor": lambda x, p, i, j: torch.floor(x) + torch.floor(i),
    "ceil": lambda x, p, i, j: torch.ceil(x),
    "rint": lambda x, p, i, j: torch.round(x),
    "trunc": lambda x, p, i, j: torch.trunc(x),
    "erf": lambda x, p, i, j: torch.erf(x) + torch.special.erf(x),
    "sigmoid": lambda x, p, i, j: torch.sigmoid(x) + F.sigmoid(20 * x) + torch.special.expit(x),
    "relu": lambda x, p, i, j: F.relu(x) + torch.relu(x) + torch.nn.ReLU()(x),
    "relu6": lambda x, p, i, j: F.relu6(2 * x),
    "leaky_relu": lambda x, p, i, j: F.leaky_relu(x) + F.leaky_relu(x, 0.2) + F.leaky_relu(x, negative_slope=0.3),
    "elu": lambda x, p, i, j: F.elu(x) + F.elu(x, alpha=0.5),
    "gelu": lambda x, p, i, j: F.gelu(x) + F.gelu(x, approximate="tanh") + torch.nn.GELU()(x),
    "silu": lambda x, p, i, j: F.silu(x) + torch.nn.SiLU()(20 * x),
    "mish": lambda x, p, i, j: F.mish(x),
    "softplus": lambda x, p, i, j: F.softplus(x) + F.softplus(20 * x) + F.softplus(x, 2.0, 3.0) + F.softplus(x, beta=3),
    "softsign": lambda x, p, i, j: F.softsign(x),
    "log_sigmoid": lambda x, p, i, j: F.logsigmoid(x),
    "hardtanh": lambda x, p, i, j: F.hardtanh(x) + F.hardtanh(x, -0.5, 0.7) + F.hardtanh(x, min_val=-2.0),
}
LEFT = torch.linspace(-1, 1, H * 24).reshape(H, 24)
RIGHT = torch.cos(torch.arange(KV * 24.0)).reshape(KV, 24)
ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "dot": lambda h, k: torch.dot(LEFT[h], RIGHT[k]),
    "inner": lambda h, k: torch.inner(LEFT[h], RIGHT[k]),
    "matmul": lambda h, k: LEFT[h] @ RIGHT[k],
    "method": lambda h, k: LEFT[h].dot(RIGHT[k]),
}


def mod_of(name: str) -> Callable[..., Any]:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if name in ROWS:
            return score + ROWS[name](h, kv_idx)
        return CASES[name](score, torch.abs(score) + 0.25, q_idx - kv_idx, kv_idx + 1) + 0.0

    return mod


ON_DEVICE = ModsOnDevice({name: ("score_mod", mod_of(name)) for name in (*CASES, *ROWS)})


def expected_of(name: str) -> np.ndarray[Any, Any]:
    score, *indices = (torch.tensor(values).expand(B, H, Q, KV) for values in grid())
    if name in ROWS:
        return (score + (LEFT @ RIGHT.T)[:, None].double()).numpy()
    values: np.ndarray[Any, Any] = mod_of(name)(score.float(), *indices).numpy()
    return values


def test_every_function_has_a_case() -> None:
    assert set(CASES) == set(BUILDERS)


@pytest.mark.parametrize("name", [*CASES, *ROWS])
def test_numpy_computes_what_pytorch_does(name: str) -> None:
    score, *indices = grid()
    actual = ON_DEVICE.traced(name).evaluate(score.astype(np.float32), *indices, dtype=np.float32)
    np.testing.assert_allclose(actual, expected_of(name), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", [*CASES, *ROWS])
def test_a_device_computes_what_pytorch_does(device: Device, name: str, lanes: int) -> None:
    np.testing.assert_allclose(ON_DEVICE.run(device, name)[lanes], expected_of(name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_bounds_hold_what_a_function_gives(name: str) -> None:
    """Only the interval of the score is known."""
    traced = ON_DEVICE.traced(name)
    values, *_ = grid()
    for low, high in ((-1.0, 0.5), (0.25, 3.0), (-40.0, 90.0)):
        score = np.clip(values, low, high)
        ranges = {"score": (np.float64(low), np.float64(high))} | {
            index: (np.int64(0), np.int64(size - 1))
            for index, size in (("b", B), ("h", H), ("q_idx", Q), ("kv_idx", KV))
        }
        least, most, unsafe = bounds(traced.graph, traced.root, ranges, np.float64)
        result = traced.evaluate(score, *grid()[1:])
        if not (unsafe or np.isnan(least) or np.isnan(most)):
            assert least <= result.min() and result.max() <= most


def every_function(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    for name in (*CASES, *ROWS):
        score = score + 0.01 * torch.tanh(0.1 * mod_of(name)(score, b, h, q_idx, kv_idx))
    return score


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param(None, id="chosen"), pytest.param("portable", marks=pytest.mark.slow)])
def test_every_function_in_the_kernels(device: Device, variant: str | None) -> None:
    """Their names and macros beside those of the kernels."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, H, n, 32)).astype(np.float32) for n in (Q, KV, KV))
    expected = torch_flex(*map(torch.from_numpy, (q, k, v)), score_mod=every_function).numpy()
    out = flex_attention(q, k, v, every_function, device=device, variant=variant)
    assert np.abs(out - expected).max() < 2e-5


@pytest.mark.parametrize("name", ["sigmoid", "gelu"])
def test_a_function_that_only_16_values_at_once_lacked(default_device: Device, name: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, H, n, 32)).astype(np.float32) for n in (Q, KV, KV))
    expected = torch_flex(*map(torch.from_numpy, (q, k, v)), score_mod=mod_of(name)).numpy()
    out = flex_attention(q, k, v, mod_of(name), device=default_device)
    assert np.abs(out - expected).max() < 2e-5


def test_a_part_of_an_array_is_that_part() -> None:
    """An array indexed with numbers behaves like the array."""
    table = np.arange(float(KV * 2)).reshape(2, KV)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + (table[1] * 2)[kv_idx] + np.sum(table[0])

    score, *indices = grid()
    expected = score + 2 * table[1] + table[0].sum()
    np.testing.assert_allclose(trace_score_mod(mod).evaluate(score, *indices), expected, rtol=1e-6)
