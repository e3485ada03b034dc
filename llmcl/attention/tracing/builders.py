"""The operations a mod can use. Each builder takes a graph and node numbers and returns a node number.

Types follow PyTorch: an int with a float gives a float, int / int a float, comparisons give bools. A bool in arithmetic
counts as an int.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llmcl.attention.tracing.graph import FUNCTIONS, ROUNDINGS, Dtype, Graph
from llmcl.attention.tracing.source_locations import current_location, mod_error


def cast(graph: Graph, number: int, dtype: Dtype) -> int:
    source = graph.nodes[number].dtype
    if source == dtype:
        return number
    if source == "bool" and dtype == "float32":
        number = cast(graph, number, "int32")
    return graph.add("cast", (number,), dtype, current_location())


def common(graph: Graph, *numbers: int, least: Dtype = "int32") -> tuple[tuple[int, ...], Dtype]:
    """Converts the operands to their widest type (bool < int32 < float32), at least to `least`."""
    order: list[Dtype] = ["bool", "int32", "float32"]
    widest = max(order.index(graph.nodes[number].dtype) for number in numbers)
    dtype = order[max(widest, order.index(least))]
    return tuple(cast(graph, number, dtype) for number in numbers), dtype


def _arithmetic(op: str) -> Callable[[Graph, int, int], int]:
    def build(graph: Graph, a: int, b: int) -> int:
        args, dtype = common(graph, a, b)
        return graph.add(op, args, dtype, current_location())

    return build


def _div(graph: Graph, a: int, b: int, rounding_mode: str | None = None) -> int:
    if rounding_mode == "floor":
        return _floordiv(graph, a, b)
    args, _ = common(graph, a, b, least="float32")
    quotient = graph.add("div", args, "float32", current_location())
    if rounding_mode is None:
        return quotient
    if rounding_mode != "trunc" or common(graph, a, b)[1] == "int32":
        raise mod_error(f"div with rounding_mode={rounding_mode!r}; use // for floor, or .trunc() of a float")
    return graph.add("trunc", (quotient,), "float32", current_location())


def _floordiv(graph: Graph, a: int, b: int) -> int:
    (a, b), dtype = common(graph, a, b)
    if dtype == "int32":
        return _integer_division(graph, "floordiv", a, b)
    rest = _mod(graph, a, b)
    # a - rest is a multiple up to rounding, so rint removes only the rounding error.
    return _float(graph, "rint", _div(graph, _arithmetic("sub")(graph, a, rest), b))


def _mod(graph: Graph, a: int, b: int) -> int:
    (a, b), dtype = common(graph, a, b)
    if dtype == "int32":
        return _integer_division(graph, "mod", a, b)
    rest, zero = _arithmetic("fmod")(graph, a, b), graph.constant(0.0, "float32", current_location())
    signs_differ = _bitwise("xor")(graph, _compare("lt")(graph, rest, zero), _compare("lt")(graph, b, zero))
    wrong = _bitwise("and")(graph, signs_differ, _compare("ne")(graph, rest, zero))
    return _where(graph, wrong, _arithmetic("add")(graph, rest, b), rest)


def _integer_division(graph: Graph, op: str, a: int, b: int) -> int:
    """Follows NumPy: x // 0 = x % 0 = 0. No kernel may divide by zero, or INT_MIN by -1: both stop a CPU."""
    location = current_location()
    zero = graph.constant(0, "int32", location)
    if graph.nodes[b].op == "const":
        divisor = graph.nodes[b].value
        if divisor == 0:
            raise mod_error("a division by the constant 0")
        if divisor in (1, -1):
            return zero if op == "mod" else a if divisor == 1 else graph.add("neg", (a,), "int32", location)
        return graph.add(op, (a, b), "int32", location)
    is_zero = _compare("eq")(graph, b, zero)
    is_minus_one = _compare("eq")(graph, b, graph.constant(-1, "int32", location))
    special = _bitwise("or")(graph, is_zero, is_minus_one)
    divisor = graph.add("where", (special, graph.constant(1, "int32", location), b), "int32", location)
    result = graph.add(op, (a, divisor), "int32", location)
    if op == "mod":
        return _where(graph, special, zero, result)
    return _where(graph, is_zero, zero, _where(graph, is_minus_one, graph.add("neg", (a,), "int32", location), result))


