"""Verifies drafts of several sequences in one step: rows that decode, then a segment of rows per draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.common.ragged_step import RaggedStep, Run
from llmcl.models.attention_ops import RaggedAttention
from llmcl.models.batch import Batch
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.ragged_launches import rows_that_decode
from llmcl.models.sequence import SequenceState
from llmcl.models.stack import head, stack
from llmcl.progress import Progress
from llmcl.speculation.draft_rows import DraftRows
from llmcl.speculation.verification import MAX_ROWS, prepare, shape_of_drafts

LAST_SAMPLED = -1  # Marks a row whose token only the device knows (ragged_step.py).


class BatchVerification:
    """Verification steps, bound once for a batch. Every row is sampled. Prompts are read in separate steps.

    step: the batch's, for prompt chunks. max_rows: limit of rows per step.
    """

    def __init__(self, batch: Batch, step: RaggedStep, progress: Progress | None = None):
        model = batch.model
        device, config = model.device, model.config
        slots = model.act.logits.nbytes // (4 * config.vocab_size)
        self.max_rows = min(FEW_ROWS[-1], step.max_tokens, MAX_ROWS * slots)
        self._batch = batch
        self._step = step
        decoding, draft = rows_that_decode(model, slots, batch.decoding.ops), device.zeros(4, "no draft")
        self._rows = DraftRows(device, config.vocab_size, step, batch.step_state, batch.sampler, draft, self.max_rows)
        context = device, config, step, model.act
        attention = RaggedAttention(*context, shape_of_drafts(model), decoding[-1][1].splits, decoding)
        last_seen = self._rows.sampler.last_seen  # unused: rejected rows must not mark a token as seen
        self._forward = {}
        for rows in few_rows(self.max_rows):
            ops = PrefillOps(*context, attention, model.rotations, last_seen, rows)
            launches = [*stack(model.weights, model.layers, ops), *head(model.weights, ops, self._rows.logits)]
            listed = ListedStep(launches, step, model.cache.max_context, rows)
            self._forward[rows] = BoundLaunches(device, listed, persistent=False)
        prepare(device, self._forward.values(), self._rows.launches, progress)

    def verify(self, drafts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[list[int]]]:
        """Verifies drafts for two or more sequences in one step: per sequence a row for its last sampled token and a
        row per draft token. A draft may be empty. All rows together: at most max_rows. The returned function waits for
        the tokens per sequence: accepted draft tokens and one more. The caller appends the tokens now in the cache to
        the sequences. The sequences must use neither a bias nor log-probabilities.

        Raises OutOfDeviceMemoryError, before any row is computed, if the cache has too few pages.
        """
        rows = [(sequence, 1 + len(draft)) for sequence, draft in drafts]
        return self._batch.verify(rows, lambda: self._enqueue(drafts))

    def _enqueue(self, drafts: Sequence[tuple[SequenceState, Sequence[int]]]) -> Callable[[], list[list[int]]]:
        order = sorted(range(len(drafts)), key=lambda i: len(drafts[i][1]) > 0)  # rows that decode come first
        runs = [
            Run(self._batch.slot(sequence), sequence.position, [LAST_SAMPLED, *draft] if draft else None)
            for sequence, draft in (drafts[i] for i in order)
        ]
        self._step.write(runs, [])
        model, n = self._batch.model, self._step.n_rows
        model.run(self._rows.begin, n)
        model.run(next(forward.launches for rows, forward in self._forward.items() if n <= rows), n)
        params = [drafts[i][0].sampling for i in order]
        wait = self._rows.sample(model.run, params, [run.n_rows for run in runs])

        def sampled() -> list[list[int]]:
            tokens: list[list[int]] = [[] for _ in drafts]
            for i, of_text in zip(order, wait(), strict=True):
                tokens[i] = of_text
                drafts[i][0].n_sampled += len(of_text)
            return tokens

        return sampled
