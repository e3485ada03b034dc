"""Products of a step of few tokens on a CPU: a row has the same bits beside any other rows, and alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import DTYPES, poisoned, read_guarded, run, step_state_at, weight_on_device, with_poison
from stored_rows import load, quantized_weight, random_rows

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import FEW_ROWS, GATES
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.cpu.dot_product import bf16_dot_form
from llmcl.ops.linear import linear_decode, linear_prefill
from llmcl.runtime.device import Device

ROWS, K = 128, 768
PART_TILES = 4  # in each of two buffers, which share their programs
WHOLE = 131, K  # rows and columns of a weight in one buffer, as other tests of products have
N = 19  # tokens: two blocks of 8, and more than 2 of a third
EPS = 1e-5

pytestmark = pytest.mark.parametrize("variant", ["cpu"])


def make_weight(device: Device, dtype: str, rows: int, k: int, alternating: bool) -> Weight:
    part_tiles = 0 if (rows, k) == WHOLE else PART_TILES
    if dtype not in QUANTIZED:
        values = np.random.default_rng(0).standard_normal((rows, k)).astype(np.float32)
        return weight_on_device(device, values, dtype, alternating=alternating, tiles_per_part=part_tiles)
    weight = quantized_weight(device, rows, k, dtype, part_tiles)
    load(device, weight, random_rows(QUANTIZED[dtype].format, rows, k))
    return weight


class Problem:
    """Rows x and what is added to or overwritten, for products with one weight."""

    def __init__(
        self, device: Device, dtype: str, epilogue: str, norm: bool, rows: int = ROWS, k: int = K, exact: bool = False
    ):
        rng = np.random.default_rng(1)
        self.device, self.epilogue, self.eps = device, epilogue, EPS if norm else 0.0
        weight = make_weight(device, dtype, rows, k, epilogue in GATES)
        self.weight = dataclasses.replace(weight, exact_activations=exact)
        self.x = rng.standard_normal((N, k)).astype(np.float32)
        self.norm = device.upload(rng.standard_normal(k).astype(np.float32), "norm") if norm else None
        self.before = rng.standard_normal((N, rows // 2 if epilogue in GATES else rows)).astype(np.float32)

    def of_rows(self, rows: slice, max_rows: int) -> np.ndarray:
        """The bits of linear_prefill for these rows alone."""
        x, before = self.x[rows], self.before[rows]
        step = step_state_at(self.device, position=3, n_tokens=len(x))
        out = with_poison(self.device, before)
        launches = linear_prefill(
            self.device,
            self.weight,
            with_poison(self.device, x),
            out,
            step,
            norm=self.norm,
            normed=poisoned(self.device, x.shape),
            eps=self.eps,
            epilogue=self.epilogue,
            max_rows=max_rows,
        )
        run(launches, len(x))
        return read_guarded(self.device, out, np.int32, before.shape)

    def of_decode(self, row: int) -> np.ndarray:
        """The bits of linear_decode for a row."""
        step, out = step_state_at(self.device, position=3, n_tokens=1), with_poison(self.device, self.before[row])
        x = with_poison(self.device, self.x[row])
        run(linear_decode(self.device, self.weight, x, out, step, norm=self.norm, eps=self.eps, epilogue=self.epilogue))
        return read_guarded(self.device, out, np.int32, self.before[row].shape)


@pytest.mark.parametrize(("dtype", "k"), [("bfloat16", 16), ("q4_0", 32)])
def test_columns_of_a_single_block(target: Device, dtype: str, k: int) -> None:
    """Which threads cannot share. The last buffer has fewer tiles."""
    problem = Problem(target, dtype, "add", norm=True, rows=160, k=k)
    together = problem.of_rows(slice(0, N), 32)
    assert np.mean(together == problem.before.view(np.int32)) < 0.01  # some weights are 0
    np.testing.assert_array_equal(problem.of_rows(slice(3, 4), 8), together[3:4])


@pytest.mark.parametrize("dtype", ["q4_0", "bfloat16", "float16"])
@pytest.mark.parametrize(("epilogue", "norm"), [("add", False), ("swiglu", True)])
def test_a_row_is_the_same_beside_any_others(target: Device, dtype: str, epilogue: str, norm: bool) -> None:
    problem = Problem(target, dtype, epilogue, norm)
    together = problem.of_rows(slice(0, N), 64)
    assert len(np.unique(together)) > N
    for rows in (slice(0, 1), slice(0, 3), slice(6, 11), slice(2, 10), slice(1, N)):
        for max_rows in (of for of in (*FEW_ROWS, 0) if of == 0 or of >= rows.stop - rows.start):
            np.testing.assert_array_equal(problem.of_rows(rows, max_rows), together[rows], err_msg=f"{rows} {max_rows}")


MORE_PRODUCTS = [
    *((dtype, "swiglu", True) for dtype in (*QUANTIZED, *DTYPES) if dtype not in ("q4_0", "q6_k", "bfloat16")),
    ("q4_0", "add", False),
    *((dtype, "add", norm) for dtype in ("q5_1", "q6_k", "float16") for norm in (False, True)),
]


PRODUCTS = [
    *((dtype, "store", False) for dtype in (*QUANTIZED, *DTYPES)),
    *((dtype, "swiglu", True) for dtype in ("q4_0", "q6_k", "bfloat16")),
    ("q4_0", "add", True),
]
TYPES = (*DTYPES, "q4_0", "q5_1", "q8_0", "q4_k", "q6_k", "iq3_s", "mxfp4")  # test_linear_quantized.py has all of them
FAST = {(*case, False) for case in PRODUCTS if case[0] in TYPES}
FAST |= {("q4_0", "store", False, True), ("q6_k", "swiglu", True, True)}
CASES = [(*case, exact) for case in (*PRODUCTS, *MORE_PRODUCTS) for exact in (False, True)]


@pytest.mark.parametrize(
    ("dtype", "epilogue", "norm", "exact"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST)) for case in CASES],
)
def test_a_row_of_several_is_what_decode_makes_of_it(
    target: Device, dtype: str, epilogue: str, norm: bool, exact: bool
) -> None:
    """So a sequence gets the same tokens whether it is alone or not. exact: as on a processor without dot products."""
    if dtype == "bfloat16" and not exact and bf16_dot_form(target):
        pytest.skip("beside other rows a row is rounded to bfloat16, alone it is not")
    problem = Problem(target, dtype, epilogue, norm, *(WHOLE if epilogue == "store" else (ROWS, K)), exact)
    for max_rows in (32, 0):
        together = problem.of_rows(slice(0, N), max_rows)
        for row in (0, 7, N - 1):
            np.testing.assert_array_equal(problem.of_decode(row), together[row], err_msg=f"{row} {max_rows}")
