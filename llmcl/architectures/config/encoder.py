"""ModelConfig of an encoder of the BERT kind, from config.json or GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcl.architectures.config import limits
from llmcl.architectures.config.model_config import ModelConfig, checked
from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.architectures.families import FAMILIES
from llmcl.architectures.families.encoder import EncoderSettings
from llmcl.architectures.families.family import LayerSettings
from llmcl.errors import shown

ENCODERS = ("bert",)
_GELUS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}  # with tanh or without
_EPS = 1e-12


def encoder_from_hf(values: Mapping[str, Any], dtype: str) -> ModelConfig:
    """Returns the encoder described by config.json. Raises the errors of `config_from_hf`."""
    read = Reader(values, "config.json")
    if (kind := read.text("position_embedding_type", default="absolute")) != "absolute":
        unsupported(f"the position embeddings {shown(kind)} (position_embedding_type)", "it supports absolute")
    if (activation := read.text("hidden_act", default="gelu")) not in _GELUS:
        unsupported(f"the activation {shown(activation)} (hidden_act)", f"it supports {', '.join(_GELUS)}")
    if read.flag("is_decoder", default=False):
        unsupported("a BERT that makes text (is_decoder)")
    return _config(
        read,
        "bert",
        {
            "hidden_size": read.size("hidden_size", limits.MAX_HIDDEN),
            "intermediate_size": read.size("intermediate_size", limits.MAX_INTERMEDIATE),
            "vocab_size": read.size("vocab_size", limits.MAX_VOCAB),
            "max_position": read.size("max_position_embeddings", limits.MAX_POSITION, default=512),
            "rms_norm_eps": read.number("layer_norm_eps", 0.0, 1.0, default=_EPS),
            "dtype": dtype,
        },
        n_layers=read.size("num_hidden_layers", limits.MAX_LAYERS),
        n_heads=read.size("num_attention_heads", limits.MAX_HEADS),
        n_types=read.size("type_vocab_size", 2, default=2),
        tanh=_GELUS[activation],
        ranks=_ranks(read),
    )


def encoder_from_gguf(metadata: Mapping[str, Any], architecture: str) -> ModelConfig:
    """Returns the encoder described by GGUF metadata. Raises the errors of `config_from_hf`."""
    read, arch = Reader(metadata, "GGUF metadata"), "bert"
    tokens = read.get("tokenizer.ggml.tokens", [])
    if read.flag(f"{arch}.attention.causal", default=False):
        unsupported(f"a BERT that makes text ({arch}.attention.causal)")
    return _config(
        read,
        architecture,
        {
            "hidden_size": read.size(f"{arch}.embedding_length", limits.MAX_HIDDEN),
            "intermediate_size": read.size(f"{arch}.feed_forward_length", limits.MAX_INTERMEDIATE),
            "vocab_size": read.size(f"{arch}.vocab_size", limits.MAX_VOCAB, default=len(tokens) or None),
            "max_position": read.size(f"{arch}.context_length", limits.MAX_POSITION),
            "rms_norm_eps": read.number(f"{arch}.attention.layer_norm_epsilon", 0.0, 1.0),
            "dtype": "quantized",
        },
        n_layers=read.size(f"{arch}.block_count", limits.MAX_LAYERS),
        n_heads=read.size(f"{arch}.attention.head_count", limits.MAX_HEADS),
        n_types=read.size("tokenizer.ggml.token_type_count", 2, default=2),
        tanh=False,
    )


def _ranks(read: Reader) -> bool:
    """Returns whether config.json describes a cross-encoder. Raises UnsupportedModelError for another classifier."""
    if read.get("architectures") != ["BertForSequenceClassification"]:
        return False
    labels = read.get("id2label", {"0": "", "1": ""})
    if not isinstance(labels, dict) or len(labels) != 1:
        unsupported(f"a classifier (id2label {shown(labels)})", "it supports rerankers, which have one label")
    return True


def _config(
    read: Reader,
    architecture: str,
    sizes: dict[str, Any],
    *,
    n_layers: int,
    n_heads: int,
    n_types: int,
    tanh: bool,
    ranks: bool = False,
) -> ModelConfig:
    hidden = sizes["hidden_size"]
    if hidden % n_heads:
        unsupported(f"{n_heads} attention heads in {hidden} columns", "the heads must divide the columns evenly")
    layers = (FAMILIES[architecture].layer(LayerSettings(tanh=tanh)),) * n_layers
    return checked(
        ModelConfig(
            architecture=architecture,
            layers=layers,
            n_q_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=hidden // n_heads,
            rope_theta=10000.0,
            rope_scaling=None,
            tie_embeddings=True,
            bos_token_id=None,
            eos_token_ids=(),
            encoder=EncoderSettings(sizes["max_position"], n_types, ranks),
            bidirectional=True,
            **sizes,
        ),
        read.source,
    )
