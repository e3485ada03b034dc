"""The whole model against transformers, and its ways of reading a text (whole, in chunks, token by token) against
each other.

Errors are the largest difference over the largest reference logit. With float32 weights and cache, or weights
rounded the same way on both sides, the bound is 1e-4. What rounding itself costs on real text is bounded for the
demo model by TOLERANCES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from demo_text import TEXT
from helpers import (
    model_configs,
    random_weights,
    relative_error,
    rounded,
    save_folder,
    small_config,
    transformers_logits,
    transformers_model,
)
from late_kernels import compile_when_used
from parameters import slow_except

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.engine.llm import LLM
from llmcl.errors import ContextLengthError, UsageError
from llmcl.models.model import LOGITS_CHUNK
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
SAME = 2e-5  # two orders of summation, both in float32
SOME = 120  # of the tokens of TEXT, where each combination of types reads them

# (weights, KV cache) of the demo model -> largest error on real text against float32 weights and cache.
TOLERANCES = {
    ("float16", "float32"): 2e-3,
    ("bfloat16", "float32"): 2e-2,
    ("float32", "float16"): 2e-3,
    ("float32", "bfloat16"): 1e-2,
}

slow = pytest.mark.slow
QUESTIONS = [
    "Why is the sky blue?",
    pytest.param("Write a haiku about the sea.", marks=slow),
    pytest.param("Write a Python function that reverses a string.", marks=slow),
]


# ---- random models, from files that transformers wrote -----------------------------------------------------------


@pytest.fixture
def load_folder(tmp_path: Path, default_device: Device, separate_launches: None) -> Iterator[Callable[..., LLM]]:
    """Writes a model (arguments of `save_folder`) and loads it as a user would; options go to `llmcl.load`."""
    loaded: list[LLM] = []

    def load(config: Any, weights: Any, dtype: str = "float32", max_shard_size: str = "1GB", **options: Any) -> LLM:
        folder = save_folder(tmp_path / f"model{len(loaded)}", config, weights, dtype, max_shard_size)
        loaded.append(llmcl.load(str(folder), device=default_device.entry.index, **options))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.close()


def random_ids(n: int, vocab_size: int = 131) -> list[int]:
    return [int(i) for i in np.random.default_rng(n).integers(0, vocab_size, n)]


@pytest.mark.parametrize("name", slow_except(model_configs(), "gqa3_dim64_untied"))
def test_random_models_agree_with_transformers(name: str, load_folder: Callable[..., LLM]) -> None:
    config = model_configs()[name]
    weights = random_weights(config, seed=1)
    llm = load_folder(config, weights)
    assert (llm.dtype, llm.kv_dtype) == ("float32", "float32")
    ids = random_ids(2 * LOGITS_CHUNK + 13)
    reference = transformers_logits(transformers_model(config, weights), ids)
    logits = llm.logits(ids)
    assert logits.dtype == np.float32 and logits.shape == (len(ids), config.vocab_size)
    assert relative_error(logits, reference) <= BOUND
    # The decode kernels are others than those of the prefill.
    llm.model.cache.truncate(llm.sequence, len(ids) - 3)
    for i in range(len(ids) - 3, len(ids)):
        llm.model.decode_token(llm.sequence, ids[i])
        assert relative_error(last_logits(llm), reference[i]) <= BOUND


def test_log_probabilities_agree_with_transformers(load_folder: Callable[..., LLM]) -> None:
    import torch

    config = model_configs()["gqa4_dim64_llama3"]
    weights = random_weights(config, seed=1)
    llm = load_folder(config, weights)
    ids = random_ids(2 * LOGITS_CHUNK + 13)
    logits = torch.tensor(transformers_logits(transformers_model(config, weights), ids), dtype=torch.float64)
    reference = torch.log_softmax(logits, dim=-1)
    best = reference.topk(5)
    for i, found in enumerate(llm.logprobs(ids, top=5)):
        assert found.token == ids[i + 1]
        assert found.logprob == pytest.approx(float(reference[i, ids[i + 1]]), abs=1e-3)
        assert [value for _, value in found.top] == pytest.approx(best.values[i].tolist(), abs=1e-3)


@pytest.mark.parametrize("name", ["gqa3_dim64_untied", pytest.param("gqa8_dim128_llama3_tied", marks=slow)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow)])
def test_weights_are_exactly_those_of_the_file(dtype: str, name: str, load_folder: Callable[..., LLM]) -> None:
    config = model_configs()[name]
    weights = random_weights(config, seed=2)
    llm = load_folder(config, weights, dtype, max_shard_size="60KB", kv_dtype="float32")
    assert llm.dtype == dtype
    ids = random_ids(70)

    def step(token: int) -> np.ndarray:  # decode rounds nothing but weights, on a GPU's matrix units prefill does
        llm.model.decode_token(llm.sequence, token)
        return last_logits(llm)

    logits = np.stack([step(token) for token in ids])
    assert (
        relative_error(logits, transformers_logits(transformers_model(config, rounded(weights, dtype)), ids)) <= BOUND
    )
    assert relative_error(logits, transformers_logits(transformers_model(config, weights), ids)) > BOUND


def test_sharded_and_single_files_are_the_same_model(load_folder: Callable[..., LLM], tmp_path: Path) -> None:
    config = model_configs()["gqa4_dim64_llama3"]
    weights = random_weights(config, seed=3)
    single, sharded = load_folder(config, weights), load_folder(config, weights, max_shard_size="100KB")
    assert len(list((tmp_path / "model1").glob("*.safetensors"))) > 2
    ids = random_ids(20)
    np.testing.assert_array_equal(single.logits(ids), sharded.logits(ids))


def test_a_prompt_longer_than_a_prefill_chunk(load_folder: Callable[..., LLM]) -> None:
    config = small_config(max_position=4096)
    weights = random_weights(config, seed=4)
    llm = load_folder(config, weights)
    ids = random_ids(llm.model.chunk + 89)
    reference = transformers_logits(transformers_model(config, weights), ids)
    assert relative_error(llm.logits(ids), reference) <= BOUND
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.prefill(llm.sequence, ids)
    assert relative_error(last_logits(llm), reference[-1]) <= BOUND
    answer = llm.generate(ids, max_tokens=2)
    assert answer.token_ids[0] == int(np.argmax(reference[-1]))
    assert answer.stats.prompt_tokens == len(ids)


# ---- one text, read in different ways ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A small model with a ratio of 3 query heads to a KV head, in float32."""
    config = model_configs()["gqa3_dim64_untied"]
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=5))
    with llmcl.load(str(folder), device=default_device.entry.index) as llm:
        yield llm


