"""Steps of several sequences where layers differ in their heads, and late ones read the keys of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import FAMILIES
from helpers import random_weights, relative_error, save_folder
from late_kernels import compile_when_used

import llmcl
from llmcl.models.batch import PromptChunk, make_batch
from llmcl.ops.sample import SamplingParams

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

SAME = 1e-4  # two orders of summation, both in float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4_text-given", "gemma4_text-experts"])
def test_prompts_beside_rows_that_decode(name: str, default_device: Any, tmp_path: Path) -> None:
    config = FAMILIES[name]
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=3))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, config.vocab_size, n).tolist() for n in (40, 3, 70)]
    with llmcl.load(str(folder), device=default_device.entry.index, dtype="float32", max_context=128) as llm:
        batch = make_batch(llm.model, 3, 128, 64)
        sequences = [batch.cache.sequence() for _ in prompts]
        for sequence in sequences:
            batch.start(sequence, SamplingParams(seed=0))
        sampled = [batch.read([(sequences[0], prompts[0])])()]
        chunks = [PromptChunk(*of_text) for of_text in zip(sequences[1:], prompts[1:], strict=True)]
        tokens = batch.step(sequences[:1], chunks)()
        sampled += [[], []]
        for _ in range(3):
            for sequence, own, token in zip(sequences, sampled, tokens, strict=True):
                sequence.token_ids.extend(own[-1:])
                own.append(token)
            tokens = batch.decode(sequences)()
        rows = llm.device.read(batch.model.act.logits, np.float32, (3, config.vocab_size))
        for prompt, own, row in zip(prompts, sampled, rows, strict=True):
            expected = llm.logits([*prompt, *own])[len(prompt) - 1 :]
            assert own == expected[:-1].argmax(axis=-1).tolist()
            assert relative_error(row, expected[-1]) < SAME
