"""`llmcl generate` with a file of requests: from the command line to the file of results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from echo_engine import Engine
from helpers import random_weights, save_folder, small_config

import llmcl
from llmcl.engine.engine import Engine as RealEngine
from llmcl.runtime.device import Device

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--input", "in.jsonl"], "--input FILE and --output FILE belong together"),
        (["--output", "out.jsonl"], "--input FILE and --output FILE belong together"),
        (["--input", "in.jsonl", "--output", "in.jsonl"], "--input and --output are both in.jsonl"),
        (["--input", "in.jsonl", "--output", "out.jsonl", "-p", "x"], "give one of them"),
        (["--input", "none.jsonl", "--output", "out.jsonl"], "--input none.jsonl: cannot be read"),
        (["--input", "bad.jsonl", "--output", "out.jsonl"], "--input bad.jsonl line 2: the field 'x' is not known"),
        (["--input", "in.jsonl", "--output", "no/out.jsonl"], "--output no/out.jsonl: cannot be written"),
        (["--input", "in.jsonl", "--output", "/dev/zero"], "--output /dev/zero is no plain file; give one"),
        (
            ["--input", "in.jsonl", "--output", "out.jsonl", "--max-sequences", "0"],
            "'0' given, expected a whole number",
        ),
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
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"x": "a"}\n')
    assert invoke("generate", "-m", "m", *options) == 2
    assert expected in capsys.readouterr().err and not engine.loaded
    assert Path("in.jsonl").read_text() == '{"prompt": "a"}\n'


def test_a_file_is_answered_and_a_second_run_makes_what_is_missing(
    default_device: Device,
    invoke: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_folder(tmp_path / "m", small_config(), random_weights(small_config(), seed=7))
    (tmp_path / "template").write_text(TEMPLATE)
    prompts: list[list[int]] = [[5, 6, 7 + n] for n in range(5)]
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": prompt, "max_tokens": 3 + n} for n, prompt in enumerate(prompts)]
    lines.append({"messages": [{"role": "user", "content": "word"}], "id": "last"})
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = "generate", "-m", str(folder), "--device", str(default_device.entry.index), "-c", "128", "-n", "4"
    files = "--input", str(requests), "--output", str(results), "--max-sequences", "3", "--ignore-eos"
    template = "--chat-template-file", str(tmp_path / "template")
    assert invoke(*command, *files, *template) == 0
    shown = capsys.readouterr()
    assert shown.out == "" and "6 answers, 29 tokens in" in shown.err
    found = {result["index"]: result for result in map(json.loads, results.read_text().splitlines())}
    assert {n: result["generated_tokens"] for n, result in found.items()} == {0: 3, 1: 4, 2: 5, 3: 6, 4: 7, 5: 4}
    assert found[5]["id"] == "last" and "id" not in found[0]
    with llmcl.load(str(folder), device=default_device.entry.index, max_context=128) as llm:
        for n, prompt in enumerate(prompts):
            assert found[n]["text"] == llm.generate(prompt, max_tokens=3 + n, ignore_eos=True).text
    whole = results.read_text().splitlines(keepends=True)

    results.write_text("".join(whole[:4]) + '{"id": "last", "ind')
    stream = RealEngine.stream_questions

    def stopped(self: RealEngine, questions: Any) -> Any:
        pieces = stream(self, questions)
        for i, piece in pieces:
            yield i, piece
            if piece.stats is not None:
                pieces.close()
                raise KeyboardInterrupt

    monkeypatch.setattr(RealEngine, "stream_questions", stopped)
    assert invoke(*command, *files, *template) == 130
    assert "has the results so far, and the same command goes on" in capsys.readouterr().err
    assert len(results.read_text().splitlines()) == 5
    monkeypatch.undo()
    assert invoke(*command, *files, *template) == 0
    assert "1 answer (5 more were there already)" in capsys.readouterr().err
    assert sorted(results.read_text().splitlines(keepends=True)) == sorted(whole)
