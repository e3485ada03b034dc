"""Servers for tests of what they answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_server import Running, running


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    """A server for tests that leave its engine as it is."""
    with running() as server:
        yield server


@pytest.fixture
def server() -> Iterator[Running]:
    """A server of this test's own."""
    with running() as server:
        yield server
