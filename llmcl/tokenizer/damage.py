"""Refuses descriptions of tokenizers at which the library `tokenizers` panics or ends the process.

A panic becomes an exception, but Rust has by then written its own report to standard error. What depends on a text is
left to `library.without_report`.
"""

from __future__ import annotations

import base64
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from llmcl.errors import CheckpointError, UnsupportedModelError, one_line, shown

_MAX_GROWTH = 64  # factor by which normalisation may lengthen text; known normalizers turn a space into 3 bytes
# With a prefix the library `tokenizers` splits merges inside a character, and may crash the process.
_SUBWORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"([^"])')
_LEAST_TABLE = 4 * 256  # of a charsmap: indexed by the first byte of a text
_CHARSMAP = re.compile(rb'"precompiled_charsmap"\s*:\s*"([^"]*)"')
_ESCAPED_ASCII = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
_IN_PAIRS = re.compile(rb'"merges"\s*:\s*\[\s*\[')
# A repeated group that repeats something inside, as in (a+)+: the library gives up after ten million attempts.
_NESTED = re.compile(r"(?:[+*]|,\d*\})[?+]?[^(]*\)[?+]?(?:[+*]|\{\d+,)")
_REMEDY = "It is damaged or hostile; get tokenizer.json again."


def check_json(file: Path, data: bytes) -> None:
    """Checks the bytes of a tokenizer.json before the library reads them."""
    plain = _ESCAPED_ASCII.sub(lambda escape: bytes.fromhex(escape[1].decode()), data) if b"\\u00" in data else data
    if (match := _SUBWORD_PREFIX.search(plain)) and not _is_word_piece(plain):
        raise UnsupportedModelError(
            f"{file}: continuing_subword_prefix begins with {shown(match[1].decode('latin-1'))}, expected none but "
            "in WordPiece. Get the file again."
        )
    for match in _CHARSMAP.finditer(plain):
        if problem := _charsmap_problem(match[1].replace(b"\\/", b"/")):
            raise CheckpointError(f"{file}: precompiled_charsmap {problem}. Get the file again.")
    if _may_have_long_merge(data) and (pair := _long_merge(data)) is not None:
        left, right = map(shown, pair)
        raise CheckpointError(f"{file}: its merges have {left} and {right}, which make no token. Get the file again.")


