"""Functions for a score_mod or mask_mod beside operators; NumPy's and PyTorch's functions work too.

Each takes traced values and numbers and returns a traced value. Without a traced value it computes with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmcl.attention.tracing.symbols import Symbol, apply


def _call(name: str, *args: Any) -> Any:
    if any(isinstance(value, Symbol) for value in args):
        return apply(name, *args)
    if name == "sigmoid":
        return 1 / (1 + np.exp(-np.asarray(args[0], np.float64)))
    return getattr(np, name)(*args)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where condition holds, else b."""
    return _call("where", condition, a, b)


def exp(x: Any) -> Any:
    """e to the power of x."""
    return _call("exp", x)


def exp2(x: Any) -> Any:
    """2 to the power of x."""
    return _call("exp2", x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    return _call("log", x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _call("tanh", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return _call("sigmoid", x)


def sqrt(x: Any) -> Any:
    """The square root."""
    return _call("sqrt", x)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two values."""
    return _call("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two values."""
    return _call("maximum", a, b)


def absolute(x: Any) -> Any:
    """|x|, an integer for an integer. Also named `abs`; Python's own abs() does the same."""
    return _call("abs", x)


abs, min, max = absolute, minimum, maximum
