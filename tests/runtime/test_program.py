"""Compiled programs on disk: by llmcl, or by a driver that does it better itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from llmcl.kernels.portable.linear import register_limit
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.program import REGISTER_LIMIT, KernelSource, ProgramCache, read_source


def test_a_program_is_compiled_once(cl_entry: DeviceEntry, empty_cache: Path) -> None:
    import pyopencl as cl

    context = cl.Context([cl_entry.device])
    constants = {"VOCAB": 131, "LOCAL_SIZE": 1}
    for compiled in (1, int(cl_entry.fact("is_pocl"))):  # PoCL, asked again, looks into a cache of its own
        programs = ProgramCache(context, cl_entry.device)
        programs.kernel(KernelSource("portable/log_likelihood.cl", "log_likelihood", constants))
        assert programs.compiled == compiled
    assert len(list(empty_cache.rglob("log_likelihood-*.bin"))) == (0 if cl_entry.fact("is_pocl") else 1)


def test_a_file_is_included_once_or_again() -> None:
    text = read_source("nvidia/layer_products.cl")
    assert text.count("ALWAYS_INLINE walk walk_of(") == 2  # of a file that is included again
    assert text.count("ALWAYS_INLINE float sum4(") == 1  # of one that this file includes
    assert "#include" not in text


def test_a_limit_of_registers_is_for_the_compiler_that_knows_it(default_device: Device) -> None:
    entry = default_device.entry
    nvidia = Device.__new__(Device)
    nvidia.entry = dataclasses.replace(entry, extensions=(*entry.extensions, "cl_nv_compiler_options"))
    assert register_limit(default_device, "q4_0", 64) == {}
    assert register_limit(nvidia, "bfloat16", 64) == register_limit(nvidia, "q4_0", 16) == {}
    constants = register_limit(nvidia, "q4_0", 64)
    options = KernelSource("portable/linear_prefill.cl", "linear_prefill", constants).program()[1]
    assert options == f"-D MAX_REGISTERS=128 {REGISTER_LIMIT}128"


def test_a_limit_of_registers_holds_for_a_kept_program(
    default_device: Device, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's driver keeps PTX: the limit is heeded when that is made into machine code."""
    given: list[tuple[bool, list[str]]] = []

    class Program:
        def __init__(self, context: object, *source: object):
            self.is_kept = len(source) == 2

        def build(self, options: list[str], cache_dir: bool = False) -> None:
            given.append((self.is_kept, [option for option in options if option.startswith(REGISTER_LIMIT)]))

        def get_info(self, info: object) -> list[bytes]:
            return [b"machine code"]

    monkeypatch.setattr("llmcl.runtime.program.cl.Program", Program)
    monkeypatch.setattr("llmcl.runtime.program.new_kernel", lambda program, name: program)
    source = KernelSource("portable/embed.cl", "embed", {"MAX_REGISTERS": 128})
    for _ in range(2):
        programs = ProgramCache(default_device.context, default_device.entry.device)
        programs.keeps_binaries = True
        programs.kernel(source)
    assert given == [(False, [f"{REGISTER_LIMIT}128"]), (True, [f"{REGISTER_LIMIT}128"])]
