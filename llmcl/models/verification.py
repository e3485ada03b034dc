"""Verification of drafted tokens: a step whose rows are the token sampled last and guesses of those that follow it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.draft_rows import DraftRows
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.models.stack import head, stack
from llmcl.ops.sample import SamplingParams
from llmcl.progress import Progress
from llmcl.runtime.device import Device, Launch

MAX_ROWS = FEW_ROWS[1]


@dataclass(frozen=True)
class StepCount:
    """steps of the model, the rows of them all, and the tokens that were sampled in them and count."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0

    def since(self, before: StepCount) -> StepCount:
        return StepCount(self.steps - before.steps, self.rows - before.rows, self.tokens - before.tokens)


class Verification:
    """Steps that verify drafted tokens of one text (models/draft_rows.py), bound once for a model.

    max_draft: tokens of a draft at most.
    """

    def __init__(self, model: Model, progress: Progress | None = None):
        assert model.cache.states is None  # nothing takes back what a rejected row adds to a state
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
        ops = PrefillOps(
            model.device,
            model.config,
            model.step,
            model.act,
            shape_of_drafts(model),
            model.splits,
            model.rotations,
            self._rows.sampler.last_seen,  # of no use: rejected rows have no place in those of the text
            max_rows,
        )
        launches = [*stack(model.weights, model.layers, ops), *head(model.weights, ops, self._rows.logits)]
        return BoundLaunches(model.device, ListedStep(launches, model.step, model.cache.max_context, max_rows))

    def configure(self, params: SamplingParams) -> None:
        """The rows are sampled as params say: those with which the model's own sampler was configured."""
        self._params = params
        self._rows.allow([None] * (1 + self.max_draft))

    def verify(
        self,
        sequence: SequenceState,
        draft: Sequence[int],
        masks: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> Callable[[], list[int]]:
        """A step of the token that was sampled last, which the device has, and of 1 to max_draft drafted tokens.

        The function returned waits for the tokens sampled, as of `DraftRows.sample`. The caller adds those that the
        cache now holds to the sequence: the token sampled last and the accepted ones.

        masks: called while the device computes the rows; which tokens each may sample, as of `LogitBias.allow`.

        Raises OutOfDeviceMemoryError where the cache has too few pages: then no row was computed.
        """
        model, n = self.model, 1 + len(draft)
        model.cache.prepare(model.step, sequence, n)
        model.step_position = sequence.position
        words = np.zeros(MAX_ROWS, np.int32)
        words[:n] = [len(draft), *draft]
        model.device.fill(self._draft, words)  # a write would wait for the step that is under way
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
        """Of a row of the last step: float32 [vocab]."""
        return self._rows.row_logits(row)


def shape_of_drafts(model: Model) -> AttentionShape:
    """How rows that verify drafts attend."""
    shape = model.cache.shape
    # As in decode. And a copy of the cache in another dtype, which prefill may make, would cost too much here.
    return shape if shape.kv_dtype in QUANTIZED else replace(shape, exact_queries=True)


def prepare(
    device: Device, forward: Collection[BoundLaunches], others: Sequence[Launch], progress: Progress | None
) -> None:
    """Compiles what a verification has bound, and makes the kernels' objects."""
    separate = [launch for bound in forward for launch in bound.separate]
    for launch in (*separate, *others):
        launch.share_seldom_used()
    launches = [launch for bound in forward for launch in bound.to_prepare]
    with device.compile_progress((*launches, *others), progress):
        for bound in forward:
            bound.prepare()
        for launch in others:
            launch.prepare()
