"""Tracing: a mod's graph against the same function run on NumPy arrays and torch tensors, and against its OpenCL C."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex
from traced_mods import KV, LANES, B, H, ModsOnDevice, Q, grid

import llmcl.attention.functions as F
from llmcl.attention import masks
from llmcl.attention.block_mask import and_masks, or_masks
from llmcl.attention.tracing.trace import trace_mask_mod, trace_score_mod
from llmcl.errors import UsageError
from llmcl.runtime.device import Device

SLOPES = np.linspace(0.1, 0.9, H).astype(np.float32)
DOCUMENTS = np.repeat(np.arange(6), 8).astype(np.int64)
TABLE = np.random.default_rng(0).standard_normal((Q, KV))
VISIBLE = np.random.default_rng(1).random((H, KV)) < 0.5
TORCH_SLOPES = torch.linspace(0.1, 0.9, H)
OBJECT = SimpleNamespace(slopes=SLOPES, window=5)


# Written with operators only, so that NumPy arrays can go through the very same function.
SCORE_MODS: dict[str, Callable[..., Any]] = {
    "same": lambda score, b, h, q, k: score,
    "alibi": lambda score, b, h, q, k: score + SLOPES[h] * (k - q),
    "table": lambda score, b, h, q, k: score + TABLE[q, k],
    "table_chain": lambda score, b, h, q, k: score + TABLE[q][k] if np.isscalar(q) else score + TABLE[q, k],
    "arithmetic": lambda score, b, h, q, k: -score * 2 + 3 - (q - k) / (1 + b + h) + abs(score) ** 3,
    "roots_of_negatives": lambda score, b, h, q, k: score**0.5 * 0,
    "divisions": lambda score, b, h, q, k: score + (q - 17) // 5 + (q - 17) % -5 + (k - 9) // -4 + (k - 9) % 8,
    "divisions_by_values": lambda score, b, h, q, k: (q - 17) // (k - 60) + (q - 17) % (k + 1) + score,
    "float_divisions": lambda score, b, h, q, k: score // 0.75 + score % 0.75 + score % -1.5 + (q + 0.5) // 2,
    "bits": lambda score, b, h, q, k: score + ((q & 12) | (k ^ 5)) + (~q) + (k << 3) + ((q - 20) >> 2),
    "bools": lambda score, b, h, q, k: score + (q > k) * 2 - ((q == k) & ~(q < 3)) + ((q >= 2) ^ (k <= 7)) * score,
    "powers": lambda score, b, h, q, k: 2.0 ** (-0.5 * (h + 1)) * score + q**2 + (abs(score) + 1.0) ** -1.5,
    "numpy": lambda score, b, h, q, k: np.where(
        np.logical_and(q >= k, np.not_equal(h, 1)), np.tanh(score), np.minimum(np.exp(score), np.maximum(q, 2.5))
    ),
    "numpy_more": lambda score, b, h, q, k: (
        np.sqrt(np.abs(score)) + np.log1p(q) + np.exp2(score) + np.floor(score) + np.clip(k, 3, 9) + np.sign(q - k)
    ),
    "constant_index": lambda score, b, h, q, k: score + SLOPES[-1] + TABLE[1, k],
    "computed_array": lambda score, b, h, q, k: score + (SLOPES * 2)[h] + DOCUMENTS[q] + len(SLOPES),
    "attribute": lambda score, b, h, q, k: score * OBJECT.slopes[h] + OBJECT.window,
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_is_what_numpy_computes(name: str) -> None:
    function = SCORE_MODS[name]
    with np.errstate(invalid="ignore"):
        expected = np.broadcast_to(function(*grid()), (B, H, Q, KV))
    actual = trace_score_mod(function).evaluate(*grid())
    assert actual.shape == (B, H, Q, KV)
    # Constants are rounded to float32, which the kernels compute in.
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


TORCH_MODS: dict[str, Callable[..., Any]] = {
    "where": lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
    "tanh": lambda score, b, h, q, k: 20 * torch.tanh(score / 20),
    "tensor": lambda score, b, h, q, k: score + TORCH_SLOPES[h] * (k - q),
    "functions": lambda score, b, h, q, k: (
        torch.sigmoid(score) + torch.exp(-torch.abs(score)) + torch.sqrt(torch.square(score)) + torch.rsqrt(1.0 + q)
    ),
    "comparisons": lambda score, b, h, q, k: torch.where(
        torch.logical_or(torch.logical_not(torch.lt(q, k)), torch.eq(h, 1)), torch.maximum(score, q - k + 0.0), score
    ),
    "methods": lambda score, b, h, q, k: (
        score.tanh().abs().clamp(min=0.1) + (q - k).float() / 3 + score.to(torch.int32) + (q > k).to(score.dtype)
    ),
    "clamp": lambda score, b, h, q, k: (
        torch.clamp(score, -1.5, 1.0) + torch.clamp(q, max=7) + score.clamp(min=0, max=2)
    ),
    "reflected": lambda score, b, h, q, k: (
        torch.tensor(2.0) - score + torch.tensor(3.0) / (1 + torch.abs(score)) + 2 ** (score * 0.5) + 7 // (q + 1)
    ),
    "division": lambda score, b, h, q, k: (
        torch.div(q - 20, 3, rounding_mode="floor") + torch.remainder(score, 0.7) + torch.floor_divide(k, 5)
    ),
    "bits": lambda score, b, h, q, k: score + torch.bitwise_and(q, 6) + torch.bitwise_left_shift(k, 2),
    "constants": lambda score, b, h, q, k: score + score.new_ones(()) + torch.zeros_like(score) + q.new_full((), 3),
}


@pytest.mark.parametrize("name", TORCH_MODS)
def test_function_written_for_torch(name: str) -> None:
    function = TORCH_MODS[name]
    score, b, h, q, k = grid()
    tensors = (torch.tensor(score), *(torch.tensor(index) for index in (b, h, q, k)))
    if name == "constants":  # shapes of () broadcast in torch only as tensors
        tensors = tuple(tensor.expand(B, H, Q, KV) for tensor in tensors)
    expected = function(*tensors).numpy()
    actual = trace_score_mod(function).evaluate(score, b, h, q, k)
    np.testing.assert_allclose(actual, np.broadcast_to(expected, actual.shape), rtol=1e-5, atol=1e-5)


def test_torch_compositions_are_traced() -> None:
    documents = torch.tensor(DOCUMENTS)

    def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    _, b, h, q, k = grid()
    same = DOCUMENTS[q] == DOCUMENTS[k]
    both = trace_mask_mod(flex.and_masks(causal, document)).evaluate(0, b, h, q, k)
    either = trace_mask_mod(flex.or_masks(causal, document, flex.noop_mask)).evaluate(0, b, h, q, k)
    np.testing.assert_array_equal(both[0, 0], same & (q >= k))
    assert either.all()


class CallableMod:
    def __init__(self) -> None:
        self.slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.bfloat16)
        self.scale = 3

    def weight(self, h: Any) -> Any:
        return self.slopes[h] * self.scale

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * self.weight(h)

    def method(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + self.slopes[h]


def test_arrays_are_found_wherever_a_function_reaches_them() -> None:
    score, b, h, q, k = grid()
    slopes = np.array([0.5, 0.25, 0.125])

    def default(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any = SLOPES, *, more: Any = SLOPES) -> Any:
        return score * table[h] + more[h]

    def with_table(table: Any, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * table[h]

    def helper_of_helper(h: Any) -> Any:
        return (lambda: slopes[h])()

    def nested(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        def inner() -> Any:
            return helper_of_helper(h) * score

        return inner()

    tables = [slopes, {"a": (slopes,)}]
    expected = score * slopes[h]
    mods: dict[str, tuple[Any, Any]] = {
        "default": (default, score * SLOPES[h] + SLOPES[h]),
        "partial": (functools.partial(with_table, slopes), expected),
        "nested": (nested, expected),
        "containers": (lambda score, b, h, q, k: score * tables[1]["a"][0][h] + 0 * tables[0][h], expected),
        "callable": (CallableMod(), expected * 3),
        "method": (CallableMod().method, score + slopes[h]),
    }
    for name, (mod, value) in mods.items():
        np.testing.assert_allclose(trace_score_mod(mod).evaluate(score, b, h, q, k), value, rtol=1e-6, err_msg=name)
    assert tables[0] is slopes and type(tables[1]["a"][0]) is np.ndarray
    assert default.__defaults__ == (SLOPES,) and type(SLOPES) is np.ndarray


def test_captures() -> None:
    scale, zero_dim = np.float64(0.5), np.array(2.0)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        seen = VISIBLE[h, kv_idx] & (DOCUMENTS[q_idx] == DOCUMENTS[kv_idx])
        return F.where(seen, score * scale * zero_dim, TABLE[q_idx, kv_idx])

    traced = trace_score_mod(mod, prefix="s")
    described = [(c.name, c.label, c.dtype, c.shape) for c in traced.captures]
    assert described == [
        ("s_0", "VISIBLE", "int32", (H, KV)),
        ("s_1", "DOCUMENTS", "int32", (48,)),
        ("s_2", "TABLE", "float32", (Q, KV)),
    ]
    assert all(capture.array.flags.c_contiguous for capture in traced.captures)
    assert "s_0[h * 48 + kv_idx]" in traced.body() and "s_1[q_idx]" in traced.body()
    score, b, h, q, k = grid()
    expected = np.where(VISIBLE[h, k] & (DOCUMENTS[q] == DOCUMENTS[k]), score, TABLE[q, k])
    np.testing.assert_allclose(traced.evaluate(score, b, h, q, k), np.broadcast_to(expected, score.shape), rtol=1e-6)


def test_common_subexpressions_stay_linear() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        for _ in range(60):
            score = score * score - score
        return score

    traced = trace_score_mod(mod)
    assert len(traced.body()) < 60 * 80
    assert traced.evaluate(1.0, 0, 0, 0, 0) == 0.0


@pytest.mark.parametrize("lanes", [1, 16])
def test_operations_within_one_another_are_few(lanes: int) -> None:
    """Intel's compiler ended the process at some 2000, which a loop over the segments of a text reaches."""
    body = trace_mask_mod(segments).body(lanes)
    assert max(itertools.accumulate({"(": 1, ")": -1}.get(char, 0) for char in body)) < 90
    assert len(body) < 400 * len(SEGMENT_STARTS)


