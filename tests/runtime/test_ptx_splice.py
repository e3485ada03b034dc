"""Instructions put into a program's PTX, and what is made of devices and drivers that do not take them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from llmcl.errors import KernelBuildError
from llmcl.kernels.nvidia.wgmma import PROBES, has_tensor_maps, has_wgmma
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import NO, UNKNOWN, YES, Ending
from llmcl.runtime.program import KernelSource, ProgramCache, read_source
from llmcl.runtime.ptx_splice import needs_splice, splice

PTX = """.version 9.0
.target sm_90, texmode_independent
.address_size 64
.entry k()
{
	// begin inline asm
	//sm_90a wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 1;
	// end inline asm
	// //sm_90a is no mark inside another comment
	ret;
}
\0"""


def test_marked_comments_become_instructions() -> None:
    lines = splice(PTX).splitlines()
    assert lines[1] == ".target sm_90a, texmode_independent"
    assert (
        lines[6]
        == "\twgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd1, %rd2, 1, 1, 1, 0, 1;"
    )
    assert [line for i, line in enumerate(lines) if i not in (1, 6)] == [
        line for i, line in enumerate(PTX.splitlines()) if i not in (1, 6)
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\x7fELF", "'.target sm_90', found 0"),
        (PTX.replace("sm_90,", "sm_100,"), "'.target sm_90', found 0"),
        (PTX.replace("//sm_90a w", "// w"), "found none"),
    ],
)
def test_other_binaries_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        splice(text)


def test_which_programs_need_it() -> None:
    assert all(needs_splice(read_source(probe)) for probe in PROBES.values())
    assert not needs_splice(read_source("nvidia/linear_prefill.cl"))


def test_only_hopper_has_wgmma(cl_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    if cl_entry.fact("ptx_arch") == 90:
        pytest.skip("this device may have it")

    def ask(*args: object) -> Ending:
        raise AssertionError("nothing to try on this device")

    monkeypatch.setattr("llmcl.runtime.probe.ask", ask)
    assert not has_wgmma.__wrapped__(cl_entry) and not has_tensor_maps.__wrapped__(cl_entry)


@pytest.mark.parametrize(
    ("verdict", "kept", "expected"), [(YES, True, True), (NO, True, False), (UNKNOWN, False, False)]
)
def test_a_probe_of_wgmma_that_was_killed_is_not_remembered(
    default_entry: DeviceEntry,
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    verdict: str,
    kept: bool,
    expected: bool,
) -> None:
    entry = dataclasses.replace(default_entry, facts={**default_entry.facts, "ptx_arch": 90})
    monkeypatch.setattr("llmcl.runtime.probe.ask", lambda *_: Ending(verdict))
    assert has_wgmma.__wrapped__(entry) is has_tensor_maps.__wrapped__(entry) is expected
    assert (empty_cache / "wgmma").exists() is (empty_cache / "tensor_map").exists() is kept


def test_a_driver_without_ptx_is_named(default_device: Device, empty_cache: Path) -> None:
    if default_device.entry.fact("ptx_arch") == 90:
        pytest.skip("this driver's binaries are PTX")
    prelude = '// no instruction here, "//sm_90a " is enough\n'
    constants = {"WIDTH": 1, "CHAINS": 1, "ROUNDS": 16}
    source = KernelSource("portable/arithmetic_peak.cl", "arithmetic_peak", constants, prelude)
    programs = ProgramCache(default_device.context, default_device.entry.device)
    with pytest.raises(KernelBuildError, match="expected PTX with one line"):
        programs.kernel(source)
    assert not list(empty_cache.rglob("*.bin"))


def test_the_spliced_program_is_kept(device: Device, empty_cache: Path) -> None:
    if not has_wgmma(device.entry):
        pytest.skip("the device has no wgmma")
    operands = [device.zeros(4 * 64 * 64, name) for name in ("a", "b")]
    out = device.upload(np.ones((64, 64), np.float32), "out")
    for expected in (1, 0):  # compiled, then found
        programs = ProgramCache(device.context, device.entry.device)
        kernel = programs.kernel(KernelSource(PROBES["wgmma"], "wgmma_probe", {"APART_FROM_THE_PROBE": 1}))
        assert programs.compiled == expected
        kernel.set_args(operands[0].cl, operands[1].cl, out.cl)
    assert all(b"\n.target sm_90a" in kept.read_bytes() for kept in empty_cache.rglob("wgmma_probe-*.bin"))
