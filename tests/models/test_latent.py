"""Models with latent attention: their cache, steps of several sequences, files of both kinds, what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import FAMILIES
from family_files import save_gguf
from helpers import random_weights, relative_error, save_folder, to_storage, with_blocks
from late_kernels import compile_when_used
from latent_weights import with_joined_heads

import llmcl
from llmcl import reference
from llmcl.architectures.config import config_from_gguf, config_from_hf
from llmcl.architectures.families.blocks import Scores
from llmcl.architectures.families.latent import KEY_VALUE, KEYS, VALUES
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.latent import split_latents
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.engine.llm import LLM
from llmcl.errors import CheckpointError, UnsupportedModelError
from llmcl.models.batch import make_batch
from llmcl.models.kv_cache import kv_bytes_per_position
from llmcl.models.no_token import why_no_token
from llmcl.models.stack import why_separate
from llmcl.ops.sample import SamplingParams

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

CONFIG = FAMILIES["glm4_moe_lite"]
WEIGHTS = random_weights(CONFIG, seed=1)
IDS = np.random.default_rng(3).integers(3, CONFIG.vocab_size, 90).tolist()

Run = Callable[..., subprocess.CompletedProcess[str]]

FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.8,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("glm"), CONFIG, WEIGHTS))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with llmcl.load(folder, dtype="float32", max_context=128) as llm:
        yield llm


def last_logits(llm: LLM) -> np.ndarray:
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


def decoded(llm: LLM, n_prompt: int) -> np.ndarray:
    """The logits after IDS, of which the first n_prompt are prefilled."""
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.prefill(llm.sequence, IDS[:n_prompt])
    for token in IDS[n_prompt:]:
        llm.model.decode_token(llm.sequence, token)
    return last_logits(llm)


def test_decode_and_prefill_compute_what_the_twin_does(llm: LLM) -> None:
    """Which has keys and values of each head."""
    expected = reference.forward(CONFIG, WEIGHTS, IDS)
    assert relative_error(llm.logits(IDS), expected) < 1e-4
    assert relative_error(decoded(llm, 80), expected[-1]) < 1e-4


@pytest.mark.parametrize("name", ["glm4_moe_lite-grouped", "deepseek_v3", "deepseek_v2"])
def test_every_part_of_rotation_and_router_shows(name: str) -> None:
    """A text on which leaving a part out changes nothing would not show that llmcl has it."""
    config = FAMILIES[name]
    weights = random_weights(config, seed=1)
    logits = reference.forward(config, weights, IDS)

    def differ(change: Callable[[Any], Any]) -> bool:
        changed = with_blocks(config, lambda block: change(block.settings) if hasattr(block, "settings") else {})
        return relative_error(reference.forward(changed, weights, IDS), logits) > 1e-2

    def of_scores(**changes: Any) -> Callable[[Any], Any]:
        def change(settings: Any) -> dict[str, Any]:
            if getattr(settings, "scores", None) is None:
                return {}
            return {"settings": replace(settings, scores=replace(settings.scores, **changes))}

        return change

    def halves(settings: Any) -> dict[str, Any]:
        return {"settings": replace(settings, interleaved=False)} if hasattr(settings, "interleaved") else {}

    assert differ(halves)
    assert differ(of_scores(scale=1.0)) and differ(of_scores(n_groups=1, top_groups=1))
    assert differ(of_scores(corrected=False)) == (name != "deepseek_v2")


def test_a_token_takes_one_row_of_the_cache(llm: LLM) -> None:
    assert kv_bytes_per_position(CONFIG, "float32") == CONFIG.n_layers * 4 * CONFIG.head_dim
    assert len(llm.model.cache.buffers()) == CONFIG.n_layers
    assert sum(buffer.nbytes for buffer in llm.model.cache.buffers()) == 128 * kv_bytes_per_position(CONFIG, "float32")
    assert why_separate(llm.model.layers, llm.model.decode_ops) is None or llm.device.entry.fact("ptx_arch") >= 80
    assert {type(block).__name__ for layer in llm.model.layers for block in layer[:1]} == {"LatentBlock"}
    assert llm.model.layers[0][0].why_separate == "its attention has latents in place of keys and values"
    assert llm.model.layers[1][1].why_separate == "its router chooses experts by scores"


def test_numbers_that_are_not_finite_are_found_in_the_cache(llm: LLM) -> None:
    decoded(llm, 80)
    cache = llm.model.cache.k[1]
    assert cache is not None
    assert "all keys and values are finite" in why_no_token(llm.model, llm.sequence)
    llm.device.write(cache, np.full(CONFIG.head_dim, np.nan, np.float32), 4 * CONFIG.head_dim)
    assert "latents of layer 1 are the first" in why_no_token(llm.model, llm.sequence)
    decoded(llm, 80)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "q8_0"])
def test_a_rounded_cache(folder: str, kv_dtype: str, default_device: Any, tmp_path: Path) -> None:
    config, weights = CONFIG, WEIGHTS
    options: dict[str, Any] = {"dtype": "float32", "activation_dtype": "float32", "max_context": 128}
    if kv_dtype == "q8_0":
        config = FAMILIES["glm4_moe_lite-grouped"]  # whose rows are a multiple of 32 numbers
        weights = random_weights(config, seed=5)
        folder = str(save_folder(tmp_path / "grouped", config, weights))
    twin = reference.forward(config, weights, IDS, kv_dtype=kv_dtype)
    with llmcl.load(folder, device=default_device, kv_dtype=kv_dtype, **options) as llm:
        assert relative_error(llm.logits(IDS), twin) < 4e-3
        assert relative_error(decoded(llm, 70), twin[-1]) < 4e-3


@pytest.mark.parametrize("page_tokens", [pytest.param(None, marks=pytest.mark.slow), 64])
def test_rows_of_several_sequences(page_tokens: int | None, folder: str, default_device: Any) -> None:
    """Prompts beside rows that decode, and rows of one token each: as each is by itself."""
    prompts = [IDS[:70], IDS[3:5], IDS[40:]]
    options: dict[str, Any] = {"dtype": "float32", "max_context": 128, "device": default_device}
    with llmcl.load(folder, kv_page_tokens=page_tokens, **options) as llm:
        alone = [llm.generate(prompt, max_tokens=6, ignore_eos=True).token_ids for prompt in prompts]
        batch = make_batch(llm.model, 3, 128, 64)
        running: list[Any] = []
        ids: list[list[int]] = []
        for prompt in prompts:
            running.append(batch.cache.sequence())
            batch.start(running[-1], SamplingParams(seed=0))
            ids.append(batch.read([(running[-1], prompt)])())
        for _ in range(5):
            for sequence, own, token in zip(running, ids, batch.decode(running)(), strict=True):
                sequence.token_ids.append(own[-1])
                own.append(token)
        assert ids == alone


@pytest.mark.slow
def test_an_engine_reads_prompts_beside_answers(folder: str, default_device: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    prompts = [IDS[:50], IDS[10:75], IDS[2:9], IDS[:60]]
    with llmcl.load(folder, device=default_device, dtype="float32", max_context=128) as llm:
        alone = [llm.generate(prompt, **options).token_ids for prompt in prompts]
        with llm.engine(max_sequences=3, max_step_tokens=40, kv_pages=6) as engine:
            assert [answer.token_ids for answer in engine.generate(prompts, **options)] == alone


@pytest.mark.slow
def test_drafts_are_verified(folder: str, default_device: Any) -> None:
    prompt = IDS[:20] * 3
    options: dict[str, Any] = {"device": default_device, "dtype": "float32", "max_context": 128}
    answers = []
    for prompt_lookup in (False, True):
        with llmcl.load(folder, prompt_lookup=prompt_lookup, **options) as llm:
            answers.append(llm.generate(prompt, max_tokens=32, ignore_eos=True).token_ids)
    assert answers[0] == answers[1]


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["F32", "BF16", "Q8_0"])
def test_joined_keys_and_values_are_taken_apart(format: str) -> None:
    """Row for row what they are; keys of a quantised matrix in float32, since its blocks run along the rows."""
    config = FAMILIES["glm4_moe_lite-grouped"]
    weights = random_weights(config, seed=2)
    name = f"model.layers.1.{KEY_VALUE}"
    joined = with_joined_heads(config, weights)[name]
    if format == "Q8_0":
        data = quantize_rows(joined, format)
        exact = reference.dequantize(format, data)
    else:
        exact = np.asarray(reference.round_to(joined, {"F32": "float32", "BF16": "bfloat16"}[format]), np.float32)
        data = to_storage(exact, {"F32": "float32", "BF16": "bfloat16"}[format]).view(np.uint8)
    of, heads = config.latent, config.n_q_heads
    assert of is not None
    found = split_latents({name: StoredTensor(joined.shape, format, data.ravel())}, config)
    blocks = exact.reshape(heads, of.nope + of.value, of.rank)
    for own, expected in ((KEYS, blocks[:, : of.nope].swapaxes(1, 2)), (VALUES, blocks[:, of.nope :])):
        tensor = found[f"model.layers.1.{own}"]
        expected = expected.reshape(tensor.shape)
        assert tensor.format == ("F32" if format == "Q8_0" and own == KEYS else format)
        assert tensor.view is not None and len(tensor.view) == len(expected)
        for start, stop in ((0, len(expected)), (5, 6), (of.rank - 3, of.rank + 7), (7, 7)):
            rows = tensor.view[start:stop]
            values = reference.dequantize(tensor.format, np.ascontiguousarray(rows))
            np.testing.assert_array_equal(values, expected[start:stop])


def test_gguf_files_of_both_kinds_are_the_model(default_device: Any, tmp_path: Path) -> None:
    """k_b and v_b as later converters write them, and kv_b as those before."""
    expected = reference.forward(CONFIG, WEIGHTS, IDS)[-1]
    logits = []
    for joined in (False, True):
        path = save_gguf(tmp_path / f"{joined}.gguf", CONFIG, WEIGHTS, joined_heads=joined)
        options: dict[str, Any] = {"dtype": "float32", "max_context": 128}
        with llmcl.load(str(path), device=default_device, **options) as llm:
            assert llm.config.latent == CONFIG.latent and llm.config.head_dim == CONFIG.head_dim
            logits.append(decoded(llm, 85))
    assert relative_error(logits[0], expected) < 1e-4
    np.testing.assert_array_equal(*logits)


def test_a_router_with_a_bias_and_no_key_has_sigmoids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GLM-4.7-Flash was published; llama.cpp takes the same."""
    import gguf

    monkeypatch.setattr(gguf.GGUFWriter, "add_expert_gating_func", lambda writer, kind: None)
    path = save_gguf(tmp_path / "model.gguf", CONFIG, WEIGHTS)
    with open_checkpoint(str(path)) as checkpoint:
        assert checkpoint.gguf_metadata is not None
        assert "deepseek2.expert_gating_func" not in checkpoint.gguf_metadata
        assert checkpoint.config.layers == CONFIG.layers