def test_what_does_not_depend_on_the_key_is_computed_once() -> None:
    body = trace_score_mod(masks.alibi(4)).body(16)
    assert body.startswith("const float mod_t0 = mod_0[h];\n") and body.count("mod_0") == 1


def tanh_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return F.tanh((q_idx - kv_idx) / 10) < F.exp(-0.1 * kv_idx)


SEGMENT_STARTS = range(0, 400, 4)


def segments(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    seen = q_idx == kv_idx
    for start in SEGMENT_STARTS:
        seen = seen | ((q_idx >= start) & (kv_idx >= start) & (q_idx < start + 4) & (kv_idx < start + 4))
    return seen


DEVICE_MODS: dict[str, tuple[str, Any]] = {
    **{name: ("score_mod", mod) for name, mod in SCORE_MODS.items()},
    "soft_cap": ("score_mod", masks.soft_cap(5.0)),
    "torch_methods": ("score_mod", TORCH_MODS["methods"]),
    "only_rows": ("score_mod", lambda score, b, h, q, k: h * 2 + q),
    "constant": ("mask_mod", lambda b, h, q, k: True),
    "only_rows_mask": ("mask_mod", lambda b, h, q, k: (q > 3) & (h < 2)),
    "mixed_mask": ("mask_mod", lambda b, h, q, k: ((q > 3) | (k > 20)) ^ VISIBLE[h, k] & ~(h == 1)),
    "window": ("mask_mod", masks.sliding_window(7)),
    "documents": ("mask_mod", and_masks(masks.causal, masks.document(DOCUMENTS))),
    "neighbours": ("mask_mod", or_masks(masks.neighbourhood(7, 7, 2), masks.prefix_lm(3))),
    "tanh_mask": ("mask_mod", tanh_mask),
    "segments": ("mask_mod", segments),
}


ON_DEVICE = ModsOnDevice(DEVICE_MODS)


@pytest.mark.filterwarnings("ignore::pyopencl.CompilerWarning")
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", DEVICE_MODS)
def test_opencl_c_computes_what_evaluate_does(device: Device, name: str, lanes: int) -> None:
    if name == "roots_of_negatives" and "llvmpipe" in device.name:
        pytest.skip("Mesa's pow gives a number where OpenCL asks for NaN, for a negative base")
    score, *indices = grid()
    expected = ON_DEVICE.traced(name).evaluate(score.astype(np.float32), *indices, dtype=np.float32)
    actual = ON_DEVICE.run(device, name)[lanes]
    kind, _ = DEVICE_MODS[name]
    if kind == "mask_mod":
        np.testing.assert_array_equal(actual, expected * (1 if lanes == 1 else -1))
    elif name == "float_divisions":  # a quotient next to a whole number may fall on either side of it
        assert np.mean(np.abs(actual - expected) > 1e-3) < 1e-3
    else:
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


# Errors


def python_if(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    if q_idx > 3:  # the line
        return kv_idx < 3
    return kv_idx < 5


PLAIN_LIST = [0.1, 0.2, 0.3]
BROKEN: dict[str, tuple[Any, str, str]] = {
    "chained": (lambda b, h, q, k: 0 < q < k, "chained", "where"),
    "and": (lambda b, h, q, k: (q > 1) and (k > 1), "and", "&"),
    "not": (lambda b, h, q, k: not (q > 1), "not", "~"),
    "builtin_max": (lambda b, h, q, k: max(q, k) > 3, "builtin_max", "maximum"),
    "int": (lambda b, h, q, k: int(q) > 3, "int", "not a number"),
    "math": (lambda b, h, q, k: math.sqrt(q) > 3, "math", "llmcl.attention"),
    "range": (lambda b, h, q, k: sum(range(q)) > 3, "range", "not a number"),
    "unknown_numpy": (lambda b, h, q, k: np.arctan(q) > 3, "unknown_numpy", "arctan"),
    "unknown_array_function": (lambda b, h, q, k: np.linalg.norm(q) > 3, "unknown_array", "norm"),
    "unknown_torch": (lambda b, h, q, k: torch.erfinv(q) > 3, "unknown_torch", "erfinv"),
    "rows_of_two_lengths": (lambda b, h, q, k: SLOPES @ TABLE[q] > 3, "rows_of_two", "the same length"),
    "row": (lambda b, h, q, k: np.sum(TABLE[q]) > 3, "row", "torch.dot"),
    "in_place": (lambda b, h, q, k: torch.nn.functional.relu(q, inplace=True) > 3, "in_place", "inplace=True"),
    "unknown_form": (lambda b, h, q, k: torch.nn.functional.gelu(q, approximate="no") > 3, "unknown_form", "tanh"),
    "reduction": (lambda b, h, q, k: np.max(q) > 3, "reduction", "not supported"),
    "unknown_method": (lambda b, h, q, k: q.cumsum(0) > 3, "unknown_method", "cumsum"),
    "fresh_array": (lambda b, h, q, k: np.arange(9)[q] > 3, "fresh_array", "outside the function"),
    "fresh_tensor": (lambda b, h, q, k: torch.arange(9)[q] > 3, "fresh_tensor", "outside the function"),
    "list": (lambda b, h, q, k: PLAIN_LIST[h] > 3, "list", "outside the function"),
    "whole_array": (lambda b, h, q, k: q < DOCUMENTS, "whole_array", "index it"),
    "slice": (lambda b, h, q, k: TABLE[q, :] > 3, "slice", "one number for each"),
    "float_index": (lambda b, h, q, k: TABLE[q / 2, k] > 3, "float_index", "//"),
    "too_many_indices": (lambda b, h, q, k: DOCUMENTS[q, k] > 3, "too_many", "2 indices"),
    "missing_index": (lambda b, h, q, k: TABLE[q] > 3, "missing_index", "index it"),
    "float_bits": (lambda b, h, q, k: (q * 0.5) & (k > 1), "float_bits", "parentheses"),
    "big_constant": (lambda b, h, q, k: q * 2654435761 > 3, "big_constant", "int32"),
    "zero_division": (lambda b, h, q, k: q // 0 > 3, "zero_division", "division"),
    "big_shift": (lambda b, h, q, k: q << 40 > 3, "big_shift", "0 to 31"),
    "python_error": (lambda b, h, q, k: q + {}["key"], "python_error", "KeyError"),
    "string": (lambda b, h, q, k: q + "1", "string", "numbers"),
    "returns_float": (lambda b, h, q, k: q * 0.5, "returns_float", "float32"),
    "returns_int": (lambda b, h, q, k: q + k, "returns_int", "a comparison"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_name_line_and_remedy(name: str) -> None:
    mod, line, remedy = BROKEN[name]
    with pytest.raises(UsageError) as error:
        trace_mask_mod(mod)
    message = str(error.value)
    assert __file__ in message and f'"{line}' in message and remedy in message
    assert f":{mod.__code__.co_firstlineno}: " in message


def through_our_functions(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return F.maximum(q_idx, DOCUMENTS) > 3


@pytest.mark.parametrize("mask", [through_our_functions, and_masks(through_our_functions)])
def test_an_error_in_a_function_of_ours_names_the_users_line(mask: Any) -> None:
    with pytest.raises(UsageError) as error:
        trace_mask_mod(mask)
    assert str(error.value).startswith(f"{__file__}:{through_our_functions.__code__.co_firstlineno + 1}: ")


def test_error_of_a_python_if_names_its_line() -> None:
    with pytest.raises(UsageError) as error:
        trace_mask_mod(python_if)
    line = python_if.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}: `if q_idx > 3:  # the line`" in str(error.value)
    assert "where(condition, a, b)" in str(error.value)


def test_errors_of_whole_functions() -> None:
    def nothing(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> None:
        pass

    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: trace_mask_mod(lambda q, k: q > k), "takes 4 arguments"),
        (lambda: trace_score_mod(masks.causal), "takes 5 arguments"),
        (lambda: trace_mask_mod(nothing), "returns nothing"),
        (lambda: trace_mask_mod(lambda b, h, q, k: "yes"), "returns str"),
        (lambda: trace_score_mod(lambda s, b, h, q, k: s > 1), "returns a bool"),
        (lambda: trace_score_mod(trace_mask_mod(masks.causal)), "traced as a mask_mod"),
        (lambda: trace_mask_mod(3), "found 3"),  # type: ignore[arg-type]
    ]
    for call, expected in cases:
        with pytest.raises(UsageError, match=expected):
            call()


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.array([1j, 2j]), "complex128"),
        (np.array([1, 1 << 40]), "keep its values inside"),
        (np.array(["a", "b"]), "<U1"),
        (np.zeros((0,)), "shape"),
    ],
)
def test_arrays_that_kernels_cannot_read(array: Any, expected: str) -> None:
    with pytest.raises(UsageError, match="captured array `array`") as error:
        trace_mask_mod(lambda b, h, q, k: array[q] == 1)
    assert expected in str(error.value)


def test_index_out_of_bounds_names_array_range_and_remedy() -> None:
    traced = trace_mask_mod(lambda b, h, q, k: DOCUMENTS[k + 5] == 1)
    assert traced.evaluate(0, 0, 0, 0, np.arange(43)).shape == (43,)
    with pytest.raises(UsageError, match=r"`DOCUMENTS` of shape \(48,\) is indexed with 5 to 48 .* 0 to 47; make"):
        traced.evaluate(0, 0, 0, 0, np.arange(44))
    with pytest.raises(UsageError, match="indexed with -1 to"):
        trace_mask_mod(lambda b, h, q, k: DOCUMENTS[k - 1] == 1).evaluate(0, 0, 0, 0, np.arange(4))


def test_integers_beyond_int32_are_reported() -> None:
    traced = trace_mask_mod(lambda b, h, q, k: q * q > k)
    assert traced.evaluate(0, 0, 0, 70000, 1)
    with pytest.raises(UsageError, match=r"reaches 4900000000 .* int32"):
        traced.evaluate(0, 0, 0, 70000, 1, check_overflow=True)


def test_tracing_does_not_import_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from llmcl.attention import masks, block_mask\n"
        "block_mask.create_block_mask(masks.document(np.zeros(9, int)), None, None, 9, 9)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_traced_mod_is_renamed_for_another_prefix() -> None:
    weights, limits = np.ones(4, np.float32), np.zeros(4, np.int32)
    score = trace_score_mod(lambda score, b, h, q_idx, kv_idx: score * weights[h] + weights[b])
    mask = trace_mask_mod(lambda b, h, q_idx, kv_idx: limits[h] <= kv_idx // 3)
    assert score.captures[0].name == mask.captures[0].name == "mod_0"
    score, mask = trace_score_mod(score, prefix="score"), trace_mask_mod(mask, prefix="mask")
    assert (score.captures[0].name, mask.captures[0].name) == ("score_0", "mask_0")
    bodies = score.body(), mask.body()
    assert "mod_" not in bodies[0] + bodies[1] and "score_0[h]" in bodies[0] and "mask_0[h]" in bodies[1]
    assert score.evaluate(2.0, 0, 1, 0, 0) == 3.0
