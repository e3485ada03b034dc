"""States of sequences in a model's recurrent layers, and snapshots to return to.

    slots (device, per layer)
    | state of A | state of B | snapshot | snapshot | free |
                                after 128 tokens of A     a snapshot is found by the tokens before it

A token's contribution to a state cannot be removed. To forget the end of a text, the sequence returns to the last
snapshot before the cut, or to its beginning, and recomputes the tokens in between. Snapshots are taken at page borders,
so a paged cache can share the matching pages of keys and values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.models.prefix_pages import page_keys
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device

KEPT_STATES = 4  # minimum for conversations in a paged cache
SNAPSHOTS = 8  # maximum, beside the sequences' states
BORDER_TOKENS = 64  # tokens between borders in a cache without pages


def state_slots(n_sequences: int) -> int:
    """Returns the slots for n_sequences concurrent sequences: one state each, plus a few snapshots."""
    return n_sequences + min(SNAPSHOTS, 2 * n_sequences)


@dataclass
class _Held:
    """A sequence's state. n_tokens: number of tokens in the state, or -1 while unknown."""

    slot: int
    n_tokens: int = 0


class RecurrentStates:
    """buffers[layer]: float32 [n_slots, ...] for each array in the layer's state, by name.

    Slots in use are computed at each lookup instead of counted, so an interrupt cannot leave a wrong count. A
    sequence's slot becomes free when nothing refers to the sequence any more. If no slot is free, the least recently
    used snapshot is dropped. If there is no snapshot, the least recently used sequence loses its state and starts anew
    when it continues.
    """

    def __init__(self, devices: Sequence[Device], config: ModelConfig, n_slots: int, border_tokens: int):
        """devices: the device of each layer."""
        self.n_slots = n_slots
        self.border_tokens = border_tokens
        self._devices: dict[int, Device] = {}  # keyed by id(buffer)
        self.buffers: list[dict[str, Buffer]] = []
        self._state_bytes: dict[int, int] = {}  # bytes per slot for each buffer, keyed by id(buffer)
        for layer in range(config.n_layers):
            self.buffers.append({})
            for name, shape in config.states(layer).items():
                nbytes = 4
                for size in shape:
                    nbytes *= size
                buffer = devices[layer].alloc(n_slots * nbytes, f"{name} states of layer {layer}")
                self._devices[id(buffer)] = devices[layer]
                self.buffers[layer][name] = buffer
                self._state_bytes[id(buffer)] = nbytes
        self._held: WeakKeyDictionary[SequenceState, _Held] = WeakKeyDictionary()  # least recently used first
        self._branches: WeakKeyDictionary[SequenceState, int] = WeakKeyDictionary()  # see note_branch
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # slot by text key, least recently used first

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers())

    def forget_all(self) -> None:
        """Frees all slots."""
        self._held.clear()
        self._branches.clear()
        self._snapshots.clear()

    def begin(self, sequence: SequenceState, forget: Callable[[SequenceState], None]) -> int:
        """Returns the slot of a sequence about to be extended. forget(other): called for one that loses its slot."""
        held = self._held.pop(sequence, None)
        if held is None:
            held = _Held(self._free_slot(sequence, forget))
        self._held[sequence] = held  # moved to the end: most recently used
        assert held.n_tokens == sequence.position, "the state is not that of the text; truncate the sequence first"
        return held.slot

    def advance(self, sequence: SequenceState, n_tokens: int) -> None:
        """Adds the sequence's next n_tokens to its state, right before the step is enqueued."""
        self._held[sequence].n_tokens += n_tokens

    def kept(self, sequence: SequenceState, position: int) -> int:
        """Returns how many of the sequence's first `position` tokens `go_back` would keep."""
        held = self._held.get(sequence)
        if held is not None and held.n_tokens == position:
            return position
        return self._latest(sequence.token_ids[:position])[0]

    def go_back(self, sequence: SequenceState, position: int, forget: Callable[[SequenceState], None]) -> int:
        """Restores the latest available state within the sequence's first `position` tokens.

        Returns the number of tokens in the state. A sequence without tokens has no slot.
        """
        kept = self.kept(sequence, position)
        held = self._held.get(sequence)
        if held is not None and held.n_tokens == kept == position:
            return kept
        if kept == 0:
            self._held.pop(sequence, None)
        else:
            self.restore(sequence, sequence.token_ids[:kept], forget)
        return kept

    def restore(self, sequence: SequenceState, text: Sequence[int], forget: Callable[[SequenceState], None]) -> None:
        """Copies the snapshot of `text` into the sequence's state."""
        n_tokens, key = self._latest(text)
        assert key is not None and n_tokens == len(text)
        self._snapshots.move_to_end(key)
        held = self._held.get(sequence)
        if held is None:
            held = self._held[sequence] = _Held(self._free_slot(sequence, forget, keep=key))
        held.n_tokens = -1
        self._copy(self._snapshots[key], held.slot)
        held.n_tokens = n_tokens

    def fork(self, sequence: SequenceState, other: SequenceState, forget: Callable[[SequenceState], None]) -> bool:
        """Gives `other`, with equal tokens, a copy of the state. False if the state has different tokens."""
        held = self._held.get(sequence)
        if held is None or held.n_tokens != len(other.token_ids):
            return False
        self._held[sequence] = self._held.pop(sequence)  # moved to the end: most recently used
        copy = self._held[other] = _Held(self._free_slot(other, forget), -1)
        self._copy(held.slot, copy.slot)
        copy.n_tokens = held.n_tokens
        return True

    def found(self, text: Sequence[int]) -> int:
        """Returns the token count of the longest prefix with a snapshot, or 0."""
        return self._latest(text)[0]

    def note_branch(self, sequence: SequenceState, n_tokens: int) -> None:
        """Notes that other texts diverge from the sequence after n_tokens, a border. A snapshot there helps the next
        text with the same prefix.
        """
        self._branches[sequence] = n_tokens

    def borders(self, sequence: SequenceState, n_tokens: int, *, is_last: bool) -> list[int]:
        """Returns snapshot positions for a sequence's next n_tokens: the number of new tokens before each snapshot (0:
        before all).

        is_last: the text ends with the n_tokens. The next text may drop the last tokens and continue differently. A
        sequence that must have the same bits regardless of other sequences (n_findable) takes no snapshots.
        """
        start, size = sequence.position, self.border_tokens
        cuts = {self._branches.get(sequence, 0)} | ({(start + n_tokens - 1) // size * size} if is_last else set())
        end = start + (n_tokens if sequence.n_findable is None else 1)
        return sorted(cut - start for cut in cuts if max(1, start) <= cut < end)

    def snapshot(self, sequence: SequenceState) -> None:
        """Saves a sequence's state, which ends at a border, if a slot is free or holds an older snapshot."""
        held = self._held[sequence]
        assert held.n_tokens == sequence.position
        if (slot := self.begin_snapshot(sequence.token_ids)) is not None:
            self._copy(held.slot, slot)
            self.end_snapshot(sequence.token_ids, slot)

    def begin_snapshot(self, text: Sequence[int]) -> int | None:
        """Returns the slot for a snapshot after `text`, which ends at a border. Call `end_snapshot` afterwards.

        None: the snapshot exists already, or sequences' states fill every slot.
        """
        key = self._key(text)
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return None
        slot = self._unused()
        if slot is None and self._snapshots:
            _, slot = self._snapshots.popitem(last=False)
        return slot

    def end_snapshot(self, text: Sequence[int], slot: int) -> None:
        """Registers the snapshot once the launches that write the slot are enqueued."""
        self._snapshots[self._key(text)] = slot

    def _key(self, text: Sequence[int]) -> bytes:
        assert len(text) > 0 and len(text) % self.border_tokens == 0
        *_, key = page_keys(text, self.border_tokens)
        return key

    @property
    def slot_nbytes(self) -> int:
        """Returns the bytes per state, over all layers."""
        return sum(self._state_bytes.values())

    def findable(self) -> dict[bytes, int]:
        """Returns snapshot slots by text key, most recently used first."""
        return dict(reversed(self._snapshots.items()))

    def read_slot(self, slot: int) -> np.ndarray:
        """Reads a slot: uint8 [slot_nbytes], layer by layer."""
        parts = []
        for buffer in self._buffers():
            size = self._state_bytes[id(buffer)]
            parts.append(self._devices[id(buffer)].read(buffer, np.uint8, (size,), slot * size))
        return np.concatenate(parts)

    def add_snapshot(self, key: bytes, data: np.ndarray) -> None:
        """Stores a snapshot from `read_slot` under the text's key, if a slot is free."""
        slot = self._unused()
        if slot is None or key in self._snapshots:
            return
        start = 0
        for buffer in self._buffers():
            size = self._state_bytes[id(buffer)]
            self._devices[id(buffer)].write(buffer, data[start : start + size], slot * size)
            start += size
        self._snapshots[key] = slot

    def _latest(self, text: Sequence[int]) -> tuple[int, bytes | None]:
        """Returns the token count and key of the longest prefix with a snapshot, or (0, None)."""
        longest: tuple[int, bytes | None] = (0, None)
        if self._snapshots:
            for i, key in enumerate(page_keys(text, self.border_tokens), 1):
                if key in self._snapshots:
                    longest = i * self.border_tokens, key
        return longest

    def _free_slot(
        self, sequence: SequenceState, forget: Callable[[SequenceState], None], keep: bytes | None = None
    ) -> int:
        """Returns a slot for a sequence that has none. keep: key of a snapshot to preserve."""
        if (unused := self._unused()) is not None:
            return unused
        oldest = next((key for key in self._snapshots if key != keep), None)
        if oldest is not None:
            return self._snapshots.pop(oldest)
        other = next(other for other in self._held if other is not sequence)
        slot = self._held[other].slot
        forget(other)
        return slot

    def _unused(self) -> int | None:
        used = {*self._snapshots.values(), *(held.slot for held in self._held.values())}
        return next((slot for slot in range(self.n_slots) if slot not in used), None)

    def _copy(self, source: int, target: int) -> None:
        """Copies one slot to another in all layers."""
        for buffer in self._buffers():
            size = self._state_bytes[id(buffer)]
            device = self._devices[id(buffer)]
            device.copy_rows(buffer, source * size, target * size, row_bytes=size, n_rows=1, pitch_bytes=size)

    def _buffers(self) -> list[Buffer]:
        return [buffer for of_layer in self.buffers for buffer in of_layer.values()]
