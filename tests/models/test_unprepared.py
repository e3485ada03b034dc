"""A model whose kernels for short prompts are still being compiled by other processes when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import random_weights, save_folder, small_config
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.runtime.compilers import JOBS
from llmcl.runtime.device import Device
from llmcl.runtime.program import ProgramCache

PROMPTS = [[(5 * i + n) % 90 + 1 for i in range(n)] for n in (3, 40, 100)]


def answers(llm: LLM) -> list[list[int]]:
    return [llm.generate(prompt, max_tokens=4, ignore_eos=True).token_ids for prompt in PROMPTS]


def test_prompts_of_each_size(
    default_device: Device, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of another size waits for its kernels alone, and the answers are those of a model that has all."""
    if not ProgramCache(default_device.context, default_device.entry.device).keeps_binaries:
        pytest.skip("PoCL keeps its programs itself")
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    monkeypatch.setenv("LLMCL_VARIANT", "portable")  # which has kernels for few rows, as GPUs have
    monkeypatch.setenv(JOBS, "2")
    with llmcl.load_random(str(shape), device=Device.open(default_device.entry), max_context=256) as llm:
        sizes = [bound.max_tokens for bound in llm.model._prefill]
        assert llm.model._unprepared == {*sizes[:-1]} and sizes == [16, 64, 256]
        first = answers(llm)
        assert llm.model._unprepared == set()
    with llmcl.load_random(str(shape), device=Device.open(default_device.entry), max_context=256) as llm:
        assert llm.model._unprepared == set() and llm.device.programs.compiled == 0
        assert first == answers(llm)


def test_a_model_for_an_engine_compiles_no_kernels_of_its_own(default_device: Device, tmp_path: Path) -> None:
    config = small_config()
    folder = save_folder(tmp_path / "m", config, random_weights(config, seed=3))
    made = []
    for compile_kernels in (True, False):
        with llmcl.load(
            str(folder), device=Device.open(default_device.entry), compile_kernels=compile_kernels, max_context=128
        ) as llm:
            n = len(llm.device.programs)
            with llm.engine(max_sequences=2) as engine:
                several = [each.token_ids for each in engine.generate([[3, 4], [5, 6, 7]], max_tokens=4)]
            made.append((n, several, llm.generate([3, 4, 5], max_tokens=4).token_ids))
    (n, *expected), (n_without, *said) = made
    assert expected == said and n_without < n - 5
