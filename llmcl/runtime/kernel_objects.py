"""Kernel objects without pyopencl's invokers.

For each kernel object pyopencl generates a Python function that sets arguments and enqueues. Looking the function up in
a SQLite database and unpickling it takes a quarter of a millisecond per object. llmcl sets arguments by itself, so here
all kernel objects share two plain functions with the same effect.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pyopencl as cl
from platformdirs import user_cache_dir

INVOKERS = "generate_enqueue_and_set_args"  # a function in pyopencl.invoker, called for each kernel object
_lock = threading.Lock()


def new_kernel(program: cl.Program, name: str) -> cl.Kernel:
    """Creates a kernel object. If pyopencl lacks the function to replace, pyopencl makes its own invoker."""
    with _lock, _plain_invokers():
        return cl.Kernel(program, name)


@contextmanager
def _plain_invokers() -> Iterator[None]:
    invoker = _invoker_module()
    if (original := getattr(invoker, INVOKERS, None)) is None:
        yield
        return
    setattr(invoker, INVOKERS, _plain_unless_typed(original))
    try:
        yield
    finally:
        setattr(invoker, INVOKERS, original)


def _plain_unless_typed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leaves typed kernels alone: another thread may be creating kernels with argument types."""

    def invokers(name: str, n_passed: int, n_args: int, arg_types: object, *rest: Any, **options: Any) -> Any:
        if arg_types is not None:
            return original(name, n_passed, n_args, arg_types, *rest, **options)
        return _set_args_and_enqueue, _set_args

    return invokers


def _set_args(kernel: cl.Kernel, *args: Any) -> None:
    if len(args) != kernel.num_args:
        raise TypeError(f"{kernel.function_name} takes {kernel.num_args} arguments; {len(args)} were given")
    for index, arg in enumerate(args):
        kernel.set_arg(index, arg)


def _set_args_and_enqueue(
    kernel: cl.Kernel, queue: cl.CommandQueue, global_size: Any, local_size: Any, *args: Any, **options: Any
) -> cl.Event:
    _set_args(kernel, *args)
    return cl.enqueue_nd_range_kernel(queue, kernel, global_size, local_size, **options)


@cache
def _invoker_module() -> ModuleType | None:
    """Returns pyopencl.invoker. Importing it opens a database, if the user's cache folder allows."""
    try:
        if not cl._PYOPENCL_NO_CACHE:
            Path(user_cache_dir("pytools", "pytools")).mkdir(parents=True, exist_ok=True)
        return import_module("pyopencl.invoker")
    except ImportError:
        return None
    except (OSError, RuntimeError, sqlite3.Error):  # RuntimeError: unknown home folder
        cl._PYOPENCL_NO_CACHE = True
        return import_module("pyopencl.invoker")
