"""Small models, error measures and device buffers that several tests share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ascii_tokenizer import ascii_tokenizer
from expert_weights import expert_options, experts_of, stacked_experts
from latent_weights import latent_options, with_joined_heads
from numpy.typing import NDArray
from own_heads import as_own_heads_need, own_heads_options
from recurrent_weights import as_stored, recurrent_options
from rotary_options import rotary_options

from llmcl.architectures.config import ModelConfig, RopeScaling
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.blocks import GatedMlp
from llmcl.architectures.families.family import LayerSettings
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.linear import PackedActivations
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.cpu.attention import PAIRED
from llmcl.reference import rope_table, round_bfloat16, to_tiles
from llmcl.runtime.device import Buffer, Device, Launch

LLAMA3_SCALING = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
LINEAR_SCALING = RopeScaling(kind="linear", factor=4.0)


def small_config(
    architecture: str = "llama",
    *,
    n_layers: int = 2,
    windows: tuple[int | None, ...] | None = None,
    soft_cap: float | None = None,
    settings: Sequence[LayerSettings] | None = None,
    **changes: Any,
) -> ModelConfig:
    """A 2-layer model that runs in milliseconds; its vocabulary is no multiple of any tile.

    windows: of its layers. settings: all that is said of each layer, in place of windows and soft_cap.
    """
    layer = FAMILIES[architecture].layer
    settings = settings or [LayerSettings(window, soft_cap) for window in windows or (None,) * n_layers]
    values: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers": tuple(map(layer, settings)),
        "n_q_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 32,
        "vocab_size": 131,
        "max_position": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return ModelConfig(**(values | changes))


def gemma2_config(windows: tuple[int | None, ...]) -> ModelConfig:
    """A small Gemma 2, which has more of what sets families apart than any other. windows: of its layers."""
    return small_config(
        architecture="gemma2",
        tie_embeddings=True,
        norm_offset=1.0,
        embedding_scale=8.0,
        attention_scale=40.0**-0.5,
        soft_cap=2.0,
        logit_soft_cap=3.0,
        windows=windows,
    )


def with_blocks(config: ModelConfig, change: Callable[[Any], dict[str, Any]]) -> ModelConfig:
    """The configuration with other values in the blocks of its layers. change(block): what to replace."""
    layers = tuple(tuple(replace(block, **change(block)) for block in blocks) for blocks in config.layers)
    return replace(config, layers=layers)


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer."""
    attends = config.attention_layers
    return tuple(config.attention(i).window if i in attends else None for i in range(config.n_layers))


def model_configs() -> dict[str, ModelConfig]:
    """The variations every implementation of the model is judged on, by name.

    hidden_size is rarely n_q_heads * head_dim, so that the two cannot be mistaken for each other;
    transformers wants it to be a multiple of n_q_heads.
    """
    return {
        "gqa3_dim64_untied": small_config(n_q_heads=9, n_kv_heads=3, head_dim=64, hidden_size=144),
        "gqa1_dim32_tied": small_config(n_q_heads=3, n_kv_heads=3, head_dim=32, tie_embeddings=True, hidden_size=96),
        "gqa4_dim80_linear": small_config(
            n_q_heads=4, n_kv_heads=1, head_dim=80, rope_scaling=LINEAR_SCALING, hidden_size=80
        ),
        "gqa8_dim128_llama3_tied": small_config(
            n_q_heads=8,
            n_kv_heads=1,
            head_dim=128,
            rope_scaling=LLAMA3_SCALING,
            rope_theta=500000.0,
            tie_embeddings=True,
        ),
        "gqa4_dim64_llama3": small_config(
            n_q_heads=8, n_kv_heads=2, head_dim=64, rope_scaling=LLAMA3_SCALING, intermediate_size=160
        ),
    }


