"""Computes a lower bound on a text's token count without tokenizing, to refuse texts that no context can hold.

A token stands for a run of text, at most as long as the longest token in the vocabulary. So bytes divided by the
longest token is a lower bound, unless some text gets no token: if a normalizer or pre-tokenizer removes text, or
unknown characters are dropped or fused. The bound is then 0. The exception is bytes dropped one by one: they are known
and are not counted.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Every character has at most 4 bytes and is kept. Composition shrinks text by a factor of 3.4 at most.
_MAX_SHRINK = 4.0
_SHRINKING = "NFC", "NFD", "NFKC", "NFKD", "Lowercase"


class LeastTokens:
    """Computes least_tokens(text) for a `tokenizers` object. bos: BOS text; repeated BOS at the front counts once."""

    def __init__(self, backend: Backend, bos: str | None, byte_characters: dict[str, int]) -> None:
        """byte_characters: byte by character in byte-level BPE."""
        self._backend, self._bos, self._byte_characters = backend, bos, byte_characters
        self._known: float | None = None
        self._dropped = b""  # bytes without any token
        self._takes_spaces = any(
            token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()
        )  # a token that absorbs any number of spaces

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
        """Returns the most bytes per token; infinite if some text gets no token."""
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
        length = len if byte_level else _n_bytes  # byte-level tokens have a character per byte
        longest = max(max(map(length, vocabulary)), max(map(_n_bytes, added), default=0))
        return longest * math.prod(map(_shrink, normalizers))


def _kinds(component: Any, parts: str) -> list[dict[str, Any]]:
    """Lists the steps in a normalizer or pre-tokenizer, in tokenizer.json's format."""
    if component is None:
        return []

    def steps(described: dict[str, Any]) -> list[dict[str, Any]]:
        if described["type"] != "Sequence":
            return [described]
        return [step for part in described[parts] for step in steps(part)]

    return steps(json.loads(component.__getstate__()))


def _keeps(pre_tokenizer: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer keeps every character."""
    match pre_tokenizer:
        case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": "Isolated" | "MergedWithPrevious" | "MergedWithNext" | "Contiguous"}:
            return True
        case _:
            return False


def _shrink(normalizer: dict[str, Any]) -> float:
    """Returns the most by which a normalizer shrinks a text; infinite if it removes characters."""
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
