"""Keys and values of every layer, on the device, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmcl.errors import UsageError
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.dtype import kv_row_bytes
from llmcl.kernels.common.step_state import StepState
from llmcl.models.config import ModelConfig
from llmcl.models.recurrent_states import BORDER_TOKENS, RecurrentStates, state_slots
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device


def capacity_for(max_context: int) -> int:
    """Keys that a cache for max_context tokens has room for: the kernels' tiles divide it."""
    return -(-max_context // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def kv_bytes_per_position(config: ModelConfig, kv_dtype: str) -> int:
    of_layers = map(config.heads, config.cached_layers)
    arrays = 1 if config.latent is not None else 2  # rows of latents, or keys and values
    return arrays * sum(heads.n_kv * kv_row_bytes(heads.size, kv_dtype) for heads in of_layers)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their first items two lists have in common."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class KVCache:
    """k[layer] [n_kv_heads, capacity/16, head_dim, 16] and v[layer] [n_kv_heads, capacity, head_dim] of kv_dtype; with
    "q8_0" tiles of 16 keys or values as kernels/common/kv_cache.cl describes them.

    With latent attention k[layer] has rows [capacity, head_dim] in the layout of values (kernels/common/latent_row.cl),
    and v[layer] is None. shapes[layer]: of a layer; shape: with the heads that most layers have. Room for one sequence;
    PagedKVCache has room for several. A layer without keys of its own has None for k, v and shapes, and `states`
    has the state of a recurrent one; without any, states is None.
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
        self._allocate(device, config, max_context, shape, 1, BORDER_TOKENS)
        self._only = SequenceState(self._key)

    def _allocate(
        self,
        device: Device,
        config: ModelConfig,
        max_context: int,
        shape: AttentionShape,
        n_sequences: int,
        border_tokens: int,
    ) -> None:
        """n_sequences: that are extended at a time. border_tokens: from one border of snapshots to the next."""
        self.max_context = max_context
        self.shape = shape
        self.shapes: list[AttentionShape | None] = [None] * config.n_layers
        self._keys_of = {i: config.keys_of(i) for i in config.attention_layers}
        self._key = object()  # by which it knows its sequences
        self.k: list[Buffer | None] = [None] * config.n_layers
        self.v: list[Buffer | None] = [None] * config.n_layers
        for i in config.cached_layers:
            heads = config.heads(i)
            self.shapes[i] = own = replace(shape, n_kv_heads=heads.n_kv, head_dim=heads.size)
            layer_bytes = own.n_kv_heads * own.capacity * own.row_bytes
            if config.latent is not None:
                self.k[i] = device.alloc(layer_bytes, f"latents of layer {i}")
                continue
            self.k[i] = device.alloc(layer_bytes, f"keys of layer {i}")
            self.v[i] = device.alloc(layer_bytes, f"values of layer {i}")
        self.states: RecurrentStates | None = None
        if config.state_bytes:
            self.states = RecurrentStates(device, config, state_slots(n_sequences), border_tokens)

    def sequence(self) -> SequenceState:
        """Where a new text goes: here the one sequence there is, whatever it holds."""
        return self._only

    def fork(self, sequence: SequenceState) -> SequenceState:
        """Where a text goes that continues `sequence` in another way."""
        return self.own(sequence)

    def truncate(self, sequence: SequenceState, position: int) -> None:
        """Forgets everything of the sequence from `position` on; what follows overwrites it.

        With recurrent layers it may forget more: see `kept`.
        """
        position = self._go_back(self.own(sequence), position)
        del sequence.token_ids[position:]

    def kept(self, sequence: SequenceState, position: int) -> int:
        """How many of the first `position` tokens of a sequence `truncate` would keep: those before the last snapshot,
        where there are recurrent layers.
        """
        position = min(position, len(sequence.token_ids))
        return position if self.states is None else self.states.kept(sequence, position)

    def _go_back(self, sequence: SequenceState, position: int) -> int:
        position = min(position, len(sequence.token_ids))
        return position if self.states is None else self.states.go_back(sequence, position, self._forget)

    def _forget(self, sequence: SequenceState) -> None:
        """Another sequence needs the place of this one's state."""
        self.truncate(sequence, 0)

    def share_prefix(self, sequence: SequenceState, prompt: Sequence[int]) -> None:
        """Before a sequence becomes `prompt`: takes over what another sequence holds of its beginning."""

    def prepare(self, step: StepState, sequence: SequenceState, n_tokens: int, place: int = 0) -> None:
        """Makes room for the next n_tokens of the sequence, which fit into max_context, and tells the device where.

        place: of the sequence, in a step of several.
        """
        self._prepare_state(step, self.own(sequence), place)

    def _prepare_state(self, step: StepState, sequence: SequenceState, place: int) -> None:
        if self.states is not None:
            step.write_recurrent_slot(self.states.begin(sequence, self._forget), place)

    def advance(self, sequence: SequenceState, n_tokens: int) -> None:
        """A step is about to be enqueued, for which `prepare` made room: from now on recurrent layers have the state
        after its tokens.
        """
        if self.states is not None:
            self.states.advance(sequence, n_tokens)

    def borders(self, sequence: SequenceState, n_tokens: int, *, is_last: bool) -> list[int]:
        """After which of its next n_tokens snapshots are to be taken: see RecurrentStates."""
        return [] if self.states is None else self.states.borders(sequence, n_tokens, is_last=is_last)

    def states_of(self, layer: int) -> Mapping[str, Buffer]:
        """The arrays of the states in a layer, by name; {} for one that keeps none."""
        return {} if self.states is None else self.states.buffers[layer]

    def snapshot(self, sequence: SequenceState) -> None:
        """Texts that go on in another way can go back to where the sequence is now."""
        if self.states is not None:
            self.states.snapshot(sequence)

    def begin_snapshot(self, step: StepState, text: Sequence[int], n_tokens: int) -> int | None:
        """The step that is about to be enqueued, for which `prepare` made room, leaves a snapshot after its first
        n_tokens, with which the sequence is `text`; 0: it leaves none. The slot, for `end_snapshot`, or None.
        """
        if self.states is None:
            return None
        slot = self.states.begin_snapshot(text) if n_tokens else None
        step.write_snapshot(slot or 0, 0 if slot is None else n_tokens)
        return slot

    def end_snapshot(self, text: Sequence[int], slot: int | None) -> None:
        """The step is enqueued."""
        if self.states is not None and slot is not None:
            self.states.end_snapshot(text, slot)

    def own(self, sequence: SequenceState) -> SequenceState:
        """Raises UsageError for a sequence that another cache made."""
        if sequence.cache_key is not self._key:
            raise UsageError("the sequence is of another KV cache; expected one that this cache made")
        return sequence

    def keys_and_values(self, layer: int) -> tuple[Buffer | None, Buffer | None]:
        """What a layer attends to, of its own or of another; None for one without attention."""
        of = self._keys_of.get(layer, layer)
        return self.k[of], self.v[of]

    def buffers(self) -> list[Buffer]:
        """Keys and values of every layer."""
        return [buffer for buffer, _ in self.shaped_buffers()]

    def shaped_buffers(self) -> list[tuple[Buffer, AttentionShape]]:
        """Keys of every layer, then values of every layer."""
        layers = zip((*self.k, *self.v), 2 * self.shapes, strict=True)
        return [(buffer, shape) for buffer, shape in layers if buffer is not None and shape is not None]
