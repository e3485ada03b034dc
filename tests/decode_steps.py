"""Models that only decode, and the logits of their steps: for kernels that are several launches in one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from llmcl.models import stages
from llmcl.models.model import Model


def load_for_decode(patch: pytest.MonkeyPatch) -> None:
    """Models that are loaded get no launches that read prompts, whose programs are more than those of decode."""
    patch.setattr(stages, "Model", partial(Model, step_rows=1))


def step_logits(model: Model, n_prompt: int, n_steps: int) -> NDArray[np.float32]:
    """Logits of n_steps decode steps after a prompt of random tokens: float32 [n_steps, vocab].

    A model without launches that read prompts decodes this one.
    """
    ids = np.random.default_rng(5).integers(0, model.config.vocab_size, n_prompt + n_steps).tolist()
    sequence = model.cache.sequence()
    model.cache.truncate(sequence, 0)
    if model._prefill:
        model.prefill(sequence, ids[:n_prompt])
    else:
        for token in ids[:n_prompt]:
            model.decode_token(sequence, token)
    rows = []
    for token in ids[n_prompt:]:
        model.decode_token(sequence, token)
        rows.append(model.device.read(model.act.logits, np.float32, (model.config.vocab_size,)))
    return np.stack(rows)
