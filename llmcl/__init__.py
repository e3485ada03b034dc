"""llmcl: Llama-style language models on any OpenCL device.

import llmcl
with llmcl.load("smollm2") as llm:
    for piece in llm.stream("Why is the sky blue?"):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmcl.errors import LlmclError

if TYPE_CHECKING:
    from llmcl.engine.chat import Chat
    from llmcl.engine.engine import Engine
    from llmcl.engine.generation import Generation, Piece
    from llmcl.engine.llm import LLM
    from llmcl.engine.loading import load, load_random
    from llmcl.engine.requests import Request
    from llmcl.engine.stats import GenerationStats
    from llmcl.runtime.device import Device

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Chat",
    "Device",
    "Engine",
    "Generation",
    "GenerationStats",
    "LlmclError",
    "Piece",
    "Request",
    "load",
    "load_random",
]

_HOMES = {
    "LLM": "llmcl.engine.llm",
    "Chat": "llmcl.engine.chat",
    "Device": "llmcl.runtime.device",
    "Engine": "llmcl.engine.engine",
    "Request": "llmcl.engine.requests",
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
