"""Importance matrices: files as llama.cpp's tools/imatrix writes them, and what they change."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from llmcl.checkpoint.formats import dequantize
from llmcl.checkpoint.gguf import read_gguf
from llmcl.checkpoint.imatrix import importance_of, read_imatrix
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.convert import convert
from llmcl.errors import CheckpointError, UsageError

Sums = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by matrix: sums of squares [n, k], counts [n]
DATASET = "calibration.txt"


def write_gguf(path: Path, sums: Sums, kind: str = "imatrix") -> Path:
    class Writer(GGUFWriter):
        def add_architecture(self) -> None:  # such files have none
            pass

    writer = Writer(path, "")
    writer.add_string("general.type", kind)
    writer.add_array("imatrix.datasets", [DATASET])
    writer.add_uint32("imatrix.chunk_count", 4)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (values, counts) in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values.astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts.astype(np.float32).reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path: Path, sums: Sums, chunk: int = 512) -> Path:
    data = struct.pack("<i", len(sums))
    for name, (values, counts) in sums.items():
        calls = int(-(-counts.max() // chunk))
        means = np.where(counts[:, None] > 0, values / np.maximum(counts[:, None], 1), 1.0).astype("<f4")
        text = name.encode()
        data += struct.pack("<i", len(text)) + text + struct.pack("<ii", calls, means.size)
        data += (means * np.float32(calls)).tobytes()
    path.write_bytes(data + struct.pack("<ii", 4, len(DATASET)) + DATASET.encode())
    return path


def sums(seed: int = 0) -> Sums:
    rng = np.random.default_rng(seed)
    return {
        "blk.0.attn_q.weight": (rng.random((1, 64)) * 2048, np.array([2048])),
        "blk.0.ffn_down_exps.weight": (rng.random((3, 32)) * 700, np.array([700, 1300, 0])),
    }


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    new, old = (
        read_imatrix(write_gguf(tmp_path / "a.gguf", sums())),
        read_imatrix(write_dat(tmp_path / "a.dat", sums())),
    )
    assert new.keys() == old.keys() == sums().keys()
    for name, (values, counts) in sums().items():
        n, k = values.shape
        expected = np.where(counts[:, None] > 0, values / np.maximum(counts[:, None], 1), 1.0)
        shape = (n, 5, k) if n > 1 else (5, k)
        for columns in (new, old):
            importance = importance_of(columns, name, shape)
            assert importance is not None
            np.testing.assert_allclose(importance, expected, rtol=1e-6)
    assert importance_of(new, "blk.1.attn_q.weight", (5, 64)) is None
    with pytest.raises(
        UsageError, match=r"has 64 values for blk.0.attn_q.weight, whose rows have 128; give the file of"
    ):
        importance_of(new, "blk.0.attn_q.weight", (5, 128))


@pytest.mark.parametrize("end", [0, 2, 4, 10, 30, 100])
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, end: int) -> None:
    path = write_dat(tmp_path / "a.dat", sums())
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(CheckpointError, match=r"a\.dat"):
        read_imatrix(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"general\.type 'adapter'; expected an importance matrix"):
        read_imatrix(write_gguf(tmp_path / "a.gguf", sums(), "adapter"))
    name, (values, counts) = next(iter(sums().items()))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight has values that are no mean squares"):
        read_imatrix(write_gguf(tmp_path / "b.gguf", {name: (-values, counts)}))


@pytest.mark.parametrize("format", ["Q4_0", "Q4_K"])
def test_errors_in_important_columns_become_smaller(format: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal((32, 512)).astype(np.float32)
    importance = rng.lognormal(0, 2, 512).astype(np.float32)

    def error(data: np.ndarray) -> float:
        return float(np.mean(importance * (dequantize(format, data) - values) ** 2))

    plain, weighted = quantize_rows(values, format), quantize_rows(values, format, importance)
    assert error(weighted) < 0.8 * error(plain)
    alike = quantize_rows(values, format, np.ones(512, np.float32))
    assert np.mean((dequantize(format, alike) - values) ** 2) < 1.02 * np.mean(
        (dequantize(format, plain) - values) ** 2
    )
    zeros = quantize_rows(np.zeros((2, 512), np.float32), format, importance)
    assert not dequantize(format, zeros).any()


def test_a_conversion_follows_the_matrix(gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, source = read_gguf(gguf_file)
    name, other = "blk.0.ffn_down.weight", "blk.1.ffn_down.weight"
    columns = np.random.default_rng(1).lognormal(0, 2, (1, source[name].shape[1]))
    imatrix = write_gguf(tmp_path / "imatrix.gguf", {name: (columns, np.array([1]))})
    options: dict[str, Any] = {"quantize": "q4_k", "imatrix": imatrix}
    _, stored = read_gguf(convert(str(gguf_file), tmp_path / "model.gguf", **options))
    assert "the importance matrix has no values for 13 tensors, such as blk.0.attn_q.weight" in caplog.text
    values = {key: source[key].data.view(np.float32).reshape(source[key].shape) for key in (name, other)}
    weighted = quantize_rows(values[name], "Q4_K", columns.astype(np.float32))
    np.testing.assert_array_equal(stored[name].data, weighted.reshape(-1))
    np.testing.assert_array_equal(stored[other].data, quantize_rows(values[other], "Q4_K").reshape(-1))
