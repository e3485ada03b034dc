"""Symbols and captured arrays: they stand in for numbers and arrays while a mod is traced.

Operators on a symbol arrive at `apply`. So do NumPy and torch functions, because both libraries dispatch to the symbol.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from llmcl.attention.tracing.builders import ALIASES, BUILDERS, SUPPORTED, cast
from llmcl.attention.tracing.graph import INT_MAX, INT_MIN, Array, Capture, Dtype, Graph, capture_name
from llmcl.attention.tracing.source_locations import current_location, mod_error

_NO_TRUTH_VALUE = (
    "a value that depends on the position has no truth value while the function is traced, so `if`, `and`, `or`, "
    "`not`, `a < b < c` and the built-in min() and max() cannot use it; write where(condition, a, b), `&`, `|` and `~` "
    "with each comparison in parentheses, and minimum() or maximum()"
)
_NO_NUMBER = (
    "a value that depends on the position is not a number while the function is traced, so int(), float(), range(), "
    "the functions of `math` and the index of a list or of an array made inside the function cannot use it; use the "
    "functions of llmcl.attention, NumPy or torch, .float() and .int(), and look up arrays that were made outside "
    "the function (NumPy arrays or torch tensors)"
)


def _is_torch_tensor(value: object) -> bool:
    return any(
        base.__module__.partition(".")[0] == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__
    )


def is_device_array(value: object) -> bool:
    """Whether the value is a pyopencl.array.Array."""
    module = sys.modules.get("pyopencl.array")  # not imported: no such array can exist
    return module is not None and isinstance(value, module.Array)


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) or _is_torch_tensor(value) or is_device_array(value)


def _to_numpy(value: Any) -> Array:
    """Converts a NumPy array, a torch tensor on any device, or a pyopencl array. Widens floats that NumPy lacks."""
    if isinstance(value, np.ndarray):
        return value
    if is_device_array(value):
        return np.asarray(value.get())
    value = value.detach().cpu()
    if "float" in str(value.dtype) and "float64" not in str(value.dtype):
        value = value.float()
    return np.asarray(value.numpy())


def _device_array(array: Array, label: str) -> tuple[Array, bool]:
    """Returns the array in the kernels' form (C-contiguous float32 or int32), and whether it holds bools."""
    kind = array.dtype.kind
    if kind not in "biuf":
        raise mod_error(
            f"the captured array `{label}` has dtype {array.dtype}; kernels read bool, integer and float arrays: "
            "convert it with .astype()"
        )
    if array.size == 0 or array.size > INT_MAX:
        raise mod_error(f"the captured array `{label}` has shape {array.shape}; it must have 1 to 2^31 - 1 elements")
    if kind in "iu" and (array.min() < INT_MIN or array.max() > INT_MAX):
        raise mod_error(
            f"the captured array `{label}` holds {array.min()} to {array.max()}, and kernels read int32; "
            "keep its values inside -2^31 to 2^31 - 1, or make it a float array"
        )
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(array, np.float32 if kind == "f" else np.int32)
    return converted.reshape(array.shape), kind == "b"


def lift(graph: Graph, value: Any) -> int:
    """Returns the node for a symbol, or a constant node for a number."""
    if isinstance(value, Symbol):
        if value._graph is not graph:
            raise mod_error("a value from another trace is used; compute it inside the function")
        return value._number
    if isinstance(value, CapturedArray):
        raise mod_error(
            f"the captured array `{value._label}` of shape {value.shape} is used as a number; "
            f"index it, for example `{value._label}[{', '.join(['kv_idx'] * value.ndim)}]`"
        )
    if is_array(value):
        array = _to_numpy(value)
        if array.ndim:
            raise mod_error(
                f"an array of shape {array.shape} is used as a number; make it outside the function "
                "and look up one element of it"
            )
        value = array.item()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return graph.constant(value, "bool", current_location())
    if isinstance(value, int):
        return graph.constant(value, "int32", current_location())
    if isinstance(value, float):
        return graph.constant(value, "float32", current_location())
    raise mod_error(f"{value!r} ({type(value).__name__}) is no operand; use numbers, bools and captured arrays")


