"""Every kernel test runs on each OpenCL device (`device`) in both forms of its kernel (`target`)."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from llmcl.runtime.device import Device


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "heavy: its CPU form takes a software renderer tens of seconds to compile")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Smaller cases of the same form remain for software renderers; what they leave out is in the run's summary."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        entry = parameters.get("cl_entry")
        if (
            entry is not None
            and entry.is_software
            and item.get_closest_marker("heavy")
            and parameters["variant"] == "cpu"
        ):
            item.add_marker(
                pytest.mark.skip(reason="the CPU form takes a software renderer tens of seconds to compile")
            )


@pytest.fixture(params=["cpu", "portable"])
def variant(request: pytest.FixtureRequest) -> str:
    """The form of the kernel under test."""
    name: str = request.param
    return name


@pytest.fixture
def target(device: Device, variant: str) -> Device:
    """The device, taken for a CPU or for a GPU: it chooses that form of every kernel, its work-group sizes included."""
    taken_for = copy.copy(device)
    kind = "cpu" if variant == "cpu" else "gpu"
    taken_for.entry = dataclasses.replace(device.entry, kind=kind, is_software=False)
    return taken_for
