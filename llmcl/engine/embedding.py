"""Embeds texts: one vector for each, pooled and normalised on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.architectures.embedding import POOLINGS, EmbeddingSettings, Pooling
from llmcl.engine.prompts import are_ids, is_list
from llmcl.errors import ContextLengthError, UsageError, check_flags, check_whole, counted, shown
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, alloc_weight
from llmcl.models.encoder_blocks import ONE_TEXT
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.ops.linear import linear_prefill
from llmcl.ops.load_weight import load_weight
from llmcl.ops.pool import pool
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Device, Launch
from llmcl.tokenizer import Tokenizer

TEXTS_AT_ONCE = 64  # vectors per read
_EPS = 1e-24  # keeps a vector of zeros


def chosen_pooling(settings: EmbeddingSettings, pooling: str | None, model: str) -> Pooling:
    """Returns the caller's pooling or the checkpoint's. Raises UsageError if there is none."""
    if pooling is None and settings.pooling is None:
        raise UsageError(
            f"{model} says nothing about embeddings (modules.json, or pooling_type in a GGUF file); give a pooling "
            f"({', '.join(POOLINGS)}: --pooling, pooling), or a model made for embeddings"
        )
    if pooling is not None and pooling not in POOLINGS:
        raise UsageError(f"pooling is {shown(pooling)}; expected {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}")
    chosen = pooling or settings.pooling
    return next(name for name in POOLINGS if name == chosen)


@dataclass(frozen=True)
class TextReader:
    """Turns inputs into token ids.

    most: tokens that a text may have. prompt_name: see `LLM.embed`. truncate: cut longer texts.
    """

    settings: EmbeddingSettings
    tokenizer: Tokenizer | None
    most: int
    prompt_name: str | None = None
    truncate: bool = False

    def ids(self, texts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Returns the token ids of each text. Raises UsageError or ContextLengthError, with the text's index."""
        if not is_list(texts) or not len(texts):
            raise UsageError(f"texts is {shown(texts)}; expected a list of texts, or of lists of token ids")
        check_flags(truncate=self.truncate)
        before = self._prompt()
        return [self._fitted(self._encoded(text, i, before), i) for i, text in enumerate(texts)]

    def _prompt(self) -> str:
        name, prompts = self.prompt_name, self.settings.prompts
        if name is None:
            name = self.settings.default_prompt
        if name is not None and name not in prompts:
            known = ", ".join(map(shown, prompts)) or "none"
            raise UsageError(f"prompt_name is {shown(name)}; expected one of the model's prompts: {known}")
        return "" if name is None else prompts[name]

    def _encoded(self, text: str | Sequence[int], i: int, before: str) -> list[int]:
        if are_ids(text):
            return [*map(int, text)]
        if not isinstance(text, str):
            raise UsageError(f"texts[{i}] is {shown(text)}; expected a text or token ids")
        if self.tokenizer is None:
            raise UsageError(f"texts[{i}] is a text, but the model has no tokenizer; expected token ids")
        most = None if self.truncate else self.most
        ids = self.tokenizer.encode(before + text, most=most)
        end = self.settings.end_token
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _fitted(self, ids: list[int], i: int) -> list[int]:
        if not ids:
            raise UsageError(f"texts[{i}] has no tokens; expected at least one")
        if len(ids) <= self.most:
            return ids
        if not self.truncate:
            raise ContextLengthError(
                f"texts[{i}] has {counted(len(ids), 'token')}, the model takes {self.most}; shorten it, cut it with "
                "truncate (--truncate), or raise the context (--ctx-size, max_context)"
            )
        ends_special = self.tokenizer is not None and not self.tokenizer.token_bytes(ids[-1])
        return [*ids[: self.most - 1], ids[-1]] if ends_special else ids[: self.most]


