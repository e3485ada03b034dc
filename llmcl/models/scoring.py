"""Computes log-probabilities for a prompt's tokens, each given the tokens before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from llmcl.kernels.common.step_state import RING, StepState
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState
from llmcl.ops.logit_bias import LogitBias
from llmcl.ops.logprobs import LINES, LogProb, LogProbs
from llmcl.runtime.staging import send


class Scoring:
    """Reads prompts and scores the tokens, `Model.logit_rows` rows at a time. The kernels are the same as for answers:
    the prompt's next token stands in for the sampled token. The logits stay on the device.

    Raises OutOfDeviceMemoryError if the buffers do not fit.
    """

    def __init__(self, model: Model):
        device, vocab_size, rows = model.device, model.config.vocab_size, model.logit_rows
        logits = model.chunk_logits
        self._model = model
        self._step = StepState(device, rows, n_sequences=rows)
        no_bias = LogitBias(device, logits, vocab_size, self._step)
        self._logprobs = LogProbs(device, logits, vocab_size, self._step, no_bias)
        self._n_steps = 0
        self._unread: deque[Callable[[], list[LogProb | None]]] = deque()

    def score(
        self, sequence: SequenceState, token_ids: Sequence[int], following: Sequence[int], top: int
    ) -> Callable[[], list[LogProb]]:
        """Appends token_ids to the sequence. For each token, `following` names the next token. The returned function
        waits for the log-probabilities of `following`, with `top` alternatives.

        Raises the errors of `Model.logit_chunks`.
        """
        for row in range(self._model.logit_rows):
            self._logprobs.configure(top, row)
        waits, done = [], 0
        for _, n in self._model.logit_chunks(sequence, token_ids):
            waits.append(self._read(following[done : done + n]))
            done += n
        self._model.device.flush()
        return lambda: [scores for wait in waits for scores in wait() if scores is not None]

    def _read(self, following: Sequence[int]) -> Callable[[], list[LogProb | None]]:
        """Enqueues the read of these tokens' log-probabilities from the logits."""
        rows, device = [*range(len(following))], self._model.device
        if len(self._unread) == LINES:  # read the oldest result before its line is overwritten
            self._unread.popleft()()
        self._n_steps += 1
        at = self._n_steps % RING * self._model.logit_rows
        send(device, self._step.sampled, np.asarray(following, np.int32), 4 * at)
        self._step.write_rows(rows, self._n_steps)
        self._model.run([*self._logprobs.before, *self._logprobs.after], len(rows))
        self._unread.append(cache(self._logprobs.read(self._n_steps, rows)))
        return self._unread[-1]
