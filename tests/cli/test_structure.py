"""`llmcl generate` with a schema, an expression or a grammar that the answer is to match."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from echo_engine import Engine
from helpers import random_weights, save_folder, small_config

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "n"],
    "additionalProperties": False,
}


def test_options_reach_the_engine(
    engine: Engine, invoke: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(json.dumps(SCHEMA))
    Path("g.lark").write_text('start: "a"\n')
    for options, expected in (
        (["--json-schema", "schema.json"], {"schema": json.dumps(SCHEMA)}),
        (["--json-schema", json.dumps(SCHEMA)], {"schema": json.dumps(SCHEMA)}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--grammar", "g.lark"], {"grammar": 'start: "a"\n'}),
        ([], {}),
    ):
        assert invoke("generate", "-m", "m", "-p", "x", *options) == 0
        names = {"schema", "regex", "grammar"} & engine.request.keys()
        assert {name: engine.request[name] for name in names} == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--json-schema", "none.json"], "--json-schema none.json: cannot be read"),
        (["--json-schema", "g.lark"], "schema is no JSON"),
        (["--json-schema", '{"type": '], "schema is no JSON"),
        (["--grammar", "g.lark", "--regex", "a"], "regex and grammar both say what the answer is to match"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    options: list[str],
    expected: str,
    engine: Engine,
    invoke: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("g.lark").write_text('start: "a"\n')
    assert invoke("generate", "-m", "m", "-p", "x", *options) == 2
    assert expected in capsys.readouterr().err and not engine.loaded


def test_a_file_of_requests_has_them(
    invoke: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line's own goes before that of the command line."""
    monkeypatch.chdir(tmp_path)
    save_folder(tmp_path / "model", small_config(), random_weights(small_config(), seed=7))
    lines = [{"prompt": "ab"}, {"prompt": "ab", "schema": SCHEMA}, {"prompt": "b", "grammar": 'start: "x" /[0-9]{3}/'}]
    Path("in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = [
        "-m",
        "model",
        "--input",
        "in.jsonl",
        "--output",
        "out.jsonl",
        "-c",
        "128",
        "-n",
        "80",
        "--max-sequences",
        "2",
        "--regex",
        "[a-c]{4}",
    ]
    assert invoke("generate", *options) == 0, capsys.readouterr().err
    results = sorted(map(json.loads, Path("out.jsonl").read_text().splitlines()), key=lambda result: result["index"])
    assert {result["finish_reason"] for result in results} == {"stop"}
    assert re.fullmatch("[a-c]{4}", results[0]["text"]) and re.fullmatch("x[0-9]{3}", results[2]["text"])
    assert json.loads(results[1]["text"])["color"] in ("red", "green", "blue")
    Path("in.jsonl").write_text('{"prompt": "a", "schema": [1]}')
    assert invoke("generate", *options[:-2]) == 2
    assert "in.jsonl line 1: schema is [1]; expected a JSON schema" in capsys.readouterr().err


def test_the_demo_model_answers_in_json(
    invoke: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    asked = ["-p", "Name a color and a number, as JSON.", "--json-schema", str(tmp_path / "schema.json")]
    assert invoke("generate", "-m", "smollm2", *asked, "-n", "40", "-c", "128", "-q") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["color"] in ("red", "green", "blue") and 1 <= value["n"] <= 9 and len(value) == 2
