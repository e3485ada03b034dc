"""Verification of drafted tokens: a step whose rows are the token sampled last and guesses of those that follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.common.step_state import StepState
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.models.stack import head, stack
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.ops.verify_draft import accept_draft, draft_counts, draft_last_seen, draft_rows
from llmcl.progress import Progress

MAX_ROWS = FEW_ROWS[1]
MAX_DRAFT = MAX_ROWS - 1


@dataclass(frozen=True)
class StepCount:
    """steps of the model, the rows of them all, and the tokens that were sampled in them and count."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0

    def since(self, before: StepCount) -> StepCount:
        return StepCount(self.steps - before.steps, self.rows - before.rows, self.tokens - before.tokens)


class Verification:
    """Steps that verify drafted tokens of one text, bound once for a model.

        row        0               1           2           3
        token      sampled last    draft 0     draft 1     draft 2
        samples    a               b           c           d
        accepted                   if = a      if = b too  if = c too

    Each row samples as a decode step of its own would: with the same parameters, its number and its position. So an
    answer has the same tokens with drafts as without, apart from the rounding of other kernels. The device decides what
    is accepted and where the text goes on. What rejected rows left in the cache lies behind the text, and the next step
    writes over it.

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
        self._rows = StepState(device, max_rows, n_sequences=max_rows)
        self._rows.write_rows([*range(max_rows)], 0)
        self._logits = device.alloc(4 * max_rows * vocab, "logits of a draft")
        self._sampler = Sampler(device, self._logits, vocab, self._rows)
        self._draft = device.zeros(4 * MAX_ROWS, "draft")
        self._accepted = device.zeros(4 * (max_rows + 1), "accepted tokens")
        self._host_accepted = device.pinned(max_rows + 1)
        self._begin = draft_rows(device, self._draft, model.step, self._rows)
        self._forward = {rows: self._bind(rows) for rows in few_rows(max_rows)}
        self._last_seen = draft_last_seen(device, model.step, model.sampler.last_seen, self._sampler.last_seen)
        self._counts = draft_counts(device, model.step, model.sampler.counts, self._sampler.counts)
        of_text = model.sampler.last_seen, model.sampler.counts
        self._accept = accept_draft(device, self._rows.sampled, model.step, *of_text, self._accepted)
        others = [*self._begin, *self._last_seen, *self._counts, *self._sampler.every_launch, *self._accept]
        separate = [launch for forward in self._forward.values() for launch in forward.separate]
        for launch in (*separate, *others):
            launch.share_seldom_used()
        launches = [launch for forward in self._forward.values() for launch in forward.launches]
        with device.compile_progress((*launches, *others), progress):
            for forward in self._forward.values():
                forward.prepare()
            for launch in others:
                launch.prepare()

    def _bind(self, max_rows: int) -> BoundLaunches:
        model, shape = self.model, self.model.cache.shape
        if shape.kv_dtype not in QUANTIZED:
            # As in decode. And a copy of the cache in another dtype, which prefill may make, would cost too much here.
            shape = replace(shape, exact_queries=True)
        ops = PrefillOps(
            model.device,
            model.config,
            model.step,
            model.act,
            shape,
            model.n_splits,
            model.rotations,
            self._sampler.last_seen,  # of no use: rejected rows have no place in those of the text
            max_rows,
        )
        launches = [*stack(model.weights, model.layers, ops), *head(model.weights, ops, self._logits)]
        return BoundLaunches(model.device, ListedStep(launches, model.step, model.cache.max_context, max_rows))

    def configure(self, params: SamplingParams) -> None:
        """The rows are sampled as params say, which have a seed: those of the text."""
        self._params = params
        for row in range(self._rows.n_sequences):
            self._sampler.configure(params, row)

    def verify(
        self,
        sequence: SequenceState,
        draft: Sequence[int],
        masks: Callable[[], Sequence[np.ndarray]] | None = None,
    ) -> Callable[[], list[int]]:
        """A step of the token that was sampled last, which the device has, and of 1 to max_draft drafted tokens.

        The function returned waits for the tokens sampled (the host reads 4 bytes for each row, and for their number):
        the accepted ones of the draft and one more, the device's next input. An id of vocab_size says that its logits
        had no number. The caller adds those that the cache now holds to the sequence: the token sampled last and the
        accepted ones.

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
        model.run(self._begin)
        model.run(next(forward.launches for rows, forward in self._forward.items() if n <= rows), n)
        if masks is not None:
            model.device.flush()
            for row, mask in enumerate(masks()):
                self._sampler.bias.allow(mask, row)
        if self._params.repeat_penalty != 1:
            model.run(self._last_seen, n)
        if self._params.counts_tokens:
            model.run(self._counts, n)
        model.run(self._sampler.launches_for(range(n)), n)
        model.run(self._accept)
        wait = model.device.read_async(self._accepted, self._host_accepted[: 1 + n])
        model.device.flush()

        def sampled() -> list[int]:
            wait()
            count = int(self._host_accepted[0])
            sequence.n_sampled += count
            before = self.counted
            self.counted = StepCount(before.steps + 1, before.rows + n, before.tokens + count)
            return [int(token) for token in self._host_accepted[1 : 1 + count]]

        return sampled

    def logits(self, row: int) -> np.ndarray:
        """Of a row of the last step: float32 [vocab]."""
        vocab = self.model.config.vocab_size
        return self.model.device.read(self._logits, np.float32, (vocab,), 4 * row * vocab)
