"""Values that change from step to step. They are kept on the device because kernel arguments stay constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmcl.runtime.device import Buffer, Device, Groups
from llmcl.runtime.staging import send

RING = 256

# Slots in the int32 buffer `state`, by kernel name.
CONSTANTS = {
    "STATE_POSITION": 0,  # tokens in the cache before this step
    "STATE_N_TOKENS": 1,  # tokens of this step
    "STATE_STEP": 2,  # tokens sampled since the generation began
    "STATE_PLACE": 6,  # the sequence's place in the batch, passed to mods as b
    "STATE_TEXT_LENGTH": 9,  # see `SequenceState.text_length`
    "STATE_ROTARY_OFFSET": 10,  # rotary position minus cache position (models/image_positions.py)
    "STATE_RING": RING,  # not a slot: the length of `sampled`
}
CAPACITY, COPY_CAPACITY = 3, 4  # keys per head: in the cache, in an implementation's copy of the cache
RECURRENT = 5  # state slot of the sequence in recurrent layers
SNAPSHOT = 7  # two slots: where to copy the recurrent state, and after how many tokens; 0: no copy
N_SLOTS = 11
# Extra slots for steps with several sequences: where the sequence records begin, slots per record, and number of
# records. Kernels read them from `state`, because build constants would cause a new compilation for each step kind.
RECORDS, RECORD_SLOTS, N_RECORDS = N_SLOTS, N_SLOTS + 1, N_SLOTS + 2
N_STEP_SLOTS = N_SLOTS + 3


class StepState:
    """The next step's position, length and input tokens, and the ring of sampled tokens.

    On the device: state int32 [N_SLOTS + n_pages], tokens int32 [max_tokens], sampled int32 [RING]. On the host:
    host_sampled int32 [RING]. n_pages is the size of the page table, 0 with a contiguous KV cache.

    n_sequences is 0 for single-sequence steps. Otherwise a step has a row per sequence, up to n_sequences rows
    (max_tokens equals n_sequences). state then has the step's own slots, the sequence of each row, and a record per
    sequence with its slots and page table (kernels/common/step_rows.cl). tokens is int32 [n_sequences], and sampled is
    int32 [RING, n_sequences], indexed by step and row.
    """

    def __init__(
        self, device: Device, max_tokens: int, n_pages: int = 0, n_sequences: int = 0, *, before: int | None = None
    ):
        """Allocates the buffers. before: slots before the sequence records, if more than the step's slots and rows."""
        self._device = device
        self.max_tokens = max_tokens
        self.n_pages = n_pages
        self.n_sequences = n_sequences
        slots = N_SLOTS + n_pages  # slots per sequence
        before = N_STEP_SLOTS + max_tokens if before is None else before
        self._before = before if n_sequences else 0
        self.state = device.zeros(4 * (before + n_sequences * slots if n_sequences else slots), "step state")
        self.tokens = device.zeros(4 * max_tokens, "step tokens")
        self.sampled = device.zeros(4 * RING * max(1, n_sequences), "sampled tokens")
        self.host_sampled = device.pinned(RING * max(1, n_sequences))
        self._scratch: dict[str, Buffer] = {}
        self._capacities: dict[int, int] = {}
        self._page_tables: dict[int, list[int]] = {}  # per sequence, as written to the device
        self._recurrent_slots: dict[int, int] = {}  # per sequence, as written to the device
        # per sequence, as written to the device; not in the dict: 0
        self._text_lengths: dict[int, int | None] = {}
        self._rotary_offsets: dict[int, int | None] = {}
        self._snapshot: tuple[int, int] | None = (0, 0)  # as written to the device
        self._rows: list[int] = []
        self.mirrors: Sequence[StepState] = ()  # on other devices: get what the host writes here
        self.constants: dict[str, object] = {**CONSTANTS}
        self.layout = np.array([before, slots, n_sequences], np.int32)  # the contents of the slots from RECORDS on
        if n_sequences:
            self._device.write(self.state, self.layout, 4 * RECORDS)
            self.constants |= {"RECORDS": RECORDS, "RECORD_SLOTS": RECORD_SLOTS, "STATE_ROWS": N_STEP_SLOTS}
            for sequence in range(n_sequences):
                self.write_place(sequence, sequence)

    def record_constants(self, state: str, first: str, slots: str) -> dict[str, object]:
        """Returns the build constants `first` and `slots`: where the sequence records begin, and the slots per record.

        With one sequence, the record is the state itself. state: the name of the kernel's state argument.
        """
        if not self.n_sequences:
            return {first: 0, slots: 0}
        return {first: f"{state}[{RECORDS}]", slots: f"{state}[{RECORD_SLOTS}]"}

    @property
    def n_records(self) -> str | int:
        """Returns an expression in `state` for the number of sequences, or 1."""
        return f"state[{N_RECORDS}]" if self.n_sequences else 1

    def write_tokens(self, token_ids: Sequence[int] | np.ndarray, position: int) -> None:
        """Writes `token_ids` (at most max_tokens) as the next step's input, at `position` in the cache."""
        for mirror in self.mirrors:
            mirror.write_tokens(token_ids, position)
        ids, slots = np.asarray(token_ids, np.int32), np.array([position, len(token_ids)], np.int32)
        if len(ids) == 1:  # like `_write_slots`
            self._device.fill(self.tokens, ids, 0, 4)
            self._device.fill(self.state, slots, 0, 8)
        else:
            send(self._device, self.tokens, ids)
            send(self._device, self.state, slots)

    def capacity(self, slot: int, keys: int) -> str:
        """Returns an expression in `state` for the capacity of the KV cache or of a copy.

        A build constant would cause a new compilation for each context length.

        slot: CAPACITY or COPY_CAPACITY. keys: the capacity, equal in all calls for a slot.
        """
        if slot not in self._capacities:
            self._capacities[slot] = keys
            for first in (0, *map(self._first_slot, range(self.n_sequences))):
                self._device.write(self.state, np.array([keys], np.int32), 4 * (first + slot))
        if self._capacities[slot] != keys:
            raise ValueError(f"a step state of {self._capacities[slot]} keys is used with {keys}")
        return f"state[{slot}]"

    def _first_slot(self, sequence: int) -> int:
        return self._before + sequence * (N_SLOTS + self.n_pages)

    def _write_slots(self, values: Sequence[int], first: int) -> None:
        for mirror in self.mirrors:
            mirror._write_slots(values, first)
        if len(values) == 1:  # the common case in decode: a write would wait for steps in flight
            self._device.fill(self.state, np.int32(values[0]), 4 * first, 4)
        else:
            send(self._device, self.state, np.asarray(values, np.int32), 4 * first)

    def write_pages(self, pages: Sequence[int], sequence: int = 0) -> None:
        """Makes `pages` the page table of a sequence. Writes only the entries that the device does not have yet."""
        written = self._page_tables.setdefault(sequence, [])
        n = min(len(written), len(pages))
        same = next((i for i in range(n) if written[i] != pages[i]), n)
        if same < len(pages):
            del written[same:]  # after an interruption, the device's entries from here on are unknown
            self._write_slots(pages[same:], self._first_slot(sequence) + N_SLOTS + same)
            written += pages[same:]

    def write_recurrent_slot(self, slot: int, sequence: int = 0) -> None:
        """Sets the slot where recurrent layers keep a sequence's state."""
        if self._recurrent_slots.get(sequence) != slot:
            self._recurrent_slots.pop(sequence, None)  # after an interruption, the device's value is unknown
            self._write_slots([slot], self._first_slot(sequence) + RECURRENT)
            self._recurrent_slots[sequence] = slot

    def write_text_length(self, length: int, sequence: int = 0) -> None:
        """Sets `SequenceState.text_length`."""
        self._write_changed(self._text_lengths, "STATE_TEXT_LENGTH", length, sequence)

    def write_rotary_offset(self, offset: int, sequence: int = 0) -> None:
        """Sets what `embed` adds to the positions of a sequence's tokens for their rotation."""
        self._write_changed(self._rotary_offsets, "STATE_ROTARY_OFFSET", offset, sequence)

    def _write_changed(self, written: dict[int, int | None], slot: str, value: int, sequence: int) -> None:
        if written.get(sequence, 0) != value:
            written[sequence] = None  # after an interruption, the device's value is unknown
            self._write_slots([value], self._first_slot(sequence) + CONSTANTS[slot])
            written[sequence] = value

    def write_snapshot(self, slot: int, n_tokens: int) -> None:
        """Sets the slot for the recurrent state after the next steps' first n_tokens. 0 turns copies off."""
        wanted = (slot, n_tokens) if n_tokens else (0, 0)
        if self._snapshot != wanted:
            self._snapshot = None  # after an interruption, the device's value is unknown
            self._write_slots(wanted, SNAPSHOT)
            self._snapshot = wanted

    def write_place(self, place: int, sequence: int = 0) -> None:
        """Sets the sequence's place, passed to mods as b."""
        self._write_slots([place], self._first_slot(sequence) + CONSTANTS["STATE_PLACE"])

    def write_sequence(self, sequence: int, position: int, n_sampled: int) -> None:
        """Sets the position of a sequence's next row and the next sampled token's number. Several sequences only."""
        self._write_slots([position, 1, n_sampled], self._first_slot(sequence))

    def write_rows(self, sequences: Sequence[int], step: int) -> None:
        """Sets the sequences with a row in the next step, number `step`. For several sequences only."""
        self._write_slots([step], CONSTANTS["STATE_STEP"])
        if self._rows != sequences:
            self._rows = []
            rows = self.constants["STATE_ROWS"]
            assert isinstance(rows, int)
            self._write_slots(sequences, rows)
            self._write_slots([len(sequences)], CONSTANTS["STATE_N_TOKENS"])
            self._rows = [*sequences]

    def read_rows(self, step: int, n: int) -> Callable[[], list[int]]:
        """Enqueues a read of the n tokens sampled in step `step` (4 bytes per token), for several sequences only.

        Returns a function that waits for the tokens.
        """
        first = step % RING * self.n_sequences
        target = self.host_sampled[first : first + n]
        wait = self._device.read_async(self.sampled, target, 4 * first)

        def tokens() -> list[int]:
            wait()
            return [int(token) for token in target]

        return tokens

    def copy_to(self, others: Sequence[StepState]) -> None:
        """Copies slots, records and tokens to step states of the same layout on other devices. Waits for the work
        enqueued before.
        """
        slots = self._device.read(self.state, np.int32, (self.state.nbytes // 4,))
        tokens = self._device.read(self.tokens, np.int32, (self.tokens.nbytes // 4,))
        for other in others:
            for slot, keys in other._capacities.items():  # an implementation's copy of the cache may differ in size
                slots[[slot, *(other._first_slot(i) + slot for i in range(other.n_sequences))]] = keys
            other._device.write(other.state, slots)
            other._device.write(other.tokens, tokens)

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """Returns a named scratch buffer. Allocates it on first use. The size must not grow in later calls."""
        if name not in self._scratch:
            self._scratch[name] = self._device.alloc(nbytes, name)
        buffer = self._scratch[name]
        if buffer.nbytes < nbytes:
            raise ValueError(f"working memory {name!r} has {buffer.nbytes} bytes; {nbytes} were asked for")
        return buffer

    @property
    def scratch_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._scratch.values())

    def read_sampled(self, i: int, n: int = 1) -> Callable[[], list[int]]:
        """Enqueues a read of n sampled tokens (at most RING, 4 bytes per token), beginning with token i.

        Returns a function that waits for the tokens.
        """
        first = i % RING
        waits = []
        for start, end in ((first, min(first + n, RING)), (0, first + n - RING)):
            if start < end:
                waits.append(self._device.read_async(self.sampled, self.host_sampled[start:end], 4 * start))

        def tokens() -> list[int]:
            for wait in waits:
                wait()
            return [int(self.host_sampled[(first + k) % RING]) for k in range(n)]

        return tokens

    def restart_sampling(self, i: int = 0) -> None:
        """Makes the next sampled token number i of its generation."""
        self._write_slots([i], CONSTANTS["STATE_STEP"])


def for_rows(step: StepState, *groups: int, n_rows: Callable[[], int] | None = None) -> Groups:
    """Repeats the work-groups of a single-token kernel for each row of the step, or for the first n_rows() rows.

    With a single sequence, returns `groups` unchanged.
    """
    if not step.n_sequences:
        return groups
    return (lambda n: (*groups, n)) if n_rows is None else (lambda n: (*groups, n_rows()))