@pytest.fixture(scope="module")
def longer(default_device: Device) -> Iterator[LLM]:
    """The demo model with room for more tokens than products of few rows take."""
    with llmcl.load("smollm2", device=default_device, max_context=256) as llm:
        yield llm


@pytest.mark.slow
@pytest.mark.parametrize("context", [5, 16, 40])
def test_a_context_of_few_tokens_is_read_with_the_products_of_few_rows(
    context: int, longer: LLM, default_device: Device
) -> None:
    """As what is bound for any number of tokens takes several times as long for as few on a GPU. The same logits."""
    logits = []
    with llmcl.load("smollm2", device=default_device, max_context=context) as shorter:
        for llm in (shorter, longer):
            bound = llm.model._prefill_for(context)
            assert bound.ops.max_rows >= context or llm.model._prefill[0].ops.max_rows == 0  # it has no such products
            logits.append(llm.logits([*range(100, 100 + context)]))
    assert relative_error(logits[0], logits[1]) < 1e-5


def last_logits(llm: LLM) -> np.ndarray:
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


def after_prefill(llm: LLM, ids: Sequence[int], chunk: int | None = None) -> np.ndarray:
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.prefill(llm.sequence, ids, chunk=chunk)
    return last_logits(llm)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100])
def test_prefill_equals_single_steps(n: int, small: LLM) -> None:
    ids = random_ids(n)
    whole = after_prefill(small, ids)
    small.model.cache.truncate(small.sequence, 0)
    for token in ids:
        small.model.decode_token(small.sequence, token)
    assert relative_error(last_logits(small), whole) <= SAME


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_equal_the_whole(chunk: int, small: LLM) -> None:
    ids = random_ids(150)
    assert relative_error(after_prefill(small, ids, chunk), after_prefill(small, ids)) <= SAME


@pytest.mark.slow
def test_chunks_and_steps_of_the_demo_model_equal_the_whole(smollm2: LLM) -> None:
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer.encode(TEXT)[:80]
    whole = after_prefill(smollm2, ids)
    assert relative_error(after_prefill(smollm2, ids, 7), whole) <= SAME
    smollm2.model.cache.truncate(smollm2.sequence, 60)
    for token in ids[60:]:
        smollm2.model.decode_token(smollm2.sequence, token)
    assert relative_error(last_logits(smollm2), whole) <= SAME


