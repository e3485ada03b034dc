"""The comparison of families with llama.cpp: sizes of its models, its table, its turns, what it refuses."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import compare_engines as engines
import compare_families as compare
import pytest
from programs import Run

from llmcl.architectures.families import FAMILIES


@pytest.mark.parametrize("name", compare.NAMES)
def test_each_family_has_the_size_of_a_small_model(name: str) -> None:
    config = compare.config_of(name)
    assert config.architecture == name and FAMILIES[name].layer is not None
    assert 1e8 < config.n_parameters() < 3e8
    needed = compare.needed_parameters(config)
    mixture = FAMILIES[name].experts is not None
    assert needed < config.n_parameters() / 2 if mixture else needed == config.n_parameters()


def test_ratios_are_shown_beside_those_of_llama() -> None:
    tests = ("prefill", "decode")

    def result(prefill: float, decode: float) -> dict[str, Any]:
        """As many times as fast as llama.cpp."""
        measured = {"prefill": engines.Pairs([prefill], [1.0]), "decode": engines.Pairs([decode], [1.0])}
        sizes = {"parameters": 150_000_000, "needed": 50_000_000, "of_bandwidth": 0.5}
        return {**sizes, **{test: measured[test].to_dict(n) for test, n in zip(tests, (512, 64), strict=True)}}

    text = compare.markdown({"llama": result(4.0, 2.0), "qwen3_moe": result(3.0, 2.5)}, tests)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[2][3:6] == ["512.0", "4.00x (4.00 - 4.00)", "1.00"]
    assert cells[2][6:] == ["32.0", "64.0", "2.00x (2.00 - 2.00)", "1.00", "50%"]
    assert cells[3][:2] == ["qwen3_moe", "150 M, 50 M"]
    assert cells[3][4:6] == ["3.00x (3.00 - 3.00)", "0.75"] and cells[3][-2:] == ["1.25", "50%"]
    in_turn = result(3.0, 2.5)
    in_turn["prefill"][compare.OF_BASIS] = 0.9
    assert " 0.90 |" in compare.markdown({"llama": result(4.0, 2.0), "qwen3": in_turn}, tests)
    without = compare.markdown({"qwen3": result(3.0, 2.5)}, tests).splitlines()[-1]
    assert without.endswith("| 2.50x (2.50 - 2.50) | 50% |")


class FakeEngine:
    """A process that answers at once: prefill with 512 tokens at a time takes `small_s`, with more `large_s`."""

    def __init__(self, large_s: float, small_s: float):
        self.seconds_of, self.micro_batch = {2048: large_s, 512: small_s}, 2048

    def seconds(self, op: str, **arguments: Any) -> float:
        return self.seconds_of[self.micro_batch] if op == "prefill" else 0.5 * arguments["n"]

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        if op == "set_micro_batch":
            self.micro_batch = arguments["n"]
        return {"weight_bytes": 90, "kv_bytes_per_position": 4, "bandwidth": 400.0, "device": "a GPU"}


@pytest.mark.parametrize(("on_gpu", "expected"), [(True, 3.0), (False, 4.0)])
def test_on_a_gpu_the_faster_micro_batch_counts(tmp_path: Path, on_gpu: bool, expected: float) -> None:
    both: Any = {"llama.cpp": FakeEngine(4.0, 3.0), "llmcl": FakeEngine(1.0, 1.0)}
    started = engines.Engines(sys.executable, {0}, "0", {})
    found = compare.measure(both, compare.Plan(started, tmp_path, 2048, 4, 2, on_gpu, 10**9, False))
    assert found["prefill"]["ratio"] == expected and found["decode"]["ratio"] == 1.0
    assert found["of_bandwidth"] == pytest.approx((90 + 4 * 2.5) / 0.5 / 400.0)


def test_on_a_cpu_the_basis_is_measured_in_the_same_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that becomes twice as slow for llmcl with each turn: shares of the basis' ratio do not change."""
    slower = [1.0, 1.0, 2.0, 4.0]  # a warm-up and three turns

    class Slowing(FakeEngine):
        asked = 0

        def seconds(self, op: str, **arguments: Any) -> float:
            self.asked += 1
            return super().seconds(op, **arguments) * slower[(self.asked - 1) % 4]

    def pair(model: compare.Model, plan: compare.Plan) -> Any:
        return nullcontext(
            {"llama.cpp": FakeEngine(3.0, 3.0), "llmcl": Slowing(1.0 if model.name == "llama" else 1.5, 0)}
        )

    monkeypatch.setattr(compare, "loaded", pair)
    plan = compare.Plan(engines.Engines(sys.executable, {0}, "0", {}), tmp_path, 2048, 4, 3, False, 10**9, False)
    found = {
        model.name: result for model, result in compare.compare(compare.models_of("llama,qwen3", [], "Q4_0"), plan)
    }
    assert compare.OF_BASIS not in found["llama"]["prefill"]
    assert found["qwen3"]["prefill"]["ratio"] == 1.0
    assert found["qwen3"]["prefill"][compare.OF_BASIS] == pytest.approx(2 / 3)
    assert found["qwen3"]["decode"][compare.OF_BASIS] == 1.0


