"""GGUF files as the package `gguf` writes and reads them, to compare the project's own reader with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmcl.checkpoint.gguf import read_gguf


def write_out(writer: Any, path: Path) -> Path:
    """Ends a file of the package's GGUFWriter, and compares how it is read; its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_read_as_by_gguf(path)
    return path


def assert_read_as_by_gguf(path: Path) -> None:
    """Names, shapes, types, offsets and bytes of all tensors, and all metadata, are the same with both readers."""
    from gguf import GGUFReader, GGUFValueType

    metadata, stored = read_gguf(path)
    reader = GGUFReader(path)
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert list(metadata) == list(fields)
    for key, field in fields.items():
        value, expected = metadata[key], field.contents()
        if field.types == [GGUFValueType.FLOAT32]:  # ours is the shortest decimal of the same number
            value = float(np.float32(value))
        np.testing.assert_equal(value.tolist() if isinstance(value, np.ndarray) else value, expected, key)  # NaN, too
        assert isinstance(value, (list, np.ndarray)) or type(value) is type(expected), key
    assert list(stored) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = stored[tensor.name]
        assert ours.shape == tuple(int(n) for n in tensor.shape[::-1]), tensor.name
        assert ours.format == tensor.tensor_type.name, tensor.name
        assert offset_in_file(ours.data) == tensor.data_offset, tensor.name
        assert ours.data.tobytes() == np.asarray(tensor.data).tobytes(), tensor.name


def offset_in_file(data: np.ndarray) -> int:
    whole = data
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return int(data.ctypes.data - whole.ctypes.data)
