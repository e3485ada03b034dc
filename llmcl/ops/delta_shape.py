"""The sizes of a gated delta net."""

from __future__ import annotations

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
