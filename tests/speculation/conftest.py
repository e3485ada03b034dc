"""The default device taken for both kinds of device that speculative decoding treats differently."""

from __future__ import annotations

import pytest
from which_devices import taken

from llmcl.runtime.platforms import DeviceEntry


@pytest.fixture(scope="module", params=["as it is", pytest.param("as a GPU", marks=pytest.mark.slow)])
def either_entry(request: pytest.FixtureRequest, default_entry: DeviceEntry) -> DeviceEntry:
    """The default device as it is, and taken for a GPU."""
    return taken(default_entry, request.param)
