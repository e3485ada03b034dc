"""Rotary frequencies that depend on the text's length, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from family_configs import FAMILIES
from helpers import relative_error, small_config, transformers_logits
from late_kernels import compile_when_used
from models.test_published_configs import random_model, saved

import llmcl
from llmcl.architectures.config import RopeScaling
from llmcl.engine.llm import LLM
from llmcl.models.prefix_pages import PrefixPages
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
ORIGINAL, CONTEXT, N_TOKENS = 64, 128, 12
IDS = np.random.default_rng(0).integers(5, 99, CONTEXT).tolist()
LIMIT = {"original_max_position_embeddings": ORIGINAL}
LONGROPE = LIMIT | {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [1.0 + 0.5 * i for i in range(16)],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "hidden_size": 128, **LIMIT}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": N_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", params=MODELS)
def theirs(request: pytest.FixtureRequest) -> Any:
    """transformers' model."""
    return random_model(*MODELS[request.param])


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(saved(theirs, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llm(folder: str, default_device: Device) -> Iterator[LLM]:
    with llmcl.load(folder, device=default_device, dtype="float32", max_context=CONTEXT) as llm:
        yield llm


def answer_of(model: Any, prompt: list[int]) -> list[int]:
    """The answer that transformers' generate gives. Its Phi-3 computes all keys again where the factors change."""
    import torch

    model.model.rotary_emb.max_seq_len_cached = ORIGINAL  # otherwise a longer text before leaves its frequencies
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.original_inv_freq.clone()
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=N_TOKENS, do_sample=False)
    return [int(token) for token in ids[0, len(prompt) :]]


@pytest.mark.parametrize("n", [48, ORIGINAL, ORIGINAL + 1, CONTEXT])
def test_the_length_of_a_text_chooses_its_frequencies(
    theirs: Any, llm: LLM, n: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert relative_error(llm.logits(IDS[:n]), transformers_logits(theirs, IDS[:n])) < BOUND
    assert "frequencies" not in caplog.text


@pytest.mark.parametrize("n", [ORIGINAL - 5, ORIGINAL, ORIGINAL + 1])
def test_an_answer_outgrows_the_original_length(theirs: Any, llm: LLM, n: int) -> None:
    assert llm.generate(IDS[:n], **GREEDY).token_ids == answer_of(theirs, IDS[:n])


def test_answers_are_scored_each_by_its_text(theirs: Any, llm: LLM) -> None:
    prompt, answers = IDS[: ORIGINAL - 4], [IDS[:3], IDS[3:10]]
    scores = llm.score(prompt, answers)
    for answer, score in zip(answers, scores, strict=True):
        logits = transformers_logits(theirs, [*prompt, *answer][:-1])[len(prompt) - 1 :].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert score == pytest.approx(logprobs[range(len(answer)), answer].sum(), abs=1e-3)


@pytest.mark.parametrize("options", [{"kv_page_tokens": 64}, {"prompt_lookup": True}], ids=["pages", "drafts"])
@pytest.mark.slow
def test_pages_and_drafts_change_nothing(
    theirs: Any, folder: str, default_device: Device, options: dict[str, Any]
) -> None:
    device: dict[str, Any] = {"device": default_device, "dtype": "float32"}
    with llmcl.load(folder, **device, max_context=CONTEXT, **options) as llm:
        for n in (ORIGINAL + 20, ORIGINAL - 5, ORIGINAL + 20, ORIGINAL - 8):
            assert llm.generate(IDS[:n], **GREEDY).token_ids == answer_of(theirs, IDS[:n])


@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_texts_in_an_engine_each_have_their_frequencies(theirs: Any, llm: LLM, invariant: bool) -> None:
    """Short and long texts beside one another and after one another, with a common beginning of a page."""
    lengths = ORIGINAL - 6, ORIGINAL + 30, ORIGINAL - 3, ORIGINAL
    expected = [answer_of(theirs, IDS[:n]) for n in lengths]
    with llm.engine(max_sequences=3, max_context=CONTEXT, batch_invariant=invariant) as engine:
        for _ in range(2):
            answers = engine.generate([IDS[:n] for n in lengths], **GREEDY)
            assert [answer.token_ids for answer in answers] == expected
        found = [engine.submit(IDS[:n], **GREEDY) for n in (ORIGINAL + 30, ORIGINAL + 2)]
        assert [request.result().token_ids for request in found] == [
            expected[1],
            answer_of(theirs, IDS[: ORIGINAL + 2]),
        ]
        assert engine.metrics.preemptions == 0


def test_pages_are_found_only_with_their_frequencies() -> None:
    pages, text = PrefixPages(4), [*range(8)]
    pages.add(text, [2, 0], 4)
    pages.add(text, [1, 3], 4, b"long")
    assert pages.find(text, 4) == [2, 0] and pages.find(text, 4, b"long") == [1, 3] and not pages.find(text, 4, b"x")
    assert {*pages.chains([0, 1, 2, 3])} == {0, 1, 2, 3}  # also in a file for the next process


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_with_recurrent_layers_the_context_chooses(kind: str) -> None:
    """Snapshots of their states are shared by texts of all lengths."""
    scaling = RopeScaling(kind, 4.0, original_max_position=64, factors=(1.0,) * 16, long_factors=(2.0,) * 16)
    assert small_config(rope_scaling=scaling).why_not_for_short_texts(128) is None
    config = replace(FAMILIES["lfm2"], rope_scaling=scaling)
    assert config.why_not_for_short_texts(64) is None
    assert "set it to 64 (-c 64, max_context=64)" in str(config.why_not_for_short_texts(128))
