"""The page at `/`: its policy, and what it makes of text that a model wrote (where Node can run its scripts)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
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
# Runs the page's scripts against a document that keeps no more than its elements; each text's elements and text.
RUN = """
import {readFileSync} from "node:fs";
import {render} from "./markdown.js";
import {eventReader} from "./server.js";
class Element {
  constructor(tag) { this.tagName = tag.toUpperCase(); this.children = []; }
  set innerHTML(_) { throw new Error("innerHTML"); }
  set textContent(text) { this.children = [String(text)]; }
  get textContent() { return this.children.map(c => typeof c === "string" ? c : c.textContent).join(""); }
  append(...parts) {
    this.children.push(...parts);
    for (const part of parts) if (part instanceof Element) part.parent = this;
  }
  remove() { this.parent.children = this.parent.children.filter(c => c !== this); }
  tags() { return this.children.flatMap(c => typeof c === "string" ? [] : [c.tagName, ...c.tags()]); }
}
globalThis.document = {createElement: tag => new Element(tag)};
const {texts, chunks} = JSON.parse(readFileSync(0, "utf8"));
const shown = texts.map(text => { const t = new Element("div"); render(t, text); return [t.tags(), t.textContent]; });
const growing = new Element("div"), whole = texts.join("\\n\\n");
for (let n = 0; n <= whole.length; n++) render(growing, whole.slice(0, n));
const read = eventReader();
console.log(JSON.stringify({shown, grown: growing.tags(), events: chunks.map(read)}));
"""


def sources(server: Running) -> dict[str, str]:
    """The page and each file that it loads, by path."""
    texts: dict[str, str] = {}
    paths = ["/"]
    while paths:
        if (path := paths.pop()) not in texts:
            texts[path] = server.http.get(path).raise_for_status().text
            names = re.findall(r'(?:from "\./|="page/)([a-z]+\.(?:js|css))"', texts[path])
            paths += [f"/page/{name}" for name in names]
    return texts


def run_script(server: Running, folder: Path, texts: list[str], chunks: list[str]) -> dict[str, Any]:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    for path, text in sources(server).items():
        (folder / (path.rpartition("/")[2] or "index.html")).write_text(text, encoding="utf-8")
    (folder / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (folder / "run.js").write_text(RUN, encoding="utf-8")
    done = subprocess.run(
        [node, "run.js"],
        cwd=folder,
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
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"<style|<script(?! type=\"module\" src=\"page/main.js\"></script>)", answer.text)


def test_its_files_are_all_that_it_loads(shared: Running) -> None:
    """A script is a script for the browser alone where its type says so."""
    loaded = sources(shared)
    on_disk = {path.name for path in (files("llmcl.serve") / "static").iterdir()}  # type: ignore[attr-defined]
    assert {path.rpartition("/")[2] or "index.html" for path in loaded} == on_disk
    for path in loaded:
        answer = shared.http.get(path)
        kind = {"js": "text/javascript", "css": "text/css"}.get(path.rpartition(".")[2], "text/html")
        assert answer.headers["content-type"] == kind + "; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/page/none.js", "/page/index.html", "/page/../page.py", "/page/%2e%2e%2fpage.py", "/page/"):
        assert shared.http.get(path).status_code == 404, path


def test_it_names_no_other_address_and_writes_no_html(shared: Running) -> None:
    for path, text in sources(shared).items():
        assert set(re.findall(r"[a-z]+://[^\"\s]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick=", 'style="'):
            assert word not in text, (path, word)


def test_it_needs_no_key_to_be_shown() -> None:
    with running(api_keys=("k",)) as server:
        assert all(server.http.get(path).status_code == 200 for path in sources(server))
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.get("/page/%2e%2e/v1/models").status_code == 404


def test_what_a_model_writes_is_text(shared: Running, tmp_path: Path) -> None:
    shown = run_script(shared, tmp_path, HOSTILE, [])["shown"]
    for text, (tags, seen) in zip(HOSTILE, shown, strict=True):
        assert set(tags) <= {"P", "PRE", "CODE", "STRONG", "EM", "UL", "OL", "LI"}, text
        assert re.sub(r"[`*#\s-]|never closed", "", seen) == re.sub(r"[`*#\s-]|never closed", "", text)


def test_markdown_is_shown(shared: Running, tmp_path: Path) -> None:
    texts = [
        "# A\n\none *two* **three** `four`\nfive\n\n- six\n- seven\n1. eight\n```py\nx = 1\n\ny\n```\nend",
        "a * b * c",
    ]
    (tags, seen), plain = run_script(shared, tmp_path, texts, [])["shown"]
    assert tags == ["P", "STRONG", "P", "EM", "STRONG", "CODE", "UL", "LI", "LI", "OL", "LI", "PRE", "CODE", "P"]
    assert "x = 1\n\ny" in seen and "py" not in seen
    assert plain == [["P"], "a * b * c"]


def test_a_text_that_grows_ends_as_the_whole_text(shared: Running, tmp_path: Path) -> None:
    """While an answer streams, blocks that did not change keep their elements."""
    texts = ["# A\n\none *two*", "- six\n- **seven**", "1. eight\n2. nine", "```py\nx = 1\n\ny\n```", "end `x`"]
    done = run_script(shared, tmp_path, texts, [])
    assert done["grown"] == [tag for tags, _ in done["shown"] for tag in tags]


def test_events_that_come_in_pieces(shared: Running, tmp_path: Path) -> None:
    chunks = ['data: {"a"', ": 1}\n", "\n: ping\n\ndata: 2\n\nda", "ta: [DONE]\n\n"]
    assert run_script(shared, tmp_path, [], chunks)["events"] == [[], [], ['{"a": 1}', "2"], ["[DONE]"]]
