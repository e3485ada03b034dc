"""The comparison with llama.cpp: its processes, with a stand-in engine and with llmcl, its tables, what it refuses."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare_child as child
import compare_engines as engines
import compare_llama_cpp as compare
import compare_quality as quality
import numpy as np
import pytest
from programs import TINY_SHAPE, Run

from llmcl.checkpoint import open_checkpoint
from llmcl.reference import log_likelihood
from llmcl.runtime.device import Device

SHAPE = {**TINY_SHAPE, "head_dim": 16}  # random_file leaves a GGUF reader to divide: hidden_size / heads


class Engine:
    """Stands in for both engines; its logits are a hash of the position."""

    vocab_size = 50

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def load(self, path: str) -> None:
        self.calls.append(("load " + path, 0))

    def truncate(self, position: int) -> None:
        self.calls.append(("truncate", position))

    def append(self, ids: list[int]) -> None:
        self.calls.append(("append", len(ids)))

    def logits(self, ids: list[int], skip: int) -> Iterator[np.ndarray]:
        yield np.random.default_rng(len(ids)).standard_normal((len(ids) - skip, self.vocab_size)).astype(np.float32)

    def about(self) -> dict[str, Any]:
        return {"version": "stand-in"}

    def fails(self) -> None:
        raise ValueError("no")


def answers(engine: Engine, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    child.serve(child.Server(engine), [json.dumps(request) for request in requests], said.append)
    return said


def test_a_depth_is_filled_once_and_kept_between_turns() -> None:
    engine = Engine()
    decode = {"op": "decode", "n": 2, "depth": 8}
    load, prefill, *decodes, at_zero = answers(
        engine, {"op": "load", "path": "x"}, {"op": "prefill", "n": 4}, decode, decode, {**decode, "depth": 0}
    )
    assert all(answer["seconds"] >= 0 for answer in (load, prefill, *decodes, at_zero))
    steps = [("append", 1)] * 2
    assert engine.calls == [
        *[("load x", 0), ("append", 1)],
        *[("truncate", 0), ("append", 4)],
        *[("truncate", 0), ("append", 8), ("truncate", 8), *steps],
        *[("truncate", 8), *steps],
        *[("truncate", 0), *steps],
    ]


def test_what_is_scored_and_how_a_failure_is_told() -> None:
    window = list(range(10, 21))
    score, about, failed = answers(Engine(), {"op": "score", "windows": [window]}, {"op": "about"}, {"op": "fails"})
    rows = next(Engine().logits(window[:-1], 5))
    assert score["loss"] == pytest.approx(-log_likelihood(rows, np.array(window[6:])).sum())
    assert score["top"] == rows.argmax(axis=1).tolist()
    assert about == {"version": "stand-in"} and failed == {"error": "ValueError: no"}


@pytest.mark.slow
def test_llmcl_answers_in_a_process_of_its_own(
    tmp_path: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "gguf", None
    )  # another process makes the weights, or this one would count as large
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(SHAPE), encoding="utf-8")
    path = engines.random_file(tmp_path / "tiny.gguf", str(shape))
    with open_checkpoint(str(path)) as checkpoint:
        assert checkpoint.config.dtype == "float16" and checkpoint.config.n_layers == 2
        assert checkpoint.array("model.layers.1.mlp.down_proj.weight").std() == pytest.approx(96**-0.5, rel=0.05)
    text = tmp_path / "text.txt"
    text.write_text("ab" * 300, encoding="utf-8")
    both = engines.Engines(
        sys.executable, os.sched_getaffinity(0), str(default_device.entry.index), {"dtype": "float32"}
    )
    with both.child("llmcl") as process:
        assert both.load(process, path, 64) > 0
        assert process.seconds("prefill", n=20) > 0 and process.seconds("decode", n=3, depth=20) > 0
        windows = engines.text_windows(process, text, 32, positions=30)
        assert [len(window) for window in windows] == [32, 32]
        assert len(process.ask("score", windows=windows)["top"]) == 2 * 15
        facts = process.ask("facts")
        assert facts["bandwidth"] > 1e8 and facts["weight_bytes"] > 0
        with pytest.raises(engines.ChildError, match="llmcl failed at 'prefill': ContextLengthError"):
            process.ask("prefill", n=65)
        assert process.end() > 50e6


def test_a_process_that_dies_is_reported() -> None:
    both = engines.Engines(sys.executable, os.sched_getaffinity(0), None, {})
    with (
        both.child("llama.cpp") as process,
        pytest.raises(engines.ChildError, match=r"(?s)llama.cpp ended at 'about'.*No module named 'llama_cpp'"),
    ):
        process.ask("about")


def result(**changes: Any) -> dict[str, Any]:
    speed = compare.Pairs([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    return {
        "model": "smollm2",
        "format": "Q4_0",
        "file_bytes": 100 * 2**20,
        "load": speed.to_dict(),
        "peak_memory": compare.Pairs([2.0**28], [2.0**29]).to_dict(),
        "prefill": speed.to_dict(512),
        "decode": speed.to_dict(64),
        "quality": {"positions": 10, "perplexity": {"llama.cpp": 12.0, "llmcl": 12.1}, "top_1": 0.99},
        "bandwidth": 0.6,
        "generate": {"first_token_s": 0.9, "peak_memory": 500 * 2**20},
        **changes,
    }


def test_ratios_are_taken_turn_by_turn() -> None:
    values = compare.Pairs([2.0, 3.0, 10.0], [1.0, 3.0, 4.0]).to_dict(per=6)
    assert (values["ratio"], values["ratio_min"], values["ratio_max"]) == (2.0, 1.0, 2.5)
    assert values["llama.cpp_tokens_per_s"] == 2.0 and values["llmcl_tokens_per_s"] == 2.0


def test_tables_show_each_measurement_and_each_target() -> None:
    text = compare.markdown([result()])
    assert "| smollm2 Q4_0 | prefill 512 | 170.7 t/s | 512.0 t/s | 3.00x (2.00 - 4.00) |" in text
    assert "| smollm2 Q4_0 | peak memory | 256 MiB | 512 MiB | 0.50x (0.50 - 0.50) |" in text
    assert "| smollm2 Q4_0, prefill 512 | 4.0x | 3.00x | no |" in text
    assert "| smollm2 Q4_0, decode 64 | 2.2x | 3.00x | yes |" in text
    assert "| smollm2 Q4_0, decode, of bandwidth | 70% | 60.0% | no |" in text
    assert "| smollm2 Q4_0, same top 1 | 98% | 99.00% | yes |" in text
    assert "| smollm2 Q4_0, first token | 1.0 s | 0.90 s | yes |" in text
    assert "| smollm2 Q4_0, peak memory of generate | 464 MiB | 500 MiB | no |" in text
    assert "d4096" not in text  # not measured


@pytest.mark.slow
def test_quality_is_that_of_each_contestant_against_the_widened_weights(
    tmp_path: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, text = tmp_path / "config.json", tmp_path / "text.txt"
    shape.write_text(json.dumps({**SHAPE, "max_position_embeddings": 512}), encoding="utf-8")
    text.write_text("ab" * 600, encoding="utf-8")
    path = engines.random_file(tmp_path / "tiny.gguf", str(shape))
    llmcl_only = {name: quality.Contestant("llmcl", {"dtype": "float32"}) for name in quality.CONTESTANTS}
    llmcl_only["8 bits"] = quality.Contestant("llmcl", {"dtype": "bfloat16"})
    monkeypatch.setattr(quality, "CONTESTANTS", llmcl_only)
    both = engines.Engines(sys.executable, os.sched_getaffinity(0), str(default_device.entry.index), {})
    measured = quality.measure(path, "F16", both, text, positions=255)
    assert measured["positions"] == 255 and measured["stored"] == {"F16": 1.0}
    perplexity = measured["perplexity"]
    assert perplexity["float32"] == perplexity["llama.cpp"] == perplexity["dequantised"] != perplexity["8 bits"]
    assert perplexity["8 bits"] == pytest.approx(perplexity["dequantised"], rel=0.05)
    same = measured["top_1"]
    assert same["llama.cpp, itself"] == same["float32, dequantised"] == 1.0 and 0 < same["8 bits, llama.cpp"] <= 1


def test_quality_is_shown_against_its_targets() -> None:
    perplexity = {"dequantised": 20.0, "float32": 20.04, "8 bits": 20.3, "llama.cpp": 20.1}
    measured = {
        "format": "Q4_0",
        "stored": {"Q4_0": 0.79, "Q8_0": 0.21},
        "perplexity": perplexity,
        "top_1": {"8 bits, llama.cpp": 0.96, "llama.cpp, itself": 0.95},
    }
    text = quality.markdown([measured])
    assert "| Q4_0 | Q4_0 79%, Q8_0 21% | 20.000 | 1.00200 | 1.01500 | 1.00500 | 96.00% | 95.00% |" in text
    assert "| Q4_0, perplexity with float32 activations | within 0.3% | +0.200% | yes |" in text
    assert "| Q4_0, perplexity with 8-bit activations | within 1.0% | +1.500% | no |" in text
    assert "| Q4_0, same top 1 | 98% | 96.00% | no |" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--llama-python", "/nowhere/python"), "/nowhere/python has no llama-cpp-python"),
        (("--llama-python", sys.executable), "No module named 'llama_cpp'"),
        (("-t", "4096"), "-t/--threads 4096: this process may use"),
        (("-f", "/nowhere.txt"), "-f/--file /nowhere.txt: there is no such file"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: tuple[str, ...], message: str, run_here: Run) -> None:
    done = run_here("compare_llama_cpp.py", *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