# A llama-bench whose n-th prefill takes n s with its first micro-batch and 10 n with the second, and a decode 100 n.
LLAMA_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-ngl"] == "999" and given["-fa"] == "1" and given["-m"].endswith("model.gguf") and given["-d"] == "0"
rows = []
for i, size in enumerate(map(int, given["-ub"].split(","))):
    for n_prompt, n_gen, s in [(int(given["-p"]), 0, 10**i), (0, int(given["-n"]), 100)]:
        times = [(turn + 1) * s * 10**9 for turn in range(int(given["-r"]))]
        rows.append(dict(n_prompt=n_prompt, n_gen=n_gen, n_ubatch=size, samples_ns=times))
print(json.dumps(rows))
"""


def test_llama_bench_takes_the_place_of_a_process(tmp_path: Path) -> None:
    binary = tmp_path / "llama-bench"
    binary.write_text(LLAMA_BENCH.replace("{python}", sys.executable), encoding="utf-8")
    binary.chmod(0o755)
    started = engines.Engines(sys.executable, {0}, "0", {})
    plan = compare.Plan(started, tmp_path, 2048, 4, 3, True, 10**9, False, binary)
    both: Any = {"llama.cpp": compare.Bench(binary, tmp_path / "model.gguf", plan), "llmcl": FakeEngine(1.0, 1.0)}
    found = compare.measure(both, plan)
    assert found["decode"]["llama.cpp"] == 200.0 and found["decode"]["ratio_max"] == 150.0
    assert found["prefill"]["ratio"] == 2.0 and found["prefill"]["ratio_min"] == 1.0  # that with 512 tokens at a time


def test_as_many_models_are_loaded_at_once_as_fit(tmp_path: Path) -> None:
    models = compare.models_of("", ["qwen3-0.6b", "llama-3.2-1b=BF16", "gpt-oss-20b=MXFP4"], "Q4_0")
    assert [model.quantization for model in models] == ["Q4_0", "BF16", "MXFP4"]
    assert [round(model.nbytes() / 1e9, 1) for model in models] == [0.4, 2.5, 12.1]
    started = engines.Engines(sys.executable, {0}, "0", {})

    def names(on_gpu: bool, device_bytes: int) -> list[list[str]]:
        plan = compare.Plan(started, tmp_path, 512, 64, 1, on_gpu, device_bytes, False)
        return [[model.name for model in batch] for batch in compare.batches(models, plan)]

    apart = [["qwen3-0.6b"], ["llama-3.2-1b"], ["gpt-oss-20b"]]
    assert names(True, 80 * 10**9) == [[*apart[0], *apart[1], *apart[2]]]
    assert names(True, 24 * 10**9) == [apart[0] + apart[1], apart[2]] and names(False, 80 * 10**9) == apart


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "llama,bert"], "--families has bert; expected some of llama, mistral"),
        (["--llama-python", "/no/python"], "has no llama-cpp-python"),
        (["--llama-bench", "/no/llama-bench", "--device", "cpu"], "--llama-bench /no/llama-bench is for a GPU"),
        (["--quantization", "Q2_K"], "'Q2_K' given, expected one of F16, BF16, Q8_0"),
        (["--random", "qwen3-0.6b=Q2_K"], "'Q2_K' given, expected one of F16, BF16, Q8_0"),
        (["--random", "bert"], "neither one of llama-3.2-1b"),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], message: str, run_here: Run) -> None:
    done = run_here("compare_families.py", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
