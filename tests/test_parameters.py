"""Cases of several parameters: each value occurs, marks and names stay, and what is slow is marked."""

from __future__ import annotations

import pytest
from parameters import each_value, slow_except


def test_each_value_occurs_and_marks_stay() -> None:
    names, cases = each_value(
        ("n,width", [(1, 16), pytest.param(2, 32, marks=pytest.mark.oclgrind), (3, 48)]),
        ("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)]),
    ).args
    assert names == ["n", "width", "dtype"]
    assert [case.values for case in cases] == [(1, 16, "float32"), (2, 32, "float16"), (3, 48, "float32")]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["oclgrind", "slow"], []]


def test_all_values_but_the_named_ones_are_slow() -> None:
    first, second = slow_except({"q4_0": 1, "q8_0": 2}, "q8_0")
    assert second == "q8_0"
    assert first.values == ("q4_0",) and [mark.name for mark in first.marks] == ["slow"]
