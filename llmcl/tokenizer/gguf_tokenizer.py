"""Rebuilds the tokenizer in a GGUF file's metadata for the library `tokenizers`.

GGUF stores the vocabulary, each token's type, and either merges or scores, and names the rest: `model` is the
algorithm, `pre` the rules that first split a text into words. Four algorithms are supported:

- `gpt2`: byte-level BPE. One of PRE_TOKENIZERS splits the words.
- `llama`: SentencePiece BPE (SentencePiece's other algorithm, Unigram, is recognised and refused). A space is
  written as U+2581, characters outside the vocabulary as UTF-8 bytes (tokens `<0x00>`...`<0xFF>`). Among all
  neighbours that form a token, the pair with the highest score is joined.
- `gemma4`: spaces and bytes as with `llama`, but the file lists the merges in order.
- `bert`: WordPiece. A token that begins a word has U+2581 in front (llama.cpp's convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmcl.architectures.config.reader import Reader
from llmcl.checkpoint.pre_tokenizers import words_of
from llmcl.errors import CheckpointError, UnsupportedModelError, counted, shown
from llmcl.tokenizer.library import refusing

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

SPACE = "\u2581"  # SentencePiece's visible space

# Limits for SentencePiece, which tries all splits of a token. Known vocabularies: 48 characters, 600 000 merges.
_MAX_TOKEN_CHARACTERS = 1024
_MAX_MERGES = 1 << 22

_NEVER_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's exceptions

_BRACKETED = re.compile(r"\[(?:PAD|UNK|CLS|SEP|MASK|unused\d+)\]")  # normal tokens in older files

# `tokenizer.ggml.token_type`
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def build(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Builds the tokenizer.

    Args:
        metadata: the file's metadata; the keys `tokenizer.ggml.*` are read. Arrays of strings are lists,
            arrays of numbers lists or NumPy arrays.

    Returns:
        The tokenizer, and whether a text begins with BOS. Only WordPiece adds tokens at the ends of a text itself.

    Raises:
        UnsupportedModelError: an unknown model or pre-tokenizer.
        CheckpointError: the metadata is incomplete or contradictory.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("GGUF metadata: tokenizer.ggml.tokens is empty. Convert the file again.")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens)) or [NORMAL] * len(tokens)
    if not isinstance(model, str) or model not in ("gpt2", "llama", "gemma4", "bert"):
        raise UnsupportedModelError(
            f"GGUF tokenizer model {shown(model)} (tokenizer.ggml.model) is not supported; supported are gpt2 "
            "(byte-level BPE), llama (SentencePiece), gemma4 and bert (WordPiece). Use the model's Hugging Face folder."
        )
    if model == "bert":
        return _word_piece(metadata, tokens, types), False
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif model == "gemma4":
        tokenizer, adds_bos = _visible_spaces(metadata, tokens, types, _merges(metadata), prefix=False), True
    else:
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, types), True
    _add_special_tokens(tokenizer, tokens, types, rstrip=_is_phi3(metadata))
    return tokenizer, Reader(metadata, "GGUF metadata").flag("tokenizer.ggml.add_bos_token", adds_bos)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = words_of(metadata.get("tokenizer.ggml.pre"))
    tokenizer = Tokenizer(_checked(models.BPE, _vocabulary(tokens), _merges(metadata), ignore_merges=words.whole_words))
    if words.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = words.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, words.adds_bos


def _word_piece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    """Returns BERT's tokenizer: lower case without accents, as llama.cpp has it, between [CLS] and [SEP]."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    read = Reader(metadata, "GGUF metadata")
    words = [
        token if kind == CONTROL or _BRACKETED.fullmatch(token) else token[1:] if token[:1] == SPACE else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]

    def special(key: str, default: str, other_key: str = "") -> tuple[str, int]:
        index = read.get(f"tokenizer.ggml.{key}_token_id", read.get(f"tokenizer.ggml.{other_key}_token_id"))
        if index is None and default in words:
            index = words.index(default)
        if type(index) is not int or not 0 <= index < len(words):
            read.fail(f"tokenizer.ggml.{key}_token_id", index, f"the id of {default}")
        return words[index], index

    first, last = special("cls", "[CLS]", "bos"), special("seperator", "[SEP]")  # the key is misspelt in GGUF
    unknown, _ = special("unknown", "[UNK]")
    tokenizer = Tokenizer(models.WordPiece(_vocabulary(words), unk_token=unknown, max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _add_special_tokens(tokenizer, words, types, rstrip=False)
    tokenizer.post_processor = processors.BertProcessing(last, first)
    return tokenizer


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(
                f"GGUF metadata: tokenizer.ggml.merges has {shown(merge)}, expected two tokens with a space "
                "between. The file is damaged; get it again."
            )
        merges.append((left, right))
    tokens = metadata["tokenizer.ggml.tokens"]
    if repeated(tokens):  # a repeated text may have replaced one that merges produce
        known = set(tokens)
        merges = [(left, right) for left, right in merges if {left, right, left + right} <= known]
    return merges


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise CheckpointError(
            "GGUF metadata: tokenizer.ggml.scores is missing, which the tokenizer model llama needs. "
            "Convert the file again."
        )
    if any(score % 1 for score, kind in zip(scores, types, strict=True) if kind == NORMAL):
        raise UnsupportedModelError(
            "The GGUF file's tokenizer is SentencePiece Unigram (its scores are log probabilities, where BPE "
            "has whole numbers), which is not supported. Use the model's Hugging Face folder."
        )
    return _visible_spaces(metadata, tokens, types, merges_from_scores(tokens, scores, types), prefix=True)


def _visible_spaces(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], merges: list[tuple[str, str]], *, prefix: bool
) -> Tokenizer:
    """Returns a BPE with SentencePiece's spaces and bytes. prefix: put a space before a text by default."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    model = _checked(
        models.BPE,
        _vocabulary(tokens),
        merges,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    visible_space = normalizers.Replace(" ", SPACE)
    as_space = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if Reader(metadata, "GGUF metadata").flag("tokenizer.ggml.add_space_prefix", prefix):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), visible_space])
        as_space.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = visible_space
    tokenizer.decoder = decoders.Sequence(as_space)
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Returns all ways to join two normal tokens into a third, best first: higher score, then longer left part.

    SentencePiece has no merges: it joins the neighbours that form the token with the highest score. A BPE with these
    merges in this order gives the same result. Control, byte and user-defined tokens are never joined.
    """
    normal = {token: token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    longest = max(normal, key=len, default="")
    if len(longest) > _MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.tokens has a token of {len(longest)} characters ({shown(longest)}), "
            f"expected at most {_MAX_TOKEN_CHARACTERS}. The file is damaged; get it again."
        )
    again = repeated(tokens)
    merges = []
    for index, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        if token in normal and index not in again:
            for cut in range(len(token) - 1, 0, -1):
                left, right = normal.get(token[:cut]), normal.get(token[cut:])
                if left is not None and right is not None:
                    merges.append((-score, -cut, left, right))
        if len(merges) > _MAX_MERGES:
            raise CheckpointError(
                f"GGUF metadata: the tokens of tokenizer.ggml.tokens can be joined in {len(merges)} ways up to "
                f"{shown(token)}, expected at most {_MAX_MERGES} in all. The file is damaged; get it again."
            )
    merges.sort()
    return [(left, right) for _, _, left, right in merges]


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    """Returns whether the file is Phi-3, by llama.cpp's test. No key says that Phi-3's special tokens absorb spaces."""
    name = metadata.get("general.name")
    return isinstance(name, str) and re.search("phi[ -]?3", name.lower()) is not None


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int], *, rstrip: bool) -> None:
    """Adds special and user-defined tokens. rstrip: white space after a special token belongs to the token."""
    from tokenizers import AddedToken

    special, user_defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        strips = rstrip and token not in _NEVER_STRIP
        if token and kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False, rstrip=strips))
        elif token and kind == USER_DEFINED:
            user_defined.append(AddedToken(token, special=False, normalized=False, rstrip=strips))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)


