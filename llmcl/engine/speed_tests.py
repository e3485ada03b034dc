"""llama-bench's tests for a single text: how fast a model prefills, and decodes without sampling."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.engine.leases import Leases
from llmcl.errors import ContextLengthError, check_whole
from llmcl.models.kv_cache import kv_bytes_per_position
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Device


class SpeedTests(ABC):
    """The measuring methods of `LLM`."""

    config: ModelConfig
    device: Device
    kv_dtype: str
    leases: Leases
    max_context: int
    sequence: SequenceState

    @property
    @abstractmethod
    def model(self) -> Model: ...

    def clear(self) -> None:
        """Empties the context; call it within a turn."""
        self.model.cache.truncate(self.sequence, 0)

    @property
    def weight_bytes_per_token(self) -> int:
        """Weight bytes read by a decode step."""
        return sum(stage.weights.decode_bytes() for stage in self.model.stages)

    @property
    def kv_bytes_per_position(self) -> int:
        """KV cache bytes read by a decode step for each attended position."""
        return kv_bytes_per_position(self.config, self.kv_dtype)

    def bench_prefill(self, n_tokens: int) -> float:
        """Seconds to prefill n_tokens random tokens into an empty context, as llama-bench's pp test."""
        ids = self._bench_tokens(n_tokens, 0)

        def work() -> float:
            self.clear()
            return self._seconds(self.model.prefill, ids)

        return self.leases.call(work)

    def bench_decode(self, n_tokens: int, depth: int = 0) -> list[float]:
        """Seconds of each of n_tokens single-token decodes after `depth` tokens: llama-bench's tg test, no sampling."""
        ids = self._bench_tokens(n_tokens, depth)

        def work() -> list[float]:
            self.clear()
            if depth:
                self.model.prefill(self.sequence, ids[:depth])
            return [self._seconds(self.model.decode_token, token) for token in ids[depth:]]

        return self.leases.call(work)

    def _seconds(self, step: Callable[[SequenceState, Any], None], tokens: Any) -> float:
        self.device.finish()
        start = time.perf_counter()
        step(self.sequence, tokens)
        self.device.finish()
        return time.perf_counter() - start

    def _bench_tokens(self, n_tokens: int, depth: int) -> list[int]:
        check_whole("n_tokens", n_tokens)
        check_whole("depth", depth, 0)
        n = int(n_tokens) + int(depth)
        if n > self.max_context:
            raise ContextLengthError(
                f"{n} tokens exceed the context of {self.max_context}; take fewer or raise the context (max_context)"
            )
        return [int(i) for i in np.random.default_rng(0).integers(0, self.config.vocab_size, n)]
