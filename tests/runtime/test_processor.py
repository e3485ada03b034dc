"""What a CPU driver compiles for, and that compiled kernels are kept apart by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmcl.runtime.device import Device
from llmcl.runtime.device_cache import DeviceCache
from llmcl.runtime.processor import processor
from llmcl.runtime.program import KernelSource, ProgramCache

CPUINFO = """\
processor\t: 0
model name\t: AMD EPYC
cpu MHz\t\t: 2596.1
flags\t\t: fpu avx2{more}

processor\t: 1
model name\t: of another core
"""


def cpuinfo(root: Path, text: str) -> str:
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc/cpuinfo").write_text(text)
    return processor(root)


def test_tells_processors_of_one_name_apart(tmp_path: Path) -> None:
    old, new = (cpuinfo(tmp_path, CPUINFO.format(more=more)) for more in ("", " avx512f"))
    assert old.splitlines()[:2] == ["model name\t: AMD EPYC", "flags\t\t: fpu avx2"] and new != old
    assert "another core" not in old
    assert cpuinfo(tmp_path, CPUINFO.replace("2596.1", "1800.0").format(more="")) == old
    arm = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert cpuinfo(tmp_path, arm).startswith("Features\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd40")
    assert isinstance(processor(tmp_path / "nowhere"), str)


@pytest.mark.parametrize("variable", ["CL_CONFIG_CPU_TARGET_ARCH", "POCL_LLVM_CPU_NAME"])
def test_a_variable_that_hides_instructions_has_programs_of_its_own(
    default_device: Device, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    device = default_device
    key = KernelSource("portable/rms_norm.cl", "rms_norm", {}).program()

    def kept() -> tuple[Path, Path]:
        return ProgramCache(device.context, device.entry.device)._found(*key)[2], DeviceCache(device.entry).path

    before = kept()
    assert kept() == before
    monkeypatch.setenv(variable, "core-avx2")
    for path, earlier in zip(kept(), before, strict=True):
        assert (path != earlier) == (device.entry.kind == "cpu")
