"""One model's layers on several devices: each device computes consecutive layers, a stage, and passes x on.

    first device:  embedding, layers 0 .. a - 1    -- x through host memory -->
    next device:   layers a .. b - 1               -- x through host memory -->
    last device:   layers b .. n - 1, output head, sampling   -- token id, 4 bytes --> first device

A stage is a `Model` with its own activations, step state and launches. The sequences and the KV cache's bookkeeping
exist once; each layer's keys, values and states are on the layer's device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.models.kv_cache import KVCache
from llmcl.models.layer_span import LayerSpan
from llmcl.models.model import Model
from llmcl.models.sequence import Step
from llmcl.models.weights import ModelWeights
from llmcl.progress import Progress
from llmcl.runtime.device import Device


class RowsThroughHost:
    """Copies rows of x from a stage to the next through host memory that the next stage's device reads by itself."""

    def __init__(self, source: Model, target: Model):
        self.source_s = 0.0  # seconds until the source had its rows, in all steps
        self._source, self._target = source, target
        self._rows = target.device.pinned(source.act.x.nbytes // 4).view(np.float32)
        self._sent: object = None

    def run(self, launches: Callable[[], None], n_rows: int) -> None:
        """Enqueues the source's launches, waits for n_rows rows of x, and enqueues their copy to the target."""
        start = time.perf_counter()
        launches()
        rows = self._rows[: n_rows * self._source.config.hidden_size]
        self._sent = None  # waits until the copy before has left the host memory
        self._source.device.read_async(self._source.act.x, rows)()
        self.source_s += time.perf_counter() - start
        self._sent = self._target.device.write_async(self._target.act.x, rows)


@dataclass(frozen=True)
class Part:
    """What a stage is made from. mods: of every layer of the model, on the stage's device."""

    device: Device
    span: LayerSpan
    weights: ModelWeights
    mods: Sequence[Mods]

    def model(self, config: ModelConfig, cache: KVCache, **options: Any) -> Model:
        return Model(self.device, config, self.weights, cache, mods=self.mods, span=self.span, **options)


def model_of(parts: Sequence[Part], config: ModelConfig, cache: KVCache, **options: Any) -> Model:
    """Returns the model of one or several parts, in the order of their layers. options: as in `Model`."""
    return StagedModel(parts, config, cache, **options) if len(parts) > 1 else parts[0].model(config, cache, **options)


class StagedModel(Model):
    """A model whose first layers are on other devices, in `before`. The last stage is this object."""

    def __init__(
        self,
        parts: Sequence[Part],
        config: ModelConfig,
        cache: KVCache,
        *,
        prepared: bool = True,
        progress: Progress | None = None,
        **options: Any,
    ):
        """cache: with the device of each layer. The rest is as in `Model`."""
        chunk = options.pop("chunk", None) or min(prefill_chunk(part.device) for part in parts)
        *first, last = parts
        self.before = [part.model(config, cache, chunk=chunk, prepared=False, **options) for part in first]
        options |= {"mods": last.mods, "span": last.span, "chunk": chunk, "prepared": False}
        super().__init__(last.device, config, last.weights, cache, **options)
        self.parts = parts
        self.step.mirrors = [stage.step for stage in self.before]
        pairs = zip(self.before, [*self.before[1:], self], strict=True)
        self.gaps = [RowsThroughHost(stage, after) for stage, after in pairs]
        if prepared:
            self.prepare(progress)

    @property
    def stages(self) -> Sequence[Model]:
        return [*self.before, self]

    def with_cache(self, cache: KVCache, **options: Any) -> Model:
        return StagedModel(self.parts, self.config, cache, chunk=self.chunk, **options)

    def _compute_before(self, step: Step, *, decodes: bool) -> None:
        if step.token_ids is None:  # chosen by the last stage
            token = self.device.read(self.step.tokens, np.int32, (1,))
            for stage in self.before:
                stage.step.write_tokens(token, step.position)
        n = step.n_tokens
        for stage, gap in zip(self.before, self.gaps, strict=True):
            stage.step_position = step.position
            launches = stage.decode_launches_at(step.position) if decodes else stage.launches_for(n)
            if not decodes:
                launches = stage.place_images(step, launches)
            gap.run(partial(stage.run, launches, n), n)

    @property
    def seconds_before(self) -> Sequence[float]:
        return [gap.source_s for gap in self.gaps]

    def prepare(self, progress: Progress | None) -> None:
        for stage in self.before:
            stage.prepare(progress)
        super().prepare(progress)

    def prepare_all(self, progress: Progress | None) -> None:
        for stage in self.before:
            stage.prepare_all(progress)
        super().prepare_all(progress)
