"""Kernels as functions of one program, so that a launch may do what several do.

OpenCL C has no templates: the file's functions and structures get names of their own, and its macros end with it. So a
program can have a kernel for several shapes and storage types.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from llmcl.kernels.common.dtype import dtype_of_kernel
from llmcl.runtime.device import Launch
from llmcl.runtime.program import KernelSource, constant_text, read_source

_FUNCTION = re.compile(r"\binline [\w\s*]*?(\w+)\(")
_KERNEL = re.compile(
    r"^__kernel __attribute__\(\(reqd_work_group_size\([^)]*\)\)\)(?: REQUIRE_LANES)?\s+void (\w+)\(", re.MULTILINE
)
_STRUCT = re.compile(r"^\} (\w+);", re.MULTILINE)
_TYPE = re.compile(r"^typedef \w+ (?!\w+_t;)(\w+);", re.MULTILINE)
_MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)


def source_of(launch: Launch) -> KernelSource:
    """Of a launch that was not given a compiled kernel."""
    assert isinstance(launch.source, KernelSource)
    return launch.source


def number_of(source: KernelSource, name: str) -> int:
    """A build constant that is a whole number."""
    value = source.constants[name]
    assert isinstance(value, int)
    return value


def with_constants(source: KernelSource, **constants: object) -> KernelSource:
    """The same kernel, built with these as well, or in place of those that it has."""
    return replace(source, constants={**source.constants, **constants})


def weight_dtype(source: KernelSource) -> str:
    """Of the weights that a kernel of products is built for."""
    name = source.constants["WEIGHT"]
    assert isinstance(name, str)
    return dtype_of_kernel(name)


def as_function(source: KernelSource, suffix: str, shared: tuple[str, ...], head: str, kernel_params: str = "") -> str:
    """A kernel's file whose functions are called name + suffix. The kernel is one of them, with kernel_params in front.

    shared: files in which nothing depends on build constants; they are to stand before it. head: macros that count in
    the file alone.
    """
    constants = tuple((name, constant_text(value)) for name, value in sorted(source.constants.items()))
    return _as_function(source.file, source.prelude, constants, suffix, shared, head, kernel_params)


@lru_cache(maxsize=128)  # a batch of a model has some 20, and each engine that is opened asks for them
def _as_function(
    file: str,
    prelude: str,
    constants: tuple[tuple[str, str], ...],
    suffix: str,
    shared: tuple[str, ...],
    head: str,
    kernel_params: str,
) -> str:
    text = prelude + read_source(file, shared)
    names = {*_FUNCTION.findall(text), *_KERNEL.findall(text), *_STRUCT.findall(text), *_TYPE.findall(text)}
    text = _KERNEL.sub(rf"inline void \1({kernel_params}", text)
    text = re.sub(rf"\b({'|'.join(sorted(names))})\b", rf"\1{suffix}", text)
    before = {name for file in shared for name in _MACRO.findall(read_source(file))}
    macros = sorted({*_MACRO.findall(head + text), *dict(constants)} - before)
    return (
        "".join(f"#define {name} {value}\n" for name, value in constants)
        + head
        + text
        + "".join(f"\n#undef {name}" for name in macros)
        + "\n"
    )
