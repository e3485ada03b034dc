"""A model of a real shape (Llama 3.2 1B, random weights) on a GPU against transformers, the same weights in float32.

Random weights make flat logits, so near ties are frequent: a token that is not the reference's must be within the
tolerance of its largest logit. Errors are the largest difference over the largest reference logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ascii_tokenizer

import llmcl
from llmcl.engine.llm import LLM
from llmcl.models.random_shapes import RANDOM_SHAPES
from llmcl.runtime.device import Device

N_PROMPT, N_TOKENS = 64, 64
# weights, KV cache -> largest error of a logit; and the share of greedy tokens that must be the reference's exactly
TOLERANCES = {"float32": (1e-4, 1.0), "bfloat16": (2e-2, 0.95)}
KV_DTYPES = {"float32": "float32", "bfloat16": "float16"}


@pytest.fixture(scope="module")
def folder(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """The files of a model with bfloat16 weights, and transformers' float32 model of these weights on the GPU."""
    if default_device.is_cpu:
        pytest.skip(
            "a model of 1.2 billion weights in two engines is a GPU's work; tests/models/test_model.py has small ones"
        )
    torch: Any = pytest.importorskip("torch", reason="the reference is PyTorch's")
    transformers: Any = pytest.importorskip("transformers", reason="the reference is that of transformers")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU to compute the reference on")
    path = tmp_path_factory.mktemp("llama-3.2-1b")
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**RANDOM_SHAPES["llama-3.2-1b"])
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(path)
    ascii_tokenizer().save(str(path / "tokenizer.json"))
    yield path, model.float()


def reference_logits(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids], device="cuda")).logits[0].float().cpu().numpy()
    return logits


def step_logits(llm: LLM, ids: list[int]) -> np.ndarray:
    """Logits after each of `ids`, one decode step each, after those of the prompt that the cache holds."""
    found = []
    for token in ids:
        llm.model.decode_token(llm.sequence, token)
        found.append(llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,)))
    return np.stack(found)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    dtype: str, folder: tuple[Path, Any], default_device: Device
) -> None:
    path, reference = folder
    tolerance, share = TOLERANCES[dtype]
    prompt = np.random.default_rng(3).integers(0, 128256, N_PROMPT).tolist()
    with llmcl.load(str(path), device=default_device, dtype=dtype, kv_dtype=KV_DTYPES[dtype], max_context=256) as llm:
        answer = llm.generate(prompt, max_tokens=N_TOKENS, ignore_eos=True).token_ids
        expected = reference_logits(reference, prompt + answer)
        largest = np.abs(expected).max()
        choices = expected[N_PROMPT - 1 : -1]  # after the prompt and each token but the last
        behind = choices.max(axis=1) - choices[np.arange(N_TOKENS), answer]
        assert np.mean(behind <= 0) >= share, behind
        assert behind.max() <= tolerance * largest

        llm.reset()
        llm.model.prefill(llm.sequence, prompt)
        steps = step_logits(llm, answer)
        assert np.abs(steps - expected[N_PROMPT:]).max() <= tolerance * largest
        llm.reset()
        assert np.abs(llm.logits(prompt + answer) - expected).max() <= tolerance * largest