@pytest.mark.parametrize("kept", [1, 63, 64, 65])
def test_after_truncation_nothing_of_what_followed_is_seen(kept: int, small: LLM) -> None:
    ids, other = random_ids(140), random_ids(33)
    expected = after_prefill(small, [*ids[:kept], *other])
    after_prefill(small, ids)
    small.model.cache.truncate(small.sequence, kept)
    small.model.prefill(small.sequence, other)
    assert small.sequence.token_ids == [*ids[:kept], *other]
    assert relative_error(last_logits(small), expected) <= SAME


def test_the_cache_takes_exactly_what_fits(small: LLM) -> None:
    ids = random_ids(small.max_context)
    after_prefill(small, ids)
    model, sequence = small.model, small.sequence
    for one_more in (lambda: model.prefill(sequence, [3]), lambda: model.decode_token(sequence, 3)):
        with pytest.raises(ContextLengthError, match=f"1 token after {len(ids)} .* {small.max_context} tokens"):
            one_more()
    assert small.sequence.token_ids == ids


@pytest.mark.parametrize("token", [-1, 131])
def test_ids_outside_the_vocabulary_are_refused(token: int, small: LLM) -> None:
    model, sequence = small.model, small.sequence
    passes = (lambda ids: model.prefill(sequence, ids), lambda ids: model.decode_token(sequence, ids[-1]))
    for use in (small.logits, *passes, small.generate):
        with pytest.raises(UsageError, match=f"token id {token} is not in the vocabulary; expected 0 to 130"):
            use([5, token])
    with pytest.raises(UsageError, match="no tokens"):
        small.logits([])


# ---- the demo model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_reference(smollm2: LLM) -> Any:
    with open_checkpoint("smollm2") as checkpoint:
        return transformers_model(smollm2.config, {name: checkpoint.array(name) for name in checkpoint.tensors})


@pytest.fixture(scope="module")
def demo_text(smollm2: LLM) -> list[int]:
    assert smollm2.tokenizer is not None
    ids = smollm2.tokenizer.encode(TEXT)
    assert len(ids) >= 200
    return ids


@pytest.fixture(scope="module")
def demo_logits(demo_reference: Any, demo_text: list[int]) -> np.ndarray:
    """Of transformers, after each token of the text."""
    return transformers_logits(demo_reference, demo_text)


def test_the_demo_model_agrees_with_transformers(smollm2: LLM, demo_logits: np.ndarray, demo_text: list[int]) -> None:
    assert relative_error(smollm2.logits(demo_text), demo_logits) <= BOUND


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_answers_are_those_of_transformers(question: str, smollm2: LLM, demo_reference: Any) -> None:
    """If every token of our answer is transformers' choice after all before it, its greedy answer is the same."""
    answer = smollm2.generate(question, max_tokens=64, ignore_eos=True)
    assert len(answer.token_ids) == 64
    logits = transformers_logits(demo_reference, answer.prompt_token_ids + answer.token_ids)
    choices = logits[len(answer.prompt_token_ids) - 1 : -1].argmax(axis=-1)
    assert answer.token_ids == choices.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype"), TOLERANCES)
def test_smaller_dtypes_cost_what_is_documented(
    dtype: str,
    kv_dtype: str,
    smollm2: LLM,
    demo_reference: Any,
    demo_logits: np.ndarray,
    demo_text: list[int],
) -> None:
    with llmcl.load(
        "smollm2",
        device=smollm2.device.entry.index,
        dtype=dtype,
        kv_dtype=kv_dtype,
        activation_dtype="float32",  # rounded ones are another matter
        max_context=512,
    ) as llm:
        logits = llm.logits(demo_text[:SOME])
    assert BOUND < relative_error(logits, demo_logits[:SOME]) <= TOLERANCES[dtype, kv_dtype]
    if dtype != "float32":  # and nothing but the rounding of the matrices causes it
        with rounded_matrices(demo_reference, dtype):
            expected = transformers_logits(demo_reference, demo_text[:SOME])
        assert relative_error(logits, expected) <= BOUND


@contextmanager
def rounded_matrices(model: Any, dtype: str) -> Iterator[None]:
    """The model of transformers has its matrices as `dtype` holds them, then its own again."""
    import torch

    exact = {parameter: parameter.data for parameter in model.parameters() if parameter.ndim == 2}
    for parameter, values in exact.items():
        parameter.data = values.to(getattr(torch, dtype)).float()
    try:
        yield
    finally:
        for parameter, values in exact.items():
            parameter.data = values
