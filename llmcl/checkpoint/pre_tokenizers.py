"""How byte-level BPE cuts a text into words: a row for each name that `tokenizer.ggml.pre` can have.

The names and what they stand for are llama.cpp's (`src/llama-vocab.cpp`); the expressions are those in the families'
own tokenizer.json, where that is known. notes/pre_tokenizers.md has the vocabularies on which they were compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmcl.errors import UnsupportedModelError, shown

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer


@dataclass(frozen=True)
class Words:
    """Rules that cut a text into words."""

    expressions: tuple[str, ...]  # the first cuts the text, the next what is left whole, and so on
    gpt2: bool = False  # whether GPT-2's expression follows
    composes: bool = False  # whether characters are composed before (NFC)
    whole_words: bool = False  # whether a word that is a token is taken as that token, wherever its merges lead
    adds_bos: bool = False  # whether a text begins with BOS where the file does not say it

    def pre_tokenizer(self) -> PreTokenizer:
        from tokenizers import Regex
        from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

        words = [Split(Regex(expression), "isolated") for expression in self.expressions]
        return Sequence([*words, ByteLevel(add_prefix_space=False, use_regex=self.gpt2)])


_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
_QWEN2 = _WORDS.replace("DIGITS", r"\p{N}")
# Qwen 3.5 keeps combining marks with their letters.
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")

# o200k, GPT-4o's and gpt-oss': a word begins with capitals, and has its contraction.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}ENDS" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_GPT_4O = rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}".replace("ENDS", f"{_ENDS}?")
_TEKKEN = _GPT_4O.replace(f"{_ENDS}?", "").replace(r"\p{N}{1,3}", r"\p{N}")
# Kimi's words have no Chinese characters, which stand for themselves.
_KIMI = r"[\p{Han}]+|" + _GPT_4O.replace(_UPPER, rf"[{_UPPER}&&[^\p{{Han}}]]").replace(
    _LOWER, rf"[{_LOWER}&&[^\p{{Han}}]]"
).replace(r"[\r\n/]*", r"[\r\n]*")

# DeepSeek's cut a text by one expression after the other. In V3's a sign may begin a word of Latin letters.
_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_DEEPSEEK3_WORDS = rf"{_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK3_MAIN = rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_SPACES}"
_DEEPSEEK3 = r"\p{N}{1,3}", f"[{_CJK}]+", _DEEPSEEK3_MAIN
# V2's knows letters with a case, but for some of those that Unicode has since version 11 and for mathematical ones.
_WITHOUT_CASE = (
    "\u0560-\u0588\u10c7\u10cd\u10d0-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7ff\uab30-\uab68"
    "\U00010570-\U000105bc\U00016e40-\U00016e7f\U0001d400-\U0001d7cb\U0001df00-\U0001df2a"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_WITHOUT_CASE}]]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three from the right
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e01-\u0e3a\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT2 = Words((), gpt2=True)
_DIGITS = Words((r"\p{N}",), gpt2=True)
_LLAMA3_WHOLE = Words((_LLAMA3,), whole_words=True, adds_bos=True)
_PLAIN_LLAMA3 = Words((_LLAMA3,))
_PLAIN_QWEN2 = Words((_QWEN2,))
_OF_DEEPSEEK3 = Words(_DEEPSEEK3)
_OF_GPT_4O = Words((_GPT_4O,))
_OF_BLOOM = Words((_BLOOM,))

# A conversion takes the first name whose rules are the folder's.
_NAMES: dict[str, Words] = {
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling": (
        _GPT2
    ),
    "smollm refact starcoder codeshell exaone minerva-7b mellum2": _DIGITS,
    "llama-bpe llama3 llama-v3 lfm2 falcon3 falcon-h1 pixtral midm-2.0": _LLAMA3_WHOLE,
    "qwen2 deepseek-r1-qwen megrez f2llmv2 kormo": replace(_PLAIN_QWEN2, composes=True),
    "qwen35": Words((_QWEN35,), composes=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _OF_GPT_4O,
    "glm4 chatglm-bpe dbrx smaug-bpe": _PLAIN_LLAMA3,
    "deepseek-llm": Words(_DEEPSEEK),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _OF_DEEPSEEK3,
    "olmo mpt": replace(_GPT2, composes=True),  # GPT-NeoX' vocabulary
    "tekken": Words((_TEKKEN,), whole_words=True, adds_bos=True),
    "command-r": replace(_DIGITS, composes=True),
    "stablelm2 hunyuan solar-open grok-2": _PLAIN_QWEN2,
    "deepseek-coder": Words((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    "kimi-k2": Words((_KIMI,)),
    "falcon": Words((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, "[0-9][0-9][0-9]")),
    "default": Words((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "poro-chat bloom gpt3-finnish": _OF_BLOOM,
    "viking": Words((_BLOOM, r"\p{N}")),
    "chameleon": Words(
        (
            "<sentinel:[0-9]+>",
            "IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
        ),
        gpt2=True,
        adds_bos=True,
    ),
    "tiny_aya cohere2moe": Words((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O)),
    "superbpe": Words((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": Words(
        (_QWEN2.replace(_ENDS, r"'(?i:[sdmt]|ll|ve|re)").replace(r"\s*[\r\n]+", r"\s*[\r\n]"),)
    ),
    "seed-coder": Words((_QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),)),
    "ufakzeka": Words((_QWEN2.removeprefix(f"{_ENDS}|"),)),
    "laguna": Words((r"[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": Words(
        (
            rf"{_ENDS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": Words((r"\p{N}{1,3}", _WORDS.replace("DIGITS", r"\p{N}+")), whole_words=True),
    "afmoe": Words((_THREES, _ASIAN, _DEEPSEEK3_MAIN)),
    "spark2_5": Words((*_DEEPSEEK3[:2], rf"{_DEEPSEEK3_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "youtu": Words(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[{_CJK}]+",
            _GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}"),
        ),
        whole_words=True,
    ),
    "jais-2": Words(
        (
            _LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
            + "".join(rf"|\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
            + r"|\s{1}",
        )
    ),
}

PRE_TOKENIZERS: dict[str, Words] = {name: words for names, words in _NAMES.items() for name in names.split()}


def words_of(pre: object) -> Words:
    """Looks up the rules of a name. Raises UnsupportedModelError for one that is not known, or none."""
    if isinstance(pre, str) and pre in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[pre]
    problem = f"names the pre-tokenizer {shown(pre)}, which llmcl does not have"
    if pre is None:
        problem = "has no tokenizer.ggml.pre, so it is of an old converter"
    raise UnsupportedModelError(f"The GGUF file {problem}. Use another file, or the model's Hugging Face folder.")
