"""Servers for tests of what they answer, and a browser for tests of their page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Browser, browser
from fake_server import FakeEngine, Running, byte_tokenizer, running
from page_driver import open_page


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


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture
def fake_engine() -> FakeEngine:
    return FakeEngine(byte_tokenizer())


@pytest.fixture
def page(chromium: Browser, fake_engine: FakeEngine) -> Iterator[Browser]:
    """The page, just opened, of a server with this engine. Its port is new, so nothing is stored yet."""
    with running(fake_engine) as server:
        open_page(chromium, server)
        yield chromium
        chromium.open("about:blank#left")