def shortened(vectors: np.ndarray, dimensions: int | None, *, normalize: bool) -> np.ndarray:
    """Returns the first `dimensions` values of each vector (Matryoshka), normalised again."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    vectors = vectors[:, :dimensions]
    if normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
    return np.ascontiguousarray(vectors)


def check_dimensions(dimensions: int | None, most: int) -> None:
    """Raises UsageError for more dimensions than the vectors have."""
    if dimensions is not None:
        check_whole("dimensions", dimensions)
        if dimensions > most:
            raise UsageError(f"dimensions is {dimensions}; expected 1 to the model's {most}")


@dataclass(frozen=True)
class _Rows:
    """Float32 rows of a matrix as a source for load_weight."""

    values: np.ndarray
    format: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def row_bytes(self) -> int:
        return 4 * int(self.values.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop]


class Embedder:
    """Reads texts one after the other in `sequence`. The vectors stay on the device, TEXTS_AT_ONCE at a time.

    Raises OutOfDeviceMemoryError if its buffers do not fit.
    """

    def __init__(self, model: Model, sequence: SequenceState, dense: Sequence[np.ndarray], pooling: Pooling):
        device, hidden, act = model.device, model.config.hidden_size, model.act
        self._model = model
        self._sequence = sequence
        self._hidden = hidden
        self._step = StepState(device, TEXTS_AT_ONCE)
        self._rows = device.alloc(4 * (TEXTS_AT_ONCE + 1) * hidden, "pooled rows")
        norm, x, self._pool = model.weights.final_norm, act.x, list[Launch]()
        if norm is not None:
            x = act.normed
            self._pool += rms_norm(device, act.x, norm, x, model.config.stream_eps)
        self._pool.append(pool(device, model.step, x, self._rows, pooling, TEXTS_AT_ONCE, hidden))
        self._finish, rows = list[Launch](), self._rows
        for matrix in dense:
            weight = _on_device(device, matrix)
            out = device.alloc(4 * TEXTS_AT_ONCE * weight.rows, "dense rows")
            self._finish += linear_prefill(device, weight, rows, out, self._step, max_rows=0)
            rows, hidden = out, weight.rows
        self.dimensions, self._vectors = hidden, rows
        scale = device.upload(np.full(hidden, hidden**-0.5, np.float32), "unit norm")
        self._normalize = rms_norm(device, rows, scale, rows, _EPS / hidden)

    def vectors(
        self, texts: Sequence[Sequence[int]], *, normalize: bool, seconds: Sequence[int] | None = None
    ) -> Iterator[np.ndarray]:
        """Yields float32 [n, dimensions] for the next n texts, in order. seconds: of pairs, where the second text
        begins. Raises the errors of `Model.prefill`.
        """
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            some = texts[start : start + TEXTS_AT_ONCE]
            for i, ids in enumerate(some):
                self._read(ids, i, ONE_TEXT if seconds is None else seconds[start + i])
            yield self._finished(len(some), normalize)

    def _read(self, ids: Sequence[int], i: int, second: int) -> None:
        model, size, encoder = self._model, 4 * self._hidden, self._model.weights.encoder
        if encoder is not None:
            one_type = encoder.types.nbytes == size
            model.device.fill(encoder.second, np.int32(ONE_TEXT if one_type else second), 0, 4)
        model.cache.truncate(self._sequence, 0)
        for n in model.rows_of(self._sequence, ids):
            model.run(self._pool, n)
        row = TEXTS_AT_ONCE * size
        model.device.copy_rows(self._rows, row, i * size, row_bytes=size, n_rows=1, pitch_bytes=size)
        model.device.flush()

    def _finished(self, n: int, normalize: bool) -> np.ndarray:
        self._step.write_tokens([0] * n, 0)
        self._model.run([*self._finish, *(self._normalize if normalize else ())], n)
        return self._model.device.read(self._vectors, np.float32, (n, self.dimensions))


def _on_device(device: Device, matrix: np.ndarray) -> Weight:
    rows, k = matrix.shape
    weight = alloc_weight(device, "dense", rows, k, "float32")
    flags = device.zeros(4, "finite flags")
    for _ in load_weight(device, weight, _Rows(np.ascontiguousarray(matrix, np.float32)), flags, 0):
        pass
    return weight
