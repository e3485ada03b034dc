"""A small BERT with random weights and a WordPiece vocabulary, as a folder and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf_reference import write_out

WORDS = "the a cat dog sits on mat is , . ! ? ##s ##ing play un ##able ##a ##b ##c \u00e9 \u65e5 \u672c"
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split(), *"bcdefghijklmnopqrstuvwxyz0123456789"]
TEXTS = ["The cat sits.", "A DOG is playing on the mat!", "unable, 日本 cats", "zzz-é", "abc 123 the"]
HIDDEN, HEADS, LAYERS = 64, 4, 2


def bert_config(**changes: Any) -> dict[str, Any]:
    """What BertConfig takes. Heads have 16 dimensions."""
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}
    more = {"intermediate_size": 96, "vocab_size": len(VOCABULARY), "max_position_embeddings": 96}
    return {**sizes, **more, "type_vocab_size": 2, "pad_token_id": 0, **changes}


def random_bert(kind: str = "BertModel", **changes: Any) -> Any:
    """transformers' model with random weights, large enough that texts differ."""
    import torch
    import transformers

    torch.manual_seed(5)
    model = getattr(transformers, kind)(transformers.BertConfig(**bert_config(**changes)))
    with torch.no_grad():
        for name, values in model.named_parameters():
            scale = 0.3 if values.ndim == 1 else values.shape[1] ** -0.5 if "embeddings" not in name else 1.0
            values.copy_(scale * torch.randn_like(values) + float(name.endswith("LayerNorm.weight")))
    return model.eval()


def word_piece() -> Any:
    """BERT's tokenizer without cases, a `tokenizers` object."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(VOCABULARY[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def save_bert(folder: Path, model: Any, pooling: str | None = "mean_tokens") -> Path:
    """The model with its tokenizer and, if it has a pooling, the files of sentence-transformers; its folder."""
    model.save_pretrained(folder)
    word_piece().save(str(folder / "tokenizer.json"))
    if pooling is not None:
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


def save_bert_gguf(path: Path, model: Any) -> Path:
    """The model as llama.cpp's convert_hf_to_gguf.py writes it: with U+2581 before words and no ##."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.CLS)
    writer.add_token_type_count(2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list([*VOCABULARY[:5], *(t[2:] if t[:2] == "##" else f"\u2581{t}" for t in VOCABULARY[5:])])
    kinds = gguf.TokenType
    writer.add_token_types([*[kinds.CONTROL] * 5, *[kinds.NORMAL] * (len(VOCABULARY) - 5)])
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_pad_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        if name.startswith("pooler.") or name.endswith("position_ids"):
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, np.ascontiguousarray(values.numpy()))
    return write_out(writer, path)
