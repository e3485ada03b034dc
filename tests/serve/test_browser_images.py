"""Images on the page at `/`: dropped, pasted, shown, kept, and sent to a model that takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from browser import Browser, find_browser
from fake_server import FakeEngine, Running
from image_server import ImageEngine, encoded, image_server, picture
from page_driver import IDLE, STORED, ask, asks_nobody_else, open_page, reload, text_of

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed")

IMAGES = "[...document.querySelectorAll('.user img')].map(i => [i.alt, i.naturalWidth, i.naturalHeight])"
SHOWN = "[...document.querySelectorAll('.user img')].every(i => i.complete && i.naturalWidth)"


@pytest.fixture
def seeing(chromium: Browser) -> Iterator[Running]:
    with image_server() as server:
        open_page(chromium, server)
        yield server
        chromium.open("about:blank#left")


def give(page: Browser, event: str, target: str, *files: tuple[bytes, str, str]) -> None:
    """Drops or pastes files: (bytes, name, type)."""
    given = [(encoded(data), name, kind) for data, name, kind in files]
    data = "dataTransfer" if event == "DragEvent('drop'" else "clipboardData"
    page.js(
        f"(files => {{ const data = new DataTransfer();"
        "for (const [text, name, type] of files) data.items.add(new File("
        "[Uint8Array.from(atob(text), c => c.charCodeAt(0))], name, {type}));"
        f"document.querySelector('{target}').dispatchEvent(new {event}, {{{data}: data, bubbles: true,"
        f"cancelable: true}})); }})({json.dumps(given)})"
    )


def drop(page: Browser, *files: tuple[bytes, str, str]) -> None:
    give(page, "DragEvent('drop'", "body", *files)


def paste(page: Browser, *files: tuple[bytes, str, str]) -> None:
    give(page, "ClipboardEvent('paste'", "#input", *files)


def n_files(n: int) -> str:
    return f"document.querySelectorAll('#files li').length === {n}"


def test_images_are_sent_and_kept(chromium: Browser, seeing: Running) -> None:
    page = chromium
    drop(page, (picture(2000, 1000), "wide.png", "image/png"), (picture(), "away.png", "image/png"))
    paste(page, (picture(30, 20), "small.png", "image/png"), (b"a = 1\n", "a.py", "text/x-python"))
    page.wait_for(n_files(4))
    assert page.js("document.querySelectorAll('#files img').length") == 3
    page.click("#files li:nth-child(2) button")
    ask(page, "What is it?")
    expected = "[user](<img><img>)(<img><img>)a.py\n```\na = 1\n```\n\nWhat is it?\n[assistant]"
    assert seeing.engine.asked[-1][0] == expected
    assert isinstance(seeing.engine, ImageEngine) and seeing.engine.images() == [(1568, 784), (30, 20)]
    shown = [["wide.png", 1568, 784], ["small.png", 30, 20]]
    page.wait_for(SHOWN)
    assert page.js(IMAGES) == shown
    reload(page)
    page.wait_for(SHOWN)
    assert page.js(IMAGES) == shown
    page.click(".edit")  # takes the images along
    assert page.js("document.querySelectorAll('#files img').length") == 2
    page.js("document.getElementById('input').focus()")
    ask(page, " Now?")
    assert seeing.engine.asked[-1][0].endswith("What is it? Now?\n[assistant]") and len(seeing.engine.images()) == 2
    assert page.problems() == [] and asks_nobody_else(page)


def test_an_export_brings_its_images_along(chromium: Browser, seeing: Running) -> None:
    """A file with something else in place of an image is refused."""
    page = chromium
    drop(page, (picture(), "a.png", "image/png"))
    page.wait_for(n_files(1))
    ask(page, "")
    assert text_of(page, "#list .open") == "a.png"
    page.js("import('./page/exchange.js').then(m => { window.exchange = m; })")
    page.js(
        "import('./page/store.js').then(m => m.openStore()).then(async s => {"
        "window.exported = exchange.exportText([await s.get((await s.list())[0].id)]); })"
    )
    read = "exchange.importText({0})[0].messages[0].files[0]"
    url = page.js(read.format("exported") + ".image")
    assert url == f"data:image/png;base64,{encoded(picture())}"
    for other in ("https://evil.example/a.png", "data:image/svg+xml;base64,AAAA", "data:text/html;base64,AAAA", 1):
        changed = f"exported.replace({json.dumps(json.dumps(url))}, {json.dumps(json.dumps(other))})"
        refused = page.js(
            f"(() => {{ try {{ {read.format(changed)}; return ''; }} catch (e) {{ return e.message; }} }})()"
        )
        assert "conversations[0].messages[0].files[0].image: expected a PNG" in refused


def test_what_is_no_image_is_refused(chromium: Browser, seeing: Running) -> None:
    drop(chromium, (b"GIF89a", "cat.gif", "image/gif"), (picture(kind="GIF"), "dog.gif", "image/gif"))
    chromium.wait_for(n_files(1))
    assert text_of(chromium, "#notice") == "cat.gif: not an image that this browser reads"
    chromium.js("document.getElementById('input').focus()")
    ask(chromium, "Now?")
    assert isinstance(seeing.engine, ImageEngine) and seeing.engine.images() == [(3, 2)]


def test_a_message_whose_answer_was_stopped_keeps_its_image(chromium: Browser, seeing: Running) -> None:
    """It is one with the next."""
    page, engine = chromium, seeing.engine
    drop(page, (picture(), "a.png", "image/png"))
    engine.hold_after = 0
    page.type("one")
    page.press("Enter")
    page.wait_for(f"!{IDLE} && fetch('metrics').then(a => a.text()).then(t => t.includes('requests_processing 1.0'))")
    page.click("#stop")
    page.wait_for(f"{IDLE} && {STORED}")
    engine.hold_after = None
    ask(page, "two")
    assert engine.asked[-1][0] == "[user](<img><img>)one\n\ntwo\n[assistant]"


def test_a_model_without_vision_is_not_offered_them(page: Browser, fake_engine: FakeEngine) -> None:
    paste(page, (picture(), "a.png", "image/png"))
    page.wait_for("document.getElementById('notice').textContent")
    assert text_of(page, "#notice") == "a.png: this model takes no images" and page.js(n_files(0))
    label = "document.getElementById('add-files').getAttribute('aria-label')"
    assert page.js(label) == "Add text files"
