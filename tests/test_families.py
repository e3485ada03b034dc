"""Each supported architecture against transformers on random weights, from a Hugging Face folder and from GGUF.

Errors are the largest difference over the largest reference logit, in float32. The texts are longer than the windows,
so that a window that is missing, or off by one, shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config, transformers_logits, transformers_model

import llmcl
from llmcl import reference
from llmcl.config import ModelConfig
from llmcl.llm import LLM

BOUND = 1e-4
N_TOKENS = 90
WINDOW = 20  # no multiple of a tile of keys

FAMILIES: dict[str, ModelConfig] = {
    "mistral": small_config(architecture="mistral", windows=(WINDOW, WINDOW)),
    "qwen2": small_config(architecture="qwen2", qkv_bias=True, n_q_heads=4, head_dim=16, tie_embeddings=True),
    "qwen2-windows": small_config(
        architecture="qwen2", qkv_bias=True, n_q_heads=4, head_dim=16, n_layers=3, windows=(None, WINDOW, WINDOW)
    ),
    "qwen3": small_config(architecture="qwen3", qk_norm=True, n_q_heads=6, n_kv_heads=2, hidden_size=96),
    "gemma2": small_config(
        architecture="gemma2",
        n_layers=3,
        head_dim=48,
        tie_embeddings=True,
        post_norms=True,
        activation="gelu_tanh",
        norm_offset=1.0,
        embedding_scale=8.0,
        attention_scale=40.0**-0.5,
        attention_soft_cap=2.0,
        logit_soft_cap=3.0,
        windows=(WINDOW, None, WINDOW),
    ),
}


def ids_for(config: ModelConfig) -> list[int]:
    return np.random.default_rng(7).integers(0, config.vocab_size, N_TOKENS).tolist()


def decode(llm: LLM, ids: Sequence[int], from_position: int, chunk: int | None = None) -> np.ndarray:
    """Logits of every position from from_position - 1 on: what is before it is prefilled."""
    llm.model.cache.truncate(0)
    llm.model.prefill(ids[:from_position], chunk=chunk)
    rows = [last_logits(llm)]
    for token in ids[from_position:]:
        llm.model.decode_token(token)
        rows.append(last_logits(llm))
    return np.stack(rows)


def last_logits(llm: LLM) -> np.ndarray:
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


@pytest.fixture(params=["cpu", "gpu"])
def kind(request: pytest.FixtureRequest, default_device: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels of a CPU, and as a GPU the portable ones on the same device."""
    from llmcl.runtime import device as device_module

    entry = dataclasses.replace(default_device.entry, kind=request.param)
    monkeypatch.setattr(device_module, "select_device", lambda request: entry)
    name: str = request.param
    return name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_of_the_family_computes_what_transformers_does(name: str, kind: str, tmp_path: Path) -> None:
    config = FAMILIES[name]
    weights = random_weights(config, seed=1)
    model = transformers_model(config, weights)
    ids = ids_for(config)
    expected = transformers_logits(model, ids)
    with llmcl.load(str(save_folder(tmp_path / "model", config, weights)), dtype="float32", max_context=128) as llm:
        assert llm.config == config
        assert relative_error(llm.logits(ids), expected) < BOUND
        assert relative_error(decode(llm, ids, 60), expected[59:]) < BOUND
        assert relative_error(decode(llm, ids, 80, chunk=7), expected[79:]) < BOUND
        prompt = ids[:33]
        answer = llm.generate(prompt, max_tokens=40, ignore_eos=True)
    choices = transformers_logits(model, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1].argmax(axis=-1)
    assert answer.token_ids == choices.tolist()


def save_gguf(path: Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> Path:
    """The model as llama.cpp's converter writes it, names by the package `gguf`: q and k of Llama and Mistral with their
    rotary pairs next to each other, Gemma's norm weights with the 1 that its model adds."""
    import gguf

    arch = {"mistral": "llama"}.get(config.architecture, config.architecture)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.n_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.n_q_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.windows:
        writer.add_sliding_window(WINDOW)
    if config.attention_soft_cap is not None and config.logit_soft_cap is not None:
        writer.add_attn_logit_softcapping(config.attention_soft_cap)
        writer.add_final_logit_softcapping(config.logit_soft_cap)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = ["a", "b", "ab", *(f"<token {i}>" for i in range(3, config.vocab_size))]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, values in weights.items():
        stored = values + np.float32(config.norm_offset) if name.endswith("norm.weight") else values
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = stored.reshape(-1, 2, config.head_dim // 2, stored.shape[1])
            stored = halves.swapaxes(1, 2).reshape(stored.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma2"])
def test_a_gguf_file_of_the_family_computes_what_transformers_does(
    name: str, default_device: Any, tmp_path: Path
) -> None:
    config = FAMILIES[name]
    if config.architecture == "gemma2":  # the format has no key for another scale
        config = dataclasses.replace(config, attention_scale=config.head_dim**-0.5)
    weights = random_weights(config, seed=3)
    ids = ids_for(config)
    expected = transformers_logits(transformers_model(config, weights), ids)
    path = save_gguf(tmp_path / "model.gguf", config, weights)
    with llmcl.load(str(path), device=default_device.entry.index, dtype="float32", max_context=128) as llm:
        assert relative_error(llm.logits(ids), expected) < BOUND
        assert relative_error(decode(llm, ids, 80), expected[79:]) < BOUND


def test_pages_hold_what_a_contiguous_cache_does(tmp_path: Path) -> None:
    config = FAMILIES["gemma2"]
    folder = str(save_folder(tmp_path / "model", config, random_weights(config, seed=1)))
    logits = []
    for page_tokens in (None, 64):
        with llmcl.load(folder, dtype="float32", max_context=128, kv_page_tokens=page_tokens) as llm:
            logits.append(decode(llm, ids_for(config), 60))
    assert relative_error(logits[1], logits[0]) < 2e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_the_twin_computes_what_transformers_does(name: str) -> None:
    config = FAMILIES[name]
    weights = random_weights(config, seed=2)
    expected = transformers_logits(transformers_model(config, weights, "float64"), ids_for(config))
    assert relative_error(reference.forward(config, weights, ids_for(config)), expected) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_every_part_of_a_family_shows(name: str) -> None:
    """A text on which leaving a part out changes nothing would not show that llmcl has it."""
    config = FAMILIES[name]
    weights = random_weights(config, seed=1)
    if config.qkv_bias:  # the shapes stay those of the configuration
        without_bias = {key: 0.0 * value if key.endswith(".bias") else value for key, value in weights.items()}
    logits = reference.forward(config, weights, ids_for(config))
    plain = small_config()
    for field in (
        "activation",
        "embedding_scale",
        "attention_scale",
        "attention_soft_cap",
        "logit_soft_cap",
        "windows",
    ):
        if getattr(config, field) != getattr(plain, field):
            changed = dataclasses.replace(config, **{field: getattr(plain, field)})
            assert relative_error(reference.forward(changed, weights, ids_for(config)), logits) > 100 * BOUND, field
    if config.qkv_bias:
        assert relative_error(reference.forward(config, without_bias, ids_for(config)), logits) > 100 * BOUND
    if config.windows:
        off_by_one = tuple(window and window + 1 for window in config.windows)
        changed = dataclasses.replace(config, windows=off_by_one)
        assert relative_error(reference.forward(changed, weights, ids_for(config)), logits) > 10 * BOUND
