"""How many tokens a text has at least, found without making them: for texts that no context can hold.

A token stands for a run of the text, and none for more bytes than the longest of the vocabulary. So there are at least
as many as bytes over that length, if no part of a text goes without a token: not where a normalizer or pre-tokenizer
removes some, or where unknown characters are dropped or joined. There the number is 0, and says nothing. Only of bytes
that are dropped one by one it is known which they are, and they do not count.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# A character has at most 4 bytes, and is not lost. Composed ones are made of at most 3.4 times their bytes.
_MAX_SHRINK = 4.0
_SHRINKING = "NFC", "NFD", "NFKC", "NFKD", "Lowercase"


class LeastTokens:
    """least_tokens(text) of a `tokenizers` object. bos: the text of the token of which the first ones count as one."""

    def __init__(self, backend: Backend, bos: str | None, byte_characters: dict[str, int]) -> None:
        """byte_characters: those that stand for a byte each in byte-level BPE."""
        self._backend, self._bos, self._byte_characters = backend, bos, byte_characters
        self._known: float | None = None
        self._dropped = b""  # bytes that no token stands for
        self._takes_spaces = any(
            token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
        )  # any number of them, into one token

    def __call__(self, text: str) -> int:
        if self._known is None:
            self._known = self._bytes_a_token()
        if self._takes_spaces:
            text = "".join(text.split())
        n_bytes = len(text.encode("utf-8", "surrogatepass").translate(None, self._dropped))
        if self._bos:
            n_bytes -= len(self._bos.encode()) * text.count(self._bos)
        return math.ceil(n_bytes / self._known)

    def _bytes_a_token(self) -> float:
        """The most bytes of a text that a token may stand for; infinite where some go without one."""
        from tokenizers.models import BPE

        backend: Any = self._backend
        model = backend.model
        kinds = _kinds(backend.pre_tokenizer, "pretokenizers")
        if not isinstance(model, BPE) or not all(map(_keeps, kinds)):
            return math.inf
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        added = [token.content for token in backend.get_added_tokens_decoder().values()]
        byte_level = any(kind["type"] == "ByteLevel" for kind in kinds)
        normalizers = _kinds(backend.normalizer, "normalizers")
        if model.unk_token not in vocabulary or model.fuse_unk:
            if byte_level and not normalizers:  # SmolLM2 has no token for some bytes
                missing = (byte for character, byte in self._byte_characters.items() if character not in vocabulary)
                self._dropped = bytes(missing)
            else:
                by_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else [""]
                if not all(token in vocabulary for token in (self._byte_characters if byte_level else by_bytes)):
                    return math.inf
        length = len if byte_level else _n_bytes  # of what is written in characters that stand for a byte each
        longest = max(max(map(length, vocabulary)), max(map(_n_bytes, added), default=0))
        return longest * math.prod(map(_shrink, normalizers))


def _kinds(component: Any, parts: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, as tokenizer.json describes them."""
    if component is None:
        return []

    def steps(described: dict[str, Any]) -> list[dict[str, Any]]:
        if described["type"] != "Sequence":
            return [described]
        return [step for part in described[parts] for step in steps(part)]

    return steps(json.loads(component.__getstate__()))


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves every character in some word."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": "Isolated" | "MergedWithPrevious" | "MergedWithNext" | "Contiguous"}:
            return True
        case _:
            return False


def _shrink(normalizer: dict[str, Any]) -> float:
    """How many times as many bytes a text may have had before a normalizer; infinite where it removes some."""
    match normalizer:
        case {"type": kind} if kind in _SHRINKING:
            return _MAX_SHRINK
        case {"type": "Prepend"}:
            return 1.0
        case {"type": "Replace", "pattern": {"String": replaced}, "content": content} if content:
            return max(1.0, _n_bytes(replaced) / _n_bytes(content))
        case _:
            return math.inf


def _n_bytes(text: str) -> int:
    return len(text.encode())
