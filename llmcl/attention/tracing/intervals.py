"""Bounds a traced graph over boxes of positions, without visiting each position (interval arithmetic).

A number is a pair [low, high] and a bool a pair (certain, possible); each member is an array with an element per block.
Float bounds use the precision of the values: rounding is monotone, so the bounds also hold for every rounded value. A
float that may be NaN or infinite has NaN bounds, and every comparison with NaN is undecided. Source: Moore, "Interval
Analysis" (1966).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from llmcl.attention.tracing.graph import (
    FUNCTIONS,
    INT_MAX,
    INT_MIN,
    MAY_OVERFLOW,
    OPERATIONS,
    Array,
    Graph,
    Node,
    numpy_dtype,
)

Interval = tuple[Array, Array]

EXACT_FUNCTIONS = frozenset({"sqrt", "floor", "ceil", "rint", "trunc"})  # correctly rounded, so monotone
UNKNOWN_FUNCTIONS = frozenset({"sin", "cos"})
# Larger captures get one bound over all elements: range tables would need more memory than a block mask.
MAX_RANGE_ELEMENTS = 1 << 20


def bounds(
    graph: Graph, root: int, ranges: Mapping[str, Interval], float_dtype: type[np.floating[Any]]
) -> tuple[Array, Array, Array]:
    """Returns (low, high, unsafe) for the root, given an interval for each input in `ranges`.

    Integer intervals are int64. unsafe marks blocks in which an index may leave its capture or an integer may leave
    int32. The bounds are meaningless there; use `evaluate`.
    """
    unsafe: Array = np.zeros((), np.bool_)

    def compute(node: Node, args: list[Interval]) -> Interval:
        nonlocal unsafe
        if node.op == "input":
            return ranges[str(node.value)]
        if node.op == "const":
            value = np.asarray(node.value, numpy_dtype(node.dtype, float_dtype))
            return value, value
        if node.op == "load":
            low, high, outside = _load(graph, node, args, float_dtype)
            unsafe = unsafe | outside
            return low, high
        low, high = _operation(graph, node, args, float_dtype)
        if node.dtype == "int32" and node.op in MAY_OVERFLOW:
            if low.min(initial=0) < INT_MIN or high.max(initial=0) > INT_MAX:
                unsafe = unsafe | (low < INT_MIN) | (high > INT_MAX)
                low, high = np.clip(low, INT_MIN, INT_MAX), np.clip(high, INT_MIN, INT_MAX)
            if node.op == "shl":
                unsafe = unsafe | (args[1][0] < 0) | (args[1][1] > 31)
        return low, high

    low, high = graph.walk(root, compute)
    return low, high, unsafe


def _operation(graph: Graph, node: Node, args: list[Interval], float_dtype: type[np.floating[Any]]) -> Interval:
    if node.op == "cast":
        return _cast(graph.nodes[node.args[0]].dtype, node.dtype, args[0], float_dtype)
    if node.op in ("lt", "le", "eq", "ne"):
        return _compare(node.op, *args)
    if node.op == "where":
        return _where(*args)
    if node.dtype == "bool":
        return _logic(node.op, args)
    if node.op in ("min", "max"):
        (a, b), pick = args, OPERATIONS[node.op]
        return pick(a[0], b[0]), pick(a[1], b[1])
    if node.op == "neg":
        return -args[0][1], -args[0][0]
    if node.op == "abs":
        return _abs(*args)
    if node.dtype == "int32":
        return INTEGER[node.op](*args)
    if node.op in FUNCTIONS:
        return _finite(*_function(node.op, args[0]))
    if node.op in ("add", "sub", "mul", "div"):
        low, high = _corners(node.op, *args)
        if node.op == "div":
            through_zero = (args[1][0] <= 0) & (args[1][1] >= 0)
            low = np.where(through_zero, np.nan, low).astype(low.dtype)
        return _finite(low, high)
    shape = np.broadcast_shapes(*(np.shape(bound) for arg in args for bound in arg))
    unknown = np.full(shape, np.nan, float_dtype)
    return unknown, unknown


def _finite(low: Array, high: Array) -> Interval:
    """Replaces infinite or NaN bounds with NaN: inside the interval, infinities may have met and produced NaN."""
    known = np.isfinite(low) & np.isfinite(high)
    return np.where(known, low, low.dtype.type(np.nan)), np.where(known, high, high.dtype.type(np.nan))


def _corners(op: str, a: Interval, b: Interval) -> Interval:
    """Bounds an operation that is monotone in each operand, rising or falling."""
    function = OPERATIONS[op]
    if op == "add":
        return function(a[0], b[0]), function(a[1], b[1])
    if op == "sub":
        return function(a[0], b[1]), function(a[1], b[0])
    corners = [function(x, y) for x in a for y in b]
    low = np.minimum(np.minimum(corners[0], corners[1]), np.minimum(corners[2], corners[3]))
    high = np.maximum(np.maximum(corners[0], corners[1]), np.maximum(corners[2], corners[3]))
    return low, high


def _abs(a: Interval) -> Interval:
    low, high = np.abs(a[0]), np.abs(a[1])
    through_zero = (a[0] <= 0) & (a[1] >= 0)
    return np.where(through_zero, low.dtype.type(0), np.minimum(low, high)), np.maximum(low, high)


def _cast(source: str, target: str, a: Interval, float_dtype: type[np.floating[Any]]) -> Interval:
    low, high = a
    if target == "bool":
        zero = low.dtype.type(0)
        return _compare("ne", a, (zero, zero))
    if target == "float32":
        return low.astype(float_dtype), high.astype(float_dtype)
    if source == "bool":
        return low.astype(np.int64), high.astype(np.int64)
    # Unknown and huge floats become values outside int32, so the block is marked unsafe.
    known = (low >= INT_MIN) & (high <= INT_MAX)
    low = np.where(known, low, 2.0 * INT_MIN).astype(np.int64)
    return low, np.where(known, high, 2.0 * INT_MAX).astype(np.int64)


def _compare(op: str, a: Interval, b: Interval) -> Interval:
    if op in ("lt", "le"):
        below, not_above = (np.less, np.greater_equal) if op == "lt" else (np.less_equal, np.greater)
        return below(a[1], b[0]), ~not_above(a[0], b[1])
    equal = (a[0] == b[1]) & (a[1] == b[0])
    disjoint = (a[1] < b[0]) | (a[0] > b[1])
    return (equal, ~disjoint) if op == "eq" else (disjoint, ~equal)


def _where(condition: Interval, a: Interval, b: Interval) -> Interval:
    certain, possible = condition

    def choose(x: Array, y: Array, join: Callable[[Array, Array], Array]) -> Array:
        return np.where(certain, x, np.where(possible, join(x, y), y))

    return choose(a[0], b[0], np.minimum), choose(a[1], b[1], np.maximum)


def _logic(op: str, args: list[Interval]) -> Interval:
    (a, *rest) = args
    if op == "not":
        return ~a[1], ~a[0]
    (b,) = rest
    if op == "and":
        return a[0] & b[0], a[1] & b[1]
    if op == "or":
        return a[0] | b[0], a[1] | b[1]
    # xor is certain where both operands are decided and differ, impossible where both are decided and agree.
    return (a[0] & ~b[1]) | (~a[1] & b[0]), ~((a[0] & b[0]) | (~a[1] & ~b[1]))


def _function(op: str, a: Interval) -> Interval:
    if op in UNKNOWN_FUNCTIONS:
        return np.full_like(a[0], np.nan), np.full_like(a[1], np.nan)
    function = FUNCTIONS[op][0]
    low, high = function(a[0]), function(a[1])
    if op == "rsqrt":
        low, high = high, low
    if op in EXACT_FUNCTIONS:
        return low, high
    # Accurate within a few units in the last place, but not always monotone.
    margin = 16 * np.finfo(low.dtype).eps
    return low - np.abs(low) * margin, high + np.abs(high) * margin


# ---- integers ---------------------------------------------------------------------------------------------


def _floordiv(a: Interval, b: Interval) -> Interval:
    low, high = _corners("floordiv", a, b)
    most = np.maximum(np.abs(a[0]), np.abs(a[1]))
    through_zero = (b[0] <= 0) & (b[1] >= 0)
    return np.where(through_zero, -most, low), np.where(through_zero, most, high)


def _remainder(a: Interval, b: Interval) -> Interval:
    low, high = np.minimum(b[0] + 1, 0), np.maximum(b[1] - 1, 0)
    # Within one period of a known divisor the remainder only grows.
    one_period = (b[0] == b[1]) & (np.floor_divide(a[0], b[0]) == np.floor_divide(a[1], b[0])) & (b[0] != 0)
    return np.where(one_period, np.remainder(a[0], b[0]), low), np.where(one_period, np.remainder(a[1], b[0]), high)


def _bits(a: Interval, b: Interval) -> Interval:
    """Bounds |, ^ and &: the result has no more bits than the longer operand."""
    largest = np.maximum(np.maximum(a[1], ~a[0]), np.maximum(b[1], ~b[0])).clip(0, INT_MAX)
    mask = np.asarray(largest)
    for shift in (1, 2, 4, 8, 16):
        mask = mask | (mask >> shift)
    return np.where((a[0] >= 0) & (b[0] >= 0), 0, ~mask), mask


def _and(a: Interval, b: Interval) -> Interval:
    low, high = _bits(a, b)
    high = np.where(a[0] >= 0, np.minimum(high, a[1]), high)
    high = np.where(b[0] >= 0, np.minimum(high, b[1]), high)
    return np.where((a[0] >= 0) | (b[0] >= 0), 0, low), high


def _shift(op: str) -> Callable[[Interval, Interval], Interval]:
    def shifted(a: Interval, b: Interval) -> Interval:
        return _corners(op, a, (np.clip(b[0], 0, 31), np.clip(b[1], 0, 31)))

    return shifted


INTEGER: dict[str, Callable[..., Interval]] = {
    "add": lambda a, b: _corners("add", a, b),
    "sub": lambda a, b: _corners("sub", a, b),
    "mul": lambda a, b: _corners("mul", a, b),
    "floordiv": _floordiv,
    "mod": _remainder,
    "and": _and,
    "or": _bits,
    "xor": _bits,
    "not": lambda a: (~a[1], ~a[0]),
    "shl": _shift("shl"),
    "shr": _shift("shr"),
}


# ---- captured arrays --------------------------------------------------------------------------------------


def _load(
    graph: Graph, node: Node, indices: list[Interval], float_dtype: type[np.floating[Any]]
) -> tuple[Array, Array, Array]:
    """Returns least and greatest value in the indexed box, or in the flat range from its first to its last corner."""
    array = graph.capture_of(node).array
    outside: Array = np.zeros((), np.bool_)
    first: Array = np.zeros((), np.int64)
    last: Array = np.zeros((), np.int64)
    for (low, high), size in zip(indices, array.shape, strict=True):
        outside = outside | (low < 0) | (high >= size)
        first = first * size + np.clip(low, 0, size - 1)
        last = last * size + np.clip(high, 0, size - 1)
    least, most = range_extremes(array.reshape(-1), first, last)
    dtype = numpy_dtype(node.dtype, float_dtype)
    return least.astype(dtype), most.astype(dtype), outside


def range_extremes(values: Array, first: Array, last: Array) -> Interval:
    """Returns min and max of values[first : last + 1] per pair, first <= last, from a sparse table over 1, 2, 4, ...
    elements."""
    if values.size > MAX_RANGE_ELEMENTS:
        shape = np.broadcast_shapes(first.shape, last.shape)
        return np.broadcast_to(values.min(), shape), np.broadcast_to(values.max(), shape)
    first, last = np.broadcast_arrays(first, last)
    level = np.floor(np.log2(last - first + 1)).astype(np.int64)
    least, most = np.empty(first.shape, values.dtype), np.empty(first.shape, values.dtype)
    low = high = values
    for k in range(int(level.max(initial=0)) + 1):
        if k:
            half = 1 << (k - 1)
            low, high = np.minimum(low[:-half], low[half:]), np.maximum(high[:-half], high[half:])
        chosen = level == k
        # Two overlapping runs with 2^k elements cover the range: from its start, and up to its end.
        start, end = first[chosen], last[chosen] - (1 << k) + 1
        least[chosen], most[chosen] = np.minimum(low[start], low[end]), np.maximum(high[start], high[end])
    return least, most
