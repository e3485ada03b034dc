"""LoraAdapters: the LoRA adapters of an LLM, from files to the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from llmcl.checkpoint import TensorInfo
from llmcl.checkpoint.lora import Adapter, LoraRequest, open_adapter
from llmcl.engine.leases import Leases
from llmcl.errors import UsageError
from llmcl.models.model import Model
from llmcl.models.sequence import SequenceState


class LoraAdapters(ABC):
    """The part of `LLM` that loads adapters. Answers choose them with the option `lora`."""

    model_name: str
    dtype: str
    leases: Leases
    sequence: SequenceState
    tensors: Mapping[str, TensorInfo] = {}  # the checkpoint's; `load` sets it

    @property
    @abstractmethod
    def model(self) -> Model: ...

    def load_lora(self, lora: str, *, wait: bool = False) -> str:
        """Loads a LoRA adapter, [NAME=]PATH, in place of an older one with its name. Returns the name, for the option
        `lora` of `LLM.stream`. wait: as in `LLM.stream`.

        Raises CheckpointError or UnsupportedModelError for an adapter that does not fit the model.
        """
        adapter = self.open_lora(lora)
        self.leases.call(lambda: self.put_lora(adapter), wait=wait)
        return adapter.name

    def unload_lora(self, name: str, *, wait: bool = False) -> None:
        """Unloads an adapter. Raises UsageError for an unknown name. wait: as in `LLM.stream`."""
        self.leases.call(lambda: self.model.adapters.unload(name), wait=wait)

    def open_lora(self, lora: str) -> Adapter:
        """Reads an adapter without loading it. Any thread may call it."""
        if not self.tensors:
            raise UsageError(f"{self.model_name} has no checkpoint, so no adapter fits; load a model (llmcl.load)")
        return open_adapter(LoraRequest.parse(lora), self.model.config, self.tensors)

    def put_lora(self, adapter: Adapter, used: Iterable[Adapter] = ()) -> None:
        """Loads an adapter that was read, for a caller that owns the model. used: see `AdapterSet.load`."""
        dtype = "float32" if self.dtype == "float32" else "float16"  # bfloat16 would lose bits of a float32 file
        self.model.adapters.load(self.model, self.tensors, adapter, dtype, used)

    def adapt_to_defaults(self) -> None:
        """Chooses the adapters for texts that choose nothing."""
        self.model.cache.adapt(self.sequence, self.model.adapters.choice(None))
