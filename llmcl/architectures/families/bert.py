"""BERT and the encoders of its kind: MiniLM, bge, e5, gte."""

from __future__ import annotations

from llmcl.architectures.families.blocks import Attention, Layer
from llmcl.architectures.families.encoder import GeluMlp, LayerNorm
from llmcl.architectures.families.family import Family, LayerSettings


def layer(settings: LayerSettings) -> Layer:
    return (
        Attention(norm=None, bias=True, output_bias=True, rotation="none"),
        LayerNorm(module="self_attn.norm"),
        GeluMlp(tanh=settings.tanh),
        LayerNorm(module="mlp.norm"),
    )


FAMILY = Family(
    "BertModel",
    "bert",
    layer,
    modules={
        "attention.self.query": "self_attn.q_proj",
        "attention.self.key": "self_attn.k_proj",
        "attention.self.value": "self_attn.v_proj",
        "attention.output.dense": "self_attn.o_proj",
        "attention.output.LayerNorm": "self_attn.norm",
        "intermediate.dense": "mlp.up_proj",
        "output.dense": "mlp.down_proj",
        "output.LayerNorm": "mlp.norm",
        "embeddings.word_embeddings": "embed_tokens",
        "embeddings.position_embeddings": "embed_positions",
        "embeddings.token_type_embeddings": "embed_types",
        "embeddings.LayerNorm": "embed_norm",
    },
    gguf_modules={
        "attn_output_norm": "self_attn.norm",
        "layer_output_norm": "mlp.norm",
    },
    models="BERT, MiniLM, bge, e5, gte",
)
