"""Kernel objects without pyopencl's invokers.

pyopencl makes a Python function for each kernel object, which sets its arguments and enqueues it. It looks the function
up in a SQLite database and unpickles it, a quarter of a millisecond for each object. llmcl sets arguments by itself, so
here all kernel objects share two plain functions that do the same.
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

INVOKERS = "generate_enqueue_and_set_args"  # in pyopencl.invoker; pyopencl calls it for each kernel object
_lock = threading.Lock()


def new_kernel(program: cl.Program, name: str) -> cl.Kernel:
    """A new object of the kernel. Where pyopencl has no such function to replace, it makes its own invoker."""
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
    """Another thread of the program may make kernels meanwhile, and say the types of their arguments."""

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
    """pyopencl.invoker. It opens its database when it is imported, if there can be one in the user's cache folder."""
    try:
        if not cl._PYOPENCL_NO_CACHE:
            Path(user_cache_dir("pytools", "pytools")).mkdir(parents=True, exist_ok=True)
        return import_module("pyopencl.invoker")
    except ImportError:
        return None
    except (OSError, RuntimeError, sqlite3.Error):  # RuntimeError: no home folder is known
        cl._PYOPENCL_NO_CACHE = True
        return import_module("pyopencl.invoker")
