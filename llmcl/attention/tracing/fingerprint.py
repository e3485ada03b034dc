"""Computes a hashable fingerprint for a mod from its code and every value the code reaches."""

from __future__ import annotations

import functools
import types
from typing import Any

import numpy as np

from llmcl.attention.tracing.symbols import is_array, is_device_array
from llmcl.attention.tracing.trace import TracedMod, is_library, names_of

MAX_ARRAY = 1 << 16  # bytes; comparing larger arrays takes longer than tracing again


class _Unknown(Exception):
    """A value with changes invisible from outside, such as an instance from a user's class."""


class _Same:
    """Compares by identity with another wrapper and keeps the wrapped object alive."""

    def __init__(self, value: object):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def fingerprint(mod: object) -> Any:
    """Returns a value that is equal for equal code reaching equal values. Returns None if equality can't be decided.

    A mod is traced again when the fingerprint changes: a closure variable, default or global has another value, or an
    array has other contents.
    """
    try:
        return _of(mod, {})
    except (_Unknown, ValueError):  # ValueError: more digits than Python converts
        return None


def _of(value: Any, seen: dict[int, int]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic)):
        return type(value), repr(value)
    if is_device_array(value):  # kernels read the contents at run time, so only identity counts
        return "device array", _Same(value), _Same(value.base_data), value.offset, value.dtype.str, value.shape
    if is_array(value):
        array = value if isinstance(value, np.ndarray) else _torch_array(value)
        if array.nbytes > MAX_ARRAY or array.dtype.hasobject:
            raise _Unknown
        return "array", array.dtype.str, array.shape, array.tobytes()
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, types.FunctionType):
        return _function(value, seen)
    if isinstance(value, functools.partial):
        return "partial", _of([value.func, list(value.args), value.keywords], seen)
    if type(value) in (list, tuple):
        return type(value), tuple(_of(item, seen) for item in value)
    if type(value) is dict:
        return dict, tuple((_of(k, seen), _of(item, seen)) for k, item in value.items())
    if isinstance(value, TracedMod):
        return _Same(value)
    home = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    fixed = (types.ModuleType, type, types.BuiltinFunctionType, np.ufunc)
    if isinstance(value, fixed) and (is_library(home) or str(home).partition(".")[0] == "llmcl"):
        return _Same(value)
    raise _Unknown


def _function(function: types.FunctionType, seen: dict[int, int]) -> Any:
    is_package_code = str(function.__module__).partition(".")[0] == "llmcl" or is_library(function.__module__)
    if is_package_code and not function.__closure__ and not function.__defaults__:
        return _Same(function)
    names = names_of(function)
    reached = [
        *(_contents(cell) for cell in function.__closure__ or ()),
        function.__defaults__,
        function.__kwdefaults__,
    ]
    if not is_package_code:
        scope = function.__globals__
        reached += [scope[name] for name in sorted(names & scope.keys())]
    return function.__code__, tuple(_of(item, seen) for item in reached)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        raise _Unknown from None


def _torch_array(tensor: Any) -> np.ndarray:
    if tensor.device.type != "cpu" or "bfloat16" in str(tensor.dtype):
        raise _Unknown
    array: np.ndarray = tensor.detach().numpy()
    return array
