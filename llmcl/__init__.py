"""llmcl: Llama-style language models on any OpenCL device.

    import llmcl

    with llmcl.load("smollm2") as llm:
        for piece in llm.stream("Why is the sky blue?"):
            print(piece.text, end="", flush=True)
        print(llm.generate("Name three primes.", max_tokens=20).text)

Loading:
    load(model, device=..., quantize=...)   a model by name, folder, .gguf file or hub name; returns an LLM
    load_random(shape)                      random weights of a model's shape, to measure speed

With an LLM:
    llm.stream(prompt, ...)         yields a Piece for each token
    llm.generate(prompt, ...)       the whole answer, a Generation; a list of prompts gives a list of them
    llm.chat()                      a conversation (Chat): chat.send(text)
    llm.engine()                    many requests at once, from threads and tasks (Engine, Request)
    llm.score(prompt, answers)      how likely each answer is
    llm.logprobs(ids), llm.logits(ids), llm.encode(prompt), llm.tokenizer

Attention on arrays, without a model:
    flex_attention(query, key, value, ...), create_block_mask(...)     more in llmcl.attention

Every error that a user can cause is an LlmclError. `help(llmcl.load)` and `help(llmcl.LLM.stream)` list the options;
docs/guide/python.md has examples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcl.errors import LlmclError

if TYPE_CHECKING:
    from llmcl.attention import create_block_mask, flex_attention
    from llmcl.engine.chat import Chat
    from llmcl.engine.engine import Engine
    from llmcl.engine.generation import Generation, Piece
    from llmcl.engine.llm import LLM
    from llmcl.engine.loading import load, load_random
    from llmcl.engine.requests import Request
    from llmcl.engine.stats import GenerationStats
    from llmcl.ops.logprobs import LogProb
    from llmcl.runtime.device import Device
    from llmcl.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Chat",
    "Device",
    "Engine",
    "Generation",
    "GenerationStats",
    "LlmclError",
    "LogProb",
    "Piece",
    "Request",
    "Tokenizer",
    "create_block_mask",
    "flex_attention",
    "load",
    "load_random",
]

_HOMES = {
    "LLM": "llmcl.engine.llm",
    "Chat": "llmcl.engine.chat",
    "Device": "llmcl.runtime.device",
    "Engine": "llmcl.engine.engine",
    "LogProb": "llmcl.ops.logprobs",
    "Request": "llmcl.engine.requests",
    "Tokenizer": "llmcl.tokenizer",
    "create_block_mask": "llmcl.attention",
    "flex_attention": "llmcl.attention",
    "load": "llmcl.engine.loading",
    "load_random": "llmcl.engine.loading",
    "Generation": "llmcl.engine.generation",
    "Piece": "llmcl.engine.generation",
    "GenerationStats": "llmcl.engine.stats",
}


def __getattr__(name: str) -> Any:
    """Imports the engine when it is first used: `llmcl --help` needs no OpenCL."""
    if name not in _HOMES:
        raise AttributeError(f"module 'llmcl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """The public names, for tab completion, whether or not they were imported yet."""
    return sorted({*globals(), *__all__})
