"""LoRA adapters of random numbers, in PEFT's form, in llama.cpp's GGUF form, and added to a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from family_files import gguf_architecture, gguf_tensors, write_metadata
from gguf_reference import write_out
from helpers import weight_shapes
from numpy.typing import NDArray

from llmcl.architectures.config import ModelConfig

ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
EVERY = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
# As PEFT 0.21 writes it, without the settings that are null or {}.
SETTINGS: dict[str, Any] = {
    "base_model_name_or_path": "org/base",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 12,
    "lora_bias": False,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "rank_pattern": {},
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
Factors = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


def factors_of(config: ModelConfig, modules: Sequence[str] = EVERY, rank: int = 4, seed: int = 0) -> Factors:
    """A and B of each matrix of these modules, by module name."""
    rng = np.random.default_rng(seed)
    return {
        name.removesuffix(".weight"): (
            0.3 * rng.standard_normal((rank, shape[1]), np.float32) / np.sqrt(shape[1] / 64).astype(np.float32),
            0.3 * rng.standard_normal((shape[0], rank), np.float32),
        )
        for name, shape in weight_shapes(config).items()
        if name.removesuffix(".weight").rpartition(".")[2] in modules
    }


def changed(
    weights: Mapping[str, NDArray[np.float32]], factors: Factors, scale: float = 12 / 4
) -> dict[str, NDArray[np.float32]]:
    """The weights with scale B A added."""
    sums = {f"{name}.weight": weights[f"{name}.weight"] + scale * (b @ a) for name, (a, b) in factors.items()}
    return {**weights, **{name: values.astype(np.float32) for name, values in sums.items()}}


def save_peft(folder: Path, factors: Factors, tensors: Mapping[str, Any] | None = None, **settings: Any) -> Path:
    """Writes a PEFT folder. tensors: more of them."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named: dict[str, Any] = {}
    for name, pair in factors.items():
        named |= {f"base_model.model.{name}.lora_{letter}.weight": m for letter, m in zip("AB", pair, strict=True)}
    save_file(named | dict(tensors or {}), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def save_gguf_adapter(path: Path, config: ModelConfig, factors: Factors, alpha: float = 12.0, **metadata: str) -> Path:
    """Writes the file of llama.cpp's convert_lora_to_gguf.py, which permutes B as the converter permutes weights."""
    import gguf

    writer = gguf.GGUFWriter(path, gguf_architecture(config))
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | metadata).items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in factors.items():
        for gguf_name, permuted in gguf_tensors(config, {f"{name}.weight": b}):
            writer.add_tensor(f"{gguf_name}.lora_a", a)
            writer.add_tensor(f"{gguf_name}.lora_b", np.ascontiguousarray(permuted))
    return write_out(writer, path)


def save_q8_0(path: Path, config: ModelConfig, weights: Mapping[str, NDArray[np.float32]]) -> Path:
    """Writes the model as a GGUF file whose matrices are Q8_0."""
    import gguf

    writer = gguf.GGUFWriter(path, gguf_architecture(config))
    write_metadata(writer, config)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, values in gguf_tensors(config, weights):
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    return write_out(writer, path)
