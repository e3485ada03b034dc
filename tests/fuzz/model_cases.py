"""Cases whose subject is a model's files: GGUF, safetensors, config.json and what stands beside it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from fuzz import seeds
from fuzz.cases import Case
from fuzz.mutations import INTEGERS, LONG, TEXTS, Draw, change_bytes, change_json, dump, numbers, shown, texts
from fuzz.seeds import ARRAY, STRING, Entry, Folders, GgufFile, Tensor
from hypothesis import strategies as st

from llmcl.architectures.families import FAMILIES

_GGUF_TYPES = [*range(13), 13, 77, 2**32 - 1]
_TENSOR_TYPES = [*range(43), 999, 2**32 - 1]
_GGUF_KEYS = {
    "general.alignment": [1, 8, 64, 48, 2**31],
    "general.architecture": ["qwen2", "qwen3", "gemma2", "mamba"],
    "split.count": [1, 3],
    "llama.expert_count": [1, 8],
    "llama.rope.dimension_count": [16, 32],
    "llama.rope.scaling.type": ["linear", "yarn"],
    "llama.rope.scaling.factor": [4.0],
    "llama.rope.scale_linear": [2.0],
    "llama.attention.sliding_window": [8, 4096],
    "llama.attention.value_length": [32],
    "tokenizer.ggml.pre": ["llama-bpe", "qwen2"],
    "tokenizer.ggml.add_bos_token": [True],
    "tokenizer.ggml.add_space_prefix": [False],
    "tokenizer.ggml.unknown_token_id": [0],
    "tokenizer.ggml.padding_token_id": [0],
    "tokenizer.ggml.eot_token_id": [5],
    "tokenizer.chat_template": ["{{ messages }}", "{% for"],
}


_how_many = st.sampled_from([1, 1, 1, 2, 3])


@st.composite
def gguf_cases(draw: Draw, folders: Folders) -> Case:
    file = copy.deepcopy(seeds.gguf_file(draw(st.sampled_from(["gpt2", "gpt2", "llama"]))))
    changes = [*[_change_entry] * 5, *[_change_array] * 3, *[_change_tensor] * 3, _change_counts]
    level = draw(st.sampled_from(["parts", "parts", "parts", "bytes"]))
    notes = [draw(st.sampled_from(changes))(draw, file) for _ in range(draw(_how_many) * (level == "parts"))]
    data = file.pack()
    if level == "bytes" or draw(st.integers(0, 9)) == 0:
        for _ in range(draw(st.integers(1, 3))):
            data, note = change_bytes(draw, data, draw(st.sampled_from([400, 1500, len(file.header()), len(data)])))
            notes.append(note)
    return Case("gguf", notes, {"model.gguf": data})


def typed_value(draw: Draw, type: int, depth: int = 0, types: Sequence[int] = _GGUF_TYPES) -> Any:
    """A value of a GGUF type; types: of an array's items."""
    if type == STRING:
        return draw(texts | st.just(b"\xff\xfe"))
    if type == ARRAY:
        item_type = draw(st.sampled_from(types)) if depth < 4 else 0
        return item_type, [typed_value(draw, item_type, depth + 1, types) for _ in range(draw(st.integers(0, 3)))]
    if type in (6, 12):
        return float(draw(st.floats() | st.sampled_from([0.0, -1.0, 1e-5, float("nan"), float("inf")])))
    if type > 12:
        return draw(st.binary(max_size=16))
    return draw(st.sampled_from(INTEGERS) | st.integers(0, 300))


def _type_of(value: Any) -> int:
    return {bool: 7, int: 4, float: 6, str: STRING}[type(value)]


