"""The probe for dot products: it runs elsewhere, remembers its answer, and takes a crash for a no."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmcl.runtime import probe
from llmcl.runtime.dot_product import BFLOAT16, INT8, NONE, DotProduct, dot_product
from llmcl.runtime.platforms import DeviceEntry


@pytest.mark.parametrize(("wanted", "flag"), [(INT8, "avx512_vnni"), (BFLOAT16, "avx512_bf16")])
def test_the_answer_is_remembered(
    cl_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, wanted: DotProduct, flag: str
) -> None:
    answer = dot_product(cl_entry, wanted)
    forms = wanted.intel if cl_entry.is_intel_cpu else wanted.pocl if cl_entry.is_pocl else ()
    has_it = flag in Path("/proc/cpuinfo").read_text()
    assert answer in (NONE, *forms) and (answer != NONE) == (has_it and forms != ())

    def run(*args: Any, **options: Any) -> Any:
        raise AssertionError("the answer is in the cache")

    monkeypatch.setattr(probe.subprocess, "run", run)
    assert dot_product(cl_entry, wanted) == answer


@pytest.mark.parametrize("outcome", [-4, 134, "timeout"])
def test_a_crash_or_a_hang_is_a_no(
    cl_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, outcome: int | str
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        if outcome == "timeout":
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, int(outcome))

    monkeypatch.setattr(probe.subprocess, "run", run)
    assert dot_product(cl_entry, INT8) == NONE
