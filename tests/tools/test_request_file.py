"""Files of requests: what is wrong in one, results in the order in which they end, and going on after an interrupt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_batch import FakeBatch, FakeLLM, answer_of

from llmcl.engine.engine import Engine
from llmcl.errors import ContextLengthError, LlmclError, UsageError
from llmcl.ops.sample import SamplingParams
from llmcl.tools.request_file import answer_requests, open_results, parse_requests

DEFAULTS: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": 100, "raw": False, "system_prompt": None}


@pytest.fixture
def engine() -> Iterator[Engine]:
    batch = FakeBatch(40, 3)
    with Engine(FakeLLM(), lambda: batch, 64, wait=False) as engine:  # type: ignore[arg-type]
        yield engine


def lines(*requests: Any) -> str:
    return "".join(json.dumps(request) + "\n" for request in requests)


def text_of(prompt: str | list[int], n: int, seed: int) -> str:
    ids = FakeLLM().encode(prompt)
    return "".join(chr(97 + token % 26) for token in answer_of(ids, SamplingParams(seed=seed), n))


def results(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", r"^--input f line 2 is no JSON"),
        ("[" * 100_000, r"^--input f line 2 is no JSON"),
        ("5", r"^--input f line 2 is 5; expected an object such as"),
        ("{}", "line 2: expected one of the fields prompt and messages"),
        ('{"prompt": null}', "line 2: expected one of the fields prompt and messages"),
        ('{"prompt": "a", "messages": []}', "line 2: expected one of the fields prompt and messages"),
        ('{"promt": "a"}', "line 2: the field 'promt' is not known; expected some of prompt, messages, id"),
        ('{"prompt": 5}', "line 2: prompt is 5; expected a text, or token ids"),
        ('{"prompt": ""}', "line 2: prompt is ''; expected a text, or token ids"),
        ('{"prompt": ["a", "b"]}', r"line 2: prompt is \['a', 'b'\]; expected a text, or token ids"),
        ('{"messages": [{"role": "user"}]}', "line 2: messages is .*expected a list of"),
        (
            '{"prompt": "a", "dry_sequence_breakers": "x"}',
            "line 2: dry_sequence_breakers is 'x'; expected a list",
        ),
        ('{"prompt": "a", "stop": [5]}', r"line 2: stop is \[5\]; expected a text, or a list of texts"),
        ('{"prompt": "a", "id": [5]}', r"line 2: id is \[5\]; expected a text or a whole number"),
        ('{"prompt": "a", "id": 7}', r"line 2: id 7 is that of --input f line 1 as well"),
        ('{"prompt": "a", "raw": 1}', "line 2: raw is 1; expected true or false"),
        ('{"prompt": "a", "max_tokens": 1.5}', "line 2: max_tokens is 1.5; expected a whole number"),
        ('{"prompt": "a", "temperature": "1"}', "line 2: temperature is '1'; expected a number"),
    ],
)
def test_a_bad_line_is_named_with_its_field(line: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        parse_requests('{"prompt": "a", "id": 7}\n' + line, "--input f")


def test_a_file_without_requests() -> None:
    with pytest.raises(UsageError, match="--input f has no requests; expected a JSON object a line"):
        parse_requests("\n \n", "--input f")


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ({"prompt": "a", "top_p": 2}, UsageError, "^f line 2: top_p is 2"),
        ({"prompt": "a", "max_tokens": 0}, UsageError, "^f line 2: max_tokens is 0"),
        ({"prompt": "a" * 2000}, ContextLengthError, "^f line 2: the prompt has 2000 tokens"),
    ],
)
def test_nothing_is_generated_where_a_value_is_out_of_range(
    bad: dict[str, Any], error: type[Exception], match: str, engine: Engine, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.raises(error, match=match):
        answer_requests(engine, parse_requests(lines({"prompt": "a"}, bad), "f"), output, DEFAULTS)
    assert output.read_bytes() == b""


def test_results_come_as_they_end_with_what_each_line_asked_for(engine: Engine, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    requests = parse_requests(
        lines(
            {"prompt": "first", "max_tokens": 900},
            {"messages": [{"role": "user", "content": "second"}], "id": "b", "max_tokens": 5},
            {"prompt": [5, 6, 7], "id": 9, "temperature": 0.5, "seed": 3},
            {"prompt": "first", "temperature": 0.5, "stop": None},
        )
        + "\n",
        "f",
    )
    output = tmp_path / "out.jsonl"
    totals = answer_requests(engine, requests, output, DEFAULTS, lambda what, done, total: calls.append((done, total)))
    found = results(output)
    assert (found[0]["index"], found[-1]["index"]) == (1, 0)
    by_index = {result["index"]: result for result in found}
    assert by_index[1] == {
        "id": "b",
        "index": 1,
        "text": text_of("second", 5, 101),
        "finish_reason": "length",
        "prompt_tokens": 6,
        "cached_tokens": 0,
        "generated_tokens": 5,
    }
    assert by_index[2]["text"] == text_of([5, 6, 7], 20, 3) and (by_index[2]["id"], by_index[2]["seed"]) == (9, 3)
    assert by_index[0]["text"] == text_of("first", 900, 100) and "seed" not in by_index[0]
    assert by_index[3]["text"] == text_of("first", 20, 103) and by_index[3]["seed"] == 103
    assert (totals.n_requests, totals.n_before, totals.n_done, totals.n_tokens) == (4, 0, 4, 945)
    assert calls == [(n, 4) for n in range(5)]


def test_an_interrupted_run_goes_on_where_it_stopped(engine: Engine, tmp_path: Path) -> None:
    requests = parse_requests(lines(*({"prompt": f"prompt {n}", "max_tokens": 5 + n} for n in range(12))), "f")
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    answer_requests(engine, requests, whole, DEFAULTS)

    def stop(what: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_requests(engine, requests, output, DEFAULTS, stop)
    before = results(output)
    assert len(before) == 5
    with output.open("a") as file:
        file.write('{"index": 7, "text": "half a li')
    totals = answer_requests(engine, requests, output, DEFAULTS)
    assert (totals.n_before, totals.n_done) == (5, 7)
    assert results(output)[:5] == before
    assert sorted(output.read_text().splitlines()) == sorted(whole.read_text().splitlines())
    assert answer_requests(engine, requests, output, DEFAULTS).n_done == 0


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"index": 5, "text": ""}\n', "line 1 is not the result of a request of --input"),
        ('{"id": "b", "text": ""}\n', "line 1 is not the result"),
        ('{"id": ["a"], "text": ""}\n', "line 1 is not the result"),
        ('{"index": 0}\n', "line 1 is not the result"),
        ("notes\n", "line 1 is no JSON"),
        ("notes without an end", "line 1 is not the result"),
        ('{"index": 0, "text": ""}\n{"index": 5, "te', "line 2 is not the result"),
        ('{"id": "ab', "line 1 is not the result"),
        ('{"prompt": "mine"}', "line 1 is not the result"),
    ],
)
def test_a_file_of_something_else_is_left_alone(content: str, match: str, engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    with pytest.raises(UsageError, match=match):
        answer_requests(engine, parse_requests(lines({"prompt": "a"}, {"prompt": "b", "id": "a"}), "f"), output, {})
    assert output.read_text() == content
    with pytest.raises(UsageError, match="cannot be written"):
        answer_requests(engine, parse_requests(lines({"prompt": "a"}), "f"), tmp_path / "no" / "folder", {})
    for special in ("/dev/null", tmp_path):
        with pytest.raises(UsageError, match="is no plain file"):
            answer_requests(engine, parse_requests(lines({"prompt": "a"}), "f"), Path(special), {})


def test_a_full_disk_is_named_and_the_next_run_goes_on(engine: Engine, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    requests, output = parse_requests(lines(*({"prompt": f"prompt {n}"} for n in range(4))), "f"), tmp_path / "o"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(
            LlmclError, match=r"--output .*/o: cannot be written \(File too large\); make room, and the"
        ):
            answer_requests(engine, requests, output, DEFAULTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert output.stat().st_size == 300
    totals = answer_requests(engine, requests, output, DEFAULTS)
    assert totals.n_before > 0 and totals.n_before + totals.n_done == len(results(output)) == 4


def test_two_runs_do_not_share_a_file_of_results(engine: Engine, tmp_path: Path) -> None:
    requests, output = parse_requests(lines({"prompt": "a"}), "f"), tmp_path / "out.jsonl"
    with open_results(output, requests), pytest.raises(UsageError, match="is being written by another run"):
        answer_requests(engine, requests, output, DEFAULTS)
    assert answer_requests(engine, requests, output, DEFAULTS).n_done == 1


@pytest.mark.parametrize("key", ['{"index": 0', '{"id": "b"'])
def test_every_beginning_of_a_result_is_cut_off(key: str, engine: Engine, tmp_path: Path) -> None:
    requests, output = parse_requests(lines({"prompt": "a"}, {"prompt": "b", "id": "b"}), "f"), tmp_path / "out.jsonl"
    answer_requests(engine, requests, output, DEFAULTS)
    (line,) = (line for line in output.read_text().splitlines() if line.startswith(key))
    for end in range(1, len(line)):
        output.write_text(line[:end])
        with open_results(output, requests) as (done, _):
            assert not done
        assert output.read_text() == ""