def _may_have_long_merge(data: bytes) -> bool:
    """Returns False if no merge makes more bytes than the longest token has. Much faster than reading the JSON."""
    start = data.rfind(b'"merges"')
    if start < 0:
        return False
    plain = data.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in data else data  # of the same length
    text = np.frombuffer(plain + b"    ", np.uint8)
    quotes = np.flatnonzero(text == ord('"'))
    quotes = quotes[: len(quotes) // 2 * 2]
    begins, sizes = quotes[::2], np.diff(quotes)[::2] - 1  # sizes as written, never less than what it stands for
    n = int(np.searchsorted(begins, start))
    after = quotes[1 : 2 * n : 2] + 1
    values = np.where(text[after + 1] == ord(" "), text[after + 2], text[after + 1])
    is_token = (text[after] == ord(":")) & (values >= ord("0")) & (values <= ord("9"))
    begins, tokens, merged = begins[:n][is_token], sizes[:n][is_token], sizes[n + 1 :]
    if not len(tokens) or not len(merged):
        return bool(len(merged))
    longest, at = int(tokens.max()), int(begins[tokens.argmax()])
    merged = merged + np.append(merged[1:], 0) if _IN_PAIRS.match(data, start) else merged - 1  # without the space
    return int(merged.max()) > longest or b"\\" in data[at : at + longest]


def _long_merge(data: bytes) -> tuple[str, str] | None:
    """Returns a merge of two tokens that makes more bytes than any token has: the library panics at it."""
    try:
        model = json.loads(data)["model"]
        longest = max(len(token.encode()) for token in model["vocab"])
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        return next(((a, b) for a, b in pairs if len((a + b).encode()) > longest), None)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None  # the library says what is wrong


def may_give_up(backend: Any) -> bool:
    """Returns whether a regular expression may panic at a text, because it tries too many ways to match it."""
    steps = (step for part in ("normalizer", "pre_tokenizer") for step in _steps(backend, part))
    patterns = (step["pattern"].get("Regex", "") for step in steps if isinstance(step.get("pattern"), dict))
    return any(map(_NESTED.search, patterns))


def _is_word_piece(data: bytes) -> bool:
    """Returns whether the model is WordPiece, whose prefix has no merges."""
    try:
        model = json.loads(data).get("model")
    except (ValueError, RecursionError, AttributeError):
        return False
    return isinstance(model, dict) and model.get("type") == "WordPiece" and "merges" not in model


def check_steps(backend: Any) -> None:
    """Checks the steps of a tokenizer that the library has read, before it encodes a text."""
    steps = [
        (part, step) for part in ("normalizer", "pre_tokenizer", "post_processor") for step in _steps(backend, part)
    ]
    for part, step in steps:
        if problem := _problem(step):
            raise CheckpointError(f"The tokenizer's {part} {problem}. {_REMEDY}")
    growth = math.prod(_growth(step) for part, step in steps if part == "normalizer")
    if growth > _MAX_GROWTH:
        raise CheckpointError(
            f"The tokenizer's normalizer may make a text {shown(growth)} times as long, expected at most "
            f"{_MAX_GROWTH}. {_REMEDY}"
        )


def _steps(backend: Any, part: str) -> list[dict[str, Any]]:
    """Returns the steps of a part of the tokenizer, without the sequences around them."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        inner = next((step[key] for key in ("normalizers", "pretokenizers", "processors") if key in step), None)
        return [step] if inner is None else [each for one in inner for each in flat(one)]

    value = getattr(backend, part)
    return [] if value is None else flat(json.loads(value.__getstate__()))


def _problem(step: dict[str, Any]) -> str | None:
    match step:
        case {"type": "Replace", "pattern": {"String": ""}}:
            return "replaces a text of no characters"
        case {"type": "FixedLength", "length": 0}:
            return "cuts texts into pieces of 0 characters"
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": known}:
            for piece in pieces:
                if piece.get("Sequence", {}).get("id", "A") != "A":
                    return "adds a second text to a single one"
                if (token := piece.get("SpecialToken", {}).get("id")) is not None and token not in known:
                    return f"adds the token {shown(token)}, which its special_tokens do not have"
    return None


def _growth(step: dict[str, Any]) -> int:
    """Returns by how much a normalizer's replacement may multiply a text's bytes."""
    match step:
        case {"type": "Replace", "pattern": pattern, "content": content}:
            replaced = len(pattern.get("String", "").encode()) or 1  # a regular expression may match a single byte
            return max(1, -(-len(content.encode()) // replaced))
        case _:
            return 1


def _charsmap_problem(text: bytes) -> str | None:
    """Checks a base64 charsmap: the table's size in 4 bytes, the table, and the texts. Returns the problem or None.

    The library allocates the table before checking that it exists.
    """
    try:
        data = base64.b64decode(text, validate=True)
        size = int.from_bytes(data[:4], "little")
        data[4 + size :].decode()
    except ValueError as error:
        return f"is damaged: {one_line(error)}"
    if size < _LEAST_TABLE or size % 4 or size > len(data) - 4:
        expected = f"a multiple of 4 from {_LEAST_TABLE} to its own {len(data)}"
        return f"says that it has a table of {size} bytes, expected {expected}"
    return _table_problem(np.frombuffer(data, "<u4", size // 4, 4), np.frombuffer(data, np.uint8, -1, 4 + size))


def _table_problem(table: np.ndarray, texts: np.ndarray) -> str | None:
    """Checks a charsmap's double-array trie (Yata et al., 2007), in the layout of the library Darts-clone.

    Bits of an entry: 0 to 7 its byte, 8 whether a replacement ends here, 9 and from 10 on the offset to its children,
    31 set in a replacement's entry, which holds the place of a text. Children lie at (place ^ offset) ^ next byte.
    """
    offsets = (table >> 10) << ((table >> 6) & 8)
    places = np.arange(len(table), dtype=np.uint32)
    nodes = (table < 1 << 31) & (table & 255 > 0)
    nodes[0] = True  # the root has no byte
    children = (places ^ offsets)[nodes]
    if (children | 255).max() >= len(table):
        return f"is damaged: its table of {len(table)} entries points to entry {(children | 255).max()}"
    starts = table[children[(table[nodes] >> 8) & 1 == 1]] & 0x7FFFFFFF
    if len(starts) and starts.max() > len(texts):
        return f"is damaged: its {len(texts)} bytes of text are to have a text at byte {starts.max()}"
    starts = starts[starts < len(texts)]
    if len(cut := starts[texts[starts] & 0xC0 == 0x80]):
        return f"is damaged: the text at byte {cut[0]} begins inside a character"
    return None
