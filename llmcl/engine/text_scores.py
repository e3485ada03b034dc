"""Scores how likely a text is for a model: log-probabilities of tokens, and of answers after a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmcl.models.model import Model
from llmcl.models.no_token import check_scored
from llmcl.models.scoring import Scoring
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb


class TextScores:
    """Scores texts in a model's sequence, emptied first. The logits stay on the device."""

    def __init__(self, model: Model, sequence: SequenceState):
        self._model = model
        self._sequence = sequence
        self._scoring = Scoring(model)

    def logprobs(self, ids: Sequence[int], top: int) -> list[LogProb]:
        """Returns the log-probability of each token except the first, with `top` alternatives."""
        if len(ids) < 2:
            return []
        self._model.cache.truncate(self._sequence, 0)
        scored = self._scoring.score(self._sequence, ids[:-1], ids[1:], top)()
        self._check(scored, ids)
        return scored

    def answers(self, prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> list[float]:
        """Returns the log-probability of each answer after the prompt: the sum over the answer's tokens.

        The prompt is read once; recurrent layers go back to the prompt's last snapshot. The answers are enqueued one
        after the other, and the host waits at the end.
        """
        model, sequence, n_read = self._model, self._sequence, len(prompt) - 1
        model.cache.truncate(sequence, 0)
        waits = []
        for answer in answers:
            model.cache.choose_frequencies(sequence, n_read + len(answer))
            model.cache.truncate(sequence, n_read)
            if sequence.position < n_read:  # at first, or where recurrent layers could not go back
                model.prefill(sequence, prompt[sequence.position : n_read])
            waits.append(self._scoring.score(sequence, [prompt[-1], *answer[:-1]], answer, 0))
        sums = []
        for answer, wait in zip(answers, waits, strict=True):
            scored = wait()
            self._check(scored, [*prompt, *answer])
            sums.append(sum(token.logprob for token in scored))
        return sums

    def _check(self, scored: Sequence[LogProb], ids: Sequence[int]) -> None:
        if not all(math.isfinite(token.logprob) for token in scored):
            self._model.cache.truncate(self._sequence, 0)
            check_scored(self._model, self._sequence, ids[:-1])
