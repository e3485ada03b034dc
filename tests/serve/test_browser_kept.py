"""What the page at `/` keeps in the browser: conversations, their versions, and files of them."""

from __future__ import annotations

import pytest
from browser import Browser, find_browser
from fake_server import FakeEngine
from page_driver import IDLE, STORED, ask, messages, reload, titles

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")


def test_conversations_survive_a_reload(page: Browser, engine: FakeEngine) -> None:
    ask(page, "Hello")
    page.click("#fresh")
    ask(page, "Another")
    assert titles(page) == ["Another", "Hello"]
    reload(page)
    assert messages(page) == ["Another", "Another"] and titles(page) == ["Another", "Hello"]
    page.click("#list li:nth-child(2) .open")
    page.wait_for("document.querySelector('.user').textContent.startsWith('Hello')")
    page.js("document.getElementById('input').focus()")
    ask(page, "More")
    assert engine.asked[-1][0] == "[user]Hello\n[assistant]Hello\n[user]More\n[assistant]"
    page.wait_for("document.querySelector('#list .open').textContent === 'Hello'")
    assert page.problems() == []


def test_an_answer_is_kept_as_far_as_it_came(page: Browser, engine: FakeEngine) -> None:
    """Also where the page is closed while it is written."""
    engine.hold_after = 3
    page.type("Hello")
    page.press("Enter")
    page.wait_for("(document.querySelector('.assistant .text') || {}).textContent === 'Hel'")
    page.wait_for(STORED)
    reload(page)
    assert page.js(IDLE) and messages(page) == ["Hello", "Hel"]
    assert page.js("document.querySelector('.mark').textContent").startswith("Stopped.")