# First keyword arguments that are operands, in positional order; then keyword arguments without effect.
_OPERANDS = (
    "condition",
    "input",
    "self",
    "x",
    "x1",
    "a",
    "min",
    "a_min",
    "max",
    "a_max",
    "other",
    "y",
    "x2",
    "exponent",
)
_IGNORED = ("dtype", "device", "requires_grad", "memory_format", "layout", "pin_memory", "non_blocking", "copy")


def apply(name: str, *args: Any, **kwargs: Any) -> Symbol:
    """Applies the function `name` to symbols and numbers, with at least one symbol among the arguments."""
    build = BUILDERS.get(ALIASES.get(name, name))
    if build is None:
        raise mod_error(f"the function `{name}` cannot be compiled for a device; supported are operators, {SUPPORTED}")
    if ALIASES.get(name, name) == "clamp":
        args, kwargs = _clamp_arguments(args, kwargs)
    operands = [*args, *(kwargs.pop(key) for key in _OPERANDS if key in kwargs)]
    for key in [key for key in kwargs if key in _IGNORED or (key in ("out", "inplace") and not kwargs[key])]:
        del kwargs[key]
    if kwargs.get("alpha") == 1:
        del kwargs["alpha"]
    graph = next(value._graph for value in operands if isinstance(value, Symbol))
    numbers = [None if value is None else lift(graph, value) for value in operands]
    options = {
        key: value if value is None or isinstance(value, (str, bool)) else lift(graph, value)
        for key, value in kwargs.items()
    }
    try:
        inspect.signature(build).bind(graph, *numbers, **options)
    except TypeError:
        arguments = [*(["..."] * len(numbers)), *(f"{key}={value!r}" for key, value in kwargs.items())]
        raise mod_error(
            f"`{name}({', '.join(arguments)})` is not supported with these arguments; a mod computes one value for "
            "each position and cannot reduce, reshape or sort"
        ) from None
    return Symbol(graph, build(graph, *numbers, **options))


