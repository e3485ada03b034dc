"""Verifies draft tokens: a step whose rows are the last sampled token and guesses at the tokens after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.models.attention_ops import ChunkAttention
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState, StepCount
from llmcl.models.stack import head, stack
from llmcl.ops.sample import SamplingParams
from llmcl.progress import Progress
from llmcl.runtime.device import Device, Launch
from llmcl.speculation.draft_rows import DraftRows

MAX_ROWS = FEW_ROWS[1]


class Verification:
    """Steps that verify draft tokens for one sequence (draft_rows.py), bound once for a model.

    max_draft: maximum draft length in tokens.
    """

    def __init__(self, model: Model, progress: Progress | None = None):
        assert model.cache.states is None  # a rejected row's change to a recurrent state cannot be undone
        device, vocab = model.device, model.config.vocab_size
        max_rows = min(MAX_ROWS, model.chunk)
        self.model = model
        self.max_draft = max_rows - 1
        self.counted = StepCount()
        self._params = SamplingParams()
        self._draft = device.zeros(4 * MAX_ROWS, "draft")
        self._rows = DraftRows(device, vocab, model.step, model.step, model.sampler, self._draft, max_rows)
        self._forward = {rows: self._bind(rows) for rows in few_rows(max_rows)}
        prepare(device, self._forward.values(), self._rows.launches, progress)

    def _bind(self, max_rows: int) -> BoundLaunches:
        model = self.model
        context = model.device, model.config, model.step, model.act
        attention = ChunkAttention(*context, shape_of_drafts(model), model.splits)
        last_seen = self._rows.sampler.last_seen  # unused: rejected rows must not mark a token as seen
        ops = PrefillOps(*context, attention, model.rotations, last_seen, max_rows)
        launches = [*stack(model.weights, model.layers, ops), *head(model.weights, ops, self._rows.logits)]
        return BoundLaunches(model.device, ListedStep(launches, model.step, model.cache.max_context, max_rows))

    def configure(self, params: SamplingParams) -> None:
        """Sets the sampling parameters of the rows. They equal the parameters of the model's own sampler."""
        self._params = params
        self._rows.allow([None] * (1 + self.max_draft))

    def verify(
        self,
        sequence: SequenceState,
        draft: Sequence[int],
        masks: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> Callable[[], list[int]]:
        """Runs a step for the last sampled token, which the device holds, and 1 to max_draft draft tokens.

        The returned function waits for the sampled tokens (see `DraftRows.sample`). The caller appends the tokens now
        in the cache to the sequence: the last sampled token and the accepted draft tokens.

        masks: called while the device computes the rows; returns the allowed tokens per row (see `LogitBias.allow`).

        Raises OutOfDeviceMemoryError, before any row is computed, if the cache has too few pages.
        """
        model, n = self.model, 1 + len(draft)
        model.cache.prepare(model.step, sequence, n)
        model.step_position = sequence.position
        words = np.zeros(MAX_ROWS, np.int32)
        words[:n] = [len(draft), *draft]
        model.device.fill(self._draft, words)  # a write would wait for the running step
        model.device.traffic.host_to_device_bytes += words.nbytes
        model.run(self._rows.begin, n)
        model.run(next(forward.launches for rows, forward in self._forward.items() if n <= rows), n)
        if masks is not None:
            model.device.flush()
            self._rows.allow(masks())
        wait = self._rows.sample(model.run, [self._params], [n])

        def sampled() -> list[int]:
            (tokens,) = wait()
            sequence.n_sampled += len(tokens)
            before = self.counted
            self.counted = StepCount(before.steps + 1, before.rows + n, before.tokens + len(tokens))
            return tokens

        return sampled

    def logits(self, row: int) -> np.ndarray:
        """Reads the logits of a row in the last step: float32 [vocab]."""
        return self._rows.row_logits(row)


def shape_of_drafts(model: Model) -> AttentionShape:
    """Returns the attention shape for rows that verify drafts."""
    shape = model.cache.shape
    # Queries stay exact as in decode. Prefill's converted copy of the cache would also cost too much here.
    return shape if shape.kv_dtype in QUANTIZED else replace(shape, exact_queries=True)


def prepare(
    device: Device, forward: Collection[BoundLaunches], others: Sequence[Launch], progress: Progress | None
) -> None:
    """Compiles all launches of a verification and creates their kernel objects."""
    separate = [launch for bound in forward for launch in bound.separate]
    for launch in (*separate, *others):
        launch.share_seldom_used()
    launches = [launch for bound in forward for launch in bound.to_prepare]
    with device.compile_progress((*launches, *others), progress):
        for bound in forward:
            bound.prepare()
        for launch in others:
            launch.prepare()
