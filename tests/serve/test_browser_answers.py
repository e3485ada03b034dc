"""Answers on the page at `/`: cut ones that go on, prompts that take long, the context, copies and files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from browser import Browser, find_browser
from fake_server import FakeEngine, byte_tokenizer, running, served, wait_for
from page_driver import HOSTILE, IDLE, STORED, ask, asks_nobody_else, messages, open_page, reload, text_of

from llmcl.serve import events as serve_events

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")


def test_escape_ends_the_request(page: Browser, fake_engine: FakeEngine) -> None:
    fake_engine.hold_after = 3
    page.type("Hello")
    page.press("Enter")
    page.wait_for("(document.querySelector('.assistant .text') || {}).textContent === 'Hel'")
    page.press("Escape")
    wait_for(lambda: fake_engine.open == 0)
    page.wait_for(IDLE)
    assert messages(page) == ["Hello", "Hel"] and text_of(page, ".mark span") == "Stopped."


@pytest.mark.parametrize("how", ["limit", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_cut_answer_goes_on(page: Browser, fake_engine: FakeEngine, how: str) -> None:
    fake_engine.reply = lambda text: "one, two, three"
    if how == "limit":
        page.js("document.getElementById('max_tokens').value = 5")
        ask(page, "Count")
        assert text_of(page, ".mark span") == "Cut off at the limit of tokens."
    else:
        fake_engine.hold_after = 5
        page.type("Count")
        page.press("Enter")
        page.wait_for("(document.querySelector('.assistant .text') || {}).textContent === 'one, '")
        page.click("#stop")
        page.wait_for(f"{IDLE} && {STORED}")
        fake_engine.hold_after = None
    reload(page)  # the mark stays
    page.js("document.getElementById('max_tokens').value = 100")
    fake_engine.reply = lambda text: "two."
    page.click(".go-on")
    page.wait_for(f"{IDLE} && !document.querySelector('.mark')")
    assert messages(page) == ["Count", "one, two."] and fake_engine.asked[-1][0] == "[user]Count\n[assistant]one, "
    assert page.js("document.querySelectorAll('.previous').length") == 0


def test_an_answer_that_fills_the_context_says_so(chromium: Browser) -> None:
    """It cannot go on: the next request would be longer than the context."""
    fake_engine = FakeEngine(byte_tokenizer())
    fake_engine.reply = lambda text: "x" * 50
    with running(fake_engine) as server:
        server.service.ready(served(fake_engine, max_context=40))
        open_page(chromium, server)
        assert text_of(chromium, "#context") == "context 40"
        chromium.js("document.getElementById('max_tokens').value = 40 - 23")  # the fake engine has no context
        ask(chromium, "Hello")
        assert text_of(chromium, ".mark span") == "The context is full."
        assert not chromium.js("document.querySelector('.go-on')")
        assert text_of(chromium, "#full-text") == "context 100% full (40)"
        chromium.open("about:blank#left")


def test_the_share_of_the_context_that_is_full(page: Browser, fake_engine: FakeEngine) -> None:
    assert not page.js("document.getElementById('full').checkVisibility()")
    ask(page, "x" * 500)
    total = len(byte_tokenizer().encode(fake_engine.asked[0][0])) + 501
    share = f"context {round(100 * total / 2048)}% full (1\u202f{total - 1000:03})"
    assert text_of(page, "#full-text") == share
    assert page.js("document.getElementById('full').value") == pytest.approx(total / 2048, abs=1e-6)
    reload(page)
    page.wait_for(f"document.getElementById('full-text').textContent === {json.dumps(share)}")
    page.click("#fresh")
    assert text_of(page, "#full-text") == ""


def test_the_progress_of_a_prompt(page: Browser, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_events, "REPORT_S", 0.02)
    fake_engine.delay_s, fake_engine.read = 1.0, (10, 20)
    page.type("Hello, page")
    page.press("Enter")
    page.wait_for("!document.getElementById('progress').hidden")
    figures = text_of(page, "#figures")
    assert figures.startswith("reading the prompt: 20 of 29 tokens, 10 from the cache, "), figures
    assert float(figures.removesuffix(" tokens/s").rpartition(" ")[2]) > 0
    bar = page.js("(bar => [bar.value, bar.max])(document.getElementById('progress'))")
    assert bar == [20, 29]
    fake_engine.delay_s = 0
    page.wait_for(IDLE)
    assert page.js("document.getElementById('progress').hidden") and text_of(page, "#figures").startswith("TTFT")


def test_copies(page: Browser, fake_engine: FakeEngine) -> None:
    page.command("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    fake_engine.reply = lambda text: "# One\n\n```html\n<b>\n\n</b>\n```\n*two*"
    ask(page, "Hello")
    for button, text in (
        (".code .copy", "<b>\n\n</b>"),
        (".assistant > .tools .copy", fake_engine.reply("")),
        (".copy", "Hello"),
    ):
        page.click(button)
        page.wait_for(f"document.querySelector({json.dumps(button)}).textContent === 'Copied'")
        assert page.js("navigator.clipboard.readText()") == text
    page.js("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as without https
    page.js(
        "document.execCommand = command => { window.copied = [command, document.activeElement.value]; return true; }"
    )
    page.click(".copy")
    page.wait_for("window.copied")
    assert page.js("window.copied") == ["copy", "Hello"]


def drop(page: Browser, *files: tuple[str, str, str]) -> None:
    """Drops files on the page: (text, name, type)."""
    page.js(
        f"(files => {{ const data = new DataTransfer();"
        "for (const [text, name, type] of files) data.items.add(new File([text], name, {type}));"
        "const event = new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true});"
        f"document.body.dispatchEvent(event); }})({json.dumps(files)})"
    )


def test_text_files_are_dropped_in(page: Browser, fake_engine: FakeEngine) -> None:
    drop(page, ("a = 1\n", "a.py", "text/x-python"), ("GIF89a", "cat.gif", "image/gif"), ("b", HOSTILE, ""))
    page.wait_for("document.querySelectorAll('#files li').length === 2")
    assert text_of(page, "#notice") == "cat.gif: this model takes no images"
    page.click("#files li:nth-child(2) button")
    ask(page, "What is it?")
    assert fake_engine.asked[0][0] == "[user]a.py\n```\na = 1\n```\n\nWhat is it?\n[assistant]"
    assert text_of(page, ".user summary") == "a.py (6 characters)" and not page.js(
        "document.querySelector('details').open"
    )
    assert text_of(page, "#notice") == "" and page.js("document.querySelectorAll('#files li').length") == 0
    page.click(".edit")  # takes the file along
    ask(page, "!")
    assert fake_engine.asked[1][0] == "[user]a.py\n```\na = 1\n```\n\nWhat is it?!\n[assistant]"
    assert page.js("window.hit === undefined") and asks_nobody_else(page)


OTHER_FILES = {
    "x.bin: not a text in UTF-8": "[new Uint8Array([255, 254, 0])], 'x.bin'",
    "x.dat: not a text": "['a\\0b'], 'x.dat'",
    "x.log: larger than 1 MiB": "['x'.repeat((1 << 20) + 1)], 'x.log'",
    "x.mp3: this server takes no audio or video": "['x'], 'x.mp3', {type: 'audio/mpeg'}",
}


def test_other_files_are_refused(page: Browser) -> None:
    for error, file in OTHER_FILES.items():
        page.js(f"import('./page/files.js').then(m => m.addFiles([new File({file})]))")
        assert text_of(page, "#notice") == error
    assert page.js("document.querySelectorAll('#files li').length") == 0


def test_settings_are_fields_that_the_server_reads(page: Browser, fake_engine: FakeEngine) -> None:
    names = page.js("import('./page/settings.js').then(m => [...m.NUMBERS, 'reasoning_effort'])")
    described: Any = page.js("fetch('openapi.json').then(a => a.json())")
    content = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    fields = content["application/json"]["schema"]["properties"]
    assert {*names, "return_progress", "continue_final_message", "stream_options"} <= fields.keys()
    page.js("document.getElementById('seed').value = 7; document.getElementById('min_p').value = 0.25")
    ask(page, "Hello")
    options = fake_engine.asked[0][1]
    assert options["seed"] == 7 and options["min_p"] == 0.25 and options["temperature"] == 0.8, options


@pytest.mark.slow
def test_settings_are_kept(page: Browser, fake_engine: FakeEngine) -> None:
    page.click("#open-settings")
    page.js("document.getElementById('system').value = 'Be brief.'; document.getElementById('top_k').value = 5")
    page.js("document.getElementById('key').value = 'secret'")
    page.press("Escape")
    page.wait_for("localStorage.getItem('llmcl-settings')")
    assert "secret" not in page.js("JSON.stringify(localStorage)")
    reload(page)
    ask(page, "Hello")
    assert (
        fake_engine.asked[0][0].startswith("[system]Be brief.\n[user]Hello") and fake_engine.asked[0][1]["top_k"] == 5
    )
