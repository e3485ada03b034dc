"""LoRA adapters: two thin matrices per changed weight, from a PEFT folder or a GGUF file.

    W x   becomes   W x + scale alpha / rank B (A x)          A [rank, k], B [rows, rank]

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint.formats import FLOAT_FORMATS, dequantize
from llmcl.checkpoint.lora_files import Factors, Source, read_adapter
from llmcl.checkpoint.tensors import Checkpoint, RowView, TensorInfo, read_rows
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError, one_line, shown

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class LoraRequest:
    """An adapter as the user names it."""

    name: str
    path: str
    scale: float = 1.0  # beside alpha / rank

    @classmethod
    def parse(cls, text: str) -> LoraRequest:
        """Parses [NAME=]PATH[:SCALE]. Without a name, the file's or the folder's name is taken.

        Raises UsageError for an empty path, an unusual name or a scale that is no number.
        """
        if not isinstance(text, str):
            raise UsageError(f"lora (--lora) is {shown(text)}; expected [NAME=]PATH[:SCALE]")
        name, equals, path = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            name, path = "", text
        start, colon, end = path.rpartition(":")
        scale = 1.0
        if colon and not Path(path).exists():
            with suppress(ValueError):  # a colon in the path
                path, scale = start, float(end)
        name = name or re.sub(r"[^A-Za-z0-9._-]+", "-", Path(path).name.removesuffix(".gguf")).strip("-.")[:100]
        return cls(name, path, scale).checked()

    def checked(self) -> LoraRequest:
        """Returns the request. Raises UsageError for values that no adapter can have."""
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(
                f"the adapter's name is {shown(self.name)}; expected letters, digits, dots, dashes and underscores, "
                "such as --lora french=adapters/fr"
            )
        if not isinstance(self.path, str) or not self.path:
            raise UsageError(f"the path of adapter {self.name} is {shown(self.path)}; expected [NAME=]PATH[:SCALE]")
        check_scale(self.scale)
        return self


def is_named(text: str) -> bool:
    """Returns whether the user's text, [NAME=]PATH[:SCALE], has a name."""
    name, equals, _ = text.partition("=")
    return bool(equals and _NAME.fullmatch(name))


def check_scale(scale: object) -> float:
    """Returns an adapter's scale. Raises UsageError unless it is a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= 1e6:
        raise UsageError(f"the scale of an adapter is {shown(scale)}; expected a number from -1000000 to 1000000")
    return float(scale)


@dataclass(frozen=True)
class LowRank:
    """The change of one weight: B A."""

    a: np.ndarray  # float32 [rank, k]
    # float32 [rows, rank], alpha / rank and the user's scale included, rows in the order of the model's tensor
    b: np.ndarray


@dataclass(frozen=True, eq=False)
class Adapter:
    """A checked adapter."""

    name: str
    path: str
    matrices: Mapping[str, LowRank]  # by the tensor that it changes
    digest: bytes  # of the numbers; the same numbers have the same digest

    @property
    def rank(self) -> int:
        """Returns the largest rank."""
        return max(len(low.a) for low in self.matrices.values())


def open_adapter(request: LoraRequest, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> Adapter:
    """Reads an adapter for the model with these tensors.

    Raises CheckpointError for a missing or damaged file or an adapter of another model, and UnsupportedModelError for
    an adapter that changes more than llmcl can apply.
    """
    label = f"adapter {one_line(request.path)}"
    try:
        path = Path(request.path).expanduser()
        if not path.exists():
            raise CheckpointError(
                "there is no such file or folder. Give a folder with adapter_config.json and "
                "adapter_model.safetensors, or a GGUF file of llama.cpp's convert_lora_to_gguf.py."
            )
        source = read_adapter(path, config)
        matrices: dict[str, LowRank] = {}
        for factors in source.factors:
            for name, low in _of_tensors(factors, source, config, tensors, request.scale):
                if name in matrices:
                    raise CheckpointError(f"{factors.stored} changes tensor {name}, which another entry changes too.")
                matrices[name] = low
    except CheckpointError as error:
        raise type(error)(f"{label}: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:  # no permission, a null character, an unknown home folder
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise MemoryError from error
        raise CheckpointError(f"{label}: cannot be read ({one_line(error)}). Check the path.") from error
    digest = blake2b(digest_size=16)
    for name in sorted(matrices):
        digest.update(name.encode())
        for values in (matrices[name].a, matrices[name].b):
            digest.update(np.array(values.shape).tobytes() + np.ascontiguousarray(values).tobytes())
    return Adapter(request.name, request.path, matrices, digest.digest())


def _of_tensors(
    factors: Factors, source: Source, config: ModelConfig, tensors: Mapping[str, TensorInfo], scale: float
) -> list[tuple[str, LowRank]]:
    """Returns the changes of the model's tensors that one stored pair of matrices makes."""
    if _EMBEDDING in factors.tensors:
        raise UnsupportedModelError(
            f"{factors.stored} changes the token embedding, which llmcl does not apply; use an adapter without it."
        )
    lacking = next((name for name in factors.tensors if name not in tensors), None)
    if lacking == HEAD and config.tie_embeddings:
        lacking = None
    if lacking is not None:
        raise CheckpointError(
            f"{factors.stored} changes tensor {shown(lacking)}, which the model does not have"
            f"{source.hint}; give an adapter of this model."
        )
    infos = [tensors.get(name, tensors[_EMBEDDING]) for name in factors.tensors]
    rows, k = sum(info.shape[0] for info in infos), infos[0].shape[-1]
    if any(len(info.shape) != 2 for info in infos):
        raise UnsupportedModelError(f"{factors.stored} changes {factors.tensors[0]}, which is no matrix.")
    for letter, values, expected in (("A", factors.a, (len(factors.a), k)), ("B", factors.b, (rows, len(factors.a)))):
        if values.shape != expected:
            raise CheckpointError(
                f"matrix {letter} of {factors.stored} has the shape {list(values.shape)}, expected {list(expected)}, "
                f"because the model's tensor {factors.tensors[0]} is {[rows, k]}{source.hint}; give an adapter of "
                "this model."
            )
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"matrix {letter} of {factors.stored} has values that are NaN or infinite, expected finite numbers. "
                "The adapter is damaged; fetch or train it again."
            )
    changes, first = [], 0
    for name, info in zip(factors.tensors, infos, strict=True):
        b = factors.b[first : first + info.shape[0]] * np.float32(scale * factors.scale)
        first += info.shape[0]
        is_rotary = name.endswith((".q_proj.weight", ".k_proj.weight"))
        if is_rotary and source.interleaves_rope != info.rope_interleaved:
            b = pairs_moved(b, config, apart=source.interleaves_rope)
        changes.append((name, LowRank(factors.a, b)))
    return changes


