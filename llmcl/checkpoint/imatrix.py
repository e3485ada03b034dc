"""Importance matrices from llama.cpp's `llama-imatrix`: the mean square of each column that a matrix multiplies.

Two formats: GGUF (general.type "imatrix", tensors NAME.in_sum2 and NAME.counts), and the older binary one (.dat).
Source: tools/imatrix in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from llmcl.checkpoint.files import map_file, reading
from llmcl.checkpoint.gguf import MAGIC, read_gguf
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import CheckpointError, UsageError, shown

_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_NAME = 1 << 12


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Returns the importance of columns by the matrix's GGUF name: float32 [n, k], n experts or 1.

    Raises CheckpointError for a damaged file, or a GGUF file of another kind.
    """
    with reading(path):
        data = map_file(path)
        if bytes(data[:4]) == MAGIC:
            metadata, stored = read_gguf(path)
            if metadata.get("general.type") != "imatrix":
                kind = shown(metadata.get("general.type"))
                raise CheckpointError(f"{path.name} has general.type {kind}; expected an importance matrix (imatrix)")
            columns = _from_gguf(path, stored)
        else:
            columns = _from_binary(path, data)
    for name, values in columns.items():
        if not np.isfinite(values).all() or (values < 0).any():
            raise CheckpointError(f"{path.name}: {name} has values that are no mean squares; make the file anew")
    return columns


def _from_gguf(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    columns = {}
    for name, tensor in stored.items():
        if not name.endswith(_SUMS):
            continue
        matrix = name.removesuffix(_SUMS)
        counts = stored.get(matrix + _COUNTS)
        if counts is None or {tensor.format, counts.format} != {"F32"}:
            raise CheckpointError(f"{path.name}: {name} has no {matrix}{_COUNTS} beside it in F32; make the file anew")
        n = np.frombuffer(counts.data.tobytes(), "<f4")
        sums = np.frombuffer(tensor.data.tobytes(), "<f4")
        if len(n) == 0 or len(sums) % len(n):
            raise CheckpointError(f"{path.name}: {name} has {len(sums)} values for {len(n)} counts; make the file anew")
        # An expert that no text reached counts all columns alike.
        columns[matrix] = np.where(n[:, None] > 0, sums.reshape(len(n), -1) / np.maximum(n[:, None], 1), np.float32(1))
    if not columns:
        raise CheckpointError(f"{path.name} holds no tensor {_SUMS}; expected a file from llama-imatrix")
    return columns


def _from_binary(path: Path, data: np.ndarray) -> dict[str, np.ndarray]:
    """Reads the count of matrices, then each matrix: length of the name, name, calls, number of values, values."""
    at = 0

    def fail() -> CheckpointError:
        return CheckpointError(f"{path.name} is no importance matrix, or is cut off at byte {at}; expected a file from "
                               "llama-imatrix (.gguf or .dat)")  # fmt: skip

    def number() -> int:
        nonlocal at
        at += 4
        if at > len(data):
            raise fail()
        return int(data[at - 4 : at].view("<i4")[0])

    columns = {}
    for _ in range(number()):
        length = number()
        if not 0 < length <= _LONGEST_NAME or at + length > len(data):
            raise fail()
        name = bytes(data[at : at + length]).decode("utf-8", "replace")
        at += length
        calls, n = max(1, number()), number()
        if n < 1 or at + 4 * n > len(data):
            raise fail()
        values = np.frombuffer(data[at : at + 4 * n].tobytes(), "<f4")
        columns[name] = (values / np.float32(calls)).reshape(1, -1)
        at += 4 * n
    if not columns:
        raise fail()
    return columns


def importance_of(columns: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns float32 [n, k] for a matrix (GGUF name), n experts or 1; None: the file lacks it.

    Raises UsageError if the file is another model's.
    """
    values = columns.get(name)
    if values is None:
        return None
    n = shape[0] if len(shape) == 3 else 1
    if values.size not in (shape[-1], n * shape[-1]):  # the older format joins the experts
        raise UsageError(
            f"the importance matrix has {values.size} values for {name}, whose rows have {shape[-1]}; give the file "
            "of this model (--imatrix)"
        )
    return values.reshape(-1, shape[-1])