def _clamp_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tells min from max before the names are dropped: either may be missing."""
    low = kwargs.pop("min", kwargs.pop("a_min", None))
    high = kwargs.pop("max", kwargs.pop("a_max", None))
    value, *rest = [*args, *(kwargs.pop(key) for key in ("input", "a") if key in kwargs)]
    low = rest[0] if rest else low
    high = rest[1] if len(rest) > 1 else high
    return (value, low, high), kwargs


def _dtype_of(value: Any) -> Dtype | None:
    """Maps a NumPy, torch or Python dtype to a graph dtype. Returns None for anything else, such as a device."""
    if isinstance(value, Symbol):
        return value.dtype
    text = str(value).removeprefix("torch.")
    if not str(value).startswith("torch."):
        try:
            text = np.dtype(value).name
        except TypeError:
            return None
    if text == "bool":
        return "bool"
    return "float32" if "float" in text else "int32" if "int" in text else None


def _binary(name: str) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: apply(name, self, other)


def _reflected(name: str) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: apply(name, other, self)


class Symbol:
    """A mod's value during tracing. Operators and functions on it add nodes to the graph."""

    __slots__ = ("_graph", "_number")
    __hash__ = object.__hash__
    shape = ()
    ndim = 0
    device = "traced"

    def __init__(self, graph: Graph, number: int):
        self._graph = graph
        self._number = number

    @property
    def dtype(self) -> Dtype:
        return self._graph.nodes[self._number].dtype

    def __repr__(self) -> str:
        return f"<symbol {self.dtype}>"

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __mod__, __rmod__ = _binary("remainder"), _reflected("remainder")
    __pow__, __rpow__ = _binary("pow"), _reflected("pow")
    __and__, __rand__ = _binary("and"), _reflected("and")
    __or__, __ror__ = _binary("or"), _reflected("or")
    __xor__, __rxor__ = _binary("xor"), _reflected("xor")
    __lshift__, __rlshift__ = _binary("lshift"), _reflected("lshift")
    __rshift__, __rrshift__ = _binary("rshift"), _reflected("rshift")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __eq__, __ne__ = _binary("eq"), _binary("ne")  # type: ignore[assignment]

    def __neg__(self) -> Symbol:
        return apply("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return apply("abs", self)

    def __invert__(self) -> Symbol:
        return apply("not", self)

    def __bool__(self) -> bool:
        raise mod_error(_NO_TRUTH_VALUE)

    def _no_number(self, *args: object, **kwargs: object) -> Any:
        raise mod_error(_NO_NUMBER)

    __int__ = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __len__ = __array__ = item = _no_number

    def __iter__(self) -> Iterator[Symbol]:
        raise mod_error("a value that depends on the position is one number and cannot be iterated over or unpacked")

    def __getitem__(self, index: object) -> Symbol:
        raise mod_error("a value that depends on the position is one number and cannot be indexed; use it as it is")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Symbol:
        if method != "__call__":
            raise mod_error(f"`{ufunc.__name__}.{method}` cannot be compiled for a device; a mod computes one value")
        return apply(ufunc.__name__, *inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Symbol:
        return apply(func.__name__, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Symbol:
        name = getattr(func, "__name__", repr(func)).strip("_")
        if (
            name not in BUILDERS
            and name not in ALIASES
            and name.startswith("r")
            and name[1:] in {**BUILDERS, **ALIASES}
        ):
            name, args = name[1:], tuple(args)[::-1]
        return apply(name, *args, **(kwargs or {}))

    # Tensor methods from torch.

    def to(self, *args: Any, dtype: Any = None, **kwargs: Any) -> Symbol:
        """Converts to the first dtype among the arguments. A device has no effect."""
        for value in (*args, dtype):
            target = None if value is None else _dtype_of(value)
            if target is not None:
                return Symbol(self._graph, cast(self._graph, self._number, target))
        return self

    type = astype = to

    def float(self) -> Symbol:
        return self.to(dtype="float32")

    double = half = bfloat16 = float

    def int(self) -> Symbol:
        return self.to(dtype="int32")

    long = int

    def bool(self) -> Symbol:
        return self.to(dtype="bool")

    def where(self, condition: Any, other: Any) -> Symbol:
        return apply("where", condition, self, other)

    def new_full(self, size: Any, value: Any, *, dtype: Any = None, **kwargs: Any) -> Symbol:
        """Adds a constant with this symbol's type, or with dtype. size must be ()."""
        if tuple(size):
            raise mod_error(f"a tensor of shape {tuple(size)} is made in the function; make it outside and index it")
        target = self.dtype if dtype is None else _dtype_of(dtype)
        return Symbol(self._graph, lift(self._graph, value)).to(dtype=target)

    def new_zeros(self, size: Any = (), **kwargs: Any) -> Symbol:
        return self.new_full(size, 0, **kwargs)

    def new_ones(self, size: Any = (), **kwargs: Any) -> Symbol:
        return self.new_full(size, 1, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        if name.startswith("_") or ALIASES.get(name, name) not in BUILDERS:
            raise AttributeError(f"a traced value has no attribute `{name}`")
        return functools.partial(apply, name, self)


DOTS = frozenset({"dot", "vdot", "inner", "matmul", "vecdot", "linalg_vecdot", "rmatmul"})
MOST_PRODUCTS = 256  # each product is a separate expression in the kernel


class CapturedArray(NDArrayOperatorsMixin):
    """An array within a mod's reach during tracing. A symbol may index it.

    Until an index is or depends on a symbol, it behaves like the array: `table[0]`, `table * 2` and `len(table)`.
    """

    def __init__(self, graph: Graph, value: Any, label: str, prefix: tuple[Any, ...] = ()):
        self._graph = graph
        self._value = value
        self._label = label
        self._prefix = prefix
        self.shape: tuple[int, ...] = tuple(value.shape)[len(prefix) :]
        self.ndim = len(self.shape)
        self.dtype = value.dtype
        self.device = getattr(value, "device", "cpu")

    def __len__(self) -> int:
        return self.shape[0]

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __repr__(self) -> str:
        return f"<captured array {self._label} {self.shape}>"

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if any(item is None or item is Ellipsis or isinstance(item, slice) or _rank(item) for item in indices):
            raise mod_error(
                f"the captured array `{self._label}` is indexed with a slice, None, ... or an array; give one number "
                f"for each of its {self.ndim} dimensions"
            )
        if len(indices) > self.ndim:
            raise mod_error(
                f"the captured array `{self._label}` of shape {self.shape} is indexed with {len(indices)} indices"
            )
        indices = self._prefix + indices
        if len(indices) < self.ndim + len(self._prefix):
            return CapturedArray(self._graph, self._value, self._label, indices)
        return self._load(indices)

    def _load(self, indices: tuple[Any, ...]) -> Symbol:
        graph, location = self._graph, current_location()
        number, capture = _capture(graph, self._value, self._label)
        nodes = []
        for item, size in zip(indices, capture.shape, strict=True):
            node = lift(graph, item)
            if graph.nodes[node].dtype == "float32":
                raise mod_error(f"the captured array `{self._label}` is indexed with a float; use // or .int()")
            value = graph.nodes[node].value
            if graph.nodes[node].op == "const" and isinstance(value, int) and value < 0:
                node = graph.constant(value + size, "int32", location)  # a constant counts from the end, as in Python
            nodes.append(cast(graph, node, "int32"))
        dtype: Dtype = "float32" if capture.dtype == "float32" else "int32"
        load = graph.add("load", tuple(nodes), dtype, location, number)
        return Symbol(graph, cast(graph, load, "bool") if capture.is_bool else load)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        for value in inputs:
            if isinstance(value, Symbol):
                lift(self._graph, self)  # raises: an array is no number
        if ufunc.__name__ in DOTS and method == "__call__":
            return _dot(ufunc.__name__, *inputs, **kwargs)
        raw = [np.asarray(value) if isinstance(value, CapturedArray) else value for value in inputs]
        result = getattr(ufunc, method)(*raw, **kwargs)
        return CapturedArray(self._graph, result, self._label) if _rank(result) else result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        array = next(value for value in args if isinstance(value, CapturedArray))
        name = getattr(func, "__name__", repr(func)).strip("_")
        if name in DOTS:
            return _dot(name, *args, **(kwargs or {}))
        raise mod_error(
            f"`{name}` is called with the whole captured array `{array._label}`; index it first, or compute the array "
            "outside the function"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Array:
        """Returns the part selected by the indices up to now."""
        if any(isinstance(index, Symbol) for index in self._prefix):
            raise mod_error(
                f"a row of the captured array `{self._label}` is used as an array, and which row depends on the "
                "position; index it to the end, or multiply two rows: torch.dot(a[h], b[kv_idx]) or a[h] @ b[kv_idx]"
            )
        return np.asarray(_to_numpy(self._value)[self._prefix])

    def dot(self, other: Any) -> Any:
        return _dot("dot", self, other)

    def to(self, *args: Any, **kwargs: Any) -> CapturedArray:
        """Ignores conversions of the whole array: kernels read float32 or int32 in any case."""
        return self

    cpu = cuda = contiguous = detach = clone = to


def _dot(name: str, a: Any, b: Any, **kwargs: Any) -> Any:
    """Expands the dot product of two vectors: rows of captured arrays, indexed up to the last axis."""
    shapes = [tuple(getattr(value, "shape", ())) for value in (a, b)]
    if kwargs or len(shapes[0]) != 1 or shapes[0] != shapes[1] or shapes[0][0] > MOST_PRODUCTS:
        raise mod_error(
            f"`{name}` of shapes {shapes[0]} and {shapes[1]}; a mod can multiply two vectors of the same length, at "
            f"most {MOST_PRODUCTS}, such as rows of captured arrays: torch.dot(a[h], b[kv_idx])"
        )
    return functools.reduce(operator.add, (a[i] * b[i] for i in range(shapes[0][0])))


def _rank(value: Any) -> int:
    return 0 if isinstance(value, Symbol) else len(getattr(value, "shape", ()))


def _capture(graph: Graph, value: Any, label: str) -> tuple[int, Capture]:
    """Returns the array's capture, adding it at first use."""
    known = graph.sources.get(id(value))
    if known is None:
        array, is_bool = _device_array(_to_numpy(value), label)
        known = len(graph.captures)
        as_it_lies = is_device_array(value) and value.dtype == array.dtype and value.flags.c_contiguous
        source = value if as_it_lies and not value.offset else None
        graph.captures.append(Capture(capture_name(graph.prefix, known), label, array, is_bool, source))
        graph.sources[id(value)] = known
        graph.kept.append(value)
    return known, graph.captures[known]
