"""The default device taken for both kinds of device that speculative decoding treats differently."""

from __future__ import annotations

import pytest
from which_devices import taken

from llmcl.runtime.platforms import DeviceEntry


@pytest.fixture(scope="module", params=["as it is", pytest.param("as a GPU", marks=pytest.mark.as_gpu)])
def either_entry(request: pytest.FixtureRequest, default_entry: DeviceEntry) -> DeviceEntry:
    """Of the default device, as it is and as a GPU, which `--quick` leaves to the full run."""
    return taken(default_entry, request.param)
