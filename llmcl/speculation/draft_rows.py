"""Samples each row of a step that verifies drafts, and accepts draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from llmcl.kernels.common.step_state import StepState
from llmcl.ops.sample import Sampler, SamplingParams
from llmcl.ops.verify_draft import accept_draft, draft_counts, draft_last_seen, draft_rows
from llmcl.runtime.device import Buffer, Device, Launch

Run = Callable[[Iterable[Launch], int], None]
"""Enqueues launches of a step of so many rows: `Model.run`."""


class DraftRows:
    """Samples each row as its own decode step would: with the sequence's parameters, the sample number and the
    position.

        row        0               1           2           3
        token      sampled last    draft 0     draft 1     draft 2
        samples    a               b           c           d
        accepted                   if = a      if = b too  if = c too

    Therefore an answer has the same tokens with and without drafts, apart from rounding in other kernels. The device
    decides how many tokens are accepted and where a sequence continues. Rejected rows leave data behind the end of the
    sequence, and the next step overwrites the data.

    step: the rows, from one sequence or several (a RaggedStep). texts: the step state with a record per sequence;
    `sampler` chooses the tokens. draft int32 [.]: see `draft_rows`. begin: launches enqueued before the forward pass,
    which fills `logits` float32 [max_rows, vocab].
    """

    def __init__(
        self,
        device: Device,
        vocab_size: int,
        step: StepState,
        texts: StepState,
        sampler: Sampler,
        draft: Buffer,
        max_rows: int,
    ):
        self._device = device
        self._vocab_size = vocab_size
        rows = StepState(device, max_rows, n_sequences=max_rows)
        rows.write_rows([*range(max_rows)], 0)
        self.logits = device.alloc(4 * max_rows * vocab_size, "logits of drafts")
        self.sampler = Sampler(device, self.logits, vocab_size, rows)
        most = max_rows + min(max_rows, max(1, texts.n_sequences))
        self._accepted = device.zeros(4 * most, "accepted tokens")
        self._host_accepted = device.pinned(most)
        self.begin = draft_rows(device, draft, step, texts, sampler.params, rows, self.sampler.params)
        self._last_seen = draft_last_seen(device, step, texts, sampler.last_seen, self.sampler.last_seen)
        self._counts = draft_counts(device, step, texts, sampler.counts, self.sampler.counts)
        of_texts = texts, sampler.last_seen, sampler.counts
        self._accept = accept_draft(device, rows.sampled, step, *of_texts, self._accepted, max_rows)

    @property
    def launches(self) -> list[Launch]:
        return [*self.begin, *self._last_seen, *self._counts, *self.sampler.every_launch, *self._accept]

    def sample(
        self, run: Run, params: Sequence[SamplingParams], n_rows: Sequence[int]
    ) -> Callable[[], list[list[int]]]:
        """Enqueues sampling for each row and acceptance. params and n_rows: per sequence.

        The returned function waits for the sampled tokens per sequence: the accepted draft tokens and the next input.
        The host reads 4 bytes for each row and each sequence. An id equal to vocab_size means that the logits held no
        number.
        """
        n = sum(n_rows)
        if any(of_text.repeat_penalty != 1 for of_text in params):
            run(self._last_seen, n)
        if any(of_text.counts_tokens for of_text in params):
            run(self._counts, n)
        biased = any(self.sampler.bias.applies_to(row) for row in range(n))
        choose = self.sampler.launches_that_choose({self.sampler.choice(of_text) for of_text in params})
        run([*(self.sampler.bias.launches if biased else ()), *choose], n)
        run(self._accept, n)
        accepted = self._host_accepted[: n + len(n_rows)]
        wait = self._device.read_async(self._accepted, accepted)
        self._device.flush()

        def sampled() -> list[list[int]]:
            wait()
            tokens, first = [], 0
            for rows in n_rows:
                tokens.append([int(token) for token in accepted[first + 1 : first + 1 + accepted[first]]])
                first += 1 + rows
            return tokens

        return sampled

    def allow(self, masks: Iterable[np.ndarray | None]) -> None:
        """Restricts the tokens that each row may sample (see `LogitBias.allow`)."""
        self.sampler.bias.allow(dict(enumerate(masks)))

    def row_logits(self, row: int) -> np.ndarray:
        """Reads the logits of a row in the last step: float32 [vocab]."""
        return self._device.read(self.logits, np.float32, (self._vocab_size,), 4 * row * self._vocab_size)
