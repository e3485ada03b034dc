"""What configurations of published models say beyond the usual, each beside transformers on a random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from helpers import relative_error, transformers_logits
from late_kernels import compile_when_used
from safetensors.numpy import load_file, save_file

import llmcl
from llmcl import reference
from llmcl.checkpoint import open_checkpoint
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
N_TOKENS = 80
# The sizes of `helpers.small_config`, and with latents those of `family_configs.LATENT`: their kernels are shared.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "head_dim": None,
    "n_routed_experts": 9,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 48,
    "v_head_dim": 32,
}
IN_GROUPS = {"n_group": 3, "topk_group": 2}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
# One position on each of three axes, which are equal in text.
AXES = {"type": "mrope", "mrope_section": [2, 3, 3]}
INTERLEAVED_AXES = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
MUSE_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_TOWER = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows in all layers": (
        "qwen3_moe",
        EXPERTS | {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "rope_scaling beside rope_parameters": ("llama", {"rope_parameters": PLAIN, "rope_scaling": YARN}),
    "rope_scaling beside scaled rope_parameters": (
        "qwen3",
        {"rope_parameters": YARN | {"rope_theta": 77.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "rope_scaling beside those of each kind": (
        "olmo3",
        {
            "rope_parameters": {"full_attention": PLAIN | {}, "sliding_attention": PLAIN | {}},
            "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            "sliding_window": 13,
        },
    ),
    "frequencies for each kind of layer": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": YARN | {"full_attention": PLAIN, "sliding_attention": PLAIN},
                "sliding_attention": PLAIN | {"rope_theta": 5e3},
            },
            "num_hidden_layers": 4,
            "sliding_window": 13,
        },
    ),
    "gemma2 with biases and a head": (
        "gemma2",
        {"attention_bias": True, "tie_word_embeddings": False, "sliding_window": 9, "query_pre_attn_scalar": 16},
    ),
    "gemma3 with biases": ("gemma3_text", {"attention_bias": True, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "qwen3 with biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe with biases": ("qwen3_moe", EXPERTS | {"attention_bias": True}),
    "deepseek_v3 with biases": ("deepseek_v3", LATENT | IN_GROUPS | {"attention_bias": True}),
    "deepseek_v3 with biases, queries whole": (
        "deepseek_v3",
        LATENT | IN_GROUPS | {"attention_bias": True, "q_lora_rank": None},
    ),
    "deepseek_v2 with norm_topk_prob": ("deepseek_v2", LATENT | {"topk_method": "greedy", "norm_topk_prob": True}),
    "glm4_moe_lite with biases": ("glm4_moe_lite", LATENT | {"attention_bias": True, "head_dim": 16}),
    "smollm3 with windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 11, "num_hidden_layers": 4},
    ),
    "hunyuan with an alpha": (
        "hunyuan_v1_dense",
        {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "command a with biases": (
        "cohere2",
        {"attention_bias": True, "sliding_window": 9, "num_hidden_layers": 4},
    ),
    "llama4": (
        "llama4_text",
        {"num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_local_experts": 6, "intermediate_size": 48}
        | {"intermediate_size_mlp": 96, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.5},
    ),
    "muse_glimmer": (
        "muse_glimmer",
        {
            "text_config": SIZES
            | {"sliding_window": 11, "num_hidden_layers": 5, "attention_bias": True, "qk_scale_factor": 2.5}
        },
    ),
    "qwen3_vl": ("qwen3_vl", {"text_config": SIZES | {"rope_scaling": INTERLEAVED_AXES}, "tie_word_embeddings": True}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"text_config": SIZES | EXPERTS | {"rope_scaling": INTERLEAVED_AXES}, "tie_word_embeddings": False},
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {"text_config": SIZES | {"rope_scaling": AXES, "head_dim": None}}),
    "qwen2_vl": ("qwen2_vl", {"text_config": SIZES | {"rope_scaling": AXES, "head_dim": None}}),
    "smolvlm": ("smolvlm", {"text_config": SIZES | {"model_type": "llama"}}),
    "mistral3 that says nothing of its head": ("mistral3", {"text_config": SIZES | {"model_type": "mistral"}}),
    "mistral3 around ministral3": ("mistral3", {"text_config": SIZES | {"model_type": "ministral3"}}),
    "mistral3 whose text part contradicts it": (
        "mistral3",
        {"text_config": SIZES | {"model_type": "mistral", "tie_word_embeddings": True}, "tie_word_embeddings": False},
    ),
}


def random_model(model_type: str, settings: dict[str, Any]) -> Any:
    """transformers' model of these settings, with all weights and biases random."""
    import torch
    import transformers

    if "text_config" in settings:
        others = {"vision_config": TOWER, "image_token_index": 10}
        if model_type.startswith("qwen"):
            others = {"vision_config": QWEN_TOWER}
        if model_type == "muse_glimmer":
            others = {"vision_config": MUSE_TOWER, "out_hidden_size": 128, "projector_hidden_size": 32}
        settings = settings | others
        kind = transformers.AutoModelForImageTextToText
    else:
        settings, kind = SIZES | settings, transformers.AutoModelForCausalLM
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.CONFIG_MAPPING[model_type](**settings, **ids, attn_implementation="eager")
    torch.manual_seed(3)
    model = kind.from_config(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.normal_(1.0 if "norm" in name else 0.0, 0.1 if values.dim() == 1 else 0.2)
    return model


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama4", "muse_glimmer"])
def test_decode_and_the_twin_compute_what_transformers_does(name: str, default_device: Device, tmp_path: Path) -> None:
    """Token by token, behind a window or a chunk and behind none."""
    model = random_model(*CONFIGS[name])
    folder = saved(model, tmp_path / "model")
    ids = np.random.default_rng(0).integers(5, 99, 40).tolist()
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=128) as llm:
        answer = llm.generate(ids, max_tokens=20, ignore_eos=True).token_ids
    expected = transformers_logits(model, [*ids, *answer])
    assert answer == expected[len(ids) - 1 : -1].argmax(axis=-1).tolist()
    with open_checkpoint(str(folder)) as checkpoint:
        weights = {
            name: checkpoint.rows(name, 0, info.n_rows).view(np.float32).reshape(info.shape)
            for name, info in checkpoint.tensors.items()
        }
        assert relative_error(reference.forward(checkpoint.config, weights, [*ids, *answer]), expected) < BOUND