def _change_entry(draw: Draw, file: GgufFile) -> str:
    what = draw(
        st.sampled_from(["known", "known", "known", "value", "value", "value", "type", "drop", "twice", "key", "move"])
    )
    if what == "known" or not file.entries:
        key = draw(st.sampled_from(sorted(_GGUF_KEYS)))
        value = draw(st.sampled_from(_GGUF_KEYS[key]))
        type = _type_of(value)
        if draw(st.booleans()):
            type = draw(st.sampled_from([type, type, *_GGUF_TYPES]))
            value = typed_value(draw, type)
        file.entries = [entry for entry in file.entries if entry.key != key] + [Entry(key, type, value)]
        return f"{key} = {shown(value)} (type {type})"
    index = draw(st.integers(0, len(file.entries) - 1))
    entry = file.entries[index]
    if what == "drop":
        del file.entries[index]
        return f"{entry.key} dropped"
    if what == "twice":
        file.entries.append(entry)
        return f"{entry.key} twice"
    if what == "move":
        file.entries.append(file.entries.pop(index))
        return f"{entry.key} last"
    if what == "key":
        old, entry.key = entry.key, draw(texts | st.sampled_from([e.key for e in file.entries]))
        return f"{old} renamed {shown(entry.key)}"
    type = draw(st.sampled_from(_GGUF_TYPES)) if what == "type" else entry.type
    entry.type, entry.value = type, typed_value(draw, type)
    return f"{entry.key} = {shown(entry.value)} (type {type})"


def _change_array(draw: Draw, file: GgufFile) -> str:
    arrays = [entry for entry in file.entries if entry.type == ARRAY and entry.value[1]]
    if not arrays:
        return _change_counts(draw, file)
    entry = draw(st.sampled_from(arrays))
    item_type, items = entry.value
    at = draw(st.randoms(use_true_random=True)).randrange(len(items))
    what = draw(st.sampled_from(["item", "item", "copy", "cut", "more"]))
    if what == "item":
        items[at] = typed_value(draw, item_type)
    elif what == "copy":
        items[at] = draw(st.sampled_from(items))
    elif what == "cut":
        del items[at:]
    else:
        items += [typed_value(draw, item_type) for _ in range(draw(st.sampled_from([1, 2, 200])))]
    return f"{entry.key}[{at}] {what}: {shown(items[at]) if at < len(items) else ''}"


def _change_tensor(draw: Draw, file: GgufFile) -> str:
    if not file.tensors:
        return _change_counts(draw, file)
    tensor = draw(st.sampled_from(file.tensors))
    what = draw(st.sampled_from(["name", "size", "type", "offset", "drop", "twice", "add", "add", "nan", "nan"]))
    if what == "name":
        known = ["output.weight", "rope_freqs.weight", "blk.1.attn_q.weight", "blk.0.attn_q.bias", "blk.0.x.weight"]
        tensor.name = draw(st.sampled_from([*known, *(t.name for t in file.tensors)]) | texts)
    elif what == "size":
        sizes = st.sampled_from([*INTEGERS, 16, 32, 48, 63, 65, 96, 128])
        if draw(st.booleans()) or not tensor.dimensions:
            tensor.dimensions = draw(st.lists(sizes, max_size=5))
        else:
            tensor.dimensions[draw(st.integers(0, len(tensor.dimensions) - 1))] = draw(sizes)
    elif what == "type":
        tensor.type = draw(st.sampled_from(_TENSOR_TYPES))
    elif what == "offset":
        tensor.offset = draw(st.sampled_from([*INTEGERS, 32, tensor.offset + 4, tensor.offset + 32]))
    elif what == "drop":
        file.tensors.remove(tensor)
    elif what == "twice":
        file.tensors.append(tensor)
    elif what == "add":
        name = draw(st.sampled_from(["rope_freqs.weight", "output.weight", "blk.0.attn_q.bias", "more.weight"]))
        sizes = draw(st.lists(st.sampled_from([1, 16, 32, 64]), min_size=1, max_size=2))
        tensor = Tensor(name, sizes, draw(st.sampled_from([0, 0, 1, 8])), len(file.content))
        file.tensors.append(tensor)
        file.content += draw(st.sampled_from([bytes(16384), b"\0\0\x80\x3f" * 4096, b"\xff" * 16384]))
    else:
        at = min(tensor.offset % (1 << 20), len(file.content))
        file.content = file.content[:at] + b"\xff\xff\xff\x7f" + file.content[at + 4 :]
    return f"tensor {what}: {shown(tensor)}"


