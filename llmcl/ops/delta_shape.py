"""The sizes of a gated delta net."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaShape:
    """n_k heads of queries and keys of d_k, n_v heads of values of d_v; n_v a multiple of n_k, d_k and d_v of 16.

    length: of the convolution. heads_in_turn: value head h has key head h % n_k; otherwise those of a key head are
    neighbours.
    """

    n_k: int
    n_v: int
    d_k: int
    d_v: int
    length: int
    heads_in_turn: bool = False

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return 2 * self.n_k * self.d_k + self.n_v * self.d_v

    @property
    def row(self) -> int:
        """Values of a row: queries, keys, values, gates of the norm, rates and decays before their functions."""
        return self.channels + self.n_v * self.d_v + 2 * self.n_v

    @property
    def token_bytes(self) -> int:
        """What a token moves of its row, of the weights and states between the projections, and leaves."""
        return 4 * (2 * self.n_v * self.d_k * self.d_v + 3 * self.length * self.channels + 2 * self.n_v * self.d_v)

    @property
    def constants(self) -> dict[str, object]:
        return {"N_K": self.n_k, "N_V": self.n_v, "D_K": self.d_k, "D_V": self.d_v}
