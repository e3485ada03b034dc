"""Keys and values of every layer, on the device, and how many tokens they hold."""

from __future__ import annotations

from llmcl.attention.kernels import CAPACITY_MULTIPLE, AttentionShape
from llmcl.config import ModelConfig
from llmcl.ops.dtype import ITEM_BYTES
from llmcl.runtime.device import Buffer, Device


def capacity_for(max_context: int) -> int:
    """Keys that a cache for max_context tokens has room for: the kernels' tiles divide it."""
    return -(-max_context // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def kv_bytes_per_position(config: ModelConfig, kv_dtype: str) -> int:
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * ITEM_BYTES[kv_dtype]


class KVCache:
    """k[layer] [n_kv_heads, capacity/16, head_dim, 16] and v[layer] [n_kv_heads, capacity, head_dim] of kv_dtype.

    The cache owns the position: `token_ids` are the tokens whose keys and values it holds (a sampled token is held
    from the step on that takes it as input).
    """

    def __init__(self, device: Device, config: ModelConfig, max_context: int, kv_dtype: str):
        self.max_context = max_context
        self.shape = AttentionShape(
            config.n_q_heads, config.n_kv_heads, config.head_dim, capacity_for(max_context), kv_dtype
        )
        layer_bytes = config.n_kv_heads * self.shape.capacity * config.head_dim * ITEM_BYTES[kv_dtype]
        self.k = [device.alloc(layer_bytes, f"keys of layer {i}") for i in range(config.n_layers)]
        self.v = [device.alloc(layer_bytes, f"values of layer {i}") for i in range(config.n_layers)]
        self.token_ids: list[int] = []

    @property
    def position(self) -> int:
        return len(self.token_ids)

    def truncate(self, position: int) -> None:
        """Forgets everything from `position` on; what follows overwrites it."""
        del self.token_ids[position:]

    def buffers(self) -> list[Buffer]:
        return [*self.k, *self.v]
