"""Small random models with a SigLIP tower, their folders, and mmproj files as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEXT = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 320,
}
# 64 patches of 6 pixels; heads of 24 columns, which the device pads to 32.
TOWER = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 6,
}
PREPROCESSING: dict[str, dict[str, Any]] = {
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 48, "width": 48},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "smolvlm": {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 144},
        "max_image_size": {"longest_edge": 48},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}
PREPROCESSING["idefics3"] = PREPROCESSING["smolvlm"]
PREPROCESSING["qwen2_5_vl"] = {"size": {"shortest_edge": 12 * 12 * 4, "longest_edge": 12 * 12 * 40}, "patch_size": 6}
PREPROCESSING["qwen3_vl"] = PREPROCESSING["qwen2_5_vl"]
PREPROCESSING["mistral3"] = {"size": {"longest_edge": 96}}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 136,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": 6,
    "window_size": 24,
    "fullatt_block_indexes": [1],
}
QWEN3_TOWER = {
    "depth": 3,
    "hidden_size": 96,
    "num_heads": 4,
    "intermediate_size": 160,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": 6,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
}
PIXTRAL_TOWER = TOWER | {"model_type": "pixtral", "intermediate_size": 136, "image_size": 96, "hidden_act": "silu"}
AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@cache
def random_model(model_type: str) -> Any:
    """In transformers, with random values in every tensor, norms and biases too."""
    import torch
    import transformers

    kinds = {
        "gemma3": "gemma3_text",
        "qwen2_5_vl": "qwen2_5_vl_text",
        "qwen3_vl": "qwen3_vl_text",
        "mistral3": "mistral",
    }
    text: dict[str, Any] = {"model_type": kinds.get(model_type, "llama"), **TEXT}
    tower, more = TOWER, {"image_token_id": 300}
    if model_type == "gemma3":
        more = {"image_token_index": 300, "mm_tokens_per_image": 16}
    elif model_type == "qwen2_5_vl":
        # heads as transformers has them: as wide as the hidden size together
        text |= {"num_attention_heads": 3, "head_dim": 16, "rope_parameters": AXES}
        tower = QWEN_TOWER
    elif model_type == "qwen3_vl":
        rope = AXES | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
        text |= {"num_hidden_layers": 3, "rope_parameters": rope}
        tower = QWEN3_TOWER
    elif model_type == "mistral3":
        tower, more = PIXTRAL_TOWER, {"image_token_index": 300}
    else:
        more["scale_factor"] = 2
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=tower, **more)
    torch.manual_seed(5)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            near = 1.0 if "norm" in name and name.endswith("weight") and "vision" in name else 0.0
            spread = 0.5 if values.ndim == 1 else values.shape[-1] ** -0.5
            values.copy_(near + spread * torch.randn_like(values))
    return model


def save_vision(folder: Path, model_type: str, dtype: str = "float32") -> Path:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    model = random_model(model_type)
    if dtype != "float32":
        state = {name: values.to(getattr(torch, dtype)) for name, values in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state)
    else:
        model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSING[model_type]))
    return folder


def image_features(model: Any, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """In transformers, [tiles * rows, hidden]."""
    import torch

    pixels = torch.from_numpy(values)
    with torch.no_grad():
        if model.config.model_type == "gemma3":
            out = model.model.get_image_features(pixels)
        else:
            out = model.model.get_image_features(pixels[None])
    features = out.pooler_output
    features = torch.cat(list(features)) if isinstance(features, (list, tuple)) else features
    rows: NDArray[np.float32] = features.reshape(-1, features.shape[-1]).float().numpy()
    return rows


def save_mmproj(path: Path, model_type: str, format: str = "F32", *, old_names: bool = False) -> Path:
    """Keys and names as llama.cpp's conversion writes them; names come from the package `gguf`.

    old_names: ffn_up and ffn_down have each other's names, as in files of the first converters.
    """
    import gguf

    model = random_model(model_type)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(TEXT["hidden_size"])
    writer.add_vision_image_size(TOWER["image_size"])
    writer.add_vision_patch_size(TOWER["patch_size"])
    writer.add_vision_embedding_length(TOWER["hidden_size"])
    writer.add_vision_feed_forward_length(TOWER["intermediate_size"])
    writer.add_vision_block_count(TOWER["num_hidden_layers"])
    writer.add_vision_head_count(TOWER["num_attention_heads"])
    writer.add_vision_image_mean([0.5, 0.5, 0.5])
    writer.add_vision_image_std([0.5, 0.5, 0.5])
    kind = gguf.VisionProjectorType
    writer.add_clip_projector_type(kind.GEMMA3 if model_type == "gemma3" else kind.IDEFICS3)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(2)
    if model_type != "gemma3":
        writer.add_vision_preproc_image_size(PREPROCESSING[model_type]["size"]["longest_edge"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, TOWER["num_hidden_layers"])
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if old_names else {}
    for name, tensor in model.state_dict().items():
        if "language_model" in name or "text_model" in name or name.startswith("lm_head") or ".head." in name:
            continue
        values = tensor.numpy()
        hf_name = name.replace("vision_tower.", "vision_tower.vision_model.").removeprefix("model.")
        hf_name = f"model.{hf_name}" if model_type != "gemma3" else hf_name
        hf_name = hf_name.replace("mm_input_projection_weight", "mm_input_projection.weight")
        if "soft_emb_norm" in hf_name:
            values = values + 1
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        for module, other in swapped.items():
            if f".{module}." in gguf_name:
                gguf_name = gguf_name.replace(module, other)
                break
        kept = values.ndim == 1 or "embd" in gguf_name or values.shape[-1] % 32
        if kept or format == "F32":
            writer.add_tensor(gguf_name, np.ascontiguousarray(values))
        else:
            type = gguf.GGMLQuantizationType[format]
            writer.add_tensor(gguf_name, gguf.quants.quantize(values, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
