"""The page at `/`: its policy, and what it makes of text that a model wrote (where Node can run its script)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from typing import Any

import pytest
from fake_server import Running, running

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "```\n<script>alert(1)</script>\n```",
    "`<b>` **<i onclick=x>** *<u>*",
    "- <iframe src=javascript:alert(1)>",
    "# <style>*{}</style>",
    "[x](javascript:alert(1)) ![y](http://evil.example/z)",
    "&lt;b&gt; \u202e \x00",
    "```\nnever closed",
]
# Runs the page's script against a document that keeps no more than what was made; each text's elements and text.
RUN = """
class Element {
  constructor(tag) { this.tagName = tag.toUpperCase(); this.children = []; }
  set innerHTML(_) { throw new Error("innerHTML"); }
  set textContent(text) { this.children = [String(text)]; }
  get textContent() { return this.children.map(c => typeof c === "string" ? c : c.textContent).join(""); }
  append(...parts) { this.children.push(...parts); }
  replaceChildren(...parts) { this.children = parts; }
  tags() { return this.children.flatMap(c => typeof c === "string" ? [] : [c.tagName, ...c.tags()]); }
}
%s
globalThis.document = {createElement: tag => new Element(tag)};
const {texts, chunks} = JSON.parse(require("fs").readFileSync(0, "utf8"));
const shown = texts.map(text => { const t = new Element("div"); render(t, text); return [t.tags(), t.textContent]; });
const read = eventReader();
console.log(JSON.stringify({shown, events: chunks.map(read)}));
"""


def script_of(server: Running) -> str:
    (script,) = re.findall("<script>(.*?)</script>", server.http.get("/").text, re.DOTALL)
    return str(script)


def run_script(server: Running, texts: list[str], chunks: list[str]) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    done = subprocess.run(
        [node, "-e", RUN % script_of(server)],
        input=json.dumps({"texts": texts, "chunks": chunks}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_policy_lets_nothing_else_run(shared: Running) -> None:
    answer = shared.http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{b64encode(sha256(inner.encode()).digest()).decode()}'"


def test_it_names_no_other_address_and_writes_no_html(shared: Running) -> None:
    text = shared.http.get("/").text
    assert set(re.findall(r"[a-z]+://[^\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick=", 'style="'):
        assert word not in text, word


def test_it_needs_no_key_to_be_shown() -> None:
    with running(api_keys=("k",)) as server:
        assert server.http.get("/").status_code == 200 and server.http.get("/v1/models").status_code == 401


def test_what_a_model_writes_is_text(shared: Running) -> None:
    shown = run_script(shared, HOSTILE, [])["shown"]
    for text, (tags, seen) in zip(HOSTILE, shown, strict=True):
        assert set(tags) <= {"P", "PRE", "CODE", "STRONG", "EM", "UL", "OL", "LI"}, text
        assert re.sub(r"[`*#\s-]|never closed", "", seen) == re.sub(r"[`*#\s-]|never closed", "", text)


def test_markdown_is_shown(shared: Running) -> None:
    texts = [
        "# A\n\none *two* **three** `four`\nfive\n\n- six\n- seven\n1. eight\n```py\nx = 1\n\ny\n```\nend",
        "a * b * c",
    ]
    (tags, seen), plain = run_script(shared, texts, [])["shown"]
    assert tags == ["P", "STRONG", "P", "EM", "STRONG", "CODE", "UL", "LI", "LI", "OL", "LI", "PRE", "CODE", "P"]
    assert "x = 1\n\ny" in seen and "py" not in seen
    assert plain == [["P"], "a * b * c"]


def test_events_that_come_in_pieces(shared: Running) -> None:
    chunks = ['data: {"a"', ": 1}\n", "\n: ping\n\ndata: 2\n\nda", "ta: [DONE]\n\n"]
    assert run_script(shared, [], chunks)["events"] == [[], [], ['{"a": 1}', "2"], ["[DONE]"]]