def _checked(model: type[BPE], vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    problem = "GGUF metadata: the tokenizer's vocabulary and merges do not fit together"
    # At a merge with more characters than any token the library panics.
    if (pair := next((pair for pair in merges if "".join(pair) not in vocabulary), None)) is not None:
        left, right = map(shown, pair)
        raise CheckpointError(f"{problem}: {left} and {right} make no token. The file is damaged; get it again.")
    with refusing(problem, "The file is damaged; get it again."):
        return model(vocabulary, merges, **options)


def repeated(tokens: list[str]) -> dict[int, int]:
    """Maps each id whose text has occurred before to the first id with the same text."""
    first: dict[str, int] = {}
    same = ((index, first.setdefault(token, index)) for index, token in enumerate(tokens))
    return {index: before for index, before in same if before != index}


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Returns ids by text. A repeated text maps to the first id; later ids get unreachable texts."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        while token in vocabulary:
            token = f"{token}\0{index}"
        vocabulary[token] = index
    return vocabulary


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        actual = "missing" if value is None else f"a {type(value).__name__}"
        raise CheckpointError(
            f"GGUF metadata: {key} is {actual}, expected a list of strings. The file holds no usable "
            "tokenizer: convert it again, or use the model's Hugging Face folder."
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> list[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, list) or len(numbers) != length or not all(type(n) in (int, float) for n in numbers):
        actual = counted(len(numbers), "value") if isinstance(numbers, list) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"GGUF metadata: {key} has {actual}, expected {counted(length, 'number')}, one for each token. "
            "The file is damaged; get it again."
        )
    return numbers
