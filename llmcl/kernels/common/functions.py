"""Turns kernels into functions within a program. A launch can then do the work of several launches.

OpenCL C has no templates. A file's functions and structures get unique names, and macros are undefined at the file's
end. A program can then hold a kernel for several shapes and storage types.
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
    """Returns a launch's source. The launch must not hold a compiled kernel."""
    assert isinstance(launch.source, KernelSource)
    return launch.source


def number_of(source: KernelSource, name: str) -> int:
    """Returns a build constant that must be a whole number."""
    value = source.constants[name]
    assert isinstance(value, int)
    return value


def with_constants(source: KernelSource, **constants: object) -> KernelSource:
    """Returns the kernel with additional or replaced build constants."""
    return replace(source, constants={**source.constants, **constants})


def weight_dtype(source: KernelSource) -> str:
    """Returns the weight dtype that a product kernel is built for."""
    name = source.constants["WEIGHT"]
    assert isinstance(name, str)
    return dtype_of_kernel(name)


def as_function(source: KernelSource, suffix: str, shared: tuple[str, ...], head: str, kernel_params: str = "") -> str:
    """Returns the text of a kernel file with `suffix` added to every function name.

    The kernel becomes a function, too, with kernel_params in front of the parameters.

    shared: files without dependence on build constants. The program must include them before the text.
    head: macros that apply to the returned text only.
    """
    constants = tuple((name, constant_text(value)) for name, value in sorted(source.constants.items()))
    return _as_function(source.file, source.prelude, constants, suffix, shared, head, kernel_params)


@lru_cache(maxsize=128)  # a model's batch needs about 20 texts, and each new engine asks for them
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