def _pow(graph: Graph, a: int, b: int) -> int:
    exponent = graph.nodes[b].value if graph.nodes[b].op == "const" else None
    (a, _), dtype = common(graph, a, b)
    if graph.nodes[b].dtype != "float32" and dtype == "int32" and (not isinstance(exponent, int) or exponent < 0):
        raise mod_error(
            "an integer to the power of a negative or variable integer; use a float base (2.0 ** n), or 1 << n"
        )
    if isinstance(exponent, (int, float)) and exponent in range(9):
        return _whole_power(graph, a, int(exponent), dtype)
    if dtype == "int32":
        raise mod_error(f"an integer to the power of {exponent}; use a float base, or an exponent up to 8")
    b = cast(graph, b, "float32")
    if exponent == 0.5:
        return _float(graph, "sqrt", a)
    if graph.nodes[a].op == "const" and graph.nodes[a].value == 2.0:
        return _float(graph, "exp2", b)
    return graph.add("pow", (a, b), "float32", current_location())


def _whole_power(graph: Graph, a: int, exponent: int, dtype: Dtype) -> int:
    if exponent == 0:
        return graph.constant(1, dtype, current_location())
    half = _whole_power(graph, a, exponent // 2, dtype) if exponent > 1 else None
    if half is None:
        return a
    square = _arithmetic("mul")(graph, half, half)
    return _arithmetic("mul")(graph, square, a) if exponent % 2 else square


def _float(graph: Graph, op: str, a: int) -> int:
    return graph.add(op, (cast(graph, a, "float32"),), "float32", current_location())


def _function(op: str) -> Callable[[Graph, int], int]:
    return lambda graph, a: _float(graph, op, a)


def _rounding(op: str) -> Callable[[Graph, int], int]:
    return lambda graph, a: _float(graph, op, a) if graph.nodes[a].dtype == "float32" else a


def _unary(op: str) -> Callable[[Graph, int], int]:
    def build(graph: Graph, a: int) -> int:
        args, dtype = common(graph, a)
        return graph.add(op, args, dtype, current_location())

    return build


def _sign(graph: Graph, a: int) -> int:
    (a,), dtype = common(graph, a)
    zero, one, minus = (graph.constant(value, dtype, current_location()) for value in (0, 1, -1))
    negative = _where(graph, _compare("lt")(graph, a, zero), minus, zero)
    return _where(graph, _compare("lt")(graph, zero, a), one, negative)


def _clamp(graph: Graph, a: int, low: int | None = None, high: int | None = None) -> int:
    if low is not None:
        a = _arithmetic("max")(graph, a, low)
    return a if high is None else _arithmetic("min")(graph, a, high)


def _compare(op: str, *, swap: bool = False) -> Callable[[Graph, int, int], int]:
    def build(graph: Graph, a: int, b: int) -> int:
        args, _ = common(graph, a, b)
        return graph.add(op, args[::-1] if swap else args, "bool", current_location())

    return build


def _bitwise(op: str) -> Callable[[Graph, int, int], int]:
    def build(graph: Graph, a: int, b: int) -> int:
        (a, b), dtype = common(graph, a, b, least="bool")
        if dtype == "float32":
            raise mod_error("`&`, `|` and `^` on a float; compare it first, with each comparison in parentheses")
        if dtype == "bool":
            for one, other in ((a, b), (b, a)):
                value = graph.nodes[one].value if graph.nodes[one].op == "const" else None
                if value is not None and op in ("and", "or"):
                    return other if bool(value) == (op == "and") else one
        return graph.add(op, (a, b), dtype, current_location())

    return build


def _logical(op: str) -> Callable[[Graph, int, int], int]:
    return lambda graph, a, b: _bitwise(op)(graph, cast(graph, a, "bool"), cast(graph, b, "bool"))


def _invert(graph: Graph, a: int) -> int:
    if graph.nodes[a].dtype == "float32":
        raise mod_error("`~` on a float; compare it first")
    return graph.add("not", (a,), graph.nodes[a].dtype, current_location())


def _logical_not(graph: Graph, a: int) -> int:
    return _invert(graph, cast(graph, a, "bool"))


def _shift(op: str) -> Callable[[Graph, int, int], int]:
    def build(graph: Graph, a: int, b: int) -> int:
        (a, b), dtype = common(graph, a, b)
        if dtype == "float32":
            raise mod_error("a shift of or by a float; shift integers by integers")
        count = graph.nodes[b].value if graph.nodes[b].op == "const" else 0
        if not isinstance(count, int) or not 0 <= count <= 31:
            raise mod_error(f"a shift by {count} bits; kernels compute in int32, so shift by 0 to 31")
        return graph.add(op, (a, b), dtype, current_location())

    return build


def _where(graph: Graph, condition: int, a: int, b: int) -> int:
    condition = cast(graph, condition, "bool")
    (a, b), dtype = common(graph, a, b, least="bool")
    return a if a == b else graph.add("where", (condition, a, b), dtype, current_location())


def _is_nan(graph: Graph, a: int) -> int:
    a = cast(graph, a, "float32")
    return graph.add("ne", (a, a), "bool", current_location())


def _same(graph: Graph, a: int) -> int:
    return a


def _swapped(build: Callable[[Graph, int, int], int]) -> Callable[[Graph, int, int], int]:
    return lambda graph, a, b: build(graph, b, a)


def _full_like(graph: Graph, a: int, value: int) -> int:
    return cast(graph, value, graph.nodes[a].dtype)


# ---- activation functions ---------------------------------------------------------------------------------


def _constant(graph: Graph, value: float) -> int:
    return graph.constant(value, "float32", current_location())


def _sigmoid(graph: Graph, a: int) -> int:
    """1 / (1 + exp(-a))."""
    one, negative = _constant(graph, 1.0), _unary("neg")(graph, cast(graph, a, "float32"))
    return _div(graph, one, _arithmetic("add")(graph, one, _float(graph, "exp", negative)))


def _relu(graph: Graph, a: int) -> int:
    return _arithmetic("max")(graph, a, graph.constant(0, "int32", current_location()))


def _leaky_relu(graph: Graph, a: int, negative_slope: int | None = None) -> int:
    slope = _constant(graph, 0.01) if negative_slope is None else negative_slope
    return _where_positive(graph, a, a, _arithmetic("mul")(graph, a, slope))


def _elu(graph: Graph, a: int, alpha: int | None = None) -> int:
    below = _float(graph, "expm1", a)
    return _where_positive(graph, a, a, below if alpha is None else _arithmetic("mul")(graph, below, alpha))


def _where_positive(graph: Graph, a: int, above: int, below: int) -> int:
    return _where(graph, _compare("lt")(graph, _constant(graph, 0.0), a), above, below)


def _gelu(graph: Graph, a: int, approximate: str = "none") -> int:
    """a / 2 (1 + erf(a / sqrt 2)), or with "tanh" a / 2 (1 + tanh(sqrt(2 / pi) (a + 0.044715 a^3)))."""
    multiply, add = _arithmetic("mul"), _arithmetic("add")
    if approximate == "none":
        inner = _float(graph, "erf", multiply(graph, a, _constant(graph, math.sqrt(0.5))))
    elif approximate == "tanh":
        cube = multiply(graph, _whole_power(graph, cast(graph, a, "float32"), 3, "float32"), _constant(graph, 0.044715))
        inner = _float(graph, "tanh", multiply(graph, add(graph, a, cube), _constant(graph, math.sqrt(2 / math.pi))))
    else:
        raise mod_error(f'gelu with approximate={approximate!r}; it is "none" or "tanh"')
    return multiply(graph, multiply(graph, a, _constant(graph, 0.5)), add(graph, inner, _constant(graph, 1.0)))


def _softplus(graph: Graph, a: int, beta: int | None = None, threshold: int | None = None) -> int:
    """log(1 + exp(beta a)) / beta, or a where beta a > threshold."""
    scaled = a if beta is None else _arithmetic("mul")(graph, a, beta)
    log = _float(graph, "log1p", _float(graph, "exp", scaled))
    limit = _constant(graph, 20.0) if threshold is None else threshold
    return _where(graph, _compare("lt")(graph, limit, scaled), a, log if beta is None else _div(graph, log, beta))


def _softsign(graph: Graph, a: int) -> int:
    return _div(graph, a, _arithmetic("add")(graph, _unary("abs")(graph, a), _constant(graph, 1.0)))


def _log_sigmoid(graph: Graph, a: int) -> int:
    negate = _unary("neg")
    return negate(graph, _softplus(graph, negate(graph, a)))


def _times(function: Callable[[Graph, int], int]) -> Callable[[Graph, int], int]:
    return lambda graph, a: _arithmetic("mul")(graph, a, function(graph, a))


def _hardtanh(graph: Graph, a: int, min_val: int | None = None, max_val: int | None = None) -> int:
    low = _constant(graph, -1.0) if min_val is None else min_val
    return _clamp(graph, a, low, _constant(graph, 1.0) if max_val is None else max_val)


BUILDERS: dict[str, Callable[..., int]] = {
    "add": _arithmetic("add"),
    "sub": _arithmetic("sub"),
    "mul": _arithmetic("mul"),
    "div": _div,
    "floor_divide": _floordiv,
    "remainder": _mod,
    "pow": _pow,
    "rsub": _swapped(_arithmetic("sub")),
    "rdiv": _swapped(_div),
    "rpow": _swapped(_pow),
    "neg": _unary("neg"),
    "abs": _unary("abs"),
    "sign": _sign,
    "square": lambda graph, a: _arithmetic("mul")(graph, a, a),
    "reciprocal": lambda graph, a: _div(graph, graph.constant(1.0, "float32", current_location()), a),
    "sigmoid": _sigmoid,
    "relu": _relu,
    "relu6": lambda graph, a: _clamp(graph, _relu(graph, a), None, graph.constant(6, "int32", current_location())),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "gelu": _gelu,
    "silu": _times(_sigmoid),
    "mish": _times(lambda graph, a: _float(graph, "tanh", _softplus(graph, a))),
    "softplus": _softplus,
    "softsign": _softsign,
    "log_sigmoid": _log_sigmoid,
    "hardtanh": _hardtanh,
    "minimum": _arithmetic("min"),
    "maximum": _arithmetic("max"),
    "clamp": _clamp,
    "lt": _compare("lt"),
    "le": _compare("le"),
    "gt": _compare("lt", swap=True),
    "ge": _compare("le", swap=True),
    "eq": _compare("eq"),
    "ne": _compare("ne"),
    "and": _bitwise("and"),
    "or": _bitwise("or"),
    "xor": _bitwise("xor"),
    "not": _invert,
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "logical_not": _logical_not,
    "lshift": _shift("shl"),
    "rshift": _shift("shr"),
    "where": _where,
    "isnan": _is_nan,
    "zeros_like": lambda graph, a: graph.constant(0, graph.nodes[a].dtype, current_location()),
    "ones_like": lambda graph, a: graph.constant(1, graph.nodes[a].dtype, current_location()),
    "full_like": _full_like,
    "clone": _same,
    "contiguous": _same,
    "detach": _same,
    **{name: _rounding(name) if name in ROUNDINGS else _function(name) for name in FUNCTIONS},
}
# The operator, NumPy and torch names.
ALIASES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "power": "pow",
    "float_power": "pow",
    "negative": "neg",
    "absolute": "abs",
    "fabs": "abs",
    "sgn": "sign",
    "clip": "clamp",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
    "bitwise_and": "and",
    "bitwise_or": "or",
    "bitwise_xor": "xor",
    "bitwise_not": "not",
    "invert": "not",
    "left_shift": "lshift",
    "right_shift": "rshift",
    "bitwise_left_shift": "lshift",
    "bitwise_right_shift": "rshift",
    "fmin": "minimum",
    "fmax": "maximum",
    "min": "minimum",
    "max": "maximum",
    "round": "rint",
    "around": "rint",
    "fix": "trunc",
    "concat_where": "where",
    "special_erf": "erf",
    "special_expit": "sigmoid",
    "special_log1p": "log1p",
    "special_expm1": "expm1",
    "special_exp2": "exp2",
    "special_round": "rint",
    "logsigmoid": "log_sigmoid",
    "_conj": "clone",
}
SUPPORTED = "where, " + ", ".join(
    name for name in sorted(BUILDERS) if name not in ("where", "and", "or", "not", "xor", "add", "sub", "mul", "rdiv")
)
