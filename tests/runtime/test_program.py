"""Compiled programs on disk: by llmcl, or by a driver that does it better itself."""

from __future__ import annotations

from pathlib import Path

from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.program import KernelSource, ProgramCache, read_source


def test_a_program_is_compiled_once(cl_entry: DeviceEntry, empty_cache: Path) -> None:
    import pyopencl as cl

    context = cl.Context([cl_entry.device])
    constants = {"VOCAB": 131, "LOCAL_SIZE": 1}
    for compiled in (1, int(cl_entry.is_pocl)):  # PoCL, asked again, looks into a cache of its own
        programs = ProgramCache(context, cl_entry.device)
        programs.kernel(KernelSource("portable/log_likelihood.cl", "log_likelihood", constants))
        assert programs.compiled == compiled
    assert len(list(empty_cache.rglob("log_likelihood-*.bin"))) == (0 if cl_entry.is_pocl else 1)


def test_a_file_is_included_once_or_again() -> None:
    text = read_source("nvidia/layer_products.cl")
    assert text.count("inline walk walk_of(") == 2  # of a file that is included again
    assert text.count("inline float sum4(") == 1  # of one that this file includes
    assert "#include" not in text
