"""Compiles every kernel of a loaded model by running a little of everything."""

from __future__ import annotations

from typing import Any

from llmcl.engine.llm import LLM
from llmcl.progress import Progress

# Sampling parameters with separate kernels.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.1, "seed": 1},
    {"temperature": 0.8, "typical_p": 0.9},
    {"logprobs": 2, "logit_bias": {1: 1.0}},
)


def warm(llm: LLM, max_sequences: int = 8, progress: Progress | None = None) -> None:
    """Compiles the kernels for answers to one prompt, for log-probabilities, and for an engine with max_sequences.

    Raises `LLM.engine`'s errors.
    """
    model = llm.model
    model.prepare_all(progress)
    ids = [1 + i % (llm.config.vocab_size - 1) for i in range(8)]
    for way in WAYS:
        llm.generate(ids, max_tokens=3, ignore_eos=True, **way)
    llm.logprobs(ids, top=1)
    llm.logits(ids)
    with llm.engine(max_sequences=max_sequences, progress=progress) as engine:
        for way in WAYS:
            engine.generate([ids[i % 4 :] for i in range(max_sequences)], max_tokens=3, ignore_eos=True, **way)
        engine.submit(ids, prompt_logprobs=1, max_tokens=1).result()
