"""What the page at `/` keeps in the browser: conversations, their versions, and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_browser
from fake_server import FakeEngine, running, wait_for
from page_driver import HOSTILE, IDLE, STORED, ask, asks_nobody_else, messages, open_page, reload, text_of, titles

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")

HOSTILE_TITLE = "<img src=x onerror='window.hit = 1'> \u202e \"'"


def test_conversations_survive_a_reload(page: Browser, fake_engine: FakeEngine) -> None:
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
    assert fake_engine.asked[-1][0] == "[user]Hello\n[assistant]Hello\n[user]More\n[assistant]"
    page.wait_for("document.querySelector('#list .open').textContent === 'Hello'")
    assert page.problems() == []


def test_an_answer_is_kept_as_far_as_it_came(page: Browser, fake_engine: FakeEngine) -> None:
    """Also where the page is closed while it is written."""
    fake_engine.hold_after = 3
    page.type("Hello")
    page.press("Enter")
    page.wait_for("(document.querySelector('.assistant .text') || {}).textContent === 'Hel'")
    page.wait_for(STORED)
    reload(page)
    assert page.js(IDLE) and messages(page) == ["Hello", "Hel"]
    assert page.js("document.querySelector('.mark').textContent").startswith("Stopped.")


def test_editing_and_retrying_lose_nothing(page: Browser, fake_engine: FakeEngine) -> None:
    answers = iter(["one", "two", "three", "four"])
    fake_engine.reply = lambda text: next(answers)
    ask(page, "Hello")
    ask(page, "Again")
    page.click(".user .edit")
    assert value(page) == "Hello"
    ask(page, " there")
    assert messages(page) == ["Hello there", "three"]
    assert fake_engine.asked[-1][0] == "[user]Hello there\n[assistant]"
    page.click(".assistant .retry")
    page.wait_for(IDLE)
    assert messages(page) == ["Hello there", "four"] and versions(page) == ["2/2", "2/2"]
    page.click(".assistant .previous")
    assert messages(page) == ["Hello there", "three"] and versions(page) == ["2/2", "1/2"]
    assert page.js("document.activeElement.className") == "next"
    page.click(".user .previous")
    assert messages(page) == ["Hello", "one", "Again", "two"] and versions(page) == ["1/2"]
    page.wait_for(STORED)
    reload(page)
    assert messages(page) == ["Hello", "one", "Again", "two"]
    page.click(".user .next")
    assert messages(page) == ["Hello there", "three"]


def value(page: Browser) -> str:
    text: str = page.js("document.getElementById('input').value")
    return text


def versions(page: Browser) -> list[str]:
    texts: list[str] = page.js("[...document.querySelectorAll('.previous + span')].map(s => s.textContent)")
    return texts


@pytest.mark.slow
def test_escape_leaves_the_message_as_it_is(page: Browser) -> None:
    """So does the button on a phone, which has no such key."""
    ask(page, "Hello")
    page.type("a draft")
    for leave in (lambda: page.press("Escape"), lambda: page.click(".edited .edit")):
        page.click(".edit")
        assert text_of(page, ".edited .edit") == "Cancel" and value(page) == "Hello"
        leave()
        assert page.js("document.querySelector('.edited') === null") and value(page) == "a draft"
    page.click(".edit")
    ask(page, " there")
    assert messages(page) == ["Hello there", "Hello there"] and value(page) == "a draft"
    page.js("document.getElementById('input').focus()")
    ask(page, " again")
    assert messages(page)[2:] == ["a draft again", "a draft again"]


def test_renaming_and_deleting(page: Browser) -> None:
    ask(page, "Hello")
    page.click("#list .rename")
    page.type(HOSTILE_TITLE)
    page.press("Enter")
    page.wait_for(f"document.querySelector('#list .open').textContent === {json.dumps(HOSTILE_TITLE)}")
    page.wait_for(STORED)
    reload(page)
    assert titles(page) == [HOSTILE_TITLE]
    page.click("#list .delete")
    page.press("Escape")
    page.wait_for("!document.querySelector('dialog[open]')")
    assert titles(page) == [HOSTILE_TITLE]
    page.click("#list .delete")
    assert HOSTILE_TITLE in page.js("document.getElementById('question-text').textContent")
    page.click("#question-yes")
    page.wait_for("!document.querySelector('#list li')")
    reload(page)
    assert titles(page) == messages(page) == [] and page.js("window.hit === undefined") and page.problems() == []


def test_exported_conversations_come_back_as_they_were(page: Browser, fake_engine: FakeEngine, tmp_path: Path) -> None:
    page.js("import('./page/files.js').then(m => m.addFiles([new File(['```\\nx\\n'], 'a <b>.txt')]))")
    page.wait_for("document.querySelector('#files li')")
    ask(page, "Hello \u202e <i>")
    page.click(".retry")
    page.wait_for(f"{IDLE} && {STORED} && document.querySelectorAll('#list li').length")
    page.click("#fresh")
    ask(page, "Another")
    exported = export_all(page, tmp_path / "before")
    kept = json.loads(exported.read_text(encoding="utf-8"))
    assert len(kept["conversations"]) == 2 and len(kept["conversations"][1]["messages"]) == 3
    for _ in range(2):
        page.js("document.querySelector('#list .open').click()")
        page.wait_for("document.querySelector('#list .delete')")
        page.click("#list .delete")
        page.click("#question-yes")
        page.wait_for("!document.querySelector('.message')")
    page.wait_for("!document.querySelector('#list li')")
    import_files(page, exported)
    page.wait_for("document.querySelectorAll('#list li').length === 2")
    again = export_all(page, tmp_path / "after")
    assert json.loads(again.read_text(encoding="utf-8")) == kept
    page.click("#list li:nth-child(2) .open")
    page.wait_for("document.querySelector('.user')")
    assert messages(page)[0] == "Hello \u202e <i>" and versions(page) == ["2/2"]
    assert fake_engine.asked[0][0] == "[user]a <b>.txt\n````\n```\nx\n````\n\nHello \u202e <i>\n[assistant]"


def export_all(page: Browser, folder: Path) -> Path:
    """Downloads all conversations as a file."""
    page.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    page.click("#export-all")
    path = folder / "conversations.json"
    wait_for(lambda: path.exists() and path.stat().st_size)
    return path


def import_files(page: Browser, *paths: Path) -> None:
    root = page.command("DOM.getDocument")["root"]["nodeId"]
    node = page.command("DOM.querySelector", nodeId=root, selector="#import-file")["nodeId"]
    page.command("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])


def message(**changes: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "parent": -1, "child": -1, "text": "x", "files": [], "thoughts": "", "end": "stop"}
    return answer | {"used": 0} | changes


def conversations(*messages: Any, **changes: Any) -> dict[str, Any]:
    one = {"title": "", "created": 1, "changed": 1, "system": "", "first": 0, "messages": [*messages]} | changes
    return {"format": "llmcl-conversations", "version": 1, "conversations": [one]}


def test_a_hostile_file_is_shown_as_text(page: Browser, tmp_path: Path) -> None:
    """Fields that the page does not know are left out, among them one that would change every object."""
    files = [{"name": HOSTILE, "text": HOSTILE, "type": "text/html"}]
    asked = message(role="user", text=HOSTILE, files=files, child=1)
    hostile = conversations(asked, message(text=HOSTILE, thoughts=HOSTILE, parent=0), title=HOSTILE, system=HOSTILE)
    text = json.dumps(hostile).replace('"title"', '"__proto__": {"hit": 1}, "id": "x", "title"')
    path = tmp_path / "<img src=x onerror='window.hit = 1'>.json"
    path.write_text(text, encoding="utf-8")
    import_files(page, path)
    page.wait_for("document.querySelector('#list .open')")
    page.click("#list .open")
    page.wait_for("document.querySelector('.message')")
    shown = page.js("document.getElementById('log').textContent")
    assert shown.count("<script>window.hit = 1</script>") == 5 * HOSTILE.count("<script>")
    assert page.js("window.hit === undefined && {}.hit === undefined")
    assert page.js("document.querySelectorAll('body :is(img, script, style, iframe, a, object)').length") == 0
    page.wait_for("new Promise(done => setTimeout(() => done(true), 100))")
    assert page.problems() == [] and asks_nobody_else(page)
    path.write_text("<script>window.hit = 1</script>", encoding="utf-8")
    import_files(page, path)
    page.wait_for("document.getElementById('notice').textContent.includes('not JSON')")
    assert "<img src=x" in page.js("document.getElementById('notice').textContent")


DAMAGED = {
    "is not JSON": "{",
    'no "format"': "[]",
    "version: expected 1, found 2": conversations() | {"version": 2},
    "conversations: expected a list, found 5": conversations() | {"conversations": 5},
    "conversations: 501 entries": conversations() | {"conversations": [0] * 501},
    "conversations[0]: expected an object, found null": conversations() | {"conversations": [None]},
    "title: expected a text, found {}": conversations(title={}),
    "changed: expected milliseconds since 1970, found 1e+300": conversations(changed=1e300),
    "messages[0]: expected an object, found []": conversations([]),
    'role: expected one of user, assistant, found "system"': conversations(message(role="system")),
    "messages[0].parent: expected -1 to -1, found 0": conversations(message(parent=0)),
    "messages[0].child: expected -1, or a message whose parent is 0, found 0": conversations(message(child=0)),
    "messages[1].child: expected": conversations(message(), message(parent=0, child=0)),
    "first: expected -1, or a message whose parent is -1, found 1": conversations(message(), first=1),
    "end: expected": conversations(message(end="x")),
    "used: expected a number of tokens, found -1": conversations(message(used=-1)),
    "files[0].text: expected a text, found undefined": conversations(message(files=[{"name": "x"}])),
    "larger than 16000000 characters": conversations(message(text="x" * 16_000_000)),
}


def test_a_damaged_file_is_refused_with_the_place(page: Browser) -> None:
    for error, damaged in DAMAGED.items():
        text = damaged if isinstance(damaged, str) else json.dumps(damaged)
        code = f"import('./page/exchange.js').then(m => m.importText({json.dumps(text)})).then(String, e => e.message)"
        assert error in page.js(code), error


@pytest.mark.slow
def test_what_is_stored_has_bounds(page: Browser) -> None:
    page.js("import('./page/conversation.js').then(m => { m.LIMITS.conversations = 1; })")
    ask(page, "Hello")
    page.click("#fresh")
    ask(page, "Another")
    assert messages(page) == ["Another", "Another"] and titles(page) == ["Hello"]
    assert "the store is full" in page.js("document.getElementById('notice').textContent")
    page.js("import('./page/conversation.js').then(m => { m.LIMITS.conversations = 9; m.LIMITS.size = 300; })")
    ask(page, "x" * 500)
    assert "longer than 300 characters" in page.js("document.getElementById('notice').textContent")
    assert titles(page) == ["Hello"]


@pytest.mark.slow
def test_another_window_overwrites_nothing(page: Browser) -> None:
    """A conversation that two windows changed becomes two."""
    ask(page, "Hello")
    page.js(
        "import('./page/store.js').then(m => m.openStore()).then(async store => {"
        "const [head] = await store.list(), other = await store.get(head.id);"
        "other.messages[1].text = 'changed elsewhere'; await store.put(other); })"
    )
    ask(page, "Again")
    page.wait_for("document.querySelectorAll('#list li').length === 2")
    assert titles(page) == ["Hello (copy)", "Hello"] and messages(page)[1:] == ["Hello", "Again", "Again"]
    page.click("#list li:nth-child(2) .open")
    page.wait_for("document.querySelectorAll('.message').length === 2")
    assert messages(page) == ["Hello", "changed elsewhere"]


@pytest.mark.slow
def test_a_browser_that_keeps_nothing_still_answers(chromium: Browser) -> None:
    """As some private windows, and Chromium where all cookies are blocked."""
    refuse = "{get() { throw new DOMException('denied', 'SecurityError'); }}"
    names = ("localStorage", "sessionStorage", "indexedDB")
    script = ";".join(f"Object.defineProperty(window, '{name}', {refuse})" for name in names)
    added = chromium.command("Page.addScriptToEvaluateOnNewDocument", source=script)
    with running() as server:
        try:
            open_page(chromium, server)
            assert "keeps no conversations" in text_of(chromium, "#notice")
            chromium.type("Hello")
            chromium.press("Enter")
            chromium.wait_for(f"{IDLE} && document.querySelector('.assistant')")
            assert messages(chromium) == ["Hello", "Hello"] and chromium.problems() == []
            assert not chromium.js("document.getElementById('open-side').checkVisibility()")
        finally:
            chromium.command("Page.removeScriptToEvaluateOnNewDocument", **added)
            chromium.open("about:blank#left")
