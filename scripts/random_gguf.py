"""GGUF files of a model's real size with random weights, written as fast as the disk takes them.

Metadata and names are those of the tests' files (tests/family_files.py). The matrices of a format begin with the same
random blocks: what a step costs does not depend on their values, as long as these are numbers of the usual size. Where
values count there is `compare_engines.random_file`.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from family_files import gguf_architecture, gguf_tensors, write_metadata
from llama_cpp_configs import as_llama_cpp_reads

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint.formats import FORMATS
from llmcl.errors import UsageError

Bytes = NDArray[np.uint8]

DEVIATION = 0.02  # of the weights, as models are initialised
RUN = 1 << 22  # values that are random; those behind them are the same again
ALIGNMENT = 32  # GGUF's


def _float16(value: float, n: int) -> Bytes:
    """n times the same number, [n, 2]."""
    return np.full((n, 1), value, "<f2").view(np.uint8)


def _with_scale(deviation: float, nbytes: int, *, first: bool = True) -> Callable[[np.random.Generator, int], Bytes]:
    """Blocks of a float16 scale and random bytes, whose integers have this standard deviation."""

    def blocks(rng: np.random.Generator, n: int) -> Bytes:
        parts = [_float16(DEVIATION / deviation, n), rng.integers(0, 256, (n, nbytes - 2), np.uint8)]
        return np.concatenate(parts if first else parts[::-1], axis=1)

    return blocks


def _floats(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    return rng.standard_normal((n, 1), np.float32) * np.float32(DEVIATION)


def _mxfp4(rng: np.random.Generator, n: int) -> Bytes:
    """A scale of 2^-7: its 4-bit numbers have a standard deviation of 2.9."""
    return np.concatenate([np.full((n, 1), 120, np.uint8), rng.integers(0, 256, (n, 16), np.uint8)], axis=1)


# Blocks of each format, uint8 [n, bytes of a block], by a generator and n.
BLOCKS: dict[str, Callable[[np.random.Generator, int], Bytes]] = {
    "F32": lambda rng, n: _floats(rng, n).view(np.uint8),
    "F16": lambda rng, n: _floats(rng, n).astype("<f2").view(np.uint8),
    "BF16": lambda rng, n: (_floats(rng, n).view(np.uint32) >> 16).astype("<u2").view(np.uint8),
    "Q8_0": _with_scale(73.9, 34),
    "Q4_0": _with_scale(4.6, 18),
    "Q6_K": _with_scale(18.5 * 73.9, 210, first=False),
    "MXFP4": _mxfp4,
}
QUANTIZATIONS = ("F16", "BF16", "Q8_0", "Q4_0", "MXFP4")


def format_of(name: str, shape: tuple[int, ...], quantization: str, *, tied: bool) -> str:
    """The format of a tensor with this name in GGUF, as llama.cpp's converter and quantiser choose it.

    Vectors, routers and convolutions stay float32, and so do rows that are no whole blocks. With Q4_0 the output head
    is Q6_K; with MXFP4 the experts alone have it, and the other matrices are Q8_0.
    """
    if len(shape) == 1 or name.endswith((".bias", "gate_inp.weight")) or "conv" in name.split(".")[-2]:
        return "F32"
    wanted = quantization
    if quantization == "MXFP4" and "_exps." not in name:
        wanted = "Q8_0"
    if quantization == "Q4_0" and name == ("token_embd.weight" if tied else "output.weight"):
        wanted = "Q6_K"
    fitting = [format for format in (wanted, "Q8_0", "F32") if shape[-1] % FORMATS[format].block == 0]
    return fitting[0]


def _vector(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A vector's values: norms do nothing, and states decay."""
    value = 1.0 if "norm" in name else -1.0 if name.endswith("ssm_a") else 0.0
    return np.full(shape, value, np.float32)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """By name in the file; no memory is taken for the values."""

    def stack(parts: Any) -> Any:
        return np.broadcast_to(parts[0], (len(parts), *parts[0].shape))

    nothing = np.zeros((), np.uint8)
    weights = {name: np.broadcast_to(nothing, shape) for name, shape in config.tensors().items()}
    return {name: values.shape for name, values in gguf_tensors(config, weights, stack=stack)}


def tensors_of(config: ModelConfig, quantization: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Name, shape and format of every tensor in the file."""
    return {
        name: (shape, format_of(name, shape, quantization, tied=config.tie_embeddings))
        for name, shape in _shapes(as_llama_cpp_reads(config)).items()
    }


def stored_bytes(shape: tuple[int, ...], format: str) -> int:
    return math.prod(shape) // FORMATS[format].block * FORMATS[format].nbytes


def write_random(path: Path, config: ModelConfig, quantization: str) -> Path:
    """Writes the model with random weights, and says where; raises UsageError where it does not fit.

    config: what of it llama.cpp does not know (`as_llama_cpp_reads`) is left out. quantization: one of QUANTIZATIONS.
    """
    import gguf

    tensors = tensors_of(config, quantization)
    needed, free = sum(stored_bytes(*tensor) for tensor in tensors.values()), shutil.disk_usage(path.parent).free
    if free < 1.02 * needed:
        raise UsageError(f"{path.parent} has {free / 1e9:.1f} GB free; {path.name} needs {needed / 1e9:.1f} GB")
    config, part = as_llama_cpp_reads(config), path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, gguf_architecture(config))
    write_metadata(writer, config)
    for name, (shape, format) in tensors.items():
        if len(shape) == 1:
            writer.add_tensor(name, _vector(name, shape))
            continue
        rows = (*shape[:-1], stored_bytes(shape[-1:], format))
        kind = gguf.GGMLQuantizationType[format]
        writer.add_tensor_info(name, rows, np.dtype(np.uint8), stored_bytes(shape, format), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    runs: dict[str, memoryview] = {}
    with open(part, "ab", buffering=0) as file:
        for tensor in writer.tensors[0].values():
            file.write(bytes(-file.tell() % ALIGNMENT))
            if tensor.tensor is not None:
                file.write(tensor.tensor.tobytes())
                continue
            format, left = tensor.dtype.name, tensor.nbytes
            if format not in runs:
                made = BLOCKS[format](np.random.default_rng(0), RUN // FORMATS[format].block)
                runs[format] = memoryview(made.tobytes())
            while left:
                left -= file.write(runs[format][:left])
        file.write(bytes(-file.tell() % ALIGNMENT))
    part.replace(path)
    return path
