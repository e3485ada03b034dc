"""Bound launches for steps that read prompt tokens, by size."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.weights import ModelWeights
from llmcl.ops.linear import prefill_bounds
from llmcl.runtime.device import Device, Launch


@dataclass(frozen=True)
class PrefillLaunches:
    """Launches for steps of up to max_tokens tokens. See prefill_stack."""

    max_tokens: int
    ops: PrefillOps
    every: BoundLaunches  # for all tokens
    rest: list[Launch]  # for the tokens with logits
    n_embed: int  # of every.separate, the first: they write the tokens' embeddings to `act.x`

    @property
    def to_prepare(self) -> list[Launch]:
        """Returns the launches whose kernels `prepare` compiles."""
        return [*self.every.to_prepare, *self.rest]

    def prepare(self) -> None:
        """Compiles the kernels and creates their objects."""
        self.every.prepare()
        for launch in self.rest:
            launch.prepare()


def prefill_sizes(device: Device, weights: ModelWeights, most: int) -> list[tuple[int, int]]:
    """Returns the step sizes for prefill launches, `most` last, each with max_rows for its products."""
    bounds = prefill_bounds(device, weights.matrices)
    # for a model whose steps are always short
    last = next((rows for rows in bounds if most <= rows <= FEW_ROWS[-1]), 0)
    return [*((rows, rows) for rows in bounds if rows < most), (most, last)]