def _change_counts(draw: Draw, file: GgufFile) -> str:
    what = draw(st.sampled_from(["magic", "version", "n_tensors", "n_entries", "cut", "more"]))
    if what == "magic":
        file.magic = draw(st.sampled_from([b"GGML", b"", b"PK\3\4", b"gguf"]))
    elif what == "version":
        file.version = draw(st.sampled_from([0, 1, 2, 4, 3 << 24, 2**32 - 1]))
    elif what == "n_tensors":
        file.n_tensors = draw(st.sampled_from([*INTEGERS, len(file.tensors) - 1, len(file.tensors) + 1]))
    elif what == "n_entries":
        file.n_entries = draw(st.sampled_from([*INTEGERS, len(file.entries) - 1, len(file.entries) + 1]))
    elif what == "cut":
        file.content = file.content[: draw(st.integers(0, len(file.content)))]
    else:
        file.content += bytes(draw(st.sampled_from([1, 31, 4096])))
    return f"{what} changed"


# ---- safetensors ----------------------------------------------------------------------------------------


@st.composite
def safetensors_cases(draw: Draw, folders: Folders) -> Case:
    files = folders.folder()
    if draw(st.integers(0, 3)) == 0:
        return Case("safetensors", [_shard(draw, files)], files)
    header, content = seeds.safetensors(seeds.weights())
    notes, length = [], None
    level = draw(st.sampled_from(["header", "header", "bytes"]))
    if level == "header":
        notes += [_change_header(draw, header) for _ in range(draw(_how_many))]
    if draw(st.integers(0, 9)) == 0:
        length = draw(st.sampled_from(INTEGERS))
        notes.append(f"header length {shown(length)}")
    if draw(st.integers(0, 4)) == 0:
        content = content[: draw(st.integers(0, len(content)))] + bytes(draw(st.sampled_from([0, 1, 70_000])))
        notes.append("content cut")
    data = seeds.pack_safetensors(dump(header), content, length)
    for _ in range(draw(st.integers(1, 2)) * (level == "bytes")):
        data, note = change_bytes(draw, data, draw(st.sampled_from([8, 300, 900, len(data)])))
        notes.append(note)
    return Case("safetensors", notes, files | {"model.safetensors": data})


def _change_header(draw: Draw, header: dict[str, Any]) -> str:
    names = [name for name in header if isinstance(header[name], dict) and "shape" in header[name]]
    if not names or draw(st.integers(0, 2)) == 0:
        return change_json(draw, header, {"__metadata__": [], "lm_head.weight": []})
    name = draw(st.sampled_from(names))
    entry = header[name]
    what = draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "swap"]))
    if what == "dtype":
        entry["dtype"] = draw(st.sampled_from(["F16", "BF16", "F64", "I8", "BOOL", "F8_E4M3", "F4", "U64", "f32", 7]))
    elif what == "shape":
        entry["shape"] = draw(
            st.lists(st.sampled_from([*INTEGERS[:12], 64, 32, 16]) | numbers, max_size=9)
            | st.permutations(entry["shape"] if isinstance(entry["shape"], list) else [])
        )
    elif what == "data_offsets":
        entry["data_offsets"] = draw(st.lists(st.sampled_from(INTEGERS) | numbers, max_size=3))
    elif what == "name":
        new = draw(texts | st.sampled_from(["lm_head.weight", "model.layers.7.mlp.up_proj.weight", "a.bias"]))
        header[new] = header.pop(name)
        return f"{name} renamed {shown(new)}"
    else:
        other = draw(st.sampled_from(names))
        header[name], header[other] = header[other], header[name]
        return f"{name} and {other} exchanged"
    return f"{name}.{what} = {shown(entry[what])}"


def _shard(draw: Draw, files: dict[str, Any]) -> str:
    """The model in two files with an index, which is changed."""
    del files["model.safetensors"]
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": {}}
    for n, part in enumerate(seeds.shards(), 1):
        name = f"model-{n}.safetensors"
        header, content = seeds.safetensors(part)
        files[name] = seeds.pack_safetensors(dump(header), content)
        index["weight_map"] |= dict.fromkeys(part, name)
    if draw(st.booleans()):
        places = ["../model.safetensors", "/etc/passwd", "model-3.safetensors", ".x.safetensors", "model-2.safetensors"]
        names = draw(st.sampled_from(sorted(index["weight_map"])))
        index["weight_map"][names] = draw(st.sampled_from([*places, f"{LONG[:300]}.safetensors"]))
        note = f"{names} in {shown(index['weight_map'][names])}"
    else:
        note = change_json(draw, index, {"weight_map": []})
    files["model.safetensors.index.json"] = dump(index)
    return note