@cache
def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of the model ([out_features, in_features] for matrices)."""
    family = FAMILIES[config.architecture]
    # that transformers holds otherwise than checkpoints
    if experts_of(config) or family.modules or family.recurrent or family.own_heads:
        return config.tensors()
    if config.architecture != "llama" or config.has_biases:
        return {name: tuple(value.shape) for name, value in transformers_class(config).named_parameters()}
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.n_q_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.n_layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (q_rows, hidden),
            layer + "self_attn.k_proj.weight": (kv_rows, hidden),
            layer + "self_attn.v_proj.weight": (kv_rows, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q_rows),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def random_weights(config: ModelConfig, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights by Hugging Face name, float32, scaled so that activations keep their size from layer to layer.

    The q and k projections are larger, or all scores would be near zero and attention a mere average.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, shape in weight_shapes(config).items():
        if len(shape) == 1:
            mean = 1.0 - config.norm_offset if name.endswith("norm.weight") else 0.0
            mean = 1.0 if name.endswith((".linear_attn.norm.weight", ".mamba.D")) else mean
            values = mean + (2.0 if name.endswith("sinks") else 0.2) * rng.standard_normal(shape)
            values = as_own_heads_need(config, name, values)
            if name.endswith(".act_fn.eps"):
                values = np.array([-1e-6])
            if name.endswith(".A_log"):  # texts are forgotten soon, or late
                values = rng.uniform(-4.0, 1.0, shape)
        else:
            gain = 1.5 if any(module in name for module in ("q_proj", "k_proj", "q_b_proj", "k_b_proj")) else 1.0
            if config.architecture == "gpt_oss" and ("gate_proj" in name or "up_proj" in name):
                gain = 3.0  # beyond its clamp
            values = rng.standard_normal(shape) * gain / np.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def transformers_model(config: ModelConfig, weights: Mapping[str, NDArray[Any]], dtype: str = "float32") -> Any:
    """transformers' model of the configuration with these weights, on the CPU, in evaluation mode.

    dtype: "float32" or "float64" (which transformers leaves for float32 in its norms and its rotary tables).
    """
    import torch

    model = transformers_class(config)
    weights = as_stored(config, with_joined_heads(config, stacked_experts(config, weights)))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    allowed = {"lm_head.weight"} if config.tie_embeddings else set()
    if unexpected or set(missing) - allowed:
        raise ValueError(f"weights do not fit the model: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.to(getattr(torch, dtype)).eval()


def transformers_class(config: ModelConfig) -> Any:
    """transformers' model of the configuration, with weights yet to be loaded."""
    import transformers
    from transformers.initialization import no_init_weights

    options: dict[str, Any] = recurrent_options(config) | own_heads_options(config)
    attention = config.attention(config.attention_layers[0])
    if config.architecture == "phi3":
        original = 4096 if config.rope_scaling is None else config.rope_scaling.original_max_position
        options["original_max_position_embeddings"] = original
    name = FAMILIES[config.architecture].hf_class.removesuffix("ForCausalLM")
    mlp = config.layers[0][-1]
    mlp_bias = isinstance(mlp, GatedMlp) and mlp.bias
    biases = {"attention_bias": attention.bias, "attention_out_bias": attention.output_bias, "mlp_bias": mlp_bias}
    options |= {key: has for key, has in biases.items() if key in FAMILIES[config.architecture].biases}
    if FAMILIES[config.architecture].optional_head_norms:
        options["use_qk_norm"] = attention.head_norms
    if FAMILIES[config.architecture].unrotated_layers:
        options["no_rope_layers"] = [int(config.attention(i).rotation != "none") for i in range(config.n_layers)]
    if FAMILIES[config.architecture].layer_norms:
        options |= {"layer_norm_eps": config.rms_norm_eps, "logit_scale": config.logit_scale}
    if FAMILIES[config.architecture].multipliers:
        options |= {
            "embedding_multiplier": config.embedding_scale,
            "residual_multiplier": config.residual_scale,
            "attention_multiplier": config.attention_scale,
            "logits_scaling": 1.0 / config.logit_scale,
        }
    if (experts := experts_of(config)) and (keys := FAMILIES[config.architecture].experts) is not None:
        of = next(iter(experts.values())).settings
        is_granite = config.architecture.startswith("granite")
        has_own_count = FAMILIES[config.architecture].recurrent or keys.enabled
        count = "num_experts" if has_own_count and not is_granite else "num_local_experts"
        if config.architecture == "nemotron_h":
            assert of.scores is not None
            count = "n_routed_experts"
            groups = {"n_group": of.scores.n_groups, "topk_group": of.scores.top_groups}
            options |= {**groups, "routed_scaling_factor": of.scores.scale}
        options |= {count: of.n_experts, keys.top_k: of.top_k, keys.size: of.size}
        options["experts_implementation"] = "eager"  # the others know no float64
        options |= {keys.renormalize: of.renormalize} if isinstance(keys.renormalize, str) else {}
        options |= {} if keys.shared_size is None else {keys.shared_size: of.shared_size}
        options |= latent_options(config) | expert_options(config)
        if config.architecture == "lfm2_moe":
            options |= {
                "num_dense_layers": min(experts),
                "use_expert_bias": of.scores is not None and of.scores.corrected,
            }
            options["routed_scaling_factor"] = 1.0 if of.scores is None else of.scores.scale
        elif len(experts) < config.n_layers and keys.dense_layers is None and config.architecture != "nemotron_h":
            options["mlp_only_layers"] = [i for i in range(config.n_layers) if i not in experts]
    if config.architecture == "granitemoehybrid" and not experts:
        options |= {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size}
    windows = windows_of(config)
    window = next((window for window in windows if window is not None), None)
    if config.architecture in ("mistral", "ministral3", "phi3"):
        options["sliding_window"] = window
    elif config.has_windows:  # Gemma-2's and Qwen's
        options["sliding_window"] = window
        options["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
    if FAMILIES[config.architecture].unrotated_full and window is None:
        options |= {"sliding_window": None, "layer_types": ["full_attention"] * config.n_layers}
    if config.architecture.startswith("qwen"):
        options["use_sliding_window"] = config.has_windows
    if config.architecture.startswith("gemma"):
        options |= {
            "final_logit_softcapping": config.logit_soft_cap,
            "attn_implementation": "eager",  # the others leave the soft cap out
        }
    if FAMILIES[config.architecture].query_pre_attn_scalar:
        assert config.attention_scale is not None
        options["query_pre_attn_scalar"] = round(config.attention_scale**-2)
    if config.architecture == "gpt_oss":
        options["attn_implementation"] = "eager"  # the others leave the sinks out
    if config.architecture == "gemma2":
        options["attn_logit_softcapping"] = attention.soft_cap
    class_config = transformers.CONFIG_MAPPING[config.architecture](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_q_heads,
        max_position_embeddings=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rotary_options(config),
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids),
        pad_token_id=None,
        **{
            "intermediate_size": config.intermediate_size,
            "num_key_value_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            **options,
        },
    )
    with no_init_weights():  # random ones of a whole model take seconds
        model = getattr(transformers, f"{name}ForCausalLM")(class_config)
    model.tie_weights()
    return model


