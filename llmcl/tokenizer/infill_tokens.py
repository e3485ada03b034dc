"""Tokens for infilling (fill in the middle, FIM): a model writes the text between a prefix and a suffix.

A GGUF file may name the tokens. Otherwise they are found by their texts, with one row of a table per family.

Sources: llama.cpp, src/llama-vocab.cpp, for the texts; for the order of the parts: Qwen2.5-Coder (arXiv:2409.12186),
StarCoder (arXiv:2305.06161), DeepSeek-Coder (its README), Code Llama (arXiv:2308.12950), Seed-Coder (arXiv:2506.03524),
and `encode_fim` of mistral-common for Codestral.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

# Part -> keys of a GGUF file, the newer one first.
_GGUF_KEYS = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "repository": ("fim_rep_token_id",),
    "file": ("fim_sep_token_id",),
    "pad": ("fim_pad_token_id",),
}


class Vocabulary(Protocol):
    """What a tokenizer says about its tokens; see `Tokenizer`."""

    infill_ids: dict[str, int]

    def id_of(self, token: str) -> int | None: ...


@dataclass(frozen=True)
class _Family:
    """Token texts of one family. Optional tokens may be missing from a vocabulary."""

    prefix: str
    suffix: str
    middle: str | None  # None: the prefix comes last, and the answer follows at once
    repository: str = ""  # optional: begins the name of a repository
    file: str = ""  # optional: begins the name of a file
    ends: tuple[str, ...] = ()  # optional: end an answer, like the two above
    suffix_first: bool = False


_FAMILIES = (
    # Qwen-Coder, Granite 4, CodeGemma
    _Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|repo_name|>",
        "<|file_sep|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|end_of_text|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite 3 and Granite Code
    _Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<|endoftext|>", "<|end_of_text|>"),
    ),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),  # GLM 4.5
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)


@dataclass(frozen=True)
class InfillTokens:
    """The token ids of one model; None for a token that it does not have."""

    prefix: int | None
    suffix: int | None
    middle: int | None
    repository: int | None = None
    file: int | None = None
    ends: tuple[int, ...] = ()  # tokens that end an answer, besides the usual ones
    suffix_first: bool = False

    @property
    def missing(self) -> str:
        """Says which tokens are missing, in llama-server's words; "" if the model can infill."""
        ids = {"prefix": self.prefix, "suffix": self.suffix}
        if not self.suffix_first:
            ids["middle"] = self.middle
        return " ".join(f"{name} token is missing." for name, token in ids.items() if token is None)

    def arranged(
        self, prefix: Sequence[int], suffix: Sequence[int], *, bos: Sequence[int] = (), extra: Sequence[int] = ()
    ) -> list[int]:
        """Returns the prompt. extra: text of other files."""
        assert self.prefix is not None and self.suffix is not None
        before, behind = [self.prefix, *prefix], [self.suffix, *suffix]
        parts = [*behind, *before] if self.suffix_first else [*before, *behind]
        return [*bos, *extra, *parts, *([] if self.middle is None else [self.middle])]


def infill_tokens(tokenizer: Vocabulary) -> InfillTokens:
    """Returns the tokens of a model. Those named by a GGUF file come first."""
    ids: dict[str, int | None] = {**tokenizer.infill_ids}
    ends, suffix_first = [ids.get("pad")], False
    for family in _FAMILIES:
        needed = {"prefix": family.prefix, "suffix": family.suffix, "middle": family.middle}
        row = {part: tokenizer.id_of(text) for part, text in needed.items() if text is not None}
        if None in row.values():
            continue
        suffix_first = family.suffix_first
        row |= {"repository": tokenizer.id_of(family.repository), "file": tokenizer.id_of(family.file)}
        ends += map(tokenizer.id_of, family.ends)
        ids = row | {part: token for part, token in ids.items() if token is not None}
        break
    repository, file = ids.get("repository"), ids.get("file")
    return InfillTokens(
        ids.get("prefix"),
        ids.get("suffix"),
        ids.get("middle"),
        repository,
        file,
        tuple(dict.fromkeys(token for token in (*ends, repository, file) if token is not None)),
        suffix_first,
    )


def gguf_infill_ids(metadata: Mapping[str, Any], n_tokens: int) -> dict[str, int]:
    """Returns the token ids that a GGUF file names. Ids outside the vocabulary are left out."""
    ids: dict[str, int] = {}
    for part, keys in _GGUF_KEYS.items():
        values = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
        known = [value for value in values if type(value) is int and 0 <= value < n_tokens]
        ids |= {part: known[0]} if known else {}
    return ids
