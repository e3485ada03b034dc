"""What clients may read about the model itself, such as size and family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def model_name(model: str) -> str:
    """Returns the model's name for clients, without local folders."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else model


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a checkpoint; the defaults mean unknown."""

    family: str = "unknown"  # the architecture's name in the checkpoint, such as "llama"
    n_parameters: int = 0
    embedding_size: int = 0
    weight_type: str = ""  # the type that holds most of the weights
    n_bytes: int = 0  # weights on the device
    is_gguf: bool = False

    @property
    def parameter_size(self) -> str:
        """The number of parameters as Ollama writes it, such as 134.52M or 7.2B."""
        if self.n_parameters < 1_000_000_000:
            return f"{self.n_parameters / 1e6:.2f}M"
        return f"{self.n_parameters / 1e9:.1f}B"
