"""Verifies drafts of several sequences in one step: rows that decode, then a run of rows per draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.common.ragged_step import RaggedStep, Run
from llmcl.models.activations import Activations
from llmcl.models.attention_ops import RaggedAttention
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.draft_rows import DraftRows
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.model import Model
from llmcl.models.ragged_launches import rows_that_decode
from llmcl.models.stack import head, stack
from llmcl.models.verification import MAX_ROWS, prepare, shape_of_drafts
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.progress import Progress

LAST_SAMPLED = -1  # Marks a row whose token only the device knows (ragged_step.py).


class BatchVerification:
    """Verification steps, bound once for a batch. Every row is sampled. Prompts are read in separate steps.

    step, sampler, batch_ops: the batch's. max_rows: limit of rows per step.
    """

    def __init__(
        self,
        model: Model,
        step: RaggedStep,
        sampler: Sampler,
        batch_ops: Callable[[int, Activations], PrefillOps],
        progress: Progress | None = None,
    ):
        device, config = model.device, model.config
        places = model.act.logits.nbytes // (4 * config.vocab_size)
        self.max_rows = min(FEW_ROWS[-1], step.max_tokens, MAX_ROWS * places)
        self._model = model
        self._step = step
        decoding = rows_that_decode(model, places, batch_ops)
        texts, draft = decoding[0][1].step, device.zeros(4, "no draft")
        self._rows = DraftRows(device, config.vocab_size, step, texts, sampler, draft, self.max_rows)
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

    def verify(self, runs: Sequence[tuple[int, int, Sequence[int], SamplingParams]]) -> Callable[[], list[list[int]]]:
        """Runs one step for several sequences: slot, position, draft and parameters per run. Runs without a draft come
        first. The returned function waits for the tokens sampled per run (see `DraftRows.sample`).
        """
        of_texts = [
            Run(place, position, [LAST_SAMPLED, *draft] if draft else None) for place, position, draft, _ in runs
        ]
        self._step.write(of_texts, [])
        model, n = self._model, self._step.n_rows
        model.run(self._rows.begin, n)
        model.run(next(forward.launches for rows, forward in self._forward.items() if n <= rows), n)
        return self._rows.sample(model.run, [params for *_, params in runs], [run.n_rows for run in of_texts])
