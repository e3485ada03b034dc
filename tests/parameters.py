"""Cases of a test with several parameters, fewer than all combinations: what a case compiles may take seconds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any

import pytest


def each_value(*lists: tuple[str, Iterable[Any]]) -> pytest.MarkDecorator:
    """Parametrizes a test with all values of the longest list, and beside them the values of the others in turn.

    each_value(("n", [1, 2, 3]), ("dtype", ["float32", "float16"])) has the cases (1, float32), (2, float16) and
    (3, float32). An entry may have several parameters: ("n,width", [(1, 16), (2, 32)]).
    """
    columns = [[entry(value, "," in names) for value in values] for names, values in lists]
    rows = islice(zip(*map(cycle, columns), strict=False), max(map(len, columns)))
    cases = [
        pytest.param(*(value for part in row for value in part.values), marks=[m for part in row for m in part.marks])
        for row in rows
    ]
    return pytest.mark.parametrize([name for names, _ in lists for name in names.split(",")], cases)


def entry(value: Any, is_several: bool) -> Any:
    """What pytest.param makes of a value."""
    if hasattr(value, "marks"):
        return value
    return pytest.param(*value) if is_several else pytest.param(value)


def slow_except(values: Iterable[Any], *fast: Any) -> list[Any]:
    """The values of a parameter, all but the named ones slow."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]
