#!/usr/bin/env python
"""Puts attention functions of your own into a real model and shows what they make of its answer.

    python scripts/examples/custom_attention.py ["a question"] [--device DEVICE] [-n TOKENS]

Each variant is a plain Python function with the signature of torch.nn.attention.flex_attention; llmcl compiles it into
the attention of every layer, beside the causal mask.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import llmcl

# One factor a query head: half of the heads prefer what is near, the others read as they were trained to.
preference = np.where(np.arange(9) % 2 == 0, 0.05, 0.0).astype(np.float32)


def near_tokens_count_more(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - preference[h] * (q_idx - kv_idx)


def first_tokens_and_a_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """The first 4 tokens and the last 12, whatever came between."""
    return (kv_idx < 4) | (q_idx - kv_idx < 12)


VARIANTS: dict[str, dict[str, Any]] = {
    "as trained": {},
    "score_mod: half of the heads prefer near tokens": {"score_mod": near_tokens_count_more},
    "mask_mod: the first 4 tokens and the last 12": {"mask_mod": first_tokens_and_a_window},
    "both": {"score_mod": near_tokens_count_more, "mask_mod": first_tokens_and_a_window},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="A model's answer under attention functions of your own.")
    parser.add_argument("question", nargs="?", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--device", help="as for llmcl generate")
    parser.add_argument("-n", "--max-tokens", type=int, default=40)
    options = parser.parse_args()
    for name, functions in VARIANTS.items():
        with llmcl.load("smollm2", device=options.device, max_context=512, **functions) as llm:
            answer = llm.generate(options.question, max_tokens=options.max_tokens).text
        print(f"{name}:\n    {' '.join(answer.split())}\n", flush=True)


if __name__ == "__main__":
    main()