FLOAT64 = 1e-12  # between two float64 computations of the same formula in another order


def normal(seed: int, *shape: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).standard_normal(shape)


def tensor(x: NDArray[Any]) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x))


def relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest absolute difference over the largest expected magnitude; infinite for NaN or infinities."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    if not np.all(np.isfinite(actual)):
        return float("inf")
    return float(np.max(np.abs(actual - expected)) / max(float(np.max(np.abs(expected))), 1e-300))


def rounded_operands(device: Device, dtype: str, exact: float, largest: float = 1.0) -> float:
    """The tolerance `exact`, or where the device's variant multiplies on matrix units, that of operands in `dtype`.

    largest: of what the tolerance is compared with, 1 for relative errors.
    """
    rounds = device.entry.fact("ptx_arch") >= 80 and dtype in ("float16", "bfloat16")
    return largest * {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype] if rounds else exact


# ------------------------------------------------------------------------------------------------------------
# Kernel tests: storage types, and buffers in which a read too far and a write too far both show
# ------------------------------------------------------------------------------------------------------------

DTYPES = ("float32", "float16", "bfloat16")

# A NaN as float32, and each half of it a NaN as float16 and as bfloat16.
POISON = np.uint32(0x7FE57FC1)
GUARD_WORDS = 64


def to_storage(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float values -> their bits as the device stores them: float32, or uint16 for float16 and bfloat16."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    if dtype == "float32":
        return x
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (round_bfloat16(x).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def from_storage(bits: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The inverse of to_storage: float32 values."""
    bits = np.ascontiguousarray(bits)
    if dtype == "float32":
        return bits
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def storage_type(dtype: str) -> type[np.generic]:
    return np.float32 if dtype == "float32" else np.uint16


def poisoned(device: Device, shape: tuple[int, ...], item_bytes: int = 4) -> Buffer:
    """A buffer for an array of this shape and GUARD_WORDS more words, all of it POISON."""
    buffer = device.alloc(math.prod(shape) * item_bytes + 4 * GUARD_WORDS, "test buffer")
    device.fill(buffer, POISON)
    return buffer


def with_poison(device: Device, array: NDArray[Any]) -> Buffer:
    """A buffer that holds `array` and, after it, POISON."""
    buffer = poisoned(device, array.shape, array.itemsize)
    device.write(buffer, array)
    return buffer


def read_guarded(device: Device, buffer: Buffer, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """The array at the start of a poisoned buffer; fails if the guard words after it are not as they were."""
    words = device.read(buffer, np.uint32, (buffer.nbytes // 4,))
    assert np.all(words[-GUARD_WORDS:] == POISON), "written past the end of the output"
    return words.view(dtype)[: math.prod(shape)].reshape(shape).copy()


def key_tiles(keys: NDArray[Any]) -> NDArray[Any]:
    """The cache's layout of keys: [heads, capacity, head_dim] -> [heads, capacity/16, head_dim, 16]."""
    heads, capacity, head_dim = keys.shape
    return np.ascontiguousarray(keys.reshape(heads, capacity // 16, 16, head_dim).swapaxes(2, 3))


def from_key_tiles(tiles: NDArray[Any]) -> NDArray[Any]:
    """The inverse of key_tiles."""
    heads, n_tiles, head_dim, _ = tiles.shape
    return np.ascontiguousarray(tiles.swapaxes(2, 3).reshape(heads, n_tiles * 16, head_dim))


def read_packed(device: Device, rows: PackedActivations, n: int) -> NDArray[np.float32]:
    """The first n rows of activations in blocks of 8 x 8, [n, k]."""
    bits = device.read(rows.buffer, np.uint16, (-(-n // 8), rows.k // 8, 8, 8))
    return from_storage(bits.swapaxes(1, 2).reshape(-1, rows.k)[:n], rows.layout.dtype)


def paired_buffers(step: StepState, values: int) -> list[Buffer]:
    """Where prefill on a CPU keeps as many keys' and values' numbers in bfloat16: see kernels/cpu/pair_cache.cl."""
    return [step.scratch(f"{PAIRED} {name}, {2 * values} bytes", 2 * values) for name in ("keys", "values")]


def rotations(head_dim: int, positions: NDArray[Any]) -> NDArray[np.float32]:
    """What `embed` leaves for these positions: float32 [n, head_dim], cosines, then sines."""
    cos, sin = rope_table(positions, small_config(head_dim=head_dim).inv_freq())
    return np.concatenate([cos, sin], axis=1).astype(np.float32)


def sinks_of(n_heads: int) -> NDArray[np.float32]:
    """Sinks from one that counts nothing to one beside which the keys hardly count."""
    return np.linspace(-60.0, 9.0, n_heads).astype(np.float32)


def step_state_at(device: Device, *, position: int, n_tokens: int, step: int = 0) -> StepState:
    """The step's state on the device, for kernels that do not read its tokens."""
    state = StepState(device, max(1, n_tokens))
    device.write(state.state, np.array([position, n_tokens, step], np.int32))
    return state


def weight_on_device(
    device: Device, values: NDArray[Any], dtype: str, *, alternating: bool = False, tiles_per_part: int = 0
) -> Weight:
    """A weight [rows, k] with poison after each buffer. alternating: values are gate rows, then as many up rows."""
    rows, k = values.shape
    tiles = to_tiles(to_storage(values, dtype))
    if alternating:
        tiles = tiles.reshape(2, -1, k, TILE_ROWS).swapaxes(0, 1).reshape(tiles.shape)
    n_tiles = tiles.shape[0]
    most = tiles_per_part or n_tiles
    parts = tuple(
        WeightPart(with_poison(device, tiles[first : first + most]), first, min(most, n_tiles - first), dtype)
        for first in range(0, n_tiles, most)
    )
    return Weight("test weight", rows, k, parts)


def run(launches: Iterable[Launch], n_tokens: int = 1) -> None:
    for launch in launches:
        launch.enqueue(n_tokens)


def save_folder(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, NDArray[Any]],
    dtype: str = "float32",
    max_shard_size: str = "1GB",
) -> Path:
    """Writes the model as transformers does, rounded to dtype, with a tokenizer of ASCII characters; its folder."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = transformers_model(config, weights).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def rounded(weights: Mapping[str, NDArray[Any]], dtype: str) -> dict[str, NDArray[np.float32]]:
    """The weights as `dtype` ("float32", "float16", "bfloat16") holds them, by PyTorch's rounding."""
    import torch

    return {
        name: torch.from_numpy(np.ascontiguousarray(value)).to(getattr(torch, dtype)).float().numpy()
        for name, value in weights.items()
    }


def transformers_logits(model: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """float32 [n_tokens, vocab] of a transformers model."""
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([list(token_ids)])).logits[0].numpy()
    return logits


def option_variables() -> list[str]:
    """The variables of the tests' environment that would set options of the command line."""
    kept = "LLMCL_CACHE_DIR", "LLMCL_SET_OCL_ICD_VENDORS", "LLMCL_TEST_BROKEN_DRIVER"
    return [name for name in os.environ if name.startswith("LLMCL_") and name not in kept]
