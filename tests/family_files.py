"""GGUF files of every family, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from expert_weights import experts_of, write_scores
from gguf_reference import write_out
from helpers import windows_of
from latent_weights import latent_in_gguf, write_latent
from numpy.typing import NDArray
from own_heads import own_name, width_of, write_own_heads
from recurrent_weights import as_in_gguf, recurrent_of

from llmcl.architectures.config import ModelConfig, RopeScaling
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.blocks import Experts, layer_name
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.architectures.families.recurrent import DeltaNet, Mamba, ShortConv

WINDOW = 20  # of the models that have one; no multiple of a tile of keys
# Of families whose files have the name of another.
GGUF_NAMES = {
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "granitemoeshared": "granitemoe",
    "gemma4_unified_text": "gemma4",
}
GGUF_NAMES |= {"deepseek_v2": "deepseek2", "glm4_moe_lite": "deepseek2"}


def save_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    expert_format: str = "F32",
    *,
    fused_experts: bool = False,
    joined_heads: bool = False,
) -> Path:
    """The model as llama.cpp's converter writes it, with names from the package `gguf`.

    expert_format: of the matrices of experts. fused_experts: gate and up of all experts of a layer are one tensor.
    joined_heads: latent attention is as older converters wrote it.

    Llama's and Mistral's q and k have their rotary pairs next to each other, Gemma's norm weights the 1 in them.
    """
    import gguf

    writer = gguf.GGUFWriter(path, gguf_architecture(config))
    write_metadata(writer, config, joined_heads=joined_heads)
    for key, name in FAMILIES[config.architecture].gguf_values.items():
        writer.add_array(key, [float(weights[layer_name(i, name)][0]) for i in range(config.n_layers)])
    for name, values in gguf_tensors(config, weights, fused_experts=fused_experts, joined_heads=joined_heads):
        how: dict[str, Any] = {}
        if expert_format != "F32" and name.endswith("_exps.weight"):
            how["raw_dtype"] = gguf.GGMLQuantizationType[expert_format]
            values = gguf.quants.quantize(values, how["raw_dtype"])
        writer.add_tensor(name, np.ascontiguousarray(values), **how)
    return write_out(writer, path)


def gguf_architecture(config: ModelConfig) -> str:
    """What the file's general.architecture says."""
    if experts_of(config) and (name := FAMILIES[config.architecture].gguf_name_with_experts):
        return name
    return FAMILIES[config.architecture].gguf_name or GGUF_NAMES[config.architecture]


def _rows_of_mlp(config: ModelConfig, layer: int) -> int:
    """Rows of the layer's MLP or of one of its experts, 0 for a mixer."""
    (block,) = config.layers[layer]
    if isinstance(block, Experts):
        return block.settings.size
    return config.intermediate_size if isinstance(block, PlainMlp) else 0


