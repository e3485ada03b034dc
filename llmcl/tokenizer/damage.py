"""Refuses descriptions of tokenizers at which the library `tokenizers` panics or ends the process.

A panic becomes an exception, but Rust has by then written its own report to standard error.
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
_REMEDY = "It is damaged or hostile; get tokenizer.json again."


def check_json(file: Path, data: bytes) -> None:
    """Checks the bytes of a tokenizer.json before the library reads them."""
    plain = _ESCAPED_ASCII.sub(lambda escape: bytes.fromhex(escape[1].decode()), data) if b"\\u00" in data else data
    if match := _SUBWORD_PREFIX.search(plain):
        raise UnsupportedModelError(
            f"{file}: continuing_subword_prefix begins with {shown(match[1].decode('latin-1'))}, expected none, as in "
            "all tokenizers that llmcl supports. Get the file again."
        )
    for match in _CHARSMAP.finditer(plain):
        if problem := _charsmap_problem(match[1].replace(b"\\/", b"/")):
            raise CheckpointError(f"{file}: precompiled_charsmap {problem}. Get the file again.")


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
