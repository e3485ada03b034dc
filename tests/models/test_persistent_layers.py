"""All layers of a decode step in a persistent kernel against the separate launches: every buffer that they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import TINY_SHAPE

from llmcl.attention.masks import alibi, sliding_window
from llmcl.attention.mods import bind_mods, trace_mods
from llmcl.engine.loading import load_random
from llmcl.kernels.nvidia.persistent_layers import NvidiaPersistentLayers
from llmcl.models.config import ModelConfig
from llmcl.models.kv_cache import KVCache
from llmcl.models.model import Model
from llmcl.models.stack import decode_layers
from llmcl.runtime.device import Device

SHAPES = {
    "gqa4": {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 1},
    "gqa3": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "wide": {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8},
}


def unsupported_reason(model: Model) -> str | None:
    row = NvidiaPersistentLayers()
    if not row.supports_device(model.device):
        return "the device is not NVIDIA's"
    layers = decode_layers(model.layers, model.decode_ops)
    assert layers is not None
    return row.unsupported_reason(model.device, layers)


def config_file(folder: Path, shape: dict[str, Any]) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "vocab_size": 320,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **shape,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def buffers(model: Model, config: ModelConfig, position: int) -> dict[str, np.ndarray]:
    device, shape = model.device, model.cache.shape
    sizes = {
        "x": config.hidden_size,
        "qkv": (config.n_q_heads + 2 * config.n_kv_heads) * config.head_dim,
        "attended": config.n_q_heads * config.head_dim,
        "ffn": config.intermediate_size,
        "logits": config.vocab_size,
    }
    found = {name: device.read(getattr(model.act, name), np.float32, (n,)) for name, n in sizes.items()}
    for name in ("qkv", "attended", "ffn"):
        whole = device.read(
            model.persistent_intermediates.get(name, getattr(model.act, name)), np.uint32, (sizes[name],)
        )
        found[name] = (whole & ~np.uint32(1)).view(np.float32)  # without flags
    for i, (k, v) in enumerate(zip(model.cache.k, model.cache.v, strict=True)):
        tiles = device.read(k, np.float16, (shape.n_kv_heads, shape.capacity // 16, shape.head_dim, 16))
        keys = tiles.swapaxes(2, 3).reshape(shape.n_kv_heads, shape.capacity, shape.head_dim)
        found[f"k{i}"] = keys[:, :position].astype(np.float32)
        values = device.read(v, np.float16, (shape.n_kv_heads, shape.capacity, shape.head_dim))
        found[f"v{i}"] = values[:, :position].astype(np.float32)
    return found


@pytest.mark.parametrize("with_mods", [False, True], ids=["plain", "mods"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, dtype) for shape in SHAPES for dtype in ("bfloat16", "float16")), ("gqa4", "q4_0"), ("gqa3", "q8_0")]
    + [("wide", dtype) for dtype in ("q4_0", "q4_k", "q6_k")],
)
def test_equals_the_separate_launches(device: Device, tmp_path: Path, shape: str, dtype: str, with_mods: bool) -> None:
    if device.entry.ptx_arch < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    # Rounding to 8 bits would make a step of the smallest difference.
    options: dict[str, Any] = {"dtype": dtype, "activation_dtype": "float32", "max_context": 1024}
    loaded = load_random(config_file(tmp_path, SHAPES[shape]), device=device, **options)
    config, weights = loaded.config, loaded.model.weights
    mods = ()
    if with_mods:
        mods = (bind_mods(device, *trace_mods(alibi(config.n_q_heads), sliding_window(300))),) * config.n_layers

    def model(persistent: bool) -> Model:
        cache = KVCache(device, config, 1024, "float16")
        return Model(device, config, weights, cache, mods=mods, persistent=persistent)

    one, separate = model(True), model(False)
    assert unsupported_reason(one) is None
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 320, 577).tolist()
    for which in (one, separate):
        which.prefill(which.cache.sequence(), prompt)
    for step in range(40):
        token = int(rng.integers(0, 320))
        for which in (one, separate):
            which.decode_token(which.cache.sequence(), token)
        if step % 13:
            continue
        position = one.cache.sequence().position
        expected = buffers(separate, config, position)
        for name, found in buffers(one, config, position).items():
            error = np.abs(found - expected[name]).max() / np.abs(expected[name]).max()
            # Another number of key splits rounds differently, and a key or value is then rounded to 16 bits.
            assert error < (2.0**-9 if name[0] in "kv" else 1e-3), (name, step)


@pytest.mark.parametrize(("shape", "dtype"), [("wide", "q4_k"), ("gqa3", "q4_0"), ("wide", "q8_0")])
def test_rounded_activations_are_the_same_to_the_bit(device: Device, tmp_path: Path, shape: str, dtype: str) -> None:
    """A first token, whose attention is the same however the keys are split."""
    if device.entry.ptx_arch < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    loaded = load_random(config_file(tmp_path, SHAPES[shape]), device=device, dtype=dtype, max_context=64)
    config, weights = loaded.config, loaded.model.weights
    found = []
    for persistent in (True, False):
        model = Model(device, config, weights, KVCache(device, config, 64, "float16"), persistent=persistent)
        assert unsupported_reason(model) is None
        model.decode_token(model.cache.sequence(), 5)
        found.append(buffers(model, config, 1))
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0"])
def test_decodes_the_same_twice(device: Device, tmp_path: Path, dtype: str) -> None:
    if device.entry.ptx_arch < 80:
        pytest.skip("only NVIDIA GPUs run a model's layers in a persistent kernel")
    llm = load_random(config_file(tmp_path, SHAPES["wide"]), device=device, dtype=dtype, max_context=512)
    prompt = list(range(100))
    first = llm.generate(prompt, max_tokens=200, ignore_eos=True).token_ids
    assert llm.generate(prompt, max_tokens=200, ignore_eos=True).token_ids == first


def test_other_devices_keep_separate_launches(default_device: Device, tmp_path: Path) -> None:
    if default_device.entry.ptx_arch >= 80:
        pytest.skip("this device is an NVIDIA GPU")
    llm = load_random(config_file(tmp_path, TINY_SHAPE), device=default_device, max_context=64)
    assert "NVIDIA" in str(unsupported_reason(llm.model))