@pytest.mark.slow
def test_experts_of_qwen3_vl_are_published_transposed(default_device: Device, tmp_path: Path) -> None:
    """Each expert's matrices by columns, where transformers 5 saves rows."""
    model = random_model(*CONFIGS["qwen3_vl_moe"])
    ids = np.random.default_rng(0).integers(5, 99, N_TOKENS).tolist()
    folder = saved(model, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name, values in tensors.items():
        if ".experts." in name:
            tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    save_file(tensors, folder / "model.safetensors")
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=128) as llm:
        assert relative_error(llm.logits(ids), transformers_logits(model, ids)) < BOUND


# The others compile kernels of further shapes.
FAST = (
    "rope_scaling beside rope_parameters",
    "mistral3 that says nothing of its head",
    "mistral3 whose text part contradicts it",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in CONFIGS]
)
def test_published_settings_are_computed_as_transformers_does(
    name: str, default_device: Device, tmp_path: Path
) -> None:
    model = random_model(*CONFIGS[name])
    ids = np.random.default_rng(0).integers(5, 99, N_TOKENS).tolist()
    expected = transformers_logits(model, ids)
    options: dict[str, Any] = {"device": default_device, "dtype": "float32", "max_context": 128}
    with llmcl.load(str(saved(model, tmp_path / "model")), **options) as llm:
        assert relative_error(llm.logits(ids), expected) < BOUND
