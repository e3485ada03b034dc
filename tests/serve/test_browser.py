"""The page at `/` in a real browser: a conversation, by keyboard and on a phone, and hostile answers."""

from __future__ import annotations

import pytest
from browser import Browser, find_browser
from fake_server import TEMPLATE, FakeEngine, byte_tokenizer, running, wait_for
from page_driver import HOSTILE, IDLE, ask, asks_nobody_else, messages, open_page

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")

THINK_TEMPLATE = TEMPLATE + "{% if add_generation_prompt %}<think>{% endif %}"


def test_a_conversation(page: Browser, fake_engine: FakeEngine) -> None:
    """Asked twice, with the times of its tokens."""
    ask(page, "Hello, page")
    assert messages(page) == ["Hello, page", "Hello, page"]
    figures = page.js("document.getElementById('figures').textContent")
    assert figures.startswith("TTFT ") and "TBT p50 " in figures and "tokens/s" in figures
    assert page.js("document.querySelectorAll('#chart rect').length") > 3
    assert "time between tokens: min" in page.js("document.querySelector('#chart title').textContent")
    page.js("window.first = [...document.querySelectorAll('.message')]")
    ask(page, "Again")
    assert messages(page) == ["Hello, page", "Hello, page", "Again", "Again"]
    assert page.js("window.first.every(e => e.isConnected)"), "a screen reader would say these messages again"
    assert fake_engine.asked[-1][0] == "[user]Hello, page\n[assistant]Hello, page\n[user]Again\n[assistant]"
    page.click("#fresh")
    assert messages(page) == [] and page.problems() == []


def test_stop_ends_the_request(page: Browser, fake_engine: FakeEngine) -> None:
    fake_engine.hold_after = 3
    page.type("Hello")
    page.press("Enter")
    page.wait_for("(document.querySelector('.assistant .text') || {}).textContent === 'Hel'")
    page.click("#stop")
    page.wait_for(IDLE)
    assert messages(page) == ["Hello", "Hel"]
    page.wait_for("fetch('metrics').then(a => a.text()).then(t => t.includes('requests_processing 0.0'))")


def test_messages_without_an_answer_are_one_with_the_next(page: Browser, fake_engine: FakeEngine) -> None:
    """Else a template that insists on turns would refuse them."""
    fake_engine.hold_after = 0
    page.type("Hello")
    page.press("Enter")
    wait_for(lambda: fake_engine.running)
    page.click("#stop")
    page.wait_for(IDLE)
    fake_engine.hold_after = None
    ask(page, "More")
    assert fake_engine.asked[-1][0] == "[user]Hello\n\nMore\n[assistant]"
    ask(page, "Again")
    assert fake_engine.asked[-1][0] == "[user]Hello\n\nMore\n[assistant]Hello\n\nMore\n[user]Again\n[assistant]"


def test_settings_and_errors(page: Browser, fake_engine: FakeEngine) -> None:
    page.click("#open-settings")
    page.js("document.getElementById('system').value = 'Be brief.'; document.getElementById('max_tokens').value = 2")
    page.press("Escape")
    page.wait_for("localStorage.getItem('llmcl-settings')")
    page.js("document.getElementById('input').focus()")
    ask(page, "Hello")
    assert messages(page)[1] == "He" and fake_engine.asked[-1][0].startswith("[system]Be brief.\n[user]Hello")
    fake_engine.fail = RuntimeError("no")
    ask(page, "More")
    page.wait_for("document.querySelector('.error')")
    assert "RuntimeError" in page.js("document.querySelector('.error').textContent")
    fake_engine.fail = None
    page.click(".assistant:last-of-type .retry")
    page.wait_for(f"{IDLE} && !document.querySelector('.error')")
    assert messages(page)[3] == "Mo" and page.js("document.querySelectorAll('.previous').length") == 1


def test_thoughts_are_shown_apart(chromium: Browser) -> None:
    fake_engine = FakeEngine(byte_tokenizer(THINK_TEMPLATE))
    fake_engine.reply = lambda text: "Hm.</think>Four."
    with running(fake_engine) as server:
        open_page(chromium, server)
        ask(chromium, "2 + 2")
        assert messages(chromium)[1:] == ["Four."]
        assert chromium.js("document.querySelector('details').textContent") == "ThoughtsHm."
        assert not chromium.js("document.querySelector('details').open")
        chromium.open("about:blank#left")


def test_hostile_answers_are_text(page: Browser, fake_engine: FakeEngine) -> None:
    fake_engine.reply = lambda text: HOSTILE
    ask(page, "<img src=x onerror='window.hit = 1'>")
    assert page.js("window.hit === undefined")
    tags = set(page.js("[...document.querySelectorAll('#log .message *')].map(e => e.tagName)"))
    assert tags <= {"P", "PRE", "CODE", "STRONG", "EM", "UL", "LI", "DIV", "BUTTON", "SPAN", "DETAILS", "SUMMARY"}
    shown = page.js("document.getElementById('log').textContent")
    assert all(word in shown for word in ("<script>window.hit = 1</script>", "<iframe", "onload=", "&lt;b&gt;"))
    assert asks_nobody_else(page)


