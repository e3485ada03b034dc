"""Computes a text's perplexity and a model's divergence from a reference, with llama-perplexity's windows.

The text's tokens (BOS first if the tokenizer adds BOS) are cut into disjoint windows of `window` tokens; a remainder at
the end is not used. Each window is read from an empty cache. If the tokenizer begins texts with BOS, the window's first
token is replaced by BOS. The tokens at window // 2 + 1 ... window - 1 are scored, so each has at least window // 2 + 1
tokens before it. With n scored tokens x,

    perplexity = exp(-1/n sum log P(x | earlier tokens in the window)).

Logits stay on the device (ops/log_likelihood.py): only 4 bytes per token come back. A reference's logits cross the
host, because the two models may be on different devices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmcl.errors import UsageError, counted
from llmcl.models.model import LOGITS_CHUNK
from llmcl.ops.log_likelihood import kl_divergence, log_likelihood

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM
    from llmcl.runtime.device import Buffer, Launch

WINDOW = 512
MIN_WINDOW = 4


@dataclass(frozen=True)
class Divergence:
    """How far a model is from a reference, over the scored tokens."""

    mean_kl: float  # mean of KL(reference || model) in nats
    max_kl: float  # largest KL in nats
    same_top_1: float  # share (0 to 1) of tokens for which both models predict the same likeliest token
    perplexity: float  # the reference's perplexity


@dataclass(frozen=True)
class Perplexity:
    """The result of a perplexity run."""

    perplexity: float  # exp of the mean negative log-likelihood per scored token
    standard_error: float  # error of `perplexity`, as llama-perplexity prints it after +/-
    window: int  # tokens per window
    n_windows: int
    n_scored: int  # tokens scored
    tokens_per_s: float  # tokens read (scored or not) per second, reference included
    divergence: Divergence | None = None  # None without a reference

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# progress(tokens done, total tokens, perplexity so far)
Progress = Callable[[int, int, float], None]


def perplexity(
    llm: LLM,
    text: str,
    *,
    window: int = WINDOW,
    max_windows: int | None = None,
    reference: LLM | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Scores `text` (plain, no chat template) with `llm`, and compares with `reference` if present.

    window: tokens, at least MIN_WINDOW and at most either model's max_context. max_windows: number of windows to score,
    from the start. Ends a running generation of either model.

    Raises UsageError for a text shorter than a window, an invalid window, a reference with a different vocabulary or
    tokenizer, and if another thread generates with either model.
    """
    check_window(window, llm)
    ids = _token_ids(llm, text)
    bos = leading_bos(llm)
    if reference is not None:
        check_window(window, reference)
        _check_same_tokens(llm, reference, text)
    windows = cut(ids, window, bos, max_windows)

    def work() -> Perplexity:
        return _score(llm, windows, reference, progress)

    return llm.leases.call(work if reference is None else lambda: reference.leases.call(work))


def _score(llm: LLM, windows: list[list[int]], reference: LLM | None, progress: Progress | None) -> Perplexity:
    window = len(windows[0])
    scorer = _Scorer(llm)
    comparison = None if reference is None else _Comparison(scorer, _Scorer(reference))
    start = time.perf_counter()
    for i, window_ids in enumerate(windows):
        for _ in comparison.score(window_ids) if comparison else scorer.score(window_ids):
            pass
        if progress:
            progress((i + 1) * window, len(windows) * window, _mean_perplexity(scorer.losses)[0])
    value, error = _mean_perplexity(scorer.losses)
    return Perplexity(
        perplexity=value,
        standard_error=error,
        window=window,
        n_windows=len(windows),
        n_scored=sum(map(len, scorer.losses)),
        tokens_per_s=len(windows) * window / (time.perf_counter() - start),
        divergence=comparison.result() if comparison else None,
    )


def check_window(window: int, llm: LLM) -> None:
    """Raises UsageError for a window that scores nothing or exceeds the model's context."""
    if window < MIN_WINDOW or window > llm.max_context:
        raise UsageError(
            f"the window is {counted(window, 'token')}; expected {MIN_WINDOW} to {llm.max_context}, the context of "
            f"{llm.model_name} (-c/--ctx-size)"
        )


def cut(ids: Sequence[int], window: int, bos: int | None, max_windows: int | None = None) -> list[list[int]]:
    """Cuts a text into windows of `window` token ids, and replaces each window's first token by `bos` unless None.

    Raises UsageError if the text is shorter than a window.
    """
    count = len(ids) // window
    if count == 0:
        raise UsageError(
            f"the text has {counted(len(ids), 'token')}, fewer than one window of {window}; give a longer text or a "
            "smaller window (-c/--ctx-size)"
        )
    windows = [list(ids[i * window : (i + 1) * window]) for i in range(min(count, max_windows or count))]
    if bos is not None:
        for window_ids in windows:
            window_ids[0] = bos
    return windows


