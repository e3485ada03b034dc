"""Hugging Face folders: read as the package `safetensors` reads them, refused when they do not add up."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcl.checkpoint import Checkpoint, open_checkpoint
from llmcl.checkpoint.safetensors import read_file_tensors
from llmcl.errors import CheckpointError, UnsupportedModelError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def safetensors_bytes(header: Any, content: bytes = b"", header_bytes: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + content


@pytest.fixture
def read_bytes(tmp_path: Path) -> Callable[[bytes], dict[str, Any]]:
    def read(data: bytes) -> dict[str, Any]:
        path = tmp_path / "model.safetensors"
        path.write_bytes(data)
        return read_file_tensors(path)

    return read


def assert_same(checkpoint: Checkpoint, tensors: dict[str, np.ndarray]) -> None:
    assert set(checkpoint.tensors) == set(tensors)
    for name, values in tensors.items():
        info = checkpoint.tensors[name]
        assert info.shape == values.shape
        rows = checkpoint.rows(name, 0, info.n_rows)
        assert rows.shape == (info.n_rows, info.row_bytes)
        assert rows.tobytes() == values.tobytes()
        np.testing.assert_array_equal(checkpoint.array(name), values.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_folder_is_read(hf_files, tmp_path, dtype):
    tensors = hf_files.tensors(dtype)
    with open_checkpoint(str(hf_files.write(tmp_path / "model", tensors))) as checkpoint:
        assert_same(checkpoint, tensors)
        assert checkpoint.config.dtype == dtype  # config.json says nothing about it
        assert checkpoint.path == tmp_path / "model"
        assert checkpoint.gguf_metadata is None
        assert not any(info.rope_interleaved for info in checkpoint.tensors.values())


def test_bfloat16_is_read_as_pytorch_reads_it(hf_files, tmp_path):
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in hf_files.tensors().items()}
    # Norms are often left in float32; the matrices say what the checkpoint is.
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    folder = hf_files.write(tmp_path / "model", config={"torch_dtype": "float32"})
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.tensors[Q_PROJ].format == "BF16"
    assert checkpoint.tensors["model.norm.weight"].format == "F32"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.array(name), tensor.float().numpy())


def test_sharded_weights_are_read(hf_files, tmp_path):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**hf_files.config)).to(torch.float16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same(open_checkpoint(str(tmp_path)), {name: value.numpy() for name, value in model.state_dict().items()})


def test_tied_embeddings_need_no_head_and_ignore_a_copy(hf_files, tmp_path):
    tensors = hf_files.tensors()
    tensors.pop("lm_head.weight")
    head = tensors["model.embed_tokens.weight"]
    tied = {"tie_word_embeddings": True}
    assert "lm_head.weight" not in open_checkpoint(str(hf_files.write(tmp_path / "a", tensors, tied))).tensors
    with_copy = {**tensors, "lm_head.weight": head}
    assert "lm_head.weight" not in open_checkpoint(str(hf_files.write(tmp_path / "b", with_copy, tied))).tensors
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* is missing"):
        open_checkpoint(str(hf_files.write(tmp_path / "c", tensors)))


def test_rows_are_read_from_the_file(hf_files, tmp_path):
    tensors = hf_files.tensors()
    checkpoint = open_checkpoint(str(hf_files.write(tmp_path, tensors)))
    rows = checkpoint.rows(Q_PROJ, 3, 7)
    assert rows.tobytes() == tensors[Q_PROJ][3:7].tobytes()
    for start, stop in ((-1, 2), (3, 2), (0, 65)):
        with pytest.raises(IndexError):
            checkpoint.rows(Q_PROJ, start, stop)
    checkpoint.close()
    with pytest.raises(KeyError):
        checkpoint.rows(Q_PROJ, 0, 1)
    assert rows.tobytes() == tensors[Q_PROJ][3:7].tobytes()  # what was given out lives on


def test_generation_config_is_read(hf_files, tmp_path):
    hf_files.write(tmp_path, hf_files.tensors())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert open_checkpoint(str(tmp_path)).config.eos_token_ids == (2, 5)


def test_tensors_outside_the_model_are_ignored(hf_files, tmp_path):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "score.weight": np.ones((2, 64), np.int64),
    }
    tensors = hf_files.tensors()
    assert_same(open_checkpoint(str(hf_files.write(tmp_path, {**tensors, **extra}))), tensors)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "lm_head.bias",
        "model.norm.bias",
    ],
)
def test_tensors_that_would_be_left_out_of_the_model_are_refused(hf_files, tmp_path, name):
    tensors = {**hf_files.tensors(), name: np.ones(64, np.float32)}
    with pytest.raises(UnsupportedModelError, match=name):
        open_checkpoint(str(hf_files.write(tmp_path, tensors)))


def test_wrong_tensors_are_named(hf_files, tmp_path):
    tensors = hf_files.tensors()
    wrong_shape = {**tensors, Q_PROJ: tensors[Q_PROJ].reshape(32, 128)}
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.*\[32, 128\].*\[64, 64\]"):
        open_checkpoint(str(hf_files.write(tmp_path / "shape", wrong_shape)))
    wrong_dtype = {**tensors, Q_PROJ: tensors[Q_PROJ].astype(np.float64)}
    with pytest.raises(UnsupportedModelError, match=rf"{Q_PROJ}.*F64"):
        open_checkpoint(str(hf_files.write(tmp_path / "dtype", wrong_dtype)))
    del tensors[Q_PROJ]
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.*missing"):
        open_checkpoint(str(hf_files.write(tmp_path / "missing", tensors)))


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/passwd", "/tmp/x.safetensors", "sub/x.safetensors", "..\\x.safetensors",
     "C:x.safetensors", ".hidden.safetensors", "x\0.safetensors", "pytorch_model.bin", "", 3, None, ["x"],
     "x\x1b[2J.safetensors"],
)  # fmt: skip
def test_an_index_cannot_name_files_elsewhere(hf_files, tmp_path, file):
    folder = hf_files.write(tmp_path / "model")
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes({}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: file}}))
    with pytest.raises(CheckpointError, match="plain name"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "index", [b"", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"{", b"\xff", b"[" * 10**5]
)
def test_a_damaged_index_is_refused(hf_files, tmp_path, index):
    (hf_files.write(tmp_path) / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(str(tmp_path))


def test_an_index_with_an_impossible_name_is_refused(hf_files, tmp_path):
    index = hf_files.write(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q_PROJ: "x" * 5000 + ".safetensors"}}))
    with pytest.raises(CheckpointError, match=r"cannot be read|are missing"):  # as the system answers
        open_checkpoint(str(tmp_path))


def test_an_index_must_tell_the_truth(hf_files, tmp_path):
    folder = hf_files.write(tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {Q_PROJ: "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"missing, the first is model-1\.safetensors"):
        open_checkpoint(str(folder))
    (folder / "model-1.safetensors").write_bytes(safetensors_bytes({}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.* is not in model-1\.safetensors"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"\xff\xfe", b'{"model_type": ' + b"[" * 10**5, b"9" * 5000])
def test_a_damaged_config_is_refused(hf_files, tmp_path, config):
    hf_files.write(tmp_path)
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


def test_pickle_files_are_never_read(hf_files, tmp_path):
    marker = tmp_path / "executed"
    folder = hf_files.write(tmp_path / "model")

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(marker),))

    import pickle

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match="Convert them to safetensors"):
        open_checkpoint(str(folder))
    assert not marker.exists()


def test_folders_that_are_no_model_say_what_is_missing(hf_files, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(str(empty))
    (empty / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: give the path of that file"):
        open_checkpoint(str(empty))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(str(hf_files.write(tmp_path / "config only")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\0" * 7, "expected at least 8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_files_that_are_no_safetensors_file(read_bytes, content, message):
    with pytest.raises(CheckpointError, match=message):
        read_bytes(content)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(hf_files, tmp_path):
    folder = hf_files.write(tmp_path)
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(str(folder))


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (entry(offsets=[0, 16]), r"tensor 't' is F32 \[2\] and lies at bytes 0 to 16, expected 8 bytes"),
        (entry(offsets=[2**60, 2**60 + 8]), "begin where the tensor before it ends"),
        (entry(offsets=[8, 0]), "lies at bytes 8 to 0"),
        (entry(offsets=[-8, 0]), "data_offsets"),
        (entry(offsets=[0]), "data_offsets"),
        (entry(offsets=[0, 8.0]), "data_offsets"),
        (entry(offsets="ab"), "data_offsets"),
        (entry(offsets=[0, 10**400]), "number out of range"),
        (entry(offsets=[0, 4]), "bytes 0 to 4, expected 8 bytes"),
        (entry(shape=[3]), "bytes 0 to 8, expected 12 bytes"),
        (entry(shape=[2**40, 2**40]), "bytes 0 to 8, expected 4835703278458516698824704 bytes"),
        (entry(shape=[-2]), "shape"),
        (entry(shape=[2.0]), "shape"),
        (entry(shape=[True, 2]), "shape"),
        (entry(shape="2"), "shape"),
        (entry(shape=[2**60] * 10**5), "tensor 't' is F32 .*bytes 0 to 8, expected a number of"),
        (entry(shape=None), "shape"),
        (entry(dtype="Q4"), "dtype `Q4`, expected one of `BOOL`"),
        (entry(dtype=["F32"]), "dtype"),
        (7, "integer `7`, expected struct TensorInfo"),
        ({}, "missing field `dtype`"),
    ],
)
def test_hostile_entries_are_refused_before_any_read(read_bytes, header, message):
    data = safetensors_bytes({"t": header}, bytes(8))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            read_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (safetensors_bytes({}, header_bytes=3), "header claims 3|not valid JSON"),
        (safetensors_bytes({}, header_bytes=2**63), "header claims"),
        (safetensors_bytes({}, header_bytes=100), "header claims 100 bytes"),
        (safetensors_bytes(b"{"), "header is damaged behind '{': invalid JSON"),
        (safetensors_bytes(b"\xff\xff"), "not valid JSON"),
        (safetensors_bytes(b"[]"), "invalid type: sequence"),
        (safetensors_bytes(b"[" * 10**6), "invalid type: sequence"),
        (
            safetensors_bytes(b'{"t": %b, "t": %b}' % (2 * (json.dumps(entry()).encode(),)), bytes(8)),
            "'t' appears twice",
        ),
        (
            safetensors_bytes({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)),
            r"'b' is F32 \[2\] and lies at bytes 4 to 12",
        ),
        (safetensors_bytes({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "'b' .* bytes 12 to 20"),
        (safetensors_bytes({"a": entry(offsets=[4, 12])}, bytes(12)), "'a' .* bytes 4 to 12"),
        (safetensors_bytes({"a": entry()}, bytes(16)), "end at byte 8 of 16, expected the end of the file"),
        (safetensors_bytes({"a": entry()}, bytes(7)), "end at byte 8 of 7, expected the end of the file"),
        (safetensors_bytes({"a\x1b[31m\n": entry(shape=[3])}, bytes(8)), r"tensor 'a\\x1b\[31m\\n' is F32"),
        (safetensors_bytes({"a": entry(), "b": entry()}, bytes(8)), "begin where the tensor before it ends"),
    ],
)
def test_hostile_headers_are_refused(read_bytes, data, message):
    with pytest.raises(CheckpointError, match=message):
        read_bytes(data)


def test_metadata_and_empty_tensors_are_no_obstacle(read_bytes):
    header = {"__metadata__": {"format": "pt"}, "b": entry("F16", [], [8, 10]), "a": entry()}
    header |= {"empty": entry(shape=[0, 4], offsets=[8, 8]), "also": entry(shape=[0], offsets=[0, 0])}
    stored = read_bytes(safetensors_bytes(header, bytes(range(10))))
    assert set(stored) == {"a", "b", "empty", "also"}
    assert stored["a"].data.tobytes() == bytes(range(8))
    assert (stored["b"].shape, stored["b"].data.tobytes()) == ((), bytes([8, 9]))
    assert len(stored["empty"].data) == len(stored["also"].data) == 0


def test_every_dtype_of_the_format_has_its_place(read_bytes):
    sizes = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "U8": 8, "F8_E4M3": 8, "BF16": 16, "I32": 32, "C64": 64, "F64": 64}
    header, at = {}, 0
    for dtype, bits in sizes.items():
        header[dtype] = entry(dtype, [4], [at, at + bits // 2])
        at += bits // 2
    stored = read_bytes(safetensors_bytes(header, bytes(range(at))))
    for dtype, tensor in stored.items():
        begin, end = header[dtype]["data_offsets"]
        assert tensor.data.tobytes() == bytes(range(begin, end)), dtype


@pytest.fixture(scope="module")
def damaged(hf_files, tmp_path_factory) -> tuple[Path, bytes]:
    """A sound folder and the bytes of its weights."""
    folder = hf_files.write(tmp_path_factory.mktemp("damaged"), hf_files.tensors("float16"))
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(damaged, data):
    folder, sound = damaged
    header_end = 8 + struct.unpack("<Q", sound[:8])[0]
    bytes_ = bytearray(sound[: data.draw(st.one_of(st.just(len(sound)), st.integers(0, len(sound))))])
    for position in data.draw(st.lists(st.integers(0, header_end - 1), max_size=4)):
        if position < len(bytes_):
            bytes_[position] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(bytes_)
    try:
        checkpoint = open_checkpoint(str(folder))
    except CheckpointError as error:
        assert str(error)
    else:
        assert len(bytes_) == len(sound)
        for name, info in checkpoint.tensors.items():
            assert checkpoint.rows(name, 0, info.n_rows).nbytes == info.n_bytes
