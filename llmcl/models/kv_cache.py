"""Keys and values of every layer, on the device, and the number of tokens stored."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint.lora import AdapterChoice
from llmcl.errors import UsageError
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.dtype import kv_row_bytes
from llmcl.kernels.common.step_state import StepState
from llmcl.models.image_positions import rotary_offset
from llmcl.models.image_rows import images_before
from llmcl.models.layer_span import LayerSpan
from llmcl.models.recurrent_states import BORDER_TOKENS, RecurrentStates, state_slots
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device


def capacity_for(max_context: int) -> int:
    """Returns the key capacity for max_context tokens, rounded up to a multiple that kernel tiles divide."""
    return -(-max_context // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE


def kv_bytes_per_position(config: ModelConfig, kv_dtype: str, span: LayerSpan | None = None) -> int:
    """Returns the bytes per token in all layers, or in `span`."""
    of_layers = [config.heads(i) for i in config.cached_layers if span is None or i in span.layers]
    arrays = 1 if config.latent is not None else 2  # rows of latents, or keys and values
    return arrays * sum(heads.n_kv * kv_row_bytes(heads.size, kv_dtype) for heads in of_layers)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common prefix."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


class KVCache:
    """Stores k[layer] [n_kv_heads, capacity/16, head_dim, 16] and v[layer] [n_kv_heads, capacity, head_dim] in
    kv_dtype. "q8_0" uses tiles of 16 keys or values (kernels/common/kv_cache.cl).

    With latent attention k[layer] has rows [capacity, head_dim] in the values layout (kernels/common/latent_row.cl) and
    v[layer] is None. shapes[layer] is per layer; `shape` has the most common heads. The cache holds one sequence;
    PagedKVCache holds several. A layer without keys has None for k, v and shapes. `states` holds recurrent states, or
    None if no layer is recurrent.
    """

    table_entries = 0  # page table entries in the step state

    def __init__(
        self,
        device: Device | Sequence[Device],
        config: ModelConfig,
        max_context: int,
        kv_dtype: str,
        *,
        exact_queries: bool = False,
    ):
        """device: one for all layers, or the device of each layer. exact_queries: see AttentionShape."""
        shape = AttentionShape(
            config.n_q_heads,
            config.n_kv_heads,
            config.head_dim,
            capacity_for(max_context),
            kv_dtype,
            score_scale=config.attention_scale,
            exact_queries=exact_queries,
            bidirectional=config.bidirectional,
        )
        self._allocate(device, config, max_context, shape, 1, BORDER_TOKENS)
        self._only = SequenceState(self._key)

    def _allocate(
        self,
        device: Device | Sequence[Device],
        config: ModelConfig,
        max_context: int,
        shape: AttentionShape,
        n_sequences: int,
        border_tokens: int,
    ) -> None:
        """n_sequences: sequences extended at a time. border_tokens: tokens between snapshot borders."""
        self.max_context = max_context
        self._config = config
        self.shape = shape
        self.shapes: list[AttentionShape | None] = [None] * config.n_layers
        self._keys_of = {i: config.keys_of(i) for i in config.attention_layers}
        self._key = object()  # identifies sequences made by this cache
        self.k: list[Buffer | None] = [None] * config.n_layers
        self.v: list[Buffer | None] = [None] * config.n_layers
        devices = device if isinstance(device, Sequence) else [device] * config.n_layers
        self._devices: dict[int, Device] = {}  # keyed by id(buffer)
        for i in config.cached_layers:
            heads = config.heads(i)
            self.shapes[i] = layer_shape = replace(shape, n_kv_heads=heads.n_kv, head_dim=heads.size)
            layer_bytes = layer_shape.n_kv_heads * layer_shape.capacity * layer_shape.row_bytes
            keys = "keys" if config.latent is None else "latents"
            self.k[i] = self._alloc(devices[i], layer_bytes, f"{keys} of layer {i}")
            if config.latent is None:
                self.v[i] = self._alloc(devices[i], layer_bytes, f"values of layer {i}")
        self.states: RecurrentStates | None = None
        if config.state_bytes:
            self.states = RecurrentStates(devices, config, state_slots(n_sequences), border_tokens)

    def _alloc(self, device: Device, nbytes: int, name: str) -> Buffer:
        buffer = device.alloc(nbytes, name)
        self._devices[id(buffer)] = device
        return buffer

    def sequence(self) -> SequenceState:
        """Returns the sequence for a new text: here always the only one, with the current content."""
        return self._only

    def fork(self, sequence: SequenceState) -> SequenceState:
        """Returns a sequence for a text that continues `sequence` differently."""
        return self.own(sequence)

    def truncate(self, sequence: SequenceState, position: int) -> None:
        """Forgets everything in the sequence from `position` on. Later tokens overwrite the data.

        With recurrent layers it may forget more: see `kept`.
        """
        self._cut(sequence, position)
        if position == 0:
            sequence.text_length = None

    def _cut(self, sequence: SequenceState, position: int) -> None:
        """Does the work of `truncate`. A sequence that becomes empty keeps its rotary frequencies."""
        position = self._go_back(self.own(sequence), position)
        if sequence.images and position < len(sequence.token_ids):  # otherwise images may be yet to be read
            sequence.images = images_before(sequence.images, position)
        del sequence.token_ids[position:]

    def choose_frequencies(self, sequence: SequenceState, n_tokens: int, n_prompt: int | None = None) -> None:
        """Chooses the rotary frequencies for a text (`ModelConfig.text_length`). Forgets a text with other ones."""
        length = self._config.text_length(n_tokens, n_prompt)
        if sequence.text_length != length:
            self.truncate(sequence, 0)
            sequence.text_length = length

    def adapt(self, sequence: SequenceState, adapters: AdapterChoice) -> None:
        """Chooses a text's adapters. Forgets a text with other ones."""
        if sequence.adapters.key != adapters.key:
            self.truncate(sequence, 0)
        sequence.adapters = adapters

    def frequencies_end(self, sequence: SequenceState) -> int:
        """Returns the text length beyond which all of the sequence's keys must be computed again: with "longrope",
        longer texts have other rotary frequencies.
        """
        scaling = self._config.rope_by_length
        if scaling is None or scaling.kind != "longrope" or sequence.text_length:
            return sys.maxsize
        return scaling.original_max_position

    def kept(self, sequence: SequenceState, position: int) -> int:
        """Returns how many of `position` tokens `truncate` would keep: with recurrent layers, up to a snapshot."""
        position = min(position, len(sequence.token_ids))
        return position if self.states is None else self.states.kept(sequence, position)

    def _go_back(self, sequence: SequenceState, position: int) -> int:
        position = min(position, len(sequence.token_ids))
        return position if self.states is None else self.states.go_back(sequence, position, self._forget)

    def _forget(self, sequence: SequenceState) -> None:
        """Empties a sequence because another sequence needs its state slot."""
        self.truncate(sequence, 0)

    def share_prefix(self, sequence: SequenceState, prompt: Sequence[int]) -> None:
        """Takes over another sequence's cached beginning of `prompt`, before `sequence` becomes `prompt`."""

    def prepare(self, step: StepState, sequence: SequenceState, n_tokens: int, slot: int = 0) -> None:
        """Makes room for the sequence's next n_tokens, which fit into max_context, and tells the device their location.

        slot: the sequence's slot in a step with several sequences.
        """
        self._prepare_state(step, self.own(sequence), slot)

    def _prepare_state(self, step: StepState, sequence: SequenceState, slot: int) -> None:
        step.write_text_length(sequence.text_length or 0, slot)
        if self._config.rope_axes:
            step.write_rotary_offset(rotary_offset(sequence.images, sequence.position), slot)
        if self.states is not None:
            step.write_recurrent_slot(self.states.begin(sequence, self._forget), slot)

    def advance(self, sequence: SequenceState, n_tokens: int) -> None:
        """Marks the next n_tokens as added to the recurrent states. Called between `prepare` and the step."""
        if self.states is not None:
            self.states.advance(sequence, n_tokens)

    def borders(self, sequence: SequenceState, n_tokens: int, *, is_last: bool) -> list[int]:
        """Returns after how many of the next n_tokens to take snapshots (see RecurrentStates)."""
        return [] if self.states is None else self.states.borders(sequence, n_tokens, is_last=is_last)

    def states_of(self, layer: int) -> Mapping[str, Buffer]:
        """Returns a layer's state arrays by name, or {} if the layer keeps no state."""
        return {} if self.states is None else self.states.buffers[layer]

    def snapshot(self, sequence: SequenceState) -> None:
        """Saves the current state as a starting point for texts that continue differently."""
        if self.states is not None:
            self.states.snapshot(sequence)

    def begin_snapshot(self, step: StepState, text: Sequence[int], n_tokens: int) -> int | None:
        """Prepares a snapshot in the step about to be enqueued: after its first n_tokens, when the sequence equals
        `text`. 0: no snapshot. Returns the slot for `end_snapshot`, or None. Called after `prepare`.
        """
        if self.states is None:
            return None
        slot = self.states.begin_snapshot(text) if n_tokens else None
        step.write_snapshot(slot or 0, 0 if slot is None else n_tokens)
        return slot

    def end_snapshot(self, text: Sequence[int], slot: int | None) -> None:
        """Registers the snapshot once the step is enqueued."""
        if self.states is not None and slot is not None:
            self.states.end_snapshot(text, slot)

    def own(self, sequence: SequenceState) -> SequenceState:
        """Returns the sequence. Raises UsageError if another cache made it."""
        if sequence.cache_key is not self._key:
            raise UsageError("the sequence is of another KV cache; expected one that this cache made")
        return sequence

    def keys_and_values(self, layer: int) -> tuple[Buffer | None, Buffer | None]:
        """Returns the keys and values for a layer's attention, its own or shared. None without attention."""
        source_layer = self._keys_of.get(layer, layer)
        return self.k[source_layer], self.v[source_layer]

    def buffers(self) -> list[Buffer]:
        """Returns keys and values of every layer."""
        return [buffer for buffer, _ in self.shaped_buffers()]

    def shaped_buffers(self) -> list[tuple[Buffer, AttentionShape]]:
        """Returns the keys of every layer, then the values of every layer, each with a shape."""
        layers = zip((*self.k, *self.v), 2 * self.shapes, strict=True)
        return [(buffer, shape) for buffer, shape in layers if buffer is not None and shape is not None]