def pairs_moved(rows: np.ndarray, config: ModelConfig, *, apart: bool) -> np.ndarray:
    """Moves rotary pairs of rows half of rotary_dim apart, or from there next to each other."""
    size, rotated = config.head_dim, config.rotary_dim or config.head_dim
    heads = rows.reshape(-1, size, *rows.shape[1:]).copy()
    split = (rotated // 2, 2) if apart else (2, rotated // 2)
    pairs = heads[:, :rotated].reshape(-1, *split, *rows.shape[1:])
    heads[:, :rotated] = pairs.swapaxes(1, 2).reshape(-1, rotated, *rows.shape[1:])
    return heads.reshape(rows.shape)


@dataclass(frozen=True)
class _MergedRows:
    """Rows of a float tensor with changes added, as float32."""

    stored: np.ndarray | RowView
    format: str
    changes: Sequence[LowRank]

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        values = dequantize(self.format, read_rows(self.stored, start, stop))
        for low in self.changes:
            values += low.b[start:stop] @ low.a
        return np.ascontiguousarray(values).view(np.uint8)


def why_not_merged(adapters: Sequence[Adapter], checkpoint: Checkpoint) -> str | None:
    """Says why the adapters cannot be added to the checkpoint's weights, or returns None."""
    for name in sorted({name for adapter in adapters for name in adapter.matrices}):
        if name not in checkpoint.tensors:
            return f"{name} is the token embedding itself"
        if (format := checkpoint.tensors[name].format) not in FLOAT_FORMATS:
            return f"{name} is {format}, which adding would round again"
    return None


def merge(checkpoint: Checkpoint, adapters: Sequence[tuple[Adapter, float]]) -> None:
    """Adds each adapter, times its scale, to the rows that the checkpoint returns. The sums are float32.

    Only for adapters that `why_not_merged` allows.
    """
    changes: dict[str, list[LowRank]] = {}
    for adapter, scale in adapters:
        for name, low in adapter.matrices.items():
            changes.setdefault(name, []).append(LowRank(low.a, low.b * np.float32(scale)))
    for name, of_tensor in changes.items():
        info = checkpoint.tensors[name]
        merged = replace(info, format="F32", row_bytes=4 * info.shape[1])
        checkpoint.replace_rows(merged, partial(_MergedRows, format=info.format, changes=of_tensor))


@dataclass(frozen=True)
class AdapterChoice:
    """The adapters of a text, with their scales."""

    adapters: tuple[tuple[Adapter, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.adapters)

    @cached_property
    def key(self) -> bytes:
        """Identifies the numbers: 8 bytes, or none without adapters."""
        if not self.adapters:
            return b""
        key = blake2b(digest_size=8)
        for digest, scale in sorted((adapter.digest, scale) for adapter, scale in self.adapters):
            key.update(digest + np.float64(scale).tobytes())
        return key.digest()


NO_ADAPTERS = AdapterChoice()
