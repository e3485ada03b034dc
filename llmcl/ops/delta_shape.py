"""The sizes of a gated delta net, and of a Mamba-2 mixer."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaShape:
    """Head counts and sizes: n_k query and key heads with d_k values, n_v value heads with d_v values."""

    n_k: int
    n_v: int  # a multiple of n_k
    d_k: int  # a multiple of 16
    d_v: int  # a multiple of 16
    length: int  # inputs to the convolution
    heads_in_turn: bool = False  # value head h has key head h % n_k; otherwise a key head's value heads are neighbours
    corrects: bool = True  # False: Mamba-2's scan (delta_rule.cl)

    @property
    def channels(self) -> int:
        """Returns the channels: queries, keys and values together."""
        return 2 * self.n_k * self.d_k + self.n_v * self.d_v

    @property
    def row(self) -> int:
        """Returns the values per row: queries, keys, values, gates for the norm, raw rates and decays."""
        return self.channels + self.n_v * self.d_v + 2 * self.n_v

    @property
    def token_bytes(self) -> int:
        """Returns the bytes a token moves: its row, weights and states between the projections, and output."""
        return 4 * (2 * self.n_v * self.d_k * self.d_v + 3 * self.length * self.channels + 2 * self.n_v * self.d_v)

    @property
    def constants(self) -> dict[str, object]:
        return {"N_K": self.n_k, "N_V": self.n_v, "D_K": self.d_k, "D_V": self.d_v}

    @property
    def norm_constants(self) -> dict[str, int]:
        return {"HEADS": self.n_v, "COLUMNS": self.d_v, "ROW": self.row, "GATES": self.channels, "GATE_FIRST": 0}


@dataclass(frozen=True)
class MambaShape:
    """Head counts and sizes: n_heads heads with d_head values, n_groups inputs B and outputs C with d_state values."""

    n_heads: int  # a multiple of n_groups
    d_head: int  # a multiple of 16
    n_groups: int
    d_state: int  # a multiple of 16
    length: int  # inputs to the convolution
    conv_bias: bool = True
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def scan(self) -> DeltaShape:
        """Returns the scan's sizes: B are keys, C queries and x values."""
        return DeltaShape(self.n_groups, self.n_heads, self.d_state, self.d_head, self.length, corrects=False)

    @property
    def inner(self) -> int:
        """Returns the values of all heads together."""
        return self.n_heads * self.d_head

    @property
    def channels(self) -> int:
        """Returns the convolution's channels: x, B and C together."""
        return self.inner + 2 * self.n_groups * self.d_state

    @property
    def row(self) -> int:
        """Returns the values per row: x, B, C, gates for the norm, raw time steps."""
        return self.channels + self.inner + self.n_heads

    @property
    def norm_constants(self) -> dict[str, int]:
        columns = self.inner // self.n_groups
        return {"HEADS": self.n_groups, "COLUMNS": columns, "ROW": self.row, "GATES": self.channels, "GATE_FIRST": 1}
