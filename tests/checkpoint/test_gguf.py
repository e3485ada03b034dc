"""GGUF files: read like the package `gguf` reads them, and refused when they do not add up."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from gguf_reference import assert_read_as_by_gguf, write_out
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.formats import FORMATS
from llmcl.checkpoint.gguf import read_gguf
from llmcl.errors import CheckpointError, UnsupportedModelError

N_HEADS = {"q_proj": 4, "k_proj": 2}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 6, 7, 8, 9, 10


@pytest.fixture
def read_bytes(tmp_path: Path) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        path = tmp_path / "file.gguf"
        path.write_bytes(data)
        return read_gguf(path)

    return read


def rounded(format: str, values: np.ndarray) -> np.ndarray:
    """What is left of float32 values after storing them in `format`, by the package `gguf`."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType[format]
    return dequantize(quantize(np.ascontiguousarray(values), kind), kind)


@pytest.mark.parametrize("format", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_file_is_read_under_hugging_face_names_and_row_order(hf_files, gguf_files, tmp_path, format):
    tensors = hf_files.tensors()
    gguf_tensors = gguf_files.tensors(tensors, N_HEADS)
    formats = {name: format for name, values in gguf_tensors.items() if values.ndim == 2}
    path = gguf_files.write(tmp_path / "model.gguf", gguf_tensors, formats)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.path == path
    assert set(checkpoint.tensors) == set(tensors)
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert checkpoint.config.dtype == dtypes.get(format, "quantized")
    for name, values in tensors.items():
        info = checkpoint.tensors[name]
        assert info.shape == values.shape
        assert info.format == (format if values.ndim == 2 else "F32")
        assert info.rope_interleaved == ("q_proj" in name or "k_proj" in name)
        np.testing.assert_array_equal(checkpoint.array(name), rounded(info.format, values))


def test_rows_are_the_bytes_that_the_gguf_package_sees(hf_files, gguf_files, tmp_path):
    from gguf import GGUFReader

    tensors = gguf_files.tensors(hf_files.tensors(), N_HEADS)
    path = gguf_files.write(tmp_path / "model.gguf", tensors, {"blk.0.attn_q.weight": "Q4_1"})
    reference = {tensor.name: np.asarray(tensor.data) for tensor in GGUFReader(path).tensors}
    checkpoint = open_checkpoint(str(path))
    rows = checkpoint.rows(Q_PROJ, 10, 20)
    assert rows.tobytes() == reference["blk.0.attn_q.weight"][10:20].tobytes()
    assert rows.shape == (10, 64 // 32 * 20)
    assert not rows.flags.owndata
    norm = checkpoint.rows("model.norm.weight", 0, 1)
    assert norm.tobytes() == reference["output_norm.weight"].tobytes()


@pytest.mark.parametrize("format", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_read(hf_files, gguf_files, tmp_path, format):
    # The package cannot write these, so the blocks are random bytes: any bytes are valid blocks.
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize

    changes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    shapes = gguf_files.tensors(hf_files.tensors(**changes), N_HEADS)
    metadata = {"llama.embedding_length": 256, "llama.feed_forward_length": 256, "llama.block_count": 1}
    metadata |= {"llama.attention.key_length": 64}
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {**gguf_files.metadata, **metadata}.items():
        if key != "general.architecture":
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    rng = np.random.default_rng(2)
    blocks = {}
    for name, values in shapes.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
            continue
        raw = rng.integers(0, 64, (len(values), values.shape[1] // 256 * FORMATS[format].nbytes), dtype=np.uint8)
        blocks[name] = raw
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[format])
    write_out(writer, tmp_path / "model.gguf")
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    down = "model.layers.0.mlp.down_proj.weight"
    assert checkpoint.tensors[down].format == format
    expected = dequantize(blocks["blk.0.ffn_down.weight"], GGMLQuantizationType[format])
    np.testing.assert_array_equal(checkpoint.array(down), expected)


def test_block_sizes_are_those_of_the_gguf_package():
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {name: (format.block, format.nbytes) for name, format in FORMATS.items()}
    assert {name: GGML_QUANT_SIZES[GGMLQuantizationType[name]] for name in FORMATS} == sizes


def test_every_type_of_metadata_is_read_as_the_gguf_package_reads_it(tmp_path):
    from gguf import GGUFWriter

    path = tmp_path / "metadata.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "a\u0301 \U0001f600\n\0")
    writer.add_array("texts", ["", "Ġthe", "\u4f60"])
    writer.add_array("i32s", [1, -2, 3])
    writer.add_array("f32s", [0.5, -0.25])
    writer.add_array("bools", [True, False, True])
    write_out(writer, path)
    metadata, stored = read_gguf(path)
    assert stored == {}
    assert isinstance(metadata["texts"], list)
    assert (metadata["i32s"].dtype, metadata["f32s"].dtype) == (np.int32, np.float32)
    assert metadata["bools"].dtype == np.bool_
    assert metadata["yes"] is True
    assert type(metadata["u8"]) is int
    assert (metadata["f32"], metadata["f64"]) == (0.1, 0.1)  # which is no float32


def test_arrays_of_arrays_are_read(gguf_files, read_bytes):
    inner = struct.pack("<IQ3B", 0, 3, 1, 2, 3)
    texts = struct.pack("<IQ", STRING, 1) + gguf_files.string("x")
    payload = struct.pack("<IQ", ARRAY, 2) + inner + texts
    numbers, strings = read_bytes(gguf_files.raw([gguf_files.entry("k", ARRAY, payload)]))[0]["k"]
    assert numbers.tolist() == [1, 2, 3]
    assert strings == ["x"]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_and_any_alignment_are_read(gguf_files, read_bytes, tmp_path, version):
    alignment = gguf_files.entry("general.alignment", UINT32, struct.pack("<I", 256))
    content = np.arange(64, dtype="<f4").tobytes() + np.ones(2, "<f4").tobytes()
    table = [gguf_files.tensor("a", (16, 4), 0, 0), gguf_files.tensor("b", (2,), 0, 256)]
    data = gguf_files.raw([alignment], table, content + bytes(-len(content) % 256), version=version, alignment=256)
    metadata, stored = read_bytes(data)
    (tmp_path / "padded.gguf").write_bytes(data)
    assert_read_as_by_gguf(tmp_path / "padded.gguf")
    assert metadata == {"general.alignment": 256}
    assert stored["a"].shape == (4, 16)
    assert stored["a"].data.tobytes() == content[:256]
    assert stored["b"].data.tobytes() == content[256:264]


def test_tied_and_untied_embeddings(hf_files, gguf_files, tmp_path):
    tensors = gguf_files.tensors(hf_files.tensors(), N_HEADS)
    assert not open_checkpoint(str(gguf_files.write(tmp_path / "untied.gguf", tensors))).config.tie_embeddings
    del tensors["output.weight"]
    tied = open_checkpoint(str(gguf_files.write(tmp_path / "tied.gguf", tensors)))
    assert tied.config.tie_embeddings
    assert "lm_head.weight" not in tied.tensors


def test_rope_factors_go_to_the_configuration(hf_files, gguf_files, tmp_path):
    factors = np.linspace(1, 32, 8, dtype=np.float32)
    tensors = {**gguf_files.tensors(hf_files.tensors(), N_HEADS), "rope_freqs.weight": factors}
    scaling = open_checkpoint(str(gguf_files.write(tmp_path / "model.gguf", tensors))).config.rope_scaling
    assert scaling is not None
    assert scaling.factors == tuple(factors.tolist())
    tensors["rope_freqs.weight"] = factors.reshape(2, 4)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_checkpoint(str(gguf_files.write(tmp_path / "wrong.gguf", tensors)))


@pytest.mark.parametrize(
    ("name", "shape", "error", "message"),
    [
        ("blk.0.attn_q.bias", (64,), CheckpointError, r"layers\.0\.self_attn\.k_proj\.bias is missing"),
        ("blk.2.attn_q.weight", (64, 64), UnsupportedModelError, "2 layers"),
        ("blk.0.ffn_gate_inp.weight", (8, 64), UnsupportedModelError, r"mlp\.gate\.weight"),
        ("position_embd.weight", (128, 64), UnsupportedModelError, "embed_positions"),
        ("blk.0.attn_q.weight", (32, 64), CheckpointError, r"q_proj\.weight.*\[32, 64\].*\[64, 64\]"),
        ("model.norm.weight", (64,), UnsupportedModelError, r"'model\.norm\.weight'"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(hf_files, gguf_files, tmp_path, name, shape, error, message):
    tensors = gguf_files.tensors(hf_files.tensors(), N_HEADS)
    tensors[name] = np.ones(shape, np.float32)
    with pytest.raises(error, match=message):
        open_checkpoint(str(gguf_files.write(tmp_path / "model.gguf", tensors)))


def test_missing_tensors_and_other_models_are_refused(hf_files, gguf_files, tmp_path):
    tensors = gguf_files.tensors(hf_files.tensors(), N_HEADS)
    split = gguf_files.write(tmp_path / "split.gguf", tensors, metadata={"split.count": 3})
    with pytest.raises(CheckpointError, match="one of 3 parts of a split GGUF, and its name"):
        open_checkpoint(str(split))
    quantised_norm = gguf_files.write(tmp_path / "norm.gguf", tensors, {"output_norm.weight": "Q8_0"})
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has the format Q8_0"):
        open_checkpoint(str(quantised_norm))
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        open_checkpoint(str(gguf_files.write(tmp_path / "missing.gguf", tensors)))


# Each builds one hostile file from the sound parts that the writer offers.
HOSTILE: dict[str, tuple[Callable[[Any], bytes], str]] = {
    "empty": (lambda w: b"", "is empty"),
    "magic": (lambda w: w.raw(magic=b"GGML"), "letters GGUF"),
    "only magic": (lambda w: b"GGUF", "the version"),
    "version 1": (lambda w: w.raw(version=1), "GGUF version 1"),
    "big endian": (lambda w: w.raw(version=3 << 24), "big-endian"),
    "2**60 tensors": (lambda w: w.raw(n_tensors=2**60), "number of tensors is"),
    "2**60 entries": (lambda w: w.raw(n_entries=2**60), "number of metadata entries is"),
    "one entry too few": (lambda w: w.raw(n_entries=1), "number of metadata entries is 1"),
    "key of 2**63": (lambda w: w.raw([struct.pack("<Q", 2**63) + bytes(40)]), "beyond the end"),
    "key not UTF-8": (lambda w: w.raw([w.entry(b"\xff\xfe", BOOL, b"\1")]), "not UTF-8"),
    "key twice": (lambda w: w.raw([w.entry("k", BOOL, b"\1")] * 2), "'k' appears twice"),
    "unknown type": (lambda w: w.raw([w.entry("k", 13, bytes(8))]), "unknown metadata type 13"),
    "string of 2**60": (lambda w: w.raw([w.entry("k", STRING, struct.pack("<Q", 2**60))]), "beyond the end"),
    "string not UTF-8": (lambda w: w.raw([w.entry("k", STRING, w.string(b"\xc0"))]), "not UTF-8"),
    "2**60 numbers": (
        lambda w: w.raw([w.entry("k", ARRAY, struct.pack("<IQ", 12, 2**60))]),
        "more than the file",
    ),
    "2**60 strings": (
        lambda w: w.raw([w.entry("k", ARRAY, struct.pack("<IQ", 8, 2**60))]),
        "more than the file",
    ),
    "2**60 arrays": (
        lambda w: w.raw([w.entry("k", ARRAY, struct.pack("<IQ", 9, 2**60))]),
        "more than the file",
    ),
    "array of unknown": (
        lambda w: w.raw([w.entry("k", ARRAY, struct.pack("<IQ", 77, 1))]),
        "unknown metadata type 77",
    ),
    "arrays without end": (
        lambda w: w.raw([w.entry("k", ARRAY, struct.pack("<IQ", 9, 1) * 1000)]),
        "nests arrays too deeply",
    ),
    "alignment 0": (lambda w: w.raw([w.entry("general.alignment", UINT32, bytes(4))]), "power of two"),
    "alignment 48": (lambda w: w.raw([w.entry("general.alignment", UINT32, b"\x30\0\0\0")]), "power of two"),
    "alignment text": (
        lambda w: w.raw([w.entry("general.alignment", STRING, w.string("32"))]),
        "power of two",
    ),
    "alignment 2**40": (
        lambda w: w.raw([w.entry("general.alignment", UINT64, struct.pack("<Q", 2**40))]),
        "power of two",
    ),
    "0 dimensions": (lambda w: w.raw(table=[w.tensor("t", (), 0, 0) + bytes(8)]), "0 dimensions"),
    "5 dimensions": (lambda w: w.raw(table=[w.tensor("t", (1,) * 5, 0, 0)]), "5 dimensions"),
    "2**32 dimensions": (
        lambda w: w.raw(table=[w.tensor("t", (1,), 0, 0, 2**32 - 1)]),
        "4294967295 dimensions",
    ),
    "dimension 0": (lambda w: w.raw(table=[w.tensor("t", (8, 0), 0, 0)]), "dimension of 0"),
    "dimension 2**63": (
        lambda w: w.raw(table=[w.tensor("t", (2**63, 2**63), 0, 0)], content=bytes(64)),
        "truncated",
    ),
    "type Q1_0": (
        lambda w: w.raw(table=[w.tensor("t", (256,), 41, 0)]),
        "type Q1_0; llmcl supports F32, F16",
    ),
    "type 999": (lambda w: w.raw(table=[w.tensor("t", (256,), 999, 0)]), "type 999"),
    "half a block": (
        lambda w: w.raw(table=[w.tensor("t", (40, 4), 2, 0)], content=bytes(200)),
        "tensor 't': rows of 40",
    ),
    "offset beyond": (lambda w: w.raw(table=[w.tensor("t", (8,), 0, 2**62)], content=bytes(64)), "truncated"),
    "truncated": (
        lambda w: w.raw(table=[w.tensor("t", (8,), 0, 0)], content=bytes(31)),
        "ends at byte 32 of 31",
    ),
    "no content": (lambda w: w.raw(table=[w.tensor("t", (8,), 0, 0)])[:-7], "truncated"),
    "offset 4": (
        lambda w: w.raw(table=[w.tensor("t", (8,), 0, 4)], content=bytes(64)),
        "not a multiple of 32",
    ),
    "tensor twice": (
        lambda w: w.raw(table=[w.tensor("t", (8,), 0, 0)] * 2, content=bytes(64)),
        "'t' is there twice",
    ),
    "overlap": (
        lambda w: w.raw(table=[w.tensor("t", (16,), 0, 0), w.tensor("u", (8,), 0, 32)], content=bytes(64)),
        "'u' begins at 32, expected 64: it and tensor 't' overlap",
    ),
    "a hole between tensors": (
        lambda w: w.raw(table=[w.tensor("u", (8,), 0, 64), w.tensor("t", (8,), 0, 0)], content=bytes(96)),
        "'u' begins at 64, expected 32: it and tensor 't' leave a hole",
    ),
    "a hole before the first": (
        lambda w: w.raw(table=[w.tensor("t", (8,), 0, 32)], content=bytes(64)),
        "'t' begins at 32, expected 0: it and the header leave a hole",
    ),
    "bytes behind the last": (
        lambda w: w.raw(table=[w.tensor("t", (8,), 0, 0)], content=bytes(33)),
        "'t' ends at byte 32 and the file at 33",
    ),
    "a type of fewer bytes": (  # 64 values of Q4_1 are 40 bytes, of F32 256
        lambda w: w.raw(table=[w.tensor("t", (64,), 3, 0), w.tensor("u", (8,), 0, 256)], content=bytes(288)),
        "'u' begins at 256, expected 64",
    ),
    "a name for terminals": (
        lambda w: w.raw(table=[w.tensor("\x1b[2J\u202e\n" + "x" * 500, (8,), 0, 64)], content=bytes(96)),
        r"tensor '\\x1b\[2J\\u202e\\nx+\.\.\. begins",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_before_anything_is_made_of_them(gguf_files, read_bytes, case):
    build, message = HOSTILE[case]
    data = build(gguf_files)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            read_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("llama.block_count", 2**31),
        ("llama.embedding_length", 0),
        ("llama.attention.head_count", "4"),
        ("llama.attention.head_count", [4, 4]),
        ("llama.vocab_size", True),
        ("split.count", [1]),
        ("llama.rope.scaling.type", ["linear"]),
    ],
)
def test_senseless_metadata_is_refused(hf_files, gguf_files, tmp_path, key, value):
    tensors = gguf_files.tensors(hf_files.tensors(), N_HEADS)
    path = gguf_files.write(tmp_path / "model.gguf", tensors, metadata={key: value})
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def sound(hf_files, gguf_files, tmp_path_factory) -> tuple[Path, bytes, int]:
    """A sound file, its bytes, and the length of its header."""
    tensors = gguf_files.tensors(hf_files.tensors(), N_HEADS)
    metadata = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(50)], "tokenizer.ggml.token_type": [1] * 50}
    formats = {name: "Q4_0" for name, values in tensors.items() if values.ndim == 2}
    path = gguf_files.write(tmp_path_factory.mktemp("damaged") / "m.gguf", tensors, formats, metadata)
    data = path.read_bytes()
    n_content = sum(-(-tensor.data.size // 32) * 32 for tensor in read_gguf(path)[1].values())
    return path, data, len(data) - n_content


def test_a_file_truncated_anywhere_is_refused(sound):
    path, data, header_end = sound
    last_value = len(data.rstrip(b"\0"))
    for length in [*range(0, header_end, 97), header_end, len(data) // 2, last_value - 64]:
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(str(path))


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(sound, data):
    path, sound_bytes, header_end = sound
    bytes_ = bytearray(sound_bytes)
    for position in data.draw(st.lists(st.integers(0, header_end - 1), min_size=1, max_size=4)):
        bytes_[position] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes_[: data.draw(st.one_of(st.just(len(bytes_)), st.integers(0, len(bytes_))))])
    try:
        checkpoint = open_checkpoint(str(path))
    except CheckpointError as error:
        assert str(error)
    else:
        for name, info in checkpoint.tensors.items():
            assert checkpoint.rows(name, 0, info.n_rows).nbytes == info.n_bytes


def test_a_large_vocabulary_is_read_quickly(gguf_files, read_bytes):
    # A vocabulary and its merges of the size of Llama 3, of which start-up must not notice much.
    n_texts = 400_000
    text = gguf_files.string("Ġsome token")
    entry = gguf_files.entry("k", ARRAY, struct.pack("<IQ", STRING, n_texts) + text * n_texts)
    data = gguf_files.raw([entry])
    start = time.process_time()
    metadata, _ = read_bytes(data)
    assert time.process_time() - start < 2.0
    assert metadata["k"] == ["Ġsome token"] * n_texts
