"""Traces a user's score_mod or mask_mod to OpenCL C by calling it once with symbols as arguments.

Operators, NumPy functions and PyTorch functions all dispatch to a symbol. Indexing an array with a symbol doesn't.
Therefore the function is copied first, and every array the copy reaches (closure, defaults, globals, attributes) is
replaced with a `CapturedArray`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from llmcl.attention.tracing.builders import SUPPORTED, cast
from llmcl.attention.tracing.graph import INPUTS, Array, Capture, Emitter, Graph
from llmcl.attention.tracing.source_locations import UNKNOWN_LOCATION, call_method, definition, traceback_location
from llmcl.attention.tracing.symbols import CapturedArray, Symbol, is_array, lift
from llmcl.errors import UsageError, shown

Mod = Callable[..., Any]
Kind = Literal["score_mod", "mask_mod"]
PARAMETERS: dict[str, tuple[str, ...]] = {"score_mod": tuple(INPUTS), "mask_mod": tuple(INPUTS)[1:]}


@dataclass(frozen=True)
class TracedMod:
    """A traced function: its OpenCL C, its captured arrays, and its evaluation in NumPy.

    `body` uses the identifiers `score, b, h, q_idx, kv_idx` and the capture names. Indices are not clamped: b, h, q_idx
    and kv_idx must lie in the ranges checked with `block_mask.check_mod`.
    """

    kind: Kind
    name: str
    graph: Graph
    root: int

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The captures, numbered by first use. Kernels take one argument for each."""
        return tuple(self.graph.captures)

    @property
    def depends(self) -> frozenset[str]:
        """Names of the inputs that affect the result."""
        return self.graph.nodes[self.root].depends

    def body(self, lanes: int = 1) -> str:
        """Returns the function body in OpenCL C (statements, `return` last) for 1, 2, 4, 8 or 16 keys at a time."""
        return Emitter(self.graph, self.root, lanes).body()

    def evaluate(
        self,
        score: Any,
        b: Any,
        h: Any,
        q_idx: Any,
        kv_idx: Any,
        *,
        dtype: type[np.floating[Any]] = np.float64,
        check_overflow: bool = False,
    ) -> Array:
        """Evaluates the mod in NumPy on arguments with any broadcastable shapes.

        Returns bools, or floats in `dtype`; integers inside are int64. A mask_mod ignores score. Raises UsageError for
        an index outside a captured array and, with check_overflow, for an integer outside int32 (the kernels' integer
        type).
        """
        inputs = {"score": score, "b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx}
        value = self.graph.evaluate(self.root, inputs, dtype, check_overflow=check_overflow)
        shape = np.broadcast_shapes(*(np.shape(inputs[name]) for name in PARAMETERS[self.kind]))
        return np.broadcast_to(value, shape)


def trace_score_mod(fn: Mod | TracedMod, *, prefix: str = "mod") -> TracedMod:
    """Traces `fn(score, b, h, q_idx, kv_idx) -> score`.

    score is a float32, the rest int32. Captures are named `<prefix>_0`, ..., temporaries `<prefix>_t0`, ...; an already
    traced mod is renamed.
    Raises UsageError, with file and line, for code that cannot be traced.
    """
    return _trace(fn, "score_mod", prefix)


def trace_mask_mod(fn: Mod | TracedMod, *, prefix: str = "mod") -> TracedMod:
    """Traces `fn(b, h, q_idx, kv_idx) -> bool` (False hides the key). Otherwise like trace_score_mod."""
    return _trace(fn, "mask_mod", prefix)


def _trace(fn: Mod | TracedMod, kind: Kind, prefix: str) -> TracedMod:
    if isinstance(fn, TracedMod):
        if fn.kind != kind:
            raise UsageError(f"`{fn.name}` was traced as a {fn.kind}; a {kind} is needed here")
        return fn if fn.graph.prefix == prefix else replace(fn, graph=fn.graph.renamed(prefix))
    if not callable(fn):
        raise UsageError(f"a {kind} is a function of ({', '.join(PARAMETERS[kind])}); found {shown(fn)}")
    name = getattr(fn, "__name__", type(fn).__name__)
    home = definition(fn)
    _check_parameters(fn, kind, name, home)
    graph = Graph(prefix)
    symbols = [Symbol(graph, graph.add("input", (), INPUTS[p], home, p)) for p in PARAMETERS[kind]]
    traced = _Wrapper(graph).wrap(fn, name)
    try:
        result = traced(*symbols)
    except UsageError as error:
        raise UsageError(str(error).replace(UNKNOWN_LOCATION, home)) from None
    except Exception as error:
        raise UsageError(
            f"{traceback_location(error) or home}: {type(error).__name__}: {error}; this happened while the {kind} "
            f"`{name}` was traced with symbols in place of numbers. It may use operators, {SUPPORTED}"
        ) from error
    return TracedMod(kind, name, graph, _check_result(graph, result, kind, name, home))


def _check_parameters(fn: Mod, kind: Kind, name: str, home: str) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in function without a signature
        return
    try:
        signature.bind(*PARAMETERS[kind])
    except TypeError:
        raise UsageError(
            f"{home}: a {kind} takes {len(PARAMETERS[kind])} arguments, ({', '.join(PARAMETERS[kind])}); "
            f"`{name}` takes {signature}"
        ) from None


def _check_result(graph: Graph, result: object, kind: Kind, name: str, home: str) -> int:
    if result is None:
        raise UsageError(f"{home}: the {kind} `{name}` returns nothing; end it with `return ...`")
    try:
        root = lift(graph, result)
    except UsageError as error:
        raise UsageError(
            f"{home}: the {kind} `{name}` returns {type(result).__name__}: {_without_location(error)}"
        ) from None
    node = graph.nodes[root]
    where = home if node.op in ("input", "const") else node.where
    if kind == "mask_mod" and node.dtype != "bool":
        raise UsageError(
            f"{where}: the mask_mod `{name}` returns {node.dtype}; return a bool, such as a comparison: True for a key "
            "that is seen (a function that changes the score is a score_mod)"
        )
    if kind == "score_mod" and node.dtype == "bool":
        raise UsageError(
            f"{where}: the score_mod `{name}` returns a bool; return the new score, for example "
            'where(condition, score, -float("inf")), or use the function as a mask_mod'
        )
    return root if node.dtype == "bool" else cast(graph, root, "float32")


def _without_location(error: UsageError) -> str:
    return str(error).removeprefix(f"{UNKNOWN_LOCATION}: ")


# ---- finding the arrays that a function reaches -----------------------------------------------------------


class _Wrapper:
    """Copies functions and containers, with CapturedArrays in place of arrays. The user's objects stay unchanged."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.done: dict[int, tuple[object, Any]] = {}  # by id; keeps the original alive so that no id is reused

    def wrap(self, value: Any, label: str, names: frozenset[str] = frozenset()) -> Any:
        """Wraps a value. `names`: attribute names in the calling code, used to find arrays inside objects."""
        if id(value) in self.done:
            return self.done[id(value)][1]
        if is_array(value):
            wrapped: Any = CapturedArray(self.graph, value, label) if tuple(value.shape) else value
        elif isinstance(value, types.FunctionType):
            return self._function(value)
        elif isinstance(value, types.MethodType):
            function = (
                self._function(value.__func__) if isinstance(value.__func__, types.FunctionType) else value.__func__
            )
            wrapped = types.MethodType(function, self.wrap(value.__self__, label, names_of(value.__func__)))
        elif isinstance(value, functools.partial):
            arguments = [self.wrap(item, label) for item in value.args]
            keywords = {key: self.wrap(item, key) for key, item in value.keywords.items()}
            wrapped = functools.partial(self.wrap(value.func, label), *arguments, **keywords)
        elif type(value) in (list, tuple):
            wrapped = type(value)(self.wrap(item, f"{label}[{i}]") for i, item in enumerate(value))
        elif type(value) is dict:
            wrapped = {key: self.wrap(item, f"{label}[{key!r}]") for key, item in value.items()}
        else:
            wrapped = self._object(value, label, names)
        self.done[id(value)] = (value, wrapped)
        return wrapped

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        is_ours = function.__module__ == "llmcl.attention.functions"  # our functions take symbols directly
        if is_ours or (is_library(function.__module__) and not function.__closure__):
            return function
        if id(function) in self.done:
            copied = self.done[id(function)][1]
            assert isinstance(copied, types.FunctionType)
            return copied
        # Registered before it is filled, because a function may reach itself.
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        names = names_of(function)
        scope = dict(function.__globals__)
        copied = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
        copied.__kwdefaults__ = function.__kwdefaults__
        self.done[id(function)] = (function, copied)
        for cell, new, label in zip(function.__closure__ or (), cells, function.__code__.co_freevars, strict=True):
            try:
                new.cell_contents = self.wrap(cell.cell_contents, label, names)
            except ValueError:  # a cell that is still empty
                continue
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        if function.__defaults__:
            labels = parameters[-len(function.__defaults__) :]
            copied.__defaults__ = tuple(map(self.wrap, function.__defaults__, labels))
        if function.__kwdefaults__:
            copied.__kwdefaults__ = {key: self.wrap(item, key) for key, item in function.__kwdefaults__.items()}
        if not is_library(function.__module__):
            for name in names & scope.keys():
                scope[name] = self.wrap(scope[name], name, names)
        return copied

    def _object(self, value: Any, label: str, names: frozenset[str]) -> Any:
        """Returns the object, or a wrapping view if it is callable or has array attributes."""
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, str, bytes, int, float, complex)):
            return value
        if value is None or isinstance(value, (np.generic, np.ufunc, Symbol)):
            return value
        call = None if is_library(type(value).__module__) else call_method(value)
        if isinstance(call, types.FunctionType):
            names = names | names_of(call)
        attributes = {**getattr(value, "__dict__", {}), **getattr(value, "_buffers", {})}
        if isinstance(call, types.FunctionType) or any(is_array(item) for item in attributes.values()):
            return _View(self, value, label)
        return value


class _View:
    """Stands for an object during a trace. Forwards attributes, with CapturedArrays in place of arrays."""

    def __init__(self, wrapper: _Wrapper, value: Any, label: str):
        self._wrapper = wrapper
        self._object = value
        self._label = label

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._object, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._object:
            return types.MethodType(self._wrapper._function(value.__func__), self)  # type: ignore[arg-type]
        return self._wrapper.wrap(value, f"{self._label}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = call_method(self._object)
        if not isinstance(call, types.FunctionType):
            return self._object(*args, **kwargs)
        return self._wrapper._function(call)(self, *args, **kwargs)


def is_library(module: str | None) -> bool:
    """Whether a module's globals hold only library objects, nothing from the user."""
    root = (module or "").partition(".")[0]
    return root in ("numpy", "torch") or root in sys.stdlib_module_names


def names_of(function: Any) -> frozenset[str]:
    """Returns all global and attribute names in a function's code, including nested functions."""
    names: set[str] = set()
    stack = [getattr(function, "__code__", None)]
    while stack:
        code = stack.pop()
        if code is not None:
            names.update(code.co_names)
            stack.extend(item for item in code.co_consts if isinstance(item, types.CodeType))
    return frozenset(names)
