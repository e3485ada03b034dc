"""GGUF files in parts, and GGUF files that are no model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_files import save_gguf
from helpers import random_weights, small_config

from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.gguf import check_header
from llmcl.errors import CheckpointError, UnsupportedModelError

CONFIG = small_config()
WEIGHTS = random_weights(CONFIG, seed=1)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save_gguf(tmp_path / "model.gguf", CONFIG, WEIGHTS)


def split(whole: Path, n_parts: int, folder: Path) -> list[Path]:
    """The parts of a file, as llama.cpp's gguf-split writes them: the first alone has the metadata."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(whole)
    paths = [folder / f"model-{i + 1:05d}-of-{n_parts:05d}.gguf" for i in range(n_parts)]
    for i, path in enumerate(paths):
        writer = GGUFWriter(path, "llama", use_temp_file=False)
        if i == 0:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    kind = field.types[0]
                    sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
                    writer.add_key_value(field.name, field.contents(), kind, sub_type)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::n_parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_split_file_is_the_model_whichever_part_is_named(whole: Path, tmp_path: Path) -> None:
    with open_checkpoint(str(whole)) as checkpoint:
        expected = {name: checkpoint.array(name) for name in checkpoint.tensors}
    for path in split(whole, 3, tmp_path):
        with open_checkpoint(str(path)) as checkpoint:
            assert checkpoint.tensors.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_array_equal(checkpoint.array(name), values)
            assert checkpoint.gguf_metadata is not None
            assert "tokenizer.ggml.tokens" in checkpoint.gguf_metadata


def test_parts_that_do_not_fit_are_named(whole: Path, tmp_path: Path) -> None:
    first, second, third = split(whole, 3, tmp_path)
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in (first, second, third)))
    with pytest.raises(CheckpointError, match="parts of a split GGUF one behind the other"):
        open_checkpoint(str(joined))
    renamed = shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts of a split GGUF, and its name does not say which"):
        open_checkpoint(str(renamed))
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (first, second, third):
        shutil.copy(path, folder)
    with pytest.raises(CheckpointError, match=r"a split GGUF file: give the path of its first part, .*00001-of-00003"):
        open_checkpoint(str(folder))
    shutil.copy(second, third)
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf is not part 3 of 3"):
        open_checkpoint(str(first))
    third.unlink()
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf is missing"):
        open_checkpoint(str(first))


@pytest.mark.parametrize(
    ("kind", "what"), [("adapter", "a LoRA adapter"), ("imatrix", "an importance matrix"), ("mmproj", "an encoder")]
)
def test_files_that_are_no_model_are_named(tmp_path: Path, gguf_files: Any, kind: str, what: str) -> None:
    path = gguf_files.write(tmp_path / "x.gguf", {"a.weight": np.ones((4, 32))}, metadata={"general.type": kind})
    with pytest.raises(UnsupportedModelError, match=what):
        open_checkpoint(str(path))


def test_a_header_says_whether_a_file_is_run(whole: Path, tmp_path: Path, gguf_files: Any) -> None:
    data = whole.read_bytes()
    assert check_header(data)
    assert not check_header(data[:100])
    for changes, message in (
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "cuneiform"}, "'cuneiform'"),
        ({"llama.rope.scaling.type": "cubic"}, "cubic"),
        ({"general.type": "adapter"}, "LoRA"),
    ):
        path = gguf_files.write(tmp_path / "x.gguf", {"output.weight": np.ones((50, 64))}, metadata=changes)
        with pytest.raises(UnsupportedModelError, match=message):
            check_header(path.read_bytes()[:-1000])
