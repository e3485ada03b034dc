"""Command A and R7B: attention beside an MLP, layer norms. Only layers with a window rotate, three of four."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Layer
from llmcl.architectures.families.family import Family, LayerSettings
from llmcl.architectures.families.parallel import Center, ParallelAttention


def layer(settings: LayerSettings) -> Layer:
    attention = ParallelAttention(
        bias=settings.bias, output_bias=settings.output_bias, rotation=settings.rotation, window=settings.window
    )
    return (Center(), attention, Center()) if settings.is_last else (Center(), attention)


FAMILY = Family(
    "Cohere2ForCausalLM",
    "cohere2",
    layer,
    refused=("use_qk_norm",),
    fixed={"rotary_pct": 1.0, "use_parallel_block": True, "use_gated_activation": True},
    biases=("attention_bias",),
    layer_norms=True,
    logit_scale=True,
    windows=4,
    unrotated_full=True,
    interleaves_rope=True,
    gguf_interleaves_rope=True,
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
    },
    models="Command A, Command R7B",
)