def write_metadata(writer: Any, config: ModelConfig, *, joined_heads: bool = False) -> None:
    """The keys of a model, the factors of its rotary scaling, and a tokenizer of made-up words, for a GGUFWriter."""
    import gguf

    arch = gguf_architecture(config)
    attention, recurrent = config.attention(config.attention_layers[0]), recurrent_of(config)
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    widths = [width_of(config, i) for i in range(config.n_layers)]
    rows = [width * config.intermediate_size for width in widths]
    if FAMILIES[config.architecture].single_blocks:
        rows = [_rows_of_mlp(config, i) for i in range(config.n_layers)]
    writer.add_feed_forward_length(rows if len({*rows}) > 1 else config.intermediate_size)
    writer.add_head_count(config.n_q_heads)
    block = next(iter(recurrent.values()), None)
    n_kv_heads = [config.n_kv_heads if i in config.attention_layers else 0 for i in range(config.n_layers)]
    if config.latent is not None and joined_heads:
        n_kv_heads = [config.n_q_heads] * config.n_layers
    own_heads = FAMILIES[config.architecture].own_heads
    of_layers = [config.heads(i).n_kv for i in range(config.n_layers)] if own_heads else n_kv_heads
    listed = own_heads or isinstance(block, (ShortConv, Mamba))
    writer.add_head_count_kv(of_layers if listed else max(n_kv_heads))
    if isinstance(block, ShortConv):
        writer.add_shortconv_l_cache(block.settings.length)
    if isinstance(block, Mamba):
        writer.add_ssm_conv_kernel(block.settings.length)
        writer.add_ssm_state_size(block.settings.d_state)
        writer.add_ssm_group_count(block.settings.n_groups)
        writer.add_ssm_inner_size(block.settings.inner)
        writer.add_ssm_time_step_rank(block.settings.n_heads)
        writer.add_rope_scaling_finetuned(attention.rotation == "main")
    if isinstance(block, DeltaNet):
        of = block.settings
        writer.add_ssm_conv_kernel(of.length)
        writer.add_ssm_state_size(of.d_k)
        writer.add_ssm_group_count(of.n_k)
        writer.add_ssm_time_step_rank(of.n_v)
        writer.add_ssm_inner_size(of.n_v * of.d_v)
        writer.add_full_attention_interval(config.attention_layers[0] + 1)
        writer.add_rope_dimension_sections([1, 1, 1, 0])
    if config.latent is not None:
        write_latent(writer, config, joined=joined_heads)
    else:
        main = config.rotated_size("main")
        writer.add_key_length(main)
        writer.add_value_length(main)
    write_own_heads(writer, config)
    if FAMILIES[config.architecture].layer_norms:
        writer.add_layer_norm_eps(config.rms_norm_eps)
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rotary_dim is not None:
        writer.add_rope_dimension_count(config.rotary_dim)
    if (scaling := config.rope_scaling) is not None:
        if scaling.original_max_position:
            writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)
        if scaling.kind == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling.factor)
            writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
            if scaling.amplitude == 1.0 and config.latent is None:
                writer.add_rope_scaling_yarn_log_mul(1.0)
        if scaling.kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling.factor)
        if scaling.kind == "factors":
            assert scaling.factors is not None
            factors = [1e30 if np.isinf(factor) else factor for factor in scaling.factors]
            writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
        if scaling.kind == "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(config, scaling))
        if scaling.kind == "longrope":
            writer.add_rope_scaling_attn_factors(scaling.amplitude)
            writer.add_tensor("rope_factors_short.weight", np.array(scaling.factors, np.float32))
            writer.add_tensor("rope_factors_long.weight", np.array(scaling.long_factors, np.float32))
    if FAMILIES[config.architecture].rope_axes is not None:
        n_pairs = config.rotated_size("main") // 2
        writer.add_rope_dimension_sections([n_pairs - n_pairs // 3 * 2, n_pairs // 3, n_pairs // 3, 0])
        if arch != "qwen2vl":
            writer.add_num_deepstack_layers(0)
    if config.has_windows:
        writer.add_sliding_window(next(window for window in windows_of(config) if window is not None))
        if arch != "cohere2":  # whose converter leaves it out
            writer.add_sliding_window_pattern([window is not None for window in windows_of(config)])
    if (cap := attention.soft_cap) is not None:
        writer.add_attn_logit_softcapping(cap)
    if config.logit_soft_cap is not None:
        writer.add_final_logit_softcapping(config.logit_soft_cap)
    if (query_scale := attention.query_scale) is not None:
        writer.add_attn_temperature_scale(query_scale.beta)
    if config.local_rope_theta is not None:
        writer.add_rope_freq_base_swa(config.local_rope_theta)
    if FAMILIES[config.architecture].multipliers:
        assert config.attention_scale is not None
        writer.add_embedding_scale(config.embedding_scale)
        writer.add_residual_scale(config.residual_scale)
        writer.add_attention_scale(config.attention_scale)
        writer.add_logit_scale(1.0 / config.logit_scale)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = ["a", "b", "ab", *(f"<token {i}>" for i in range(3, config.vocab_size))]
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    experts = experts_of(config)
    if experts:
        of = next(iter(experts.values())).settings
        writer.add_expert_count(of.n_experts)
        writer.add_expert_used_count(of.top_k)
        if of.size != config.intermediate_size or arch in (
            "gpt-oss",
            "minimax-m2",
            "qwen35moe",
            "qwen3next",
            "nemotron_h_moe",
        ):
            writer.add_expert_feed_forward_length(of.size)
        shared_size = of.shared_size
        if arch == "ernie4_5-moe":  # which the converter makes of other sizes
            shared_size = config.intermediate_size // config.n_kv_heads
        if arch == "nemotron_h_moe":
            assert of.scores is not None
            writer.add_expert_shared_count(1)
            writer.add_expert_weights_norm(of.renormalize)
            writer.add_expert_weights_scale(of.scores.scale)
            writer.add_expert_group_count(of.scores.n_groups)
        if of.shared_size and not FAMILIES[config.architecture].own_heads:  # whose shared expert is its MLP
            writer.add_expert_shared_feed_forward_length(shared_size)
        if arch == "hunyuan-moe":
            writer.add_expert_shared_count(1)
        if config.latent is None and of.scores is not None and arch != "nemotron_h_moe":
            write_scores(writer, config)


def llama3_factors(config: ModelConfig, scaling: RopeScaling) -> NDArray[np.float32]:
    """What llama.cpp's converter makes of Llama 3's scaling: a divisor of each frequency."""
    turns = config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    share = scaling.original_max_position / (2 * np.pi * turns)  # how often a pair turns in the original context
    smooth = (share - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / scaling.factor + smooth)).astype(np.float32)


def gguf_tensors(
    config: ModelConfig,
    weights: Mapping[str, NDArray[Any]],
    *,
    fused_experts: bool = False,
    joined_heads: bool = False,
    stack: Callable[[Sequence[NDArray[Any]]], NDArray[Any]] = np.stack,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The tensors of `save_gguf`, each with its name. stack: makes one of all experts' matrices or biases."""
    import gguf

    arch = gguf_architecture(config)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config.n_layers)
    family = FAMILIES[config.architecture]
    interleaves = (arch == "llama" or family.gguf_interleaves_rope) and not family.interleaves_rope
    in_metadata = tuple(FAMILIES[config.architecture].gguf_values.values())
    stacked = {name: values for name, values in weights.items() if not in_metadata or not name.endswith(in_metadata)}
    for i, block in experts_of(config).items():
        of = block.settings
        in_one = fused_experts or block.own_norms
        fused = [("gate_up", block.first_modules)] if in_one else []
        alone = [("gate" if module == block.gate else "up", (module,)) for module in block.first_modules]
        fused += [] if in_one else alone
        for name, modules in (*fused, ("down", (block.down,))):
            for kind in ("weight", "bias") if block.bias else ("weight",):
                of_modules = [
                    stack([stacked.pop(layer_name(i, f"{module.format(e)}.{kind}")) for e in range(of.n_experts)])
                    for module in modules
                ]
                of_all = of_modules[0] if len(of_modules) == 1 else np.concatenate(of_modules, axis=1)
                yield f"blk.{i}.ffn_{name}_exps.{kind}", of_all
        for name in ("up", "down") if block.gate is None else ("gate", "up", "down"):
            if block.settings.shared_size and not block.own_norms:
                shared = stacked.pop(layer_name(i, f"{block.shared}.{name}_proj.weight"))
                yield f"blk.{i}.ffn_{name}_shexp.weight", shared
        if block.has_shared_gate:
            gate = stacked.pop(layer_name(i, f"{block.shared_gate}.weight"))
            yield f"blk.{i}.ffn_gate_inp_shexp.weight", gate[0]
    for name, values in as_in_gguf(config, latent_in_gguf(config, stacked, joined=joined_heads)).items():
        has_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        stored = values + np.float32(config.norm_offset) if has_offset else values
        if interleaves and name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            halves = stored.reshape(-1, 2, config.head_dim // 2, *stored.shape[1:])
            stored = halves.swapaxes(1, 2).reshape(stored.shape)
        name += ".bias" if name.endswith(".expert_bias") else ""
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        gguf_name = own_name(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        gguf_name += ".weight" if name.endswith((".sinks", ".layer_scalar")) else ""
        yield gguf_name, stored
