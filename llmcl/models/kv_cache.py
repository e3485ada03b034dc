"""Keys and values of every layer, on the device, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Sequence

from llmcl.errors import UsageError
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.dtype import kv_row_bytes
from llmcl.kernels.common.step_state import StepState
from llmcl.models.config import ModelConfig
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device


def capacity_for(max_context: int) -> int:
    """Keys that a cache for max_context tokens has room for: the kernels' tiles divide it."""
    return -(-max_context // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def kv_bytes_per_position(config: ModelConfig, kv_dtype: str) -> int:
    return 2 * config.n_layers * config.n_kv_heads * kv_row_bytes(config.head_dim, kv_dtype)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first items two lists have in common."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class KVCache:
    """k[layer] [n_kv_heads, capacity/16, head_dim, 16] and v[layer] [n_kv_heads, capacity, head_dim] of kv_dtype; with
    "q8_0" tiles of 16 keys or values as kernels/common/kv_cache.cl describes them.

    Room for one sequence; PagedKVCache has room for several.
    """

    table_entries = 0  # page table entries in the step state

    def __init__(
        self, device: Device, config: ModelConfig, max_context: int, kv_dtype: str, *, exact_queries: bool = False
    ):
        """exact_queries: see AttentionShape."""
        shape = AttentionShape(
            config.n_q_heads,
            config.n_kv_heads,
            config.head_dim,
            capacity_for(max_context),
            kv_dtype,
            score_scale=config.attention_scale,
            exact_queries=exact_queries,
        )
        self._allocate(device, config, max_context, shape)
        self._only = SequenceState(self._key)

    def _allocate(self, device: Device, config: ModelConfig, max_context: int, shape: AttentionShape) -> None:
        self.max_context = max_context
        self.shape = shape
        self._key = object()  # by which it knows its sequences
        layer_bytes = config.n_kv_heads * shape.capacity * shape.row_bytes
        self.k = [device.alloc(layer_bytes, f"keys of layer {i}") for i in range(config.n_layers)]
        self.v = [device.alloc(layer_bytes, f"values of layer {i}") for i in range(config.n_layers)]

    def sequence(self) -> SequenceState:
        """Where a new text goes: here the one sequence there is, whatever it holds."""
        return self._only

    def fork(self, sequence: SequenceState) -> SequenceState:
        """Where a text goes that continues `sequence` in another way."""
        return self.own(sequence)

    def truncate(self, sequence: SequenceState, position: int) -> None:
        """Forgets everything of the sequence from `position` on; what follows overwrites it."""
        del self.own(sequence).token_ids[position:]

    def share_prefix(self, sequence: SequenceState, prompt: Sequence[int]) -> None:
        """Before a sequence becomes `prompt`: takes over what another sequence holds of its beginning."""

    def prepare(self, step: StepState, sequence: SequenceState, n_tokens: int, place: int = 0) -> None:
        """Makes room for the next n_tokens of the sequence, which fit into max_context, and tells the device where.

        place: of the sequence, in a step of several.
        """
        self.own(sequence)

    def own(self, sequence: SequenceState) -> SequenceState:
        """Raises UsageError for a sequence that another cache made."""
        if sequence.cache_key is not self._key:
            raise UsageError("the sequence is of another KV cache; expected one that this cache made")
        return sequence

    def buffers(self) -> list[Buffer]:
        return [*self.k, *self.v]
