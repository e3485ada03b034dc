"""The probe for 8-bit dot products: it runs elsewhere, remembers its answer, and takes a crash for a no."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from llmcl.runtime import probe
from llmcl.runtime.dot_product import INLINE_256, INLINE_512, INTRINSIC_512, NONE, dot_product
from llmcl.runtime.platforms import DeviceEntry


def test_the_answer_is_remembered(cl_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = dot_product(cl_entry)
    assert answer in (NONE, INTRINSIC_512, INLINE_512, INLINE_256)
    if cl_entry.is_intel_cpu and "avx512_vnni" in Path("/proc/cpuinfo").read_text():
        assert answer == INTRINSIC_512

    def run(*args: Any, **options: Any) -> Any:
        raise AssertionError("the answer is in the cache")

    monkeypatch.setattr(probe.subprocess, "run", run)
    assert dot_product(cl_entry) == answer


@pytest.mark.parametrize("outcome", [-4, 134, "timeout"])
def test_a_crash_or_a_hang_is_a_no(
    cl_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, outcome: int | str
) -> None:
    def run(command: list[str], **options: Any) -> Any:
        if outcome == "timeout":
            raise subprocess.TimeoutExpired(command, 1.0)
        return subprocess.CompletedProcess(command, int(outcome))

    monkeypatch.setattr(probe.subprocess, "run", run)
    assert dot_product(cl_entry) == NONE
