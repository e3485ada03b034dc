"""A model whose kernels for short prompts are still being compiled by other processes when it is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
