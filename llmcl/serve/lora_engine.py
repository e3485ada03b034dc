"""The interface between a server and the LoRA adapters of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from llmcl.models.adapters import AdapterSet


class LoraEngine(Protocol):
    """The part of an engine that has adapters."""

    @property
    def loras(self) -> AdapterSet: ...
    def load_lora(self, lora: str) -> str: ...
    def unload_lora(self, name: str) -> None: ...