class _Scorer:
    """Scores windows with one model and keeps their negative log-likelihoods."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.losses: list[np.ndarray] = []
        device = llm.device
        self._targets = device.alloc(4 * LOGITS_CHUNK, "target tokens")
        self._out = device.alloc(4 * LOGITS_CHUNK, "log-likelihoods")
        self._launch: Launch | None = None

    def score(self, window_ids: Sequence[int]) -> Iterator[tuple[Buffer, int]]:
        """Scores a window's second half; yields (logits on the device, rows) as it goes."""
        model, device = self.llm.model, self.llm.device
        self.llm.clear()
        first = len(window_ids) // 2
        targets = np.asarray(window_ids[first + 1 :], np.int32)
        done = 0
        for logits, n in model.logit_chunks(self.llm.sequence, window_ids[:-1], skip=first):
            if self._launch is None:
                self._launch = log_likelihood(device, model.config.vocab_size, logits, self._targets, self._out)
            device.write(self._targets, targets[done : done + n])
            self._launch.enqueue(n)
            self.losses.append(-device.read(self._out, np.float32, (n,)).astype(np.float64))
            done += n
            yield logits, n


class _Comparison:
    """Scores a model and its reference window by window, side by side."""

    def __init__(self, scorer: _Scorer, reference: _Scorer):
        self._scorer = scorer
        self._reference = reference
        self._divergences: list[np.ndarray] = []
        device, vocab = scorer.llm.device, scorer.llm.config.vocab_size
        self._reference_logits = device.alloc(4 * LOGITS_CHUNK * vocab, "logits of the reference")
        self._out = device.alloc(8 * LOGITS_CHUNK, "divergences")
        self._launch: Launch | None = None

    def score(self, window_ids: Sequence[int]) -> Iterator[tuple[Buffer, int]]:
        """Like `_Scorer.score`, for both models."""
        device, vocab = self._scorer.llm.device, self._scorer.llm.config.vocab_size
        both = zip(self._scorer.score(window_ids), self._reference.score(window_ids), strict=True)
        for (logits, n), (reference_logits, n_reference) in both:
            assert n == n_reference
            rows = self._reference.llm.device.read(reference_logits, np.float32, (n, vocab))
            device.write(self._reference_logits, rows)
            if self._launch is None:
                self._launch = kl_divergence(device, vocab, self._reference_logits, logits, self._out)
            self._launch.enqueue(n)
            self._divergences.append(device.read(self._out, np.float32, (n, 2)))
            yield logits, n

    def result(self) -> Divergence:
        kl, same = np.concatenate(self._divergences).astype(np.float64).T
        return Divergence(
            mean_kl=float(kl.mean()),
            max_kl=float(kl.max()),
            same_top_1=float(same.mean()),
            perplexity=_mean_perplexity(self._reference.losses)[0],
        )


def _mean_perplexity(losses: list[np.ndarray]) -> tuple[float, float]:
    """Returns (perplexity, standard error) from negative log-likelihoods in nats."""
    values = np.concatenate(losses)
    if not np.isfinite(values).all():
        raise UsageError(
            "some likelihoods are not numbers: the model's activations overflow or its weights are damaged; expected "
            "finite logits; try --dtype float32"
        )
    value = math.exp(values.mean())
    return value, value * math.sqrt(values.var() / max(1, len(values) - 1))


def _token_ids(llm: LLM, text: str) -> list[int]:
    if not llm.has_tokenizer:
        raise UsageError(f"{llm.model_name} has no tokenizer; expected a model that can read text")
    return llm.tokenizer.encode(text)


def leading_bos(llm: LLM) -> int | None:
    """Returns the BOS token that the tokenizer puts before a text, or None."""
    ids = _token_ids(llm, "a")
    bos = llm.tokenizer.bos_token_id
    return bos if bos is not None and len(ids) > 1 and ids[0] == bos else None


def _check_same_tokens(llm: LLM, reference: LLM, text: str) -> None:
    sizes = llm.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{llm.model_name} has a vocabulary of {sizes[0]} tokens, the reference {reference.model_name} one of "
            f"{sizes[1]}; expected the same: compare versions of one model"
        )
    if _token_ids(llm, text) != _token_ids(reference, text):
        raise UsageError(
            f"{llm.model_name} and the reference {reference.model_name} cut the text into different tokens; expected "
            "the same tokenizer: compare versions of one model"
        )
