"""Every kernel test runs on each OpenCL device (`device`) in each variant of its kernel (`target`)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Iterator

import pytest
from guard_pages import take_guarded

from llmcl.kernels import table
from llmcl.kernels.intel import linear as intel_linear
from llmcl.kernels.intel import matrix_mad
from llmcl.kernels.nvidia import VARIANTS as PTX_VARIANTS
from llmcl.kernels.nvidia.wgmma import has_wgmma
from llmcl.kernels.portable.dot_product import NONE, dot_form
from llmcl.runtime.device import Device
from llmcl.runtime.huge_pages import HugePages
from llmcl.runtime.platforms import find_devices

INT8, INTEL = "portable-int8", "intel"
NAMED = (INT8, INTEL)  # variants of products alone, which their tests name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`variant` names the one under test: those for NVIDIA GPUs where such a GPU is among the devices."""
    chosen = any("variant" in marker.args[0] for marker in metafunc.definition.iter_markers("parametrize"))
    if "variant" in metafunc.fixturenames and not chosen:
        archs = [entry.fact("ptx_arch") for entry in find_devices()]
        least = {"hopper": 90, "nvidia": 80}
        names = dict.fromkeys(row.name for row in table.ROWS if row.name not in NAMED)
        metafunc.parametrize("variant", [name for name in names if max(archs) >= least.get(name, 0)])


@pytest.fixture
def target(device: Device, variant: str, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device, taken for a CPU or a GPU: it chooses that variant of every kernel, its work-group sizes included.

    Intel's matrix units are emulated, on a driver that has Intel's sub-groups.
    """
    if variant in PTX_VARIANTS and device.entry.fact("ptx_arch") < 80:
        pytest.skip("the NVIDIA variants are made of PTX, which this device does not take")
    if variant == "hopper" and not has_wgmma(device.entry):
        pytest.skip("the Hopper variants are made of wgmma, which this device does not take")
    taken_for = copy.copy(device)
    kind = "cpu" if variant == "cpu" else "gpu"
    ptx_arch = {"hopper": device.entry.fact("ptx_arch"), "nvidia": 80}.get(variant, 0)
    facts = {**device.entry.facts, "ptx_arch": ptx_arch}
    entry = dataclasses.replace(device.entry, kind=kind, is_software=False, facts=facts)
    if variant == INT8:
        entry = dataclasses.replace(entry, facts={})  # which has them and is slow at them
        if dot_form(entry) == NONE:
            pytest.skip("this driver has no dot products of 8-bit numbers for a GPU")
    if variant == INTEL:
        if not {*entry.extensions}.issuperset(matrix_mad.NEEDED[1:]):
            pytest.skip("the variant for Intel's matrix units is made of sub-groups, which this driver lacks")
        monkeypatch.setattr(intel_linear, "matrix_form", lambda entry: matrix_mad.EMULATED)
    taken_for.entry = entry
    return taken_for


@pytest.fixture(autouse=True, scope="module")
def guard_pages() -> Iterator[None]:
    """With the CPU drivers from pip a kernel that runs past the end of a buffer ends the process."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr(HugePages, "take", take_guarded)
            patch.setattr(Device, "alloc", functools.partialmethod(Device.alloc, streamed=True))
        yield