def test_the_policy_holds_where_the_page_fails(page: Browser) -> None:
    """As if a mistake of ours made HTML of an answer: nothing of it runs, and nothing is fetched from elsewhere."""
    page.js(
        "document.getElementById('log').innerHTML = `<img src=x onerror='window.hit = 1'><svg onload='window.hit = 1'>"
        "</svg><iframe srcdoc='<script>parent.hit = 1</script>'></iframe><img src='http://127.0.0.2:9/z'>`;"
        "const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s);"
    )
    page.wait_for("new Promise(done => setTimeout(() => done(true), 300))")
    assert page.js("window.hit === undefined")
    # The page's own files are the only scripts among this server's answers.
    loads = "new Promise(done => document.body.append(Object.assign(document.createElement('script'), {src: %r,"
    loads += " onload: () => done('run'), onerror: () => done('refused')})))"
    for path in ("props", "v1/models", "metrics", "openapi.json", "page/style.css"):
        assert page.js(loads % path) == "refused", path
    assert page.js(loads % "page/list.js") == "run"
    assert page.js("fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert sum("Content Security Policy" in problem for problem in page.problems()) >= 3


def test_the_keyboard_reaches_everything(page: Browser) -> None:
    ask(page, "Hello")
    page.js("document.body.focus(); document.activeElement.blur()")
    seen = []
    for _ in range(16):
        page.press("Tab")
        seen.append(page.js("document.activeElement.id || document.activeElement.className"))
    for name in ("open-side", "fresh", "open-settings", "copy", "edit", "retry", "input", "add-files", "send"):
        assert name in seen
    page.js("document.getElementById('open-settings').focus()")
    page.press("Enter")
    page.wait_for("document.getElementById('settings').open")
    page.press("Escape")
    page.wait_for("!document.getElementById('settings').open")


def test_everything_has_a_name_for_screen_readers(page: Browser, fake_engine: FakeEngine) -> None:
    fake_engine.reply = lambda text: "```py\nx\n```\n"
    ask(page, "Hello")
    page.click(".retry")
    page.wait_for(IDLE)
    names: dict[str, list[str]] = {}
    for opened in ("#open-side", "#list .rename", "#open-settings"):
        page.click(opened)
        for node in page.command("Accessibility.getFullAXTree")["nodes"]:
            if not node["ignored"]:
                names.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
        page.press("Escape")
    assert {"button", "textbox", "spinbutton", "dialog", "log", "article", "complementary", "meter"} <= names.keys()
    for role in ("button", "textbox", "spinbutton", "combobox", "dialog", "log", "article", "complementary", "meter"):
        assert all(names[role]), (role, names[role])
    assert {"Copy message", "Copy code", "Previous version", "Edit message", "Answer again"} <= {*names["button"]}


def test_it_fits_a_phone_and_the_dark(page: Browser, fake_engine: FakeEngine) -> None:
    light = page.js("getComputedStyle(document.body).backgroundColor")
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.command("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True)
    fake_engine.reply = lambda text: "A" * 300 + "\n\n```\n" + "B" * 300 + "\n```\n- " + "C" * 300
    try:
        ask(page, "A" * 300)
        page.js("import('./page/files.js').then(m => m.addFiles([new File(['x'], 'D'.repeat(100))]))")
        page.wait_for("document.querySelectorAll('#files li').length === 1")
        page.click(".user .edit")
        page.click(".assistant .retry")
        page.wait_for(IDLE)
        assert page.js("getComputedStyle(document.body).backgroundColor") != light
        assert no_part_is_cut(page, "header button, form button, #input")
        page.click("#open-side")
        assert no_part_is_cut(page, "#side button")
        page.click("#list .delete")
        assert no_part_is_cut(page, "dialog button")
        page.press("Escape")
        page.wait_for("!document.querySelector('dialog[open]')")
        page.press("Escape")
        assert not page.js("document.getElementById('side').checkVisibility()")
        page.click("#open-settings")
        assert no_part_is_cut(page, "dialog input, dialog textarea, dialog button", scrolls=True)
    finally:
        page.command("Emulation.clearDeviceMetricsOverride")
        page.command("Emulation.setEmulatedMedia", features=[])


def no_part_is_cut(page: Browser, selector: str, *, scrolls: bool = False) -> bool:
    """Whether the page has no more than a phone's width, and all visible elements that the selector names are in it."""
    fits: bool = page.js(
        f"[...document.querySelectorAll({selector!r})].filter(e => e.checkVisibility())"
        ".map(e => e.getBoundingClientRect())"
        f".every(r => r.left >= 0 && r.right <= 360 && (r.bottom <= 640 || {str(scrolls).lower()}))"
        " && [...document.querySelectorAll('html, body, #log, #side, dialog')].every(e => e.scrollWidth <= 360)"
        " && document.getElementById('log').scrollWidth === document.getElementById('log').clientWidth"
    )
    return fits
