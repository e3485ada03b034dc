"""Writing a model in another form: a GGUF file, quantised or not, or a Hugging Face folder.

What is written appears under its name only when it is whole: it is made beside it under a temporary name, which is
removed if anything goes wrong, and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcl.checkpoint import Checkpoint, open_checkpoint
from llmcl.checkpoint.formats import FLOAT_FORMATS, row_bytes, to_float32
from llmcl.checkpoint.quantize import check_quantize, quantize_rows, target_format
from llmcl.checkpoint.safetensors import INDEX_FILE, WEIGHTS_FILE
from llmcl.errors import CheckpointError, UsageError

Progress = Callable[[str, int, int], None]

DTYPE_FORMATS = {dtype: format for format, dtype in FLOAT_FORMATS.items()}
CHUNK_VALUES = 1 << 22  # values converted at a time, so that host memory stays small
# Beside the weights: metadata with a vocabulary, configuration.
SMALL_FILES_BYTES = 64 << 20


@dataclass(frozen=True)
class OutTensor:
    """A tensor to be written.

    name, shape: in the result. format: a key of BLOCKS. source_format and rows(start, stop): the stored rows that it is
    made of, uint8 [stop - start, row_bytes], in the order of the result.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    source_format: str
    rows: Callable[[int, int], np.ndarray]

    @property
    def n_rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.name, self.format, self.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.n_rows * self.row_bytes

    def converted(self) -> Iterator[np.ndarray]:
        """The rows in `format`, uint8 [n, row_bytes], some at a time. Raises CheckpointError for a value that is not
        finite there."""
        step = max(1, CHUNK_VALUES // self.shape[-1])
        for start in range(0, self.n_rows, step):
            rows = self.rows(start, min(self.n_rows, start + step))
            if self.format == self.source_format:
                yield rows
                continue
            values = to_float32(rows, self.source_format)
            try:
                yield encode(values, self.format)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {self.name}: {error}") from error


def encode(values: np.ndarray, format: str) -> np.ndarray:
    """float32 [n, k] as stored rows of `format`, uint8 [n, row_bytes]; raises CheckpointError if one is not finite."""
    if format not in FLOAT_FORMATS:
        return quantize_rows(values, format)
    stored: np.ndarray
    if format == "BF16":
        bits = values.view(np.uint32)
        stored = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even
        finite = (stored & 0x7F80) != 0x7F80
    else:
        with np.errstate(over="ignore"):
            stored = values.astype("<f4" if format == "F32" else "<f2")
        finite = np.isfinite(stored)
    if not (finite.all() and np.isfinite(values).all()):
        raise CheckpointError(
            f"a weight is NaN, infinite or too large for {FLOAT_FORMATS[format]}; expected finite weights"
            + ("; use --dtype bfloat16" if format == "F16" else "")
        )
    return np.ascontiguousarray(stored).view(np.uint8).reshape(len(values), -1)


def convert(
    source: str,
    target: str | Path,
    *,
    quantize: str | None = None,
    dtype: str = "bfloat16",
    force: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes the model `source` (a name as for `llmcl.load`) to `target`; returns its path.

    target: a name that ends with .gguf, or a folder, which gets config.json, the tokenizer and safetensors.
    quantize: "q8_0", "q4_0" or "q4_k" for the matrices of a GGUF file (the embedding and the output head stay at q8_0).
    dtype: of the matrices otherwise: "float32", "bfloat16", "float16". Norms keep the dtype they have (GGUF: float32).
    force: replace what is there; a folder only if it holds a model. progress(description, done_bytes, total_bytes).

    Raises UsageError (a target that exists, too little disk space, a format that cannot hold the rows), CheckpointError
    and UnsupportedModelError (a source that cannot be read, or of which the target cannot say something).
    """
    target = Path(target).expanduser()
    is_gguf = target.suffix.lower() == ".gguf"
    if dtype not in DTYPE_FORMATS:
        raise UsageError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPE_FORMATS)}")
    if quantize is not None:
        check_quantize(quantize)
        if not is_gguf:
            raise UsageError(
                f"{target}: a safetensors folder holds no {quantize} blocks; give a name that ends with .gguf, or "
                "leave out --quantize"
            )
    if is_gguf:
        _check_gguf_package()
    check_target(target, is_gguf, force)
    with open_checkpoint(source, offline=offline, progress=progress) as checkpoint:
        if target.exists() and target.samefile(checkpoint.path):
            raise UsageError(f"{target} is the model that is to be read; give another name for the result")

        def chosen(name: str, shape: tuple[int, ...]) -> str:
            """The format of a matrix, by its Hugging Face name."""
            wanted = target_format(name, shape, quantize) if quantize else None
            return wanted or DTYPE_FORMATS[dtype]

        if is_gguf:
            from llmcl.convert_gguf import gguf_plan

            plan = gguf_plan(checkpoint, chosen)
            tensors: list[OutTensor] = plan.tensors
        else:
            from llmcl.convert_folder import folder_plan

            folder = folder_plan(checkpoint, chosen, dtype)
            tensors = folder.tensors
        check_space(target, tensors)
        with appearing(target, force) as temporary:
            pieces = with_progress(tensors, progress)
            if is_gguf:
                plan.write(temporary, pieces)
            else:
                folder.write(temporary, pieces)
    return target


Pieces = Iterable[tuple[OutTensor, Iterator[np.ndarray]]]


def with_progress(tensors: list[OutTensor], progress: Progress | None) -> Pieces:
    """Each tensor with its converted rows; reports what has been taken."""
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0

    def counted(tensor: OutTensor) -> Iterator[np.ndarray]:
        nonlocal done
        for rows in tensor.converted():
            yield rows
            done += rows.nbytes
            if progress:
                progress("writing weights", done, total)

    for tensor in tensors:
        yield tensor, counted(tensor)


def check_target(target: Path, is_gguf: bool, force: bool) -> None:
    """Raises UsageError if `target` must not or cannot be written."""
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}; make it first")
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{target}: the folder {target.parent} cannot be written")
    if not target.exists() and not target.is_symlink():
        return
    if not force:
        raise UsageError(f"{target} exists; give another name, or --force to replace it")
    if is_gguf != target.is_file():
        raise UsageError(f"{target} is {'a folder' if target.is_dir() else 'no folder'}; --force would not replace it")
    if not is_gguf and not ((target / "config.json").is_file() and _holds_weights(target)):
        raise UsageError(f"{target} is a folder without a model; --force replaces only folders that hold one")


def _holds_weights(folder: Path) -> bool:
    return (folder / WEIGHTS_FILE).is_file() or (folder / INDEX_FILE).is_file()


def check_space(target: Path, tensors: list[OutTensor]) -> None:
    """Raises UsageError if the result does not fit on the disk."""
    needed = sum(tensor.nbytes for tensor in tensors) + SMALL_FILES_BYTES
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise UsageError(
            f"{target} needs {needed / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free; free some space or "
            "write it elsewhere"
        )


@contextmanager
def appearing(target: Path, force: bool) -> Iterator[Path]:
    """Yields a temporary path beside `target`, which is renamed to it at the end, or removed on any exception."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        yield temporary
        if target.exists() and not force:  # made by someone else meanwhile
            raise UsageError(f"{target} exists; give another name, or --force to replace it")
        if target.is_dir():  # a folder cannot be renamed onto another
            target.rename(replaced)
        temporary.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise
    finally:
        for path in (temporary, replaced):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _check_gguf_package() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UsageError(
            'writing GGUF files needs the package gguf, which is not installed: pip install "llmcl[convert]"'
        ) from error


def synced(path: Path) -> None:
    """Waits until the file's content is on the disk, so that the renaming cannot come before it."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_safetensors(path: Path, pieces: Pieces, tensors: list[OutTensor]) -> None:
    """One safetensors file (https://github.com/huggingface/safetensors): header length, JSON header, tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.format,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, rows in pieces:
            for part in rows:
                file.write(np.ascontiguousarray(part).data)
    synced(path)


def pairs_order(n_rows: int, head_dim: int, *, interleave: bool) -> np.ndarray:
    """Where each row of the result comes from, int [n_rows]: rotary pairs half a head apart (Hugging Face) become
    neighbours (GGUF's Llama) with interleave, and the other way round without."""
    shape = (-1, 2, head_dim // 2) if interleave else (-1, head_dim // 2, 2)
    order: np.ndarray = np.arange(n_rows).reshape(shape).swapaxes(1, 2).reshape(-1)
    return order


def checkpoint_rows(checkpoint: Checkpoint, name: str, *, interleaved: bool) -> Callable[[int, int], np.ndarray]:
    """rows(start, stop) of a tensor of a checkpoint, with its rotary pairs as the target wants them."""
    info = checkpoint.tensors[name]
    wanted = interleaved and name.endswith((".q_proj.weight", ".k_proj.weight"))
    if info.rope_interleaved == wanted:
        return lambda start, stop: checkpoint.rows(name, start, stop)
    order = pairs_order(info.n_rows, checkpoint.config.head_dim, interleave=wanted)
    rows = checkpoint.rows(name, 0, info.n_rows)
    return lambda start, stop: rows[order[start:stop]]
