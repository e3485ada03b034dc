"""Latent attention: all heads share a row a token, of a latent and a rotated key, in place of keys and values.

DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. A head's key is W_k latent and the rotated key, its value W_v latent. The
device keeps the latent alone: a query is multiplied by W_k^T before, the sum of the latents by W_v after.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.models.families.blocks import Attention, MatrixPlan, Shapes, Sizes

KEY_VALUE = "self_attn.kv_b_proj.weight"
KEYS, VALUES = "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
"""In place of KEY_VALUE, as later GGUF files have it: of each head W_k^T [rank, nope], and W_v [value, rank]."""


@dataclass(frozen=True)
class LatentSettings:
    """What a checkpoint says of latent attention.

    rank: numbers of the latent. rope: of the rotated key, and of a query head that meet it; nope: its others. value: of
    the value of a head. query_rank: numbers that the queries are projected from; 0: the normalised input is.
    interleaved: rotary pairs are stored next to each other, otherwise half of rope apart.
    """

    rank: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    query_rank: int = 0
    interleaved: bool = True

    @property
    def width(self) -> int:
        """Numbers of a row of the cache."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Numbers of a query head."""
        return self.nope + self.rope

    @property
    def of_head(self) -> int:
        """Numbers of a head before or after attention, at most."""
        return max(self.query, self.value)


@dataclass(frozen=True)
class LatentAttention(Attention):
    """Causal attention to rows that all heads share: the model's n_kv_heads is 1, its head_dim the row's width.

    bias: the projections to lower ranks and the output projection add one.
    """

    settings: LatentSettings = LatentSettings()

    def matrices(self, sizes: Sizes) -> dict[str, MatrixPlan]:
        of, hidden, heads = self.settings, sizes.hidden_size, sizes.n_q_heads
        name, k = ("q_b", of.query_rank) if of.query_rank else ("q", hidden)
        down = MatrixPlan("down of queries", hidden, ("self_attn.q_a_proj.weight",), (of.query_rank,))
        return ({"query_down": down} if of.query_rank else {}) | {
            "queries": MatrixPlan("queries", k, (f"self_attn.{name}_proj.weight",), (heads * of.query,)),
            "latents": MatrixPlan("latents", hidden, ("self_attn.kv_a_proj_with_mqa.weight",), (of.width,)),
            "keys": MatrixPlan("keys of heads", of.nope, (KEYS,), (heads * of.rank,)),
            "values": MatrixPlan("values of heads", of.rank, (VALUES,), (heads * of.value,)),
            "output": MatrixPlan("output", heads * of.value, ("self_attn.o_proj.weight",), (hidden,)),
        }

    def vectors(self, sizes: Sizes) -> dict[str, Shapes]:
        of, norms = self.settings, ("norm", "post_norm")
        common = {name: shapes for name, shapes in super().vectors(sizes).items() if name in norms}
        query_norm = {"self_attn.q_a_layernorm.weight": (of.query_rank,)} if of.query_rank else {}
        query_bias = {"self_attn.q_a_proj.bias": (of.query_rank,)} if of.query_rank else {}
        biases: dict[str, Shapes] = {
            "query_bias": query_bias,
            "latent_bias": {"self_attn.kv_a_proj_with_mqa.bias": (of.width,)},
            "output_bias": {"self_attn.o_proj.bias": (sizes.hidden_size,)},
        }
        return common | {
            "query_norm": query_norm,
            "latent_norm": {"self_attn.kv_a_layernorm.weight": (of.rank,)},
            **(biases if self.bias else {name: {} for name in biases}),
        }
