"""Blocks that keep a fixed-size state per sequence instead of keys and values per token."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from llmcl.architectures.families.blocks import Block, MatrixPlan, RowRuns, Shapes, Sizes, row_runs


@dataclass(frozen=True)
class RecurrentBlock(Block):
    """A block with a state that every token updates and later tokens read."""

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        return super().vectors(sizes) | {"projection_bias": {}, "output_bias": {}}

    @abstractmethod
    def states(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Returns the float32 arrays of a sequence's state, by their names in the device block."""

    @abstractmethod
    def activations(self, sizes: Sizes) -> dict[str, int]:
        """Returns the float32 values per token, by field in `layer_ops.Activations`."""


@dataclass(frozen=True)
class ShortConvSettings:
    """A checkpoint's short-convolution settings. length: inputs visible to a token, itself included."""

    length: int = 3
    bias: bool = False  # on the convolution and on both projections


@dataclass(frozen=True)
class ShortConv(RecurrentBlock):
    """out_proj(c conv(b x)) with b, c, x = in_proj(.): a causal convolution per channel over a few tokens."""

    norm: str | None = "input_layernorm"
    settings: ShortConvSettings = ShortConvSettings()

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden = sizes.hidden_size
        return {
            "projection": MatrixPlan("conv in", hidden, ("conv.in_proj.weight",), (3 * hidden,)),
            "output": MatrixPlan("conv out", hidden, ("conv.out_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        hidden = sizes.hidden_size
        conv: dict[str, tuple[int, ...]] = {"conv.conv.weight": (hidden, self.settings.length)}
        if not self.settings.bias:
            return super().vectors(sizes) | {"conv": conv}
        return super().vectors(sizes) | {
            "conv": {**conv, "conv.conv.bias": (hidden,)},
            "projection_bias": {"conv.in_proj.bias": (3 * hidden,)},
            "output_bias": {"conv.out_proj.bias": (hidden,)},
        }

    def states(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        return {"conv": (self.settings.length - 1, sizes.hidden_size)}

    def activations(self, sizes: Sizes) -> dict[str, int]:
        return {"mixer_in": 3 * sizes.hidden_size, "mixed": sizes.hidden_size}


@dataclass(frozen=True)
class DeltaSettings:
    """A checkpoint's gated delta net settings: n_k query and key heads with size d_k, n_v value heads with size d_v."""

    n_k: int = 16
    n_v: int = 32
    d_k: int = 128
    d_v: int = 128
    length: int = 4  # inputs visible to the convolution
    in_turn: bool = False  # value head h uses key head h % n_k; False: value heads sharing a key head are neighbours
    log_decays: bool = True  # log(-A) is stored; False: A, as in GGUF files
    joined: tuple[str, ...] = ()  # projections fused into one tensor ("qkvz", "ba"), with rows grouped by key head

    @property
    def channels(self) -> int:
        """Returns the channels of queries, keys and values together."""
        return 2 * self.n_k * self.d_k + self.n_v * self.d_v


@dataclass(frozen=True)
class DeltaNet(RecurrentBlock):
    """The gated delta net: out_proj(gated norm of S^T q), where each token updates a head's matrix S.

    Queries, keys and values pass through a causal convolution. S decays, and its value for the current key moves
    towards the new value (`llmcl/reference/recurrent.py`).
    """

    norm: str | None = "input_layernorm"
    settings: DeltaSettings = DeltaSettings()

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, settings = sizes.hidden_size, self.settings
        values = settings.n_v * settings.d_v
        names, rows, runs = zip(*self._inputs(), strict=True)
        tensors = tuple(f"linear_attn.in_proj_{name}.weight" for name in names)
        return {
            "projection": MatrixPlan("delta net in", hidden, tensors, rows, row_runs=runs),
            "output": MatrixPlan("delta net out", values, ("linear_attn.out_proj.weight",), (hidden,)),
        }

    def _inputs(self) -> list[tuple[str, int, RowRuns | None]]:
        """Returns tensor, row count and row selection for the projection's parts, in the order q, k, v, z, b, a."""
        settings = self.settings
        of_key_head, values = settings.n_v // settings.n_k, settings.n_v * settings.d_v
        parts: list[tuple[str, int, RowRuns | None]] = [("qkv", settings.channels, None), ("z", values, None)]
        if "qkvz" in settings.joined:
            sizes = settings.d_k, settings.d_k, of_key_head * settings.d_v, of_key_head * settings.d_v
            parts = [("qkvz", settings.n_k * runs.run, runs) for runs in row_runs(*sizes)]
        if "ba" in settings.joined:
            return parts + [("ba", settings.n_v, runs) for runs in row_runs(of_key_head, of_key_head)]
        return [*parts, ("b", settings.n_v, None), ("a", settings.n_v, None)]

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        settings, heads = self.settings, (self.settings.n_v,)
        block_vectors: dict[str, Shapes] = {
            "conv": {"linear_attn.conv1d.weight": (settings.channels, settings.length)},
            "scalars": {f"linear_attn.{'A_log' if settings.log_decays else 'A'}": heads, "linear_attn.dt_bias": heads},
            "gated_norm": {"linear_attn.norm.weight": (settings.d_v,)},
        }
        return super().vectors(sizes) | block_vectors

    def states(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        settings = self.settings
        return {"conv": (settings.length - 1, settings.channels), "matrix": (settings.n_v, settings.d_k, settings.d_v)}

    def activations(self, sizes: Sizes) -> dict[str, int]:
        settings = self.settings
        values = settings.n_v * settings.d_v
        return {
            "mixer_in": settings.channels + values + 2 * settings.n_v,
            "mixer_qkv": settings.channels,
            "mixer_gates": 2 * settings.n_v,
            "mixed": values,
        }


@dataclass(frozen=True)
class MambaSettings:
    """A checkpoint's Mamba-2 settings: n_heads heads of d_head values; n_groups inputs B and outputs C of the state."""

    n_heads: int = 128
    d_head: int = 64
    n_groups: int = 1
    d_state: int = 128
    length: int = 4  # inputs visible to the convolution
    conv_bias: bool = True
    log_decays: bool = True  # log(-A) is stored; False: A, as in GGUF files
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def inner(self) -> int:
        """Returns the values of all heads together."""
        return self.n_heads * self.d_head

    @property
    def channels(self) -> int:
        """Returns the convolution's channels: x, B and C together."""
        return self.inner + 2 * self.n_groups * self.d_state


@dataclass(frozen=True)
class Mamba(RecurrentBlock):
    """Mamba-2: out_proj(gated norm of S^T C + D x), where each token adds B x^T to a head's decaying matrix S."""

    norm: str | None = "input_layernorm"
    settings: MambaSettings = MambaSettings()

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        hidden, settings = sizes.hidden_size, self.settings
        inner, channels = settings.inner, settings.channels
        gates, convolved, steps = row_runs(inner, channels, settings.n_heads)  # as stored
        return {
            "projection": MatrixPlan(
                "mamba in",
                hidden,
                ("mamba.in_proj.weight",) * 3,
                (channels, inner, settings.n_heads),
                row_runs=(convolved, gates, steps),
            ),
            "output": MatrixPlan("mamba out", inner, ("mamba.out_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        settings, heads = self.settings, (self.settings.n_heads,)
        conv: dict[str, tuple[int, ...]] = {"mamba.conv1d.weight": (settings.channels, settings.length)}
        conv |= {"mamba.conv1d.bias": (settings.channels,)} if settings.conv_bias else {}
        decays = "mamba.A_log" if settings.log_decays else "mamba.A"
        return super().vectors(sizes) | {
            "conv": conv,
            "scalars": {decays: heads, "mamba.dt_bias": heads, "mamba.D": heads},
            "gated_norm": {"mamba.norm.weight": (settings.inner,)},
        }

    def states(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        settings = self.settings
        matrix = settings.n_heads, settings.d_state, settings.d_head
        return {"conv": (settings.length - 1, settings.channels), "matrix": matrix}

    def activations(self, sizes: Sizes) -> dict[str, int]:
        settings = self.settings
        return {
            "mixer_in": settings.channels + settings.inner + settings.n_heads,
            "mixer_qkv": settings.channels,
            "mixer_gates": 2 * settings.n_heads,
            "mixed": settings.inner,
        }


RecurrentSettings = ShortConvSettings | DeltaSettings | MambaSettings
"""Of the layers of a family that have no attention."""