def test_the_layer_that_drafts_is_left_out(folder: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(Path(folder) / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert set(checkpoint.tensors) == set(CONFIG.tensors())


def test_joined_heads_of_another_shape_are_named(folder: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(Path(folder) / "model.safetensors")
    tensors[f"model.layers.2.{KEY_VALUE}"] = np.zeros((64, 32), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.kv_b_proj.*\[64, 32\], expected \[320, 32\]"):
        open_checkpoint(str(tmp_path))


@pytest.mark.slow
def test_random_weights_of_a_shape(tmp_path: Path, default_device: Any) -> None:
    shape = FLASH | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    shape |= {"vocab_size": 131, "n_routed_experts": 4, "moe_intermediate_size": 32, "q_lora_rank": None}
    shape |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    with llmcl.load_random(str(file), device=default_device.entry.index, dtype="q4_0", max_context=64) as llm:
        assert np.isfinite(llm.logits(IDS[:20])).all()


def test_there_are_no_sizes_to_tune(run_here: Run, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(FLASH))
    done = run_here("llmcl", "tune", "--random", str(file), "--kernel", "decode", "-q")
    assert done.returncode == 2 and "latent attention" in done.stderr and "--kernel products" in done.stderr


# ---- configurations ----------------------------------------------------------------------------------------------


def test_the_published_sizes_of_glm_flash() -> None:
    config = config_from_hf(FLASH)
    assert (config.n_q_heads, config.n_kv_heads, config.head_dim, config.rotary_dim) == (20, 1, 576, 64)
    assert config.attention_scale == 256**-0.5
    assert kv_bytes_per_position(config, "bfloat16") == 47 * 2 * 576
    kinds = [len(block.tensors(config)) for layer in config.layers for block in layer[1:]]
    assert kinds[0] == 4 and len(set(kinds[1:])) == 1 and kinds[1] > 64 * 3
    of = config.layers[1][1].settings
    assert (of.n_experts, of.top_k, of.size, of.shared_size, of.renormalize) == (64, 4, 1536, 1536, True)
    assert of.scores == Scores(scale=1.8)
    assert round(config.n_parameters() / 1e9, 1) == 29.9


def test_yarn_widens_the_scores() -> None:
    lite = FLASH | {"architectures": None, "model_type": "deepseek_v2", "rope_scaling": YARN, "q_lora_rank": None}
    lite |= {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
    config = config_from_hf(lite)
    amplitude = 0.1 * 0.707 * np.log(40.0) + 1.0
    assert config.attention_scale == pytest.approx(256**-0.5 * amplitude**2)
    assert config.rope_scaling is not None and config.rope_scaling.amplitude == 1.0
    assert config.layers[1][1].settings.scores is None
    groups = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    of = config_from_hf(lite | groups).layers[1][1].settings.scores
    assert of == Scores("softmax", 8, 3, 16.0, corrected=False) and of.per_group == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_lora_rank": 500}, UnsupportedModelError, "latents of 500 numbers; it must be a multiple of 16"),
        ({"qk_rope_head_dim": 512}, CheckpointError, "qk_rope_head_dim is 512"),
        ({"qk_nope_head_dim": 0}, CheckpointError, "qk_nope_head_dim is 0"),
        ({"rope_interleave": 1}, CheckpointError, "rope_interleave is 1"),
        ({"n_group": 5, "topk_group": 2}, CheckpointError, "4 of 64 experts cannot be chosen from 2 of 5 groups"),
        ({"n_group": 64, "topk_group": 2}, CheckpointError, "4 of 64 experts cannot be chosen from 2 of 64 groups"),
        ({"n_group": 2, "topk_group": 4}, CheckpointError, "topk_group is 4"),
        ({"mlp_layer_types": ["sparse"]}, CheckpointError, "mlp_layer_types .* for each of 47 layers"),
        ({"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func 'softmax'"),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModelError, "quantised by 'hqq'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        config_from_hf(FLASH | changes)


def test_which_layers_have_experts() -> None:
    def dense(**changes: Any) -> list[int]:
        config = config_from_hf(FLASH | changes)
        return [i for i, (_, mlp) in enumerate(config.layers) if not hasattr(mlp, "settings")]

    assert dense() == [0]
    assert dense(first_k_dense_replace=3) == [0, 1, 2]
    assert dense(mlp_layer_types=["sparse"] * 45 + ["dense"] * 2) == [45, 46]


def test_older_gguf_files_have_the_sizes_of_a_head() -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 27,
        "deepseek2.context_length": 163840,
        "deepseek2.embedding_length": 2048,
        "deepseek2.feed_forward_length": 10944,
        "deepseek2.attention.head_count": 16,
        "deepseek2.attention.head_count_kv": 16,
        "deepseek2.attention.layer_norm_rms_epsilon": 1e-6,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.attention.key_length": 192,
        "deepseek2.attention.value_length": 128,
        "deepseek2.rope.dimension_count": 64,
        "deepseek2.rope.scaling.type": "yarn",
        "deepseek2.rope.scaling.factor": 40.0,
        "deepseek2.rope.scaling.original_context_length": 4096,
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.0707,
        "deepseek2.vocab_size": 102400,
        "deepseek2.leading_dense_block_count": 1,
        "deepseek2.expert_count": 64,
        "deepseek2.expert_used_count": 6,
        "deepseek2.expert_shared_count": 2,
        "deepseek2.expert_feed_forward_length": 1408,
        "deepseek2.expert_weights_scale": 1.0,
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    config = config_from_gguf(metadata, ["token_embd.weight", "output.weight"])
    of, lite = config.latent, config.layers[1][1].settings
    assert of is not None
    assert (of.rank, of.rope, of.nope, of.value, of.query_rank) == (512, 64, 128, 128, 0)
    assert (lite.shared_size, lite.renormalize, lite.scores) == (2816, False, None)
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.0707 * np.log(40.0) + 1.0) ** 2)
