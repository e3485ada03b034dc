"""The comparison of families with llama.cpp: sizes of its models, its table, what it refuses."""

from __future__ import annotations

from typing import Any

import compare_engines as engines
import compare_families as compare
import pytest
from programs import Run

from llmcl.models.families import FAMILIES


@pytest.mark.parametrize("name", compare.NAMES)
def test_each_family_has_the_size_of_a_small_model(name: str) -> None:
    config = compare.config_of(name)
    assert config.architecture == name and FAMILIES[name].layer is not None
    assert 1e8 < config.n_parameters() < 3e8
    needed = compare.needed_parameters(config)
    mixture = FAMILIES[name].experts is not None
    assert needed < config.n_parameters() / 2 if mixture else needed == config.n_parameters()


def test_ratios_are_shown_beside_those_of_llama() -> None:
    def result(prefill: float, decode: float) -> dict[str, Any]:
        """As many times as fast as llama.cpp."""
        measured = {"prefill": engines.Pairs([prefill], [1.0]), "decode": engines.Pairs([decode], [1.0])}
        sizes = {"parameters": 150_000_000, "needed": 50_000_000}
        return {**sizes, **{test: pairs.to_dict(compare.TESTS[test][0]) for test, pairs in measured.items()}}

    text = compare.markdown({"llama": result(4.0, 2.0), "qwen3_moe": result(3.0, 2.5)})
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[2][3:] == ["512.0", "4.00x (4.00 - 4.00)", "1.00", "32.0", "64.0", "2.00x (2.00 - 2.00)", "1.00"]
    assert cells[3][:2] == ["qwen3_moe", "150 M, 50 M"]
    assert cells[3][4:6] == ["3.00x (3.00 - 3.00)", "0.75"] and cells[3][-1] == "1.25"
    without = compare.markdown({"qwen3": result(3.0, 2.5)}).splitlines()[-1]
    assert without.endswith("| 2.50x (2.50 - 2.50) |  |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--families", "llama,bert"], "--families has bert; expected some of llama, mistral"),
        (["--llama-python", "/no/python"], "has no llama-cpp-python"),
    ],
)
def test_bad_requests_are_refused(arguments: list[str], message: str, run_here: Run) -> None:
    done = run_here("compare_families.py", *arguments)
    assert done.returncode == 2 and message in done.stderr, done.stderr
