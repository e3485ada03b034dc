"""Uses the page at `/` as a person does, in a browser."""

from __future__ import annotations

from browser import Browser
from fake_server import Running

IDLE = "document.getElementById('stop').disabled"
STORED = "document.body.dataset.stored === 'true'"
READY = "document.title === 'llmcl: fake' && document.activeElement.id === 'input'"
HOSTILE = "\n\n".join(
    [
        "<script>window.hit = 1</script>",
        "<img src=x onerror='window.hit = 1'>",
        "```\n<script>window.hit = 1</script>\n```",
        "`<b>` **<i onclick=x>** *<u>*",
        '- <iframe src="javascript:parent.hit = 1">',
        "# <style>*{display:none}</style>",
        "[x](javascript:window.hit=1) ![y](http://evil.example/z)",
        "<a href=http://evil.example>x</a><form action=http://evil.example><input></form>",
        "<svg onload='window.hit = 1'></svg><math><mi xlink:href=javascript:1>",
        "&lt;b&gt; \u202e end",
    ]
)


def open_page(page: Browser, server: Running) -> None:
    page.events.clear()
    page.open(server.url + "/")
    page.wait_for(READY)


def reload(page: Browser) -> None:
    page.command("Page.reload")
    page.wait_for("performance.getEntriesByType('navigation')[0].type === 'reload' && " + READY)


def ask(page: Browser, text: str) -> None:
    """Sends by keyboard and waits until the answer is complete and stored."""
    page.type(text)
    page.press("Enter")
    page.wait_for(f"{IDLE} && document.querySelector('.assistant, .error')")
    page.wait_for(STORED)


def messages(page: Browser) -> list[str]:
    """The paragraphs of the messages shown."""
    texts: list[str] = page.js("[...document.querySelectorAll('.message .text p')].map(p => p.textContent)")
    return texts


def titles(page: Browser) -> list[str]:
    """The kept conversations, the latest first."""
    texts: list[str] = page.js("[...document.querySelectorAll('#list .open')].map(b => b.textContent)")
    return texts


def asks_nobody_else(page: Browser) -> bool:
    home = page.js("location.origin")
    return all(address.startswith((home, "data:", "blob:")) for address in page.addresses())


def text_of(page: Browser, selector: str) -> str:
    text: str = page.js(f"document.querySelector({selector!r}).textContent")
    return text
