"""Finds the source line in the user's code for the expression being traced."""

from __future__ import annotations

import functools
import linecache
import sys
import types
from pathlib import Path

import numpy as np

from llmcl.errors import UsageError

_TRACE_FILE = str(Path(__file__).with_name("trace.py"))
# The mods in masks.py are traced like a user's.
_OWN_FILES = frozenset(str(path) for path in Path(__file__).parents[1].rglob("*.py") if path.name != "masks.py")
UNKNOWN_LOCATION = "<the traced function>"


def _is_users(filename: str) -> bool:
    """Whether the file is the user's: neither ours nor part of a library that called us."""
    if filename in _OWN_FILES or filename == functools.__file__ or filename.startswith("<frozen"):
        return False
    return not any(filename.startswith(folder) for folder in (str(Path(np.__file__).parent), _torch_folder()) if folder)


def _torch_folder() -> str:
    torch = sys.modules.get("torch")
    return str(Path(torch.__file__).parent) if torch is not None and torch.__file__ else ""


def _location(filename: str, line: int) -> str:
    text = linecache.getline(filename, line).strip()
    return f"{filename}:{line}: `{text}`" if text else f"{filename}:{line}"


def current_location() -> str:
    """Returns file, line and text of the user's expression being traced."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename == _TRACE_FILE and frame.f_code.co_name == "_trace":  # callers are not traced
            break
        if _is_users(filename):
            return _location(filename, frame.f_lineno)
        frame = frame.f_back
    return UNKNOWN_LOCATION


def traceback_location(error: BaseException) -> str | None:
    location = None
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if _is_users(filename):
            location = _location(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return location


def definition(fn: object) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    function = fn if isinstance(fn, (types.FunctionType, types.MethodType)) else call_method(fn)
    code = getattr(function, "__code__", None)
    return _location(code.co_filename, code.co_firstlineno) if code is not None else repr(fn)


def call_method(value: object) -> object:
    """Returns `__call__` as defined in the value's class, or None for a value that isn't callable."""
    return next((vars(base)["__call__"] for base in type(value).__mro__ if "__call__" in vars(base)), None)


def mod_error(message: str) -> UsageError:
    return UsageError(f"{current_location()}: {message}")
