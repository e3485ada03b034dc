"""A file that something writes to while it is read: an error at any moment, never the end of the process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from programs import ROOT

from llmcl.checkpoint import resolve
from llmcl.checkpoint.files import map_file, read_view
from llmcl.errors import CheckpointError

# What `rows` gave out was a view of the mapping, which a later read of ended the process with SIGBUS.
LATER = """
import os, sys
from llmcl.checkpoint import open_checkpoint
with open_checkpoint(sys.argv[1]) as checkpoint:
    rows = {name: checkpoint.rows(name, 0, info.n_rows) for name, info in checkpoint.tensors.items()}
    os.truncate(sys.argv[1] + "/model.safetensors", 100)
    print(sum(int(part.sum()) for part in rows.values()))
"""


def test_what_was_read_stays_when_the_file_shrinks(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", small_config(), random_weights(small_config(), seed=1))
    done = subprocess.run(
        [sys.executable, "-c", LATER, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert int(done.stdout) > 0


WHILE_OPENED = """
import os, sys
from llmcl.checkpoint import gguf, open_checkpoint, safetensors
from llmcl.errors import CheckpointError

def map_and_truncate(path, map_file=gguf.map_file):
    data = map_file(path)
    os.truncate(path, 10)
    return data

gguf.map_file = safetensors.map_file = map_and_truncate
try:
    open_checkpoint(sys.argv[1])
except CheckpointError as error:
    print(error)
"""


def test_a_header_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(resolve("smollm2", offline=True, progress=None), path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WHILE_OPENED, str(path)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert "bytes when it was opened and has 10 now" in done.stdout


VIEWS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda data: data,
    lambda data: data[100:5000],
    lambda data: data[:4096].reshape(64, 64)[3:9],
    lambda data: data[:4096].reshape(64, 64)[:, 5:7],
    lambda data: data[:4096].view("<u2").reshape(32, 64)[:, 3:20].T,
    lambda data: data[:4096].reshape(4, 8, 2, 64)[2, :, 1],
    lambda data: data[:0],
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_read_from_the_file_as_it_is_mapped(tmp_path: Path, view: Callable[[np.ndarray], np.ndarray]) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(0).integers(0, 256, 9000, np.uint8)
    path.write_bytes(content.tobytes())
    data = map_file(path)
    read = read_view(view(data))
    expected = view(content)
    assert read.shape == expected.shape and read.dtype == expected.dtype
    np.testing.assert_array_equal(read, expected)
    assert not np.shares_memory(read, data)
    if not expected.size:
        return
    os.truncate(path, 10)
    with pytest.raises(CheckpointError, match="the file had 9000 bytes when it was opened and has 10 now"):
        read_view(view(data))
