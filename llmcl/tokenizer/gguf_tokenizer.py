"""The tokenizer in a GGUF file's metadata, rebuilt for the library `tokenizers`.

GGUF keeps the vocabulary, the type of each token, and either merges or scores, and names the rest: `model` is
the algorithm, `pre` the rules that cut a text into words before it. Three algorithms are known here:

- `gpt2`: byte-level BPE. Words are cut by one of PRE_TOKENIZERS.
- `llama`: SentencePiece BPE (SentencePiece's other algorithm, Unigram, is recognised and refused). A space is
  written as U+2581, characters outside the vocabulary as their UTF-8 bytes (tokens `<0x00>`...`<0xFF>`); of
  all neighbours whose union is a token the one with the highest score is joined.
- `gemma4`: spaces and bytes as with `llama`, but the file says which neighbours are joined, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llmcl.errors import CheckpointError, UnsupportedModelError, counted, shown
from llmcl.models.config.reader import Reader
from llmcl.tokenizer.library import refusing

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import PreTokenizer

SPACE = "\u2581"  # SentencePiece's visible space

# Limits for SentencePiece, where all cuts of a token are tried. Known vocabularies have 48 characters, 600 000 merges.
_MAX_TOKEN_CHARACTERS = 1024
_MAX_MERGES = 1 << 22

# `tokenizer.ggml.token_type`
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# The expressions are those in the families' own tokenizer.json: Llama 3 joins up to three digits, Qwen2 none.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
QWEN2_WORDS = _WORDS.replace("DIGITS", r"\p{N}")
# Qwen 3.5 keeps combining marks with their letters.
QWEN35_WORDS = QWEN2_WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# o200k, GPT-4o's and gpt-oss': a word begins with capitals, and has its contraction.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_4O_WORDS = "|".join(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

# DeepSeek's cut a text by one expression after the other. In V3's a sign may begin a word of Latin letters.
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3_WORDS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# V2's knows letters with a case, but for some of those that Unicode has since version 11 and for mathematical ones.
_WITHOUT_CASE = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df2a"
)
DEEPSEEK_WORDS = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_WITHOUT_CASE}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)


def _gpt2_words() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_words() -> PreTokenizer:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


def _llama3_words() -> PreTokenizer:
    return _split_by(LLAMA3_WORDS)


def _qwen2_words() -> PreTokenizer:
    return _split_by(QWEN2_WORDS)


def _qwen35_words() -> PreTokenizer:
    return _split_by(QWEN35_WORDS)


def _gpt_4o_words() -> PreTokenizer:
    return _split_by(GPT_4O_WORDS)


def _glm4_words() -> PreTokenizer:
    return _split_by(LLAMA3_WORDS)


def _deepseek_words() -> PreTokenizer:
    return _split_by(*DEEPSEEK_WORDS)


def _deepseek3_words() -> PreTokenizer:
    return _split_by(*DEEPSEEK3_WORDS)


def _split_by(*expressions: str) -> PreTokenizer:
    """By the first expression, then what is left whole by the next, and so on."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    words = [Split(Regex(expression), "isolated") for expression in expressions]
    return Sequence([*words, ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2_words,
    "default": _gpt2_words,
    "olmo": _gpt2_words,  # OLMoE's
    "smollm": _smollm_words,
    "refact": _smollm_words,  # Granite's
    "llama-bpe": _llama3_words,
    "llama3": _llama3_words,
    "llama-v3": _llama3_words,
    "lfm2": _llama3_words,
    "qwen2": _qwen2_words,
    "qwen35": _qwen35_words,
    "gpt-4o": _gpt_4o_words,
    "glm4": _glm4_words,
    "chatglm-bpe": _glm4_words,
    "deepseek-llm": _deepseek_words,
    "deepseek-v3": _deepseek3_words,
}


def build(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Builds the tokenizer.

    Args:
        metadata: the file's metadata; the keys `tokenizer.ggml.*` are read. Arrays of strings are lists,
            arrays of numbers lists or NumPy arrays.
    Returns:
        The tokenizer, which adds nothing at the ends of a text, and whether a text is to begin with the BOS
        token.
    Raises:
        UnsupportedModelError: a model or pre-tokenizer that is not known here.
        CheckpointError: the metadata is incomplete or contradicts itself.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError("GGUF metadata: tokenizer.ggml.tokens is empty. Convert the file again.")
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens)) or [NORMAL] * len(tokens)
    if not isinstance(model, str) or model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"GGUF tokenizer model {shown(model)} (tokenizer.ggml.model) is not supported; supported are gpt2 "
            "(byte-level BPE), llama (SentencePiece) and gemma4. Use the model's Hugging Face folder."
        )
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(metadata, tokens)
    elif model == "gemma4":
        tokenizer, adds_bos = _visible_spaces(metadata, tokens, types, _merges(metadata), prefix=False), True
    else:
        tokenizer, adds_bos = _sentencepiece(metadata, tokens, types), True
    _add_special_tokens(tokenizer, tokens, types)
    return tokenizer, Reader(metadata, "GGUF metadata").flag("tokenizer.ggml.add_bos_token", adds_bos)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        found = "has no tokenizer.ggml.pre" if pre is None else f"names the pre-tokenizer {shown(pre)}"
        raise UnsupportedModelError(
            f"The GGUF file {found}; supported are {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's Hugging Face folder, or a file from a current converter if the name is missing."
        )
    is_llama3 = PRE_TOKENIZERS[pre] is _llama3_words
    # Llama 3 takes a word that is a token as that token, even if its merges do not lead there.
    tokenizer = Tokenizer(_checked(models.BPE, _vocabulary(tokens), _merges(metadata), ignore_merges=is_llama3))
    if PRE_TOKENIZERS[pre] in (_qwen2_words, _qwen35_words):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


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
    """BPE with spaces and bytes as SentencePiece has them. prefix: whether a text gets a space before it where the file
    does not say so.
    """
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
    """All ways to join two normal tokens to a third, best first: higher score, then longer left part.

    SentencePiece has no merges: it joins whatever neighbours make the token with the highest score. A BPE
    with these merges in this order does the same. Control, byte and user-defined tokens are never joined.
    """
    normal = {token: token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    longest = max(normal, key=len, default="")
    if len(longest) > _MAX_TOKEN_CHARACTERS:
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.tokens has a token of {len(longest)} characters ({shown(longest)}), "
            f"expected at most {_MAX_TOKEN_CHARACTERS}. The file is damaged; get it again."
        )
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if token in normal:
            for cut in range(len(token) - 1, 0, -1):
                left, right = normal.get(token[:cut]), normal.get(token[cut:])
                if left is not None and right is not None:
                    found.append((-score, -cut, left, right))
        if len(found) > _MAX_MERGES:
            raise CheckpointError(
                f"GGUF metadata: the tokens of tokenizer.ggml.tokens can be joined in {len(found)} ways up to "
                f"{shown(token)}, expected at most {_MAX_MERGES} in all. The file is damaged; get it again."
            )
    found.sort()
    return [(left, right) for _, _, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    special, user_defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        if token and kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif token and kind == USER_DEFINED:
            user_defined.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(user_defined)


def _checked(model: type[BPE], vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> BPE:
    problem = "GGUF metadata: the tokenizer's vocabulary and merges do not fit together"
    with refusing(problem, "The file is damaged; get it again."):
        return model(vocabulary, merges, **options)


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(
            f"GGUF metadata: tokenizer.ggml.tokens has {shown(twice)} more than once, so ids and texts do not "
            "correspond. The file is damaged; get it again or convert it again."
        )
    return vocabulary


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        found = "missing" if value is None else f"a {type(value).__name__}"
        raise CheckpointError(
            f"GGUF metadata: {key} is {found}, expected a list of strings. The file holds no usable "
            "tokenizer: convert it again, or use the model's Hugging Face folder."
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> list[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, list) or len(numbers) != length or not all(type(n) in (int, float) for n in numbers):
        found = counted(len(numbers), "value") if isinstance(numbers, list) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"GGUF metadata: {key} has {found}, expected {counted(length, 'number')}, one for each token. "
            "The file is damaged; get it again."
        )
    return numbers
