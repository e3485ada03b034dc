"""Cases whose subject is a conversion: GGUF metadata of every type, sound or not, and changed folders."""

from __future__ import annotations

import copy

from fuzz import seeds
from fuzz.cases import Case
from fuzz.model_cases import config_cases, gguf_cases, typed_value
from fuzz.mutations import Draw, shown
from fuzz.seeds import ARRAY, Entry, Folders
from fuzz.tokenizer_cases import tokenizer_cases
from hypothesis import strategies as st

# Keys that a conversion reads itself, besides those that loading reads.
_KEYS = [
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.chat_template",
    "general.name",
    "general.tags",
    "general.file_type",
    "general.quantization_version",
    "some.other.key",
]
_TYPES = range(13)


@st.composite
def convert_cases(draw: Draw, folders: Folders) -> Case:
    target = draw(st.sampled_from(["out.gguf", "out"]))
    options = draw(st.sampled_from([{}, {}, {"dtype": "float32"}, {"quantize": "q8_0"}, {"quantize": "q4_0"}]))
    what = draw(st.sampled_from(["metadata", "metadata", "metadata", "gguf", "config", "tokenizer"]))
    if what == "metadata":
        case = _metadata_case(draw)
    else:
        case = draw({"gguf": gguf_cases, "config": config_cases, "tokenizer": tokenizer_cases}[what](folders))
        if what == "tokenizer":
            case.files = folders.folder() | case.files
    source = "model.gguf" if "model.gguf" in case.files else "."
    notes = [*case.notes, f"{source} to {target} {options}"]
    return Case("convert", notes, case.files, {"source": source, "target": target, "options": options})


def _metadata_case(draw: Draw) -> Case:
    file = copy.deepcopy(seeds.gguf_file(draw(st.sampled_from(["gpt2", "llama"]))))
    notes = []
    for key in draw(st.lists(st.sampled_from(_KEYS), min_size=1, max_size=3, unique=True)):
        type = draw(st.sampled_from([*_TYPES, ARRAY, ARRAY]))
        value = typed_value(draw, type, types=_TYPES)
        file.entries = [entry for entry in file.entries if entry.key != key] + [Entry(key, type, value)]
        notes.append(f"{key} = {shown(value)} (type {type})")
    return Case("gguf", notes, {"model.gguf": file.pack()})
