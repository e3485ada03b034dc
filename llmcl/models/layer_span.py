"""LayerSpan: the consecutive layers that one device computes."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.config import ModelConfig


@dataclass(frozen=True)
class LayerSpan:
    """Layers `first` to `end` - 1 of a model with n_layers layers."""

    first: int
    end: int
    n_layers: int

    @property
    def is_first(self) -> bool:
        """Whether the span begins with the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the output head follows the span."""
        return self.end == self.n_layers

    @property
    def layers(self) -> range:
        return range(self.first, self.end)

    def __str__(self) -> str:
        last = self.end - 1
        return f"layer {last}" if last == self.first else f"layers {self.first} to {last}"


def whole_span(config: ModelConfig) -> LayerSpan:
    return LayerSpan(0, config.n_layers, config.n_layers)