# ---- config.json and its neighbours ---------------------------------------------------------------------

_CONFIG_KEYS: dict[str, list[Any]] = {
    "model_type": [*FAMILIES, "mamba", "LLAMA"],
    "architectures": [["MistralForCausalLM"], "LlamaForCausalLM"],
    "rope_scaling": [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 2, "high_freq_factor": 2},
        {"rope_type": "yarn", "factor": 1e300},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 1e5},
        {"rope_type": "dynamic", "factor": 1e5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 1e5},
        {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    ],
    "rope_parameters": [{"rope_theta": 1e6}, {"full_attention": {"rope_theta": 1}}, {"partial_rotary_factor": 0.5}],
    "sliding_window": [8, 4096],
    "use_sliding_window": [True],
    "max_window_layers": [0],
    "layer_types": [["full_attention"], ["sliding_attention"], []],
    "hidden_act": ["gelu"],
    "torch_dtype": ["bfloat16", "float64"],
    "dtype": ["float16"],
    "attention_bias": [True],
    "mlp_bias": [True, 1],
    "residual_multiplier": [0.22, 0, 1e-300],
    "logits_scaling": [8.0, -1],
    "sliding_window_pattern": [1, 2, 0, [1]],
    "rope_local_base_freq": [1e4, 0],
    "no_rope_layers": [[0], [0, 1, 1, 1], [2, 2], 0],
    "no_rope_layer_interval": [1, 0, 2**40],
    "quantization_config": [{"quant_method": "awq"}, {"quant_method": LONG}],
    "num_experts": [1, 8],
    "partial_rotary_factor": [0.5, 1.0],
    "query_pre_attn_scalar": [256, 1e-300],
    "attn_logit_softcapping": [50.0],
    "max_position_embeddings": [1, 2, 100, 2**27, 2**40],
    "rope_theta": [1, 1e15, 1e16],
    "rms_norm_eps": [1e-30, 0.9],
    "num_attention_heads": [2, 8],
    "head_dim": [64, 16],
    "num_key_value_heads": [1, 4],
}
_NEIGHBOUR_KEYS: dict[str, dict[str, list[Any]]] = {
    "generation_config.json": {"eos_token_id": [[0, 1, 2], 575], "bos_token_id": [[], 575]},
    "tokenizer_config.json": {
        "chat_template": ["{{ x.y }}", "{% for", [{"name": "default", "template": "x"}], [{"name": "default"}], LONG],
        "eos_token": [{"content": 1}, LONG],
        "add_bos_token": [True],
    },
    "special_tokens_map.json": {name: [{"content": LONG}, {}] for name in ("bos_token", "eos_token", "unk_token")},
    "chat_template.json": {"chat_template": ["{{ messages[0].content }}", 1]},
}


@st.composite
def config_cases(draw: Draw, folders: Folders) -> Case:
    files = folders.folder()
    name = draw(st.sampled_from(["config.json"] * 5 + sorted(_NEIGHBOUR_KEYS)))
    if draw(st.integers(0, 7)) == 0:
        data = files.get(name, b'{"chat_template": "x"}')
        changed, note = change_bytes(draw, bytes(data) if isinstance(data, bytes) else b"{}")
        return Case("config", [f"{name}: {note}"], files | {name: changed})
    content = files.get(name, b"{}")
    tree = json.loads(content if isinstance(content, bytes) else b"{}")
    known = _CONFIG_KEYS if name == "config.json" else _NEIGHBOUR_KEYS[name]
    notes = [change_json(draw, tree, known) for _ in range(draw(_how_many))]
    if draw(st.integers(0, 29)) == 0:
        files["chat_template.jinja"] = draw(
            st.sampled_from([b"\xff", b"", b"{{ 1 }}", *(t.encode("utf-8", "replace") for t in TEXTS)])
        )
    return Case("config", [f"{name}: {note}" for note in notes], files | {name: dump(tree)})
