"""Which names for sub-groups a device's kernels may use."""

from __future__ import annotations

import dataclasses

import pytest

from llmcl.runtime import probe, sub_groups
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import CRASHED, NO, YES, Ending
from llmcl.runtime.sub_groups import AMD, INTEL, KHR, NONE, QCOM, listed, sub_group_form


def gpu(entry: DeviceEntry, *extensions: str) -> DeviceEntry:
    return dataclasses.replace(entry, kind="gpu", is_software=False, extensions=extensions)


@pytest.mark.parametrize(
    ("extensions", "form"),
    [
        (("cl_khr_fp16",), NONE),
        (("cl_khr_subgroups",), NONE),
        (("cl_intel_subgroups",), NONE),
        (("cl_khr_subgroups", "cl_intel_subgroups", "cl_intel_required_subgroup_size"), INTEL),
        (("cl_khr_subgroups", "cl_amd_media_ops"), AMD),
        (("cl_khr_subgroups", "cl_qcom_reqd_sub_group_size", "cl_qcom_subgroup_shuffle"), QCOM),
        (("cl_khr_subgroups", "cl_khr_subgroup_shuffle"), KHR),
    ],
)
def test_what_a_driver_lists(extensions: tuple[str, ...], form: int, cl_entry: DeviceEntry) -> None:
    assert listed(gpu(cl_entry, *extensions)) == form


def test_a_cpu_has_none(cl_entry: DeviceEntry) -> None:
    extensions = ("cl_intel_subgroups", "cl_intel_required_subgroup_size")
    assert listed(dataclasses.replace(gpu(cl_entry, *extensions), kind="cpu")) == NONE


@pytest.mark.parametrize(("verdict", "form"), [(YES, KHR), (NO, NONE), (CRASHED, NONE)])
def test_the_trial_decides(
    verdict: str,
    form: int,
    cl_entry: DeviceEntry,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    monkeypatch.setenv("LLMCL_CACHE_DIR", str(tmp_path_factory.mktemp("cache", numbered=True)))
    asked = []

    def ask(module: str, entry: DeviceEntry, *arguments: str) -> Ending:
        asked.append(arguments)
        return Ending(verdict)

    monkeypatch.setattr(probe, "ask", ask)
    entry = dataclasses.replace(gpu(cl_entry, "cl_khr_subgroups", "cl_khr_subgroup_shuffle"), driver_version=verdict)
    assert sub_group_form(entry) == form
    assert asked == [(str(KHR),)]


def test_on_a_driver_that_has_them(device: Device) -> None:
    """Intel's CPU runtime has what Intel's GPUs have: the kernel tests run with sub-groups there, taken for a GPU."""
    if not device.entry.fact("is_intel_cpu"):
        pytest.skip("only Intel's CPU runtime has sub-groups among the CPU drivers")
    entry = dataclasses.replace(device.entry, kind="gpu")
    assert sub_group_form(entry) == INTEL
    assert probe.ask(sub_groups.__name__, entry, str(KHR)).verdict == YES
    assert probe.ask(sub_groups.__name__, entry, str(AMD)).verdict == NO
