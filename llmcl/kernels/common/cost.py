"""Minimum bytes and FLOPs of each kernel, for the profiler's roofline.

Weights, keys and values count as stored, activations count as float32. Reading data twice earns no credit: the reported
share of the ceiling shows how far a kernel is from the device's limit.
"""

from __future__ import annotations

from llmcl.runtime.device import Cost, CostModel


def linear_cost(weight_bytes: int, rows: int, k: int, outputs: int) -> CostModel:
    """Returns the cost of a product: `rows` rows with k weights each, and `outputs` values per token."""
    return lambda n, position: Cost(weight_bytes + 4 * n * (k + outputs), 2.0 * rows * k * n)


def attention_cost(n_q_heads: int, n_kv_heads: int, head_dim: int, row_bytes: int) -> CostModel:
    """Returns the cost of causal attention: n tokens attend to earlier keys and to themselves. Mods are free.

    row_bytes: bytes per head for a key, and for a value.
    """

    def cost(n: int, position: int) -> Cost:
        pairs = n * position + n * (n + 1) // 2
        cache = 2 * n_kv_heads * row_bytes * (position + n)
        return Cost(cache + 8 * n * n_q_heads * head_dim, 4.0 * n_q_heads * head_dim * pairs)

    return cost


def per_token(nbytes: float) -> CostModel:
    """Returns a cost of `nbytes` per token and no arithmetic."""
    return lambda n, position: Cost(n * nbytes)


def once(nbytes: float) -> CostModel:
    """Returns a cost of `nbytes`, independent of the token count."""
    return lambda n, position: Cost(nbytes)


def fused_cost(*costs: CostModel) -> CostModel:
    """Returns the total cost of several kernels in a single launch."""

    def cost(n: int, position: int) -> Cost:
        parts = [cost_of(n, position) for cost_of in costs]
        return Cost(sum(part.nbytes for part in parts), sum(part.flops for part in parts))

    return cost
