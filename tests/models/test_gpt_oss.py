"""gpt-oss: its experts in MXFP4, from folders and GGUF files as they are published, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from expert_weights import experts_of, stacked_experts
from family_configs import APART, GROUPED
from family_files import save_gguf
from helpers import (
    random_weights,
    relative_error,
    rounded,
    small_config,
    transformers_class,
    transformers_logits,
    transformers_model,
)
from late_kernels import compile_when_used
from made_configs import gguf_of, hf
from tiers import is_full

import llmcl
from llmcl.architectures.config import ModelConfig, RopeScaling, config_from_gguf
from llmcl.architectures.families.blocks import ExpertSettings, layer_name
from llmcl.architectures.families.family import LayerSettings
from llmcl.checkpoint import open_checkpoint
from llmcl.convert import convert
from llmcl.errors import CheckpointError, UnsupportedModelError

if not is_full():  # the persistent kernels take seconds to compile
    pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
MATRIX_UNIT_BOUND = 0.03
CLOSE_CALL = 0.03  # between the logits of two experts: what matrix units round may choose the other one
YARN = RopeScaling("yarn", 32.0, original_max_position=64, truncate=False, amplitude=0.1 * np.log(32.0) + 1.0)


def config_of(experts: ExpertSettings, **changes: Any) -> ModelConfig:
    settings = [LayerSettings(window, bias=True, output_bias=True, experts=experts) for window in (20, None)]
    sizes = {"hidden_size": 64, "intermediate_size": experts.size, "rope_theta": 150000.0, "rope_scaling": YARN}
    return small_config("gpt_oss", settings=settings, **(sizes | changes))


CONFIGS = {
    "few": config_of(ExpertSettings(4, 2, 64)),
    "grouped": config_of(ExpertSettings(6, 4, 32), **GROUPED),
    "tied": config_of(ExpertSettings(5, 4, 96), tie_embeddings=True, **APART),
}


def expert_modules(config: ModelConfig) -> list[str]:
    return [
        layer_name(i, f"{module.format(e)}.weight")
        for i, block in experts_of(config).items()
        for e in range(block.settings.n_experts)
        for module in (block.gate, block.up, block.down)
    ]


def quantized(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights whose experts MXFP4 holds exactly, and bfloat16 the others."""
    from gguf import GGMLQuantizationType, quants

    weights = rounded(random_weights(config, seed), "bfloat16")
    kind = GGMLQuantizationType.MXFP4
    return weights | {
        name: quants.dequantize(quants.quantize(weights[name], kind), kind) for name in expert_modules(config)
    }


