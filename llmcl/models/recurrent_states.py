"""States of sequences in the recurrent layers of a model, and snapshots of them to go back to.

    slots (device, per layer)
    | state of A | state of B | snapshot | snapshot | free |
                                after 128 tokens of A     a snapshot is found by the tokens that it was taken after

A state cannot be cut: what a token adds to it cannot be taken away. To forget the end of a text is therefore to go back
to the last snapshot before it, or to its beginning, and to compute what lies between again. Snapshots are taken at page
borders, where the pages of keys and values of a paged cache are shared, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from llmcl.models.config import ModelConfig
from llmcl.models.prefix_pages import page_keys
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device

KEPT_STATES = 4  # of conversations in a paged cache, at least
SNAPSHOTS = 8  # at most, beside the states of the sequences
BORDER_TOKENS = 64  # between the borders of a cache without pages


def state_slots(n_sequences: int) -> int:
    """Slots of a cache for so many sequences at a time: theirs, and snapshots, of which one text needs few."""
    return n_sequences + min(SNAPSHOTS, 2 * n_sequences)


@dataclass
class _Held:
    """The state of a sequence. n_tokens: the first so many of its tokens made it; -1 while nobody knows."""

    slot: int
    n_tokens: int = 0


class RecurrentStates:
    """buffers[layer]: float32 [n_slots, ...] of each array of the layer's state, by name.

    Which slots are in use is looked up each time: nothing can be miscounted, and the slot of a sequence is free when
    nothing refers to it any more. Without a free one the snapshot goes that was used least recently, then the state of
    the sequence that was, which begins anew when it goes on.
    """

    def __init__(self, device: Device, config: ModelConfig, n_slots: int, border_tokens: int):
        self.n_slots = n_slots
        self.border_tokens = border_tokens
        self._device = device
        self.buffers: list[dict[str, Buffer]] = []
        self._state_bytes: dict[int, int] = {}  # of a slot in each buffer, by its identity
        for layer in range(config.n_layers):
            self.buffers.append({})
            for name, shape in config.states(layer).items():
                nbytes = 4
                for size in shape:
                    nbytes *= size
                buffer = device.alloc(n_slots * nbytes, f"{name} states of layer {layer}")
                self.buffers[layer][name] = buffer
                self._state_bytes[id(buffer)] = nbytes
        self._held: WeakKeyDictionary[SequenceState, _Held] = WeakKeyDictionary()  # the least recently used first
        self._branches: WeakKeyDictionary[SequenceState, int] = WeakKeyDictionary()  # see note_branch
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # slot by key of the text; likewise

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers())

    def forget_all(self) -> None:
        """Frees all slots."""
        self._held.clear()
        self._branches.clear()
        self._snapshots.clear()

    def begin(self, sequence: SequenceState, forget: Callable[[SequenceState], None]) -> int:
        """The slot of a sequence that is about to be extended. forget(other): called before other's slot is taken."""
        held = self._held.pop(sequence, None)
        if held is None:
            held = _Held(self._free_slot(sequence, forget))
        self._held[sequence] = held  # used last
        assert held.n_tokens == sequence.position, "the state is not that of the text; truncate the sequence first"
        return held.slot

    def advance(self, sequence: SequenceState, n_tokens: int) -> None:
        """A step is about to be enqueued that adds the sequence's next n_tokens to its state."""
        self._held[sequence].n_tokens += n_tokens

    def kept(self, sequence: SequenceState, position: int) -> int:
        """How many of the sequence's first `position` tokens `go_back` would keep."""
        held = self._held.get(sequence)
        if held is not None and held.n_tokens == position:
            return position
        return self._latest(sequence.token_ids[:position])[0]

    def go_back(self, sequence: SequenceState, position: int, forget: Callable[[SequenceState], None]) -> int:
        """Makes the state that after the first tokens of the sequence, of `position` as many as a state is at hand of.

        Returns how many these are. A sequence of no tokens has no slot.
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
        """Makes the state of a sequence that of `text`, of which there is a snapshot."""
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
        """Gives `other`, which has the same tokens, a copy of the state; False: the sequence's is of other tokens."""
        held = self._held.get(sequence)
        if held is None or held.n_tokens != len(other.token_ids):
            return False
        self._held[sequence] = self._held.pop(sequence)  # used last
        copy = self._held[other] = _Held(self._free_slot(other, forget), -1)
        self._copy(held.slot, copy.slot)
        copy.n_tokens = held.n_tokens
        return True

    def found(self, text: Sequence[int]) -> int:
        """The tokens of the longest beginning of a text that a snapshot is of; 0: of none."""
        return self._latest(text)[0]

    def note_branch(self, sequence: SequenceState, n_tokens: int) -> None:
        """After so many tokens, at a border, other texts were found to go on as the sequence does not: a snapshot there
        will serve the next one that begins as all of them.
        """
        self._branches[sequence] = n_tokens

    def borders(self, sequence: SequenceState, n_tokens: int, *, is_last: bool) -> list[int]:
        """Where snapshots are to be taken while a sequence's next n_tokens are added: how many of these come before
        each, 0 for a snapshot before them.

        is_last: the text ends with them. The next one may leave its last tokens out, and what follows. A sequence that
        is to have the same bits whatever the others are (n_findable) has none.
        """
        start, size = sequence.position, self.border_tokens
        cuts = {self._branches.get(sequence, 0)} | ({(start + n_tokens - 1) // size * size} if is_last else set())
        end = start + (n_tokens if sequence.n_findable is None else 1)
        return sorted(cut - start for cut in cuts if max(1, start) <= cut < end)

    def snapshot(self, sequence: SequenceState) -> None:
        """Keeps the state of a sequence, which ends at a border, if a slot is free or has an older snapshot."""
        held = self._held[sequence]
        assert held.n_tokens == sequence.position
        if (slot := self.begin_snapshot(sequence.token_ids)) is not None:
            self._copy(held.slot, slot)
            self.end_snapshot(sequence.token_ids, slot)

    def begin_snapshot(self, text: Sequence[int]) -> int | None:
        """The slot in which the state after a text, which ends at a border, is to be left; then `end_snapshot`.

        None: it is there already, or every slot has the state of a sequence.
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
        """What leaves the state after the text in the slot is enqueued."""
        self._snapshots[self._key(text)] = slot

    def _key(self, text: Sequence[int]) -> bytes:
        assert len(text) > 0 and len(text) % self.border_tokens == 0
        *_, key = page_keys(text, self.border_tokens)
        return key

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a state, in all layers."""
        return sum(self._state_bytes.values())

    def findable(self) -> dict[bytes, int]:
        """The slots of snapshots by the keys of their texts, used last first."""
        return dict(reversed(self._snapshots.items()))

    def read_slot(self, slot: int) -> np.ndarray:
        """What a slot holds: uint8 [slot_nbytes], layer by layer."""
        parts = []
        for buffer in self._buffers():
            size = self._state_bytes[id(buffer)]
            parts.append(self._device.read(buffer, np.uint8, (size,), slot * size))
        return np.concatenate(parts)

    def add_snapshot(self, key: bytes, data: np.ndarray) -> None:
        """A snapshot, as `read_slot` gave it, of the text with this key; a free slot takes it, or none."""
        slot = self._unused()
        if slot is None or key in self._snapshots:
            return
        start = 0
        for buffer in self._buffers():
            size = self._state_bytes[id(buffer)]
            self._device.write(buffer, data[start : start + size], slot * size)
            start += size
        self._snapshots[key] = slot

    def _latest(self, text: Sequence[int]) -> tuple[int, bytes | None]:
        """The tokens of the longest beginning of a text that a snapshot is of, and its key; (0, None): of none."""
        found: tuple[int, bytes | None] = (0, None)
        if self._snapshots:
            for i, key in enumerate(page_keys(text, self.border_tokens), 1):
                if key in self._snapshots:
                    found = i * self.border_tokens, key
        return found

    def _free_slot(
        self, sequence: SequenceState, forget: Callable[[SequenceState], None], keep: bytes | None = None
    ) -> int:
        """A slot for the sequence, which has none. keep: the key of a snapshot that stays."""
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
        """Between slots, in all layers."""
        for buffer in self._buffers():
            size = self._state_bytes[id(buffer)]
            self._device.copy_rows(buffer, source * size, target * size, row_bytes=size, n_rows=1, pitch_bytes=size)

    def _buffers(self) -> list[Buffer]:
        return [buffer for of_layer in self.buffers for buffer in of_layer.values()]
