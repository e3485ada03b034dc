"""The comparison of engines on several sequences: turns, ratios, and a run of llmcl's own process."""

from __future__ import annotations

import json
from typing import Any

import compare_child as child
import compare_sequences as compare
import pytest
from programs import TINY_SHAPE, Run

from llmcl.runtime.device import Device


class Told:
    """Stands in for a process: each request for sequences takes what it was told."""

    def __init__(self, seconds: list[float], calls: list[str], name: str):
        self.seconds_left, self.calls, self.name = list(seconds), calls, name

    def seconds(self, op: str, **arguments: Any) -> float:
        assert op == "sequences" and arguments["pp"] == 10 and arguments["tg"] == 4
        self.calls.append(self.name)
        return self.seconds_left.pop(0)


def test_turns_and_ratios() -> None:
    calls: list[str] = []
    told = {"llmcl": [9.0, 1.0, 2.0], "llama.cpp": [9.0, 2.0, 2.0], "openvino": [9.0, 4.0, 1.0]}
    children: Any = {name: Told(seconds, calls, name) for name, seconds in told.items()}
    rows = compare.compare(children, (2,), 10, 4, 2)
    assert calls[::3] == ["llmcl", "llama.cpp", "openvino"]  # another one begins each turn
    assert rows[0]["tokens_per_s"] == {"llmcl": [8.0, 4.0], "llama.cpp": [4.0, 4.0], "openvino": [2.0, 8.0]}
    last = [cell.strip() for cell in compare.markdown(rows).splitlines()[-1].strip("|").split("|")]
    assert last == ["10", "4", "2", "6.0", "4.0", "5.0", "1.25x (0.50 - 2.00)"]


@pytest.mark.slow
def test_llmcl_computes_several_sequences(tmp_path: Any, default_device: Device) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    engine = child.Llmcl()
    engine.load(str(shape), 40, 1, default_device.entry, {}, random=True)  # type: ignore[arg-type]
    try:
        engine.prepare(3, 40)
        server = child.Server(engine)
        assert all(server.sequences(pp=12, tg=4, pl=pl)["seconds"] > 0 for pl in (1, 3))
        assert engine.batch.cache.n_free == len(engine.batch.cache.order)
    finally:
        engine.llm.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-npl", "0"], "expected whole numbers, 1 or more"),
        (["--llama-python", "/no/python"], "has no llama-cpp-python"),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], message: str, run_here: Run) -> None:
    done = run_here("compare_sequences.py", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
