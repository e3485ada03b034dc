"""Latent attention: all heads share one row per token, a latent and a rotated key, instead of keys and values.

DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. A head's key is W_k latent plus the rotated key, its value W_v latent.
The device caches only the latent and the rotated key: queries are multiplied by W_k^T before attention, and the
weighted latents by W_v after.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.families.blocks import Attention, MatrixPlan, Shapes, Sizes

KEY_VALUE = "self_attn.kv_b_proj.weight"
KEYS, VALUES = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
"""In place of KEY_VALUE, as later GGUF files have it: of each head W_k^T [rank, nope], and W_v [value, rank]."""


@dataclass(frozen=True)
class LatentSettings:
    """A checkpoint's sizes for latent attention."""

    rank: int = 512  # latent size
    rope: int = 64  # size of the rotated key, and of a query head's matching part
    nope: int = 128  # size of a query head's remaining part
    value: int = 128  # size of a head's value
    query_rank: int = 0  # size of the low-rank query input; 0: queries are projected from the normalised input
    interleaved: bool = True  # rotary pairs are adjacent; False: half of rope apart

    @property
    def width(self) -> int:
        """Returns the size of a cache row."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Returns the size of a query head."""
        return self.nope + self.rope

    @property
    def of_head(self) -> int:
        """Returns the larger of a head's input and output sizes."""
        return max(self.query, self.value)


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Causal attention to rows shared by all heads. The model's n_kv_heads is 1, and head_dim is the row width.

    bias: the down projections and the output projection add a bias.
    """

    settings: LatentSettings = LatentSettings()

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        settings, hidden, heads = self.settings, sizes.hidden_size, sizes.n_q_heads
        name, k = ("q_b", settings.query_rank) if settings.query_rank else ("q", hidden)
        down = MatrixPlan("down of queries", hidden, ("self_attn.q_a_proj.weight",), (settings.query_rank,))
        return ({"query_down": down} if settings.query_rank else {}) | {
            "queries": MatrixPlan("queries", k, (f"self_attn.{name}_proj.weight",), (heads * settings.query,)),
            "latents": MatrixPlan("latents", hidden, ("self_attn.kv_a_proj_with_mqa.weight",), (settings.width,)),
            "keys": MatrixPlan("keys of heads", settings.nope, (KEYS,), (heads * settings.rank,)),
            "values": MatrixPlan("values of heads", settings.rank, (VALUES,), (heads * settings.value,)),
            "output": MatrixPlan("output", heads * settings.value, ("self_attn.o_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        settings, norms = self.settings, ("norm", "post_norm")
        common = {name: shapes for name, shapes in super().vectors(sizes).items() if name in norms}
        query_norm = {"self_attn.q_a_layernorm.weight": (settings.query_rank,)} if settings.query_rank else {}
        query_bias = {"self_attn.q_a_proj.bias": (settings.query_rank,)} if settings.query_rank else {}
        biases: dict[str, Shapes] = {
            "query_bias": query_bias,
            "latent_bias": {"self_attn.kv_a_proj_with_mqa.bias": (settings.width,)},
            "output_bias": {"self_attn.o_proj.bias": (sizes.hidden_size,)},
        }
        return common | {
            "query_norm": query_norm,
            "latent_norm": {"self_attn.kv_a_layernorm.weight": (settings.rank,)},
            **(biases if self.bias else {name: {} for name in biases}),
        }
