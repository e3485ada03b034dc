"""The NumPy twin of every op and of the whole model: defines what the kernels must compute, written for reading.

A twin has its kernel's name, takes arrays in any float dtype, and computes and returns float64 unless documented
otherwise. The engine calls no twin; the kernel tests, `llmcl doctor` and `llmcl tune` do. The twins are tested against
PyTorch, transformers and gguf. Clarity comes before speed here.

Shapes: n tokens in a call, k columns in a matrix row, kv_len keys in the cache; heads as in the config.
"""

from llmcl.checkpoint.formats import FORMATS, dequantize
from llmcl.reference.draft import accept_draft, draft_counts, draft_last_seen, draft_rows
from llmcl.reference.experts import (
    choose_experts,
    choose_scored_experts,
    experts_down,
    experts_gate_up,
    group_by_expert,
    scale_shares,
)
from llmcl.reference.kv_cache import pack_keys, pack_values, pair_cache, unpack_keys, unpack_values
from llmcl.reference.latent import latent_append, latent_attention, linear_heads
from llmcl.reference.layers import (
    add_bias,
    biased_gate,
    center_rows,
    embed,
    gate_inputs,
    geglu,
    layer_inputs,
    linear,
    pool,
    qkv_adjust,
    rms_norm,
    rope,
    rope_table,
    scale_rows,
    soft_cap,
    squared_relu,
    swiglu,
    xielu,
)
from llmcl.reference.likelihood import kl_divergence, log_likelihood
from llmcl.reference.model import forward
from llmcl.reference.online_softmax import (
    attention,
    attention_decode,
    attention_merge,
    attention_partial,
    softmax_state,
)
from llmcl.reference.ragged import attention_of_runs, gather_rows
from llmcl.reference.recurrent import (
    causal_conv,
    delta_chunks,
    delta_inputs,
    delta_rule,
    delta_terms,
    gated_norm,
    mamba_inputs,
    mamba_scan,
    short_conv,
    sigmoid_gate,
)
from llmcl.reference.samplers import dry
from llmcl.reference.sampling import (
    gumbel,
    logit_bias,
    logprobs,
    noise_bits,
    penalize,
    penalize_counts,
    sample,
    sample_scores,
    sample_threshold,
    uniform,
)
from llmcl.reference.storage import (
    TILE_ROWS,
    from_tiles,
    round_bfloat16,
    round_to,
    spread_rotary_rows,
    to_tiles,
    unpermute_rope_rows,
)

__all__ = [
    "FORMATS",
    "TILE_ROWS",
    "accept_draft",
    "add_bias",
    "attention",
    "attention_decode",
    "attention_merge",
    "attention_of_runs",
    "attention_partial",
    "biased_gate",
    "causal_conv",
    "center_rows",
    "choose_experts",
    "choose_scored_experts",
    "delta_chunks",
    "delta_inputs",
    "delta_rule",
    "delta_terms",
    "dequantize",
    "draft_counts",
    "draft_last_seen",
    "draft_rows",
    "dry",
    "embed",
    "experts_down",
    "experts_gate_up",
    "forward",
    "from_tiles",
    "gate_inputs",
    "gated_norm",
    "gather_rows",
    "geglu",
    "group_by_expert",
    "gumbel",
    "kl_divergence",
    "latent_append",
    "latent_attention",
    "layer_inputs",
    "linear",
    "linear_heads",
    "log_likelihood",
    "logit_bias",
    "logprobs",
    "mamba_inputs",
    "mamba_scan",
    "noise_bits",
    "pack_keys",
    "pack_values",
    "pair_cache",
    "penalize",
    "penalize_counts",
    "pool",
    "qkv_adjust",
    "rms_norm",
    "rope",
    "rope_table",
    "round_bfloat16",
    "round_to",
    "sample",
    "sample_scores",
    "sample_threshold",
    "scale_rows",
    "scale_shares",
    "short_conv",
    "sigmoid_gate",
    "soft_cap",
    "softmax_state",
    "spread_rotary_rows",
    "squared_relu",
    "swiglu",
    "to_tiles",
    "uniform",
    "unpack_keys",
    "unpack_values",
    "unpermute_rope_rows",
    "xielu",
]
