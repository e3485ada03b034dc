"""What most processes of tests/run.py would import, imported once, in the process that the others are forked from.

No driver is called here: its threads would be missing in a child of fork.
"""

from __future__ import annotations

import gc

import anthropic.resources  # noqa: F401  the server's clients: 2 to 3 s of CPU
import fake_server  # noqa: F401  llmcl.serve
import helpers  # noqa: F401
import hypothesis
import openai.resources  # noqa: F401
import pytest  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401  PyTorch, too

import llmcl.cli
import llmcl.engine.llm  # noqa: F401


@hypothesis.settings(max_examples=100, database=None, derandomize=True)
@hypothesis.given(hypothesis.strategies.integers(), hypothesis.strategies.text())
def read_constants(number: int, text: str) -> None:
    """Hypothesis draws constants from the sources of all imported modules: half a second of each process. Characters
    it draws from tables that it makes where none are kept: two seconds of the first ones.
    """


read_constants()
gc.freeze()  # no collection of a child looks at all this again
