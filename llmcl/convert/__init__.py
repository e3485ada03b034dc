"""Writes a model in another format: a GGUF file, quantised or not, or a Hugging Face folder.

The result appears under its name only when complete (target.py). Only files that a conversion writes are replaced, and
only with the user's consent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.formats import FLOAT_FORMATS
from llmcl.checkpoint.imatrix import read_imatrix
from llmcl.checkpoint.quantize import check_quantize, target_format, warn_of_rounding_again
from llmcl.checkpoint.safetensors import WEIGHTS_FILE
from llmcl.convert.folder import FolderPlan, folder_plan
from llmcl.convert.gguf import GgufPlan, gguf_plan
from llmcl.convert.target import appearing, check_replaceable, check_target
from llmcl.convert.tensors import OutTensor, Pieces
from llmcl.errors import UsageError, check_flags, check_function, shown
from llmcl.progress import Progress
from llmcl.runtime.cache_files import expanded

DTYPE_FORMATS = {dtype: format for format, dtype in FLOAT_FORMATS.items()}
SMALL_FILES_BYTES = 64 << 20  # beside the weights: metadata with a vocabulary, configuration


def convert(
    source: str,
    target: str | Path,
    *,
    quantize: str | None = None,
    dtype: str = "auto",
    imatrix: str | Path | None = None,
    force: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Writes the model `source` (a name as in `llmcl.load`) to `target`; returns the path.

    target: a name ending in .gguf, or a folder for config.json, the tokenizer and safetensors.
    quantize: "q8_0", "q4_0" or "q4_k" for the matrices in a GGUF file (the embedding and the output head stay at q8_0).
    dtype: matrix dtype without quantize: "float32", "bfloat16", "float16"; "auto" keeps each matrix as it is stored (in
    a folder, quantised matrices become bfloat16). Norms keep their dtype (GGUF: float32).
    imatrix: importance matrix of llama.cpp (.gguf or .dat): with quantize "q4_0" or "q4_k", errors in columns that see
    large values count more.
    force: replace an existing target. A folder is only replaced if it holds a model and no files except those
    rewritten.
    progress(description, done_bytes, total_bytes).

    Raises UsageError (existing target, too little disk space, a format that cannot hold the rows), CheckpointError and
    UnsupportedModelError (an unreadable source, or a model the target format cannot express).
    """
    check_flags(force=force, offline=offline)
    check_function("progress", progress)
    if target == "":
        raise UsageError("the target is ''; expected the name of a file (with .gguf at its end) or of a folder")
    target = expanded(target, "the target")
    if target.name in ("", ".."):
        target = target.resolve()
    is_gguf = target.suffix.lower() == ".gguf"
    if target.suffix.lower() == ".safetensors":
        raise UsageError(
            f"{target}: what is written is a folder with config.json, the tokenizer and {WEIGHTS_FILE}; give the "
            "folder's name, or one that ends with .gguf"
        )
    if not isinstance(dtype, str) or dtype not in ("auto", *DTYPE_FORMATS):
        raise UsageError(f"dtype is {shown(dtype)}; expected auto, {', '.join(DTYPE_FORMATS)}")
    if quantize is not None:
        check_quantize(quantize)
        if not is_gguf:
            raise UsageError(
                f"{target}: a safetensors folder holds no {quantize} blocks; give a name that ends with .gguf, or "
                "leave out --quantize"
            )
    if imatrix is not None and quantize not in ("q4_0", "q4_k"):
        wanted = "without --quantize" if quantize is None else f"with --quantize {quantize}"
        raise UsageError(f"an importance matrix (--imatrix) has no use {wanted}; expected --quantize q4_0 or q4_k")
    if is_gguf:
        _check_gguf_package()
    columns = None if imatrix is None else read_imatrix(expanded(imatrix, "the importance matrix"))
    check_target(target, is_gguf, force)
    with open_checkpoint(source, offline=offline, progress=progress) as checkpoint:
        if target.exists() and target.samefile(checkpoint.path):
            raise UsageError(f"{target} is the model that is to be read; give another name for the result")

        def chosen(name: str, shape: tuple[int, ...], stored: str) -> str:
            """Returns a matrix's format by its Hugging Face name. stored: its format in the source."""
            if quantize:
                return target_format(name, shape, quantize) or "F32"  # a router
            if dtype != "auto":
                return DTYPE_FORMATS[dtype]
            return stored if is_gguf or stored in FLOAT_FORMATS else "BF16"

        if quantize is not None:
            warn_of_rounding_again(checkpoint.tensors.values(), quantize)
        plan: GgufPlan | FolderPlan
        if is_gguf:
            plan = gguf_plan(checkpoint, chosen)
            if columns is not None:
                plan = plan.weighted(columns)
        else:
            plan = folder_plan(checkpoint, chosen)
            check_replaceable(target, [*plan.files, WEIGHTS_FILE])
        check_space(target, plan.tensors)
        with appearing(target, is_gguf, force) as temporary:
            plan.write(temporary, with_progress(plan.tensors, progress))
    return target


def with_progress(tensors: list[OutTensor], progress: Progress | None) -> Pieces:
    """Yields each tensor with its converted rows, and reports progress as rows are consumed."""
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


def check_space(target: Path, tensors: list[OutTensor]) -> None:
    """Raises UsageError if the result does not fit on the disk."""
    needed = sum(tensor.nbytes for tensor in tensors) + SMALL_FILES_BYTES
    free = shutil.disk_usage(target.parent).free
    if needed > free:
        raise UsageError(
            f"{target} needs {needed / 1e9:.2f} GB, but its disk has {free / 1e9:.2f} GB free; free some space or "
            "write it elsewhere"
        )


def _check_gguf_package() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UsageError(
            'writing GGUF files needs the package gguf, which is not installed: pip install "llmcl[convert]"'
        ) from error
