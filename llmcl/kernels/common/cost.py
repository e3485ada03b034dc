"""What each kernel must move and compute, for the profiler's roofline: bytes, once, and FLOPs.

Weights, keys and values as stored, activations in float32. A kernel that reads something twice gets no credit for it:
the share of a ceiling says how far a kernel is from what the device could do.
"""

from __future__ import annotations

from llmcl.runtime.device import Cost, CostModel


def linear_cost(weight_bytes: int, rows: int, k: int, outputs: int) -> CostModel:
    """A product with `rows` rows of k weights, which leaves `outputs` values a token."""
    return lambda n, position: Cost(weight_bytes + 4 * n * (k + outputs), 2.0 * rows * k * n)


def attention_cost(n_q_heads: int, n_kv_heads: int, head_dim: int, row_bytes: int) -> CostModel:
    """Causal attention of n tokens to the keys before them and to themselves; mods count nothing.

    row_bytes: of a head's key, and of its value.
    """

    def cost(n: int, position: int) -> Cost:
        pairs = n * position + n * (n + 1) // 2
        cache = 2 * n_kv_heads * row_bytes * (position + n)
        return Cost(cache + 8 * n * n_q_heads * head_dim, 4.0 * n_q_heads * head_dim * pairs)

    return cost


def per_token(nbytes: float) -> CostModel:
    """`nbytes` a token, with arithmetic that is not worth counting."""
    return lambda n, position: Cost(n * nbytes)


def once(nbytes: float) -> CostModel:
    """`nbytes` however many tokens the step has."""
    return lambda n, position: Cost(nbytes)


def fused_cost(*costs: CostModel) -> CostModel:
    """The cost of several kernels, done by one launch."""

    def cost(n: int, position: int) -> Cost:
        parts = [cost_of(n, position) for cost_of in costs]
        return Cost(sum(part.nbytes for part in parts), sum(part.flops for part in parts))

    return cost
