"""Cases whose subject is tokenizer.json."""

from __future__ import annotations

import json
from typing import Any

from fuzz import seeds
from fuzz.cases import Case
from fuzz.mutations import LONG, Draw, change_bytes, change_json, dump
from fuzz.seeds import Folders
from hypothesis import strategies as st

_SPLITS: list[Any] = [
    {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}
    for pattern, behavior, invert in [
        ({"Regex": "(a+)+$"}, "Isolated", False),
        ({"Regex": "(?=(a*)*b)"}, "Removed", True),
        ({"Regex": "["}, "Isolated", False),
        ({"Regex": ""}, "MergedWithNext", False),
        ({"String": ""}, "Isolated", False),
        ({"Regex": "(" * 300 + ")" * 300}, "Isolated", False),
        ({"String": " "}, "Contiguous", True),
    ]
]
_NORMALIZERS: list[Any] = [
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Precompiled", "precompiled_charsmap": "////////////////////////"},
    {"type": "Precompiled", "precompiled_charsmap": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 5000},
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "\u2581" * 100},
    {"type": "Prepend", "prepend": LONG},
    {"type": "Sequence", "normalizers": []},
    {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"Regex": "."}, "content": "aaaaaaaa"}] * 9},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": 1},
    *({"type": name} for name in ("NFC", "NFKD", "Lowercase", "ByteLevel", "Strip", "None", "")),
]
_DECODERS: list[Any] = [
    {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"},
    {"type": "Strip", "content": " ", "start": 2**63, "stop": 0},
    {"type": "Strip", "content": "ab", "start": 1, "stop": 0},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": " "},
    {"type": "CTC", "pad_token": "x", "word_delimiter_token": "y", "cleanup": True},
    {"type": "WordPiece", "prefix": LONG, "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 3},
    {"type": "BPEDecoder", "suffix": "</w>"},
    *({"type": name} for name in ("ByteLevel", "ByteFallback", "Fuse", "None")),
]
_MODELS: list[Any] = [
    {"type": "BPE", "vocab": {}, "merges": []},
    {"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []},
    {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": ["a b"]},
    {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]] * 3, "unk_token": "none", "dropout": 2.0},
    {"type": "Unigram", "unk_id": 9, "vocab": [["a", -1.0]], "byte_fallback": True},
    {"type": "Unigram", "unk_id": None, "vocab": []},
    {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", float("nan")]]},
    {
        "type": "WordPiece",
        "unk_token": "?",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 0,
        "vocab": {},
    },
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"},
]
_POST_PROCESSORS: list[Any] = [
    {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 9}}], "pair": [],
     "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
     "special_tokens": {"x": {"id": "x", "ids": [2**31], "tokens": ["x"]}}},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "RobertaProcessing", "sep": ["", 0], "cls": ["", 2**32 - 1], "trim_offsets": 1, "add_prefix_space": 1},
]  # fmt: skip
_KNOWN: dict[str, list[Any]] = {
    "normalizer": _NORMALIZERS,
    "pre_tokenizer": [*_SPLITS, {"type": "Sequence", "pretokenizers": _SPLITS[:2]}, {"type": "Whitespace"}],
    "decoder": _DECODERS,
    "model": _MODELS,
    "post_processor": _POST_PROCESSORS,
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}],
    "padding": [{"strategy": {"Fixed": 2**40}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": ""}],
    "version": ["2.0"],
    "added_tokens": [
        [],
        [{"id": 2**32 - 1, "content": "x", "special": True, "normalized": False}],
        [{"id": 0, "content": LONG, "special": False, "normalized": True, "single_word": True, "lstrip": True}],
        [{"id": 500, "content": "", "special": True}],
    ],
}


@st.composite
def tokenizer_cases(draw: Draw, folders: Folders) -> Case:
    kind = draw(st.sampled_from(sorted(seeds.tokenizers_json())))
    data, notes = seeds.tokenizers_json()[kind], [kind]
    if draw(st.integers(0, 4)) == 0:
        for _ in range(draw(st.integers(1, 2))):
            data, note = change_bytes(draw, data, draw(st.sampled_from([1000, len(data)])))
            notes.append(note)
    else:
        tree = json.loads(data)
        notes += [change_json(draw, tree, _KNOWN) for _ in range(draw(st.sampled_from([1, 1, 2])))]
        data = dump(tree)
    files = {name: content for name, content in folders.folder().items() if name.startswith(("tokenizer_", "special"))}
    return Case("tokenizer", notes, files | {"tokenizer.json": data}, {"vocab_size": draw(st.sampled_from([501, 576]))})
