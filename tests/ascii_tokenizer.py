"""A tokenizer of single characters, for models of random weights."""

from __future__ import annotations

from typing import Any


def ascii_tokenizer() -> Any:
    """A `tokenizers` object with 99 tokens: <unk>, <s>, </s>, newline, space, and the printable ASCII characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = [
        "<unk>",
        "<s>",
        "</s>",
        "\u010a",
        "\u0120",
        *map(chr, range(0x21, 0x7F)),
    ]  # as byte-level BPE writes them
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(symbol, special=True) for symbol in symbols[:3]])
    return tokenizer