def save_folder(folder: Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> Path:
    """As gpt-oss is published: codes of neighbouring columns in a byte, and scales."""
    import torch
    from gguf import GGMLQuantizationType, quants
    from safetensors.torch import save_file

    folder.mkdir()
    whole = transformers_class(config).config.to_dict()
    whole |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(whole))
    tensors: dict[str, Any] = {}
    for name, values in stacked_experts(config, weights).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            continue
        rows = np.ascontiguousarray(values.swapaxes(1, 2))
        blocks = quants.quantize(rows, GGMLQuantizationType.MXFP4).reshape(*rows.shape[:2], -1, 17)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        tensors[f"{name}_blocks"] = torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)
        tensors[f"{name}_scales"] = torch.from_numpy(np.ascontiguousarray(blocks[..., 0]))
    save_file(tensors, folder / "model.safetensors")
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def chosen_by(model: Any, ids: list[int]) -> np.ndarray:
    """By how much the logit of the last chosen expert of a token is above that of the first that is not, in the layer
    where it is least: float32 [n_tokens].
    """
    import torch

    margins: list[np.ndarray] = []

    def note(router: Any, inputs: tuple[Any, ...], _: Any) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        logits = torch.nn.functional.linear(rows, router.weight, router.bias).sort(-1, descending=True).values
        margins.append((logits[:, router.top_k - 1] - logits[:, router.top_k]).numpy())

    hooks = [layer.mlp.router.register_forward_hook(note) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return np.min(margins, axis=0)


@pytest.mark.parametrize(
    "name", ["few", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "few")]
)
@pytest.mark.parametrize("kind", [pytest.param("folder", marks=pytest.mark.slow), "gguf"])
def test_experts_in_mxfp4_compute_what_transformers_does(
    name: str, kind: str, default_device: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On a CPU the first model is a persistent kernel."""
    if name != "few":
        request.getfixturevalue("separate_launches")
    config = CONFIGS[name]
    weights = quantized(config, seed=4)
    if kind == "folder":
        path = save_folder(tmp_path / "model", config, weights)
    else:
        path = save_gguf(tmp_path / "model.gguf", config, weights, expert_format="MXFP4")
    model = transformers_model(config, weights)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 70).tolist()
    expected = transformers_logits(model, ids)
    options: dict[str, Any] = {"device": default_device, "max_context": 128, "kv_dtype": "float32"}
    with llmcl.load(str(path), activation_dtype="float32", **options) as llm:
        assert llm.config.layers == config.layers and llm.config.rope_scaling == config.rope_scaling
        experts = llm.model.weights.layers[0][1].matrices
        assert [weight.dtype for weight in experts[1:]] == ["mxfp4", "mxfp4"]
        if default_device.entry.fact("ptx_arch"):  # its matrix units round what meets weights of 16 bits and MXFP4
            sure = chosen_by(model, ids) > CLOSE_CALL
            assert sure.mean() > 0.7
            assert relative_error(llm.logits(ids)[sure], expected[sure]) < MATRIX_UNIT_BOUND
            return
        assert relative_error(llm.logits(ids), expected) < BOUND
        answer = llm.generate(ids[:40], max_tokens=24, ignore_eos=True)
    choices = transformers_logits(model, [*ids[:40], *answer.token_ids])[39:-1].argmax(axis=-1)
    assert answer.token_ids == choices.tolist()


def test_a_folder_is_not_converted(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", CONFIGS["few"], quantized(CONFIGS["few"], seed=5))
    for target in ("other", "model.gguf"):
        with pytest.raises(UnsupportedModelError, match="gpt_oss"):
            convert(str(folder), tmp_path / target)


def test_a_gguf_file_is_quantised_anew_but_for_biases(tmp_path: Path) -> None:
    weights = quantized(CONFIGS["few"], seed=6)
    path = save_gguf(tmp_path / "model.gguf", CONFIGS["few"], weights, expert_format="MXFP4")
    smaller = convert(str(path), tmp_path / "q8_0.gguf", quantize="q8_0")
    with open_checkpoint(str(smaller)) as checkpoint:
        formats = {name: info.format for name, info in checkpoint.tensors.items()}
        assert {formats[name] for name in expert_modules(CONFIGS["few"])} == {"Q8_0"}
        for name in weights:
            if name.endswith((".bias", "sinks", "router.weight")):
                assert formats[name] == "F32"
                np.testing.assert_array_equal(checkpoint.array(name), weights[name])


def test_rows_of_a_folder_are_read_in_any_pieces(tmp_path: Path) -> None:
    config = CONFIGS["few"]
    weights = quantized(config, seed=5)
    with open_checkpoint(str(save_folder(tmp_path / "model", config, weights))) as checkpoint:
        for name in expert_modules(config):
            info = checkpoint.tensors[name]
            assert (info.format, info.shape) == ("MXFP4", weights[name].shape)
            np.testing.assert_array_equal(checkpoint.array(name), weights[name])
            pieces = [checkpoint.rows(name, i, min(i + 7, info.n_rows)) for i in range(0, info.n_rows, 7)]
            np.testing.assert_array_equal(np.concatenate(pieces), checkpoint.rows(name, 0, info.n_rows))


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("experts.gate_up_proj_blocks", lambda x: x[:-1], r"gate_up_proj_blocks.*\[3, .*expected"),
        ("experts.gate_up_proj_blocks", lambda x: x[:, :-1], r"gate_up_proj_blocks.*a multiple of 2"),
        ("experts.down_proj_scales", lambda x: x[:, :, :-1], "its scales are U8"),
        ("experts.down_proj_scales", None, "its scales are missing"),
        ("experts.down_proj_bias", lambda x: x[:, :-16], r"down_proj\.bias.*expected \[64\]"),
        ("self_attn.sinks", lambda x: x[:-1], r"sinks.*\[3\], expected \[4\]"),
    ],
)
def test_tensors_of_another_shape_are_named(tensor: str, change: Any, message: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_folder(tmp_path / "model", CONFIGS["few"], quantized(CONFIGS["few"], seed=5))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(tensor))
    changed = tensors.pop(name)
    if change is not None:
        tensors[name] = change(changed).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder))


@pytest.mark.slow
def test_random_weights_have_experts_in_mxfp4_alone(default_device: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    shape = transformers_class(CONFIGS["few"]).config.to_dict() | {"dtype": "bfloat16"}
    file.write_text(json.dumps(shape))
    with llmcl.load_random(str(file), device=default_device.entry.index, dtype="mxfp4", max_context=64) as llm:
        weights = llm.model.weights
        assert {weight.dtype for weight in weights.layers[0][0].matrices} == {"bfloat16"} == {weights.head.dtype}
        assert [weight.dtype for weight in weights.layers[0][1].matrices] == ["bfloat16", "mxfp4", "mxfp4"]
        assert np.isfinite(llm.logits([5, 17, 99])).all()


HF = {"model_type": "gpt_oss", "architectures": None, "head_dim": 64, "rope_parameters": None}


def test_what_config_json_leaves_out() -> None:
    sizes = {"sliding_window": 128, "num_local_experts": 32, "attention_bias": True}
    config = hf(**HF, **sizes, rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False})
    assert [config.attention(i).window for i in range(4)] == [128, None, 128, None]
    assert config.attention(0).bias and config.attention(0).output_bias and config.attention(0).sinks
    assert experts_of(config)[0].settings == ExpertSettings(32, 4, 1536)
    assert config.rope_scaling is not None and not config.rope_scaling.truncate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, r"swiglu_limit 5\.0.*it supports 7\.0"),
        ({"swiglu_alpha": None, "swiglu_limit": 7}, None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, None),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'"),
    ],
)
def test_other_gates_and_methods_are_refused(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert hf(**HF, **changes).architecture == "gpt_oss"
        return
    with pytest.raises(UnsupportedModelError, match=message):
        hf(**HF, **changes)


def test_an_answer_does_not_end_with_its_first_message() -> None:
    tokens = ["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"]
    keys = {"expert_count": 8, "expert_used_count": 2}
    metadata = gguf_of("gpt-oss", **{f"gpt-oss.{key}": value for key, value in keys.items()})
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 1}
    assert config_from_gguf(metadata, []).eos_token_ids == (1, 3)
    metadata["tokenizer.ggml.tokens"] = tokens[:3]
    assert config_from_gguf(metadata, []).eos_token_ids == (1, 2)
