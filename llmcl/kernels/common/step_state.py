"""What changes from step to step, kept on the device so that no kernel argument ever changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmcl.runtime.device import Buffer, Device, Groups
from llmcl.runtime.staging import send

RING = 256

# Slots of the int32 buffer `state`, as the kernels know them.
CONSTANTS = {
    "STATE_POSITION": 0,  # tokens in the cache before this step
    "STATE_N_TOKENS": 1,  # tokens of this step
    "STATE_STEP": 2,  # tokens sampled since the generation began
    "STATE_PLACE": 6,  # of the sequence in a batch: what mods are called with as b
    "STATE_RING": RING,  # not a slot: the length of `sampled`
}
CAPACITY, COPY_CAPACITY = 3, 4  # keys of a head: of the cache, of a copy that an implementation makes of it
RECURRENT = 5  # where recurrent layers keep the state of the sequence
SNAPSHOT = 7  # where they keep a copy of it, and after how many tokens of the step; 0: after none
N_SLOTS = 9
# Of a step of several sequences behind these: where the records of the sequences begin, the slots of each, and how many
# there are. Kernels read them, since with build constants each such step would be compiled anew.
RECORDS, RECORD_SLOTS, N_RECORDS = N_SLOTS, N_SLOTS + 1, N_SLOTS + 2
N_STEP_SLOTS = N_SLOTS + 3


class StepState:
    """Position, length and input tokens of the next step, and the ring of sampled tokens.

    state int32 [N_SLOTS + n_pages], tokens int32 [max_tokens], sampled int32 [RING], all on the device;
    host_sampled int32 [RING]. n_pages: entries of the page table, 0 with a contiguous KV cache.

    n_sequences: 0 for steps of one sequence. Else steps have a row each of up to so many sequences (max_tokens is
    n_sequences): state has the step's own slots, then the sequence of each row, then a record of each sequence, its
    slots and page table (kernels/common/step_rows.cl); tokens int32 [n_sequences], sampled int32 [RING, n_sequences] by
    step and row.
    """

    def __init__(
        self, device: Device, max_tokens: int, n_pages: int = 0, n_sequences: int = 0, *, before: int | None = None
    ):
        """before: slots in front of the records of the sequences, if not those of the step and its rows alone."""
        self._device = device
        self.max_tokens = max_tokens
        self.n_pages = n_pages
        self.n_sequences = n_sequences
        own = N_SLOTS + n_pages  # slots of a sequence
        before = N_STEP_SLOTS + max_tokens if before is None else before
        self._before = before if n_sequences else 0
        self.state = device.zeros(4 * (before + n_sequences * own if n_sequences else own), "step state")
        self.tokens = device.zeros(4 * max_tokens, "step tokens")
        self.sampled = device.zeros(4 * RING * max(1, n_sequences), "sampled tokens")
        self.host_sampled = device.pinned(RING * max(1, n_sequences))
        self._scratch: dict[str, Buffer] = {}
        self._capacities: dict[int, int] = {}
        self._page_tables: dict[int, list[int]] = {}  # of each sequence, as the device has it
        self._recurrent_slots: dict[int, int] = {}  # likewise
        self._snapshot: tuple[int, int] | None = (0, 0)  # likewise
        self._rows: list[int] = []
        self.constants: dict[str, object] = {**CONSTANTS}
        self.layout = np.array([before, own, n_sequences], np.int32)  # what the slots from RECORDS on hold
        if n_sequences:
            self._device.write(self.state, self.layout, 4 * RECORDS)
            self.constants |= {"RECORDS": RECORDS, "RECORD_SLOTS": RECORD_SLOTS, "STATE_ROWS": N_STEP_SLOTS}
            for sequence in range(n_sequences):
                self.write_place(sequence, sequence)

    def record_constants(self, state: str, first: str, slots: str) -> dict[str, object]:
        """Build constants `first` and `slots`: where the records of the sequences begin, and the slots of each; of one
        sequence, the state itself. state: the name of the kernel's argument for it.
        """
        if not self.n_sequences:
            return {first: 0, slots: 0}
        return {first: f"{state}[{RECORDS}]", slots: f"{state}[{RECORD_SLOTS}]"}

    @property
    def n_records(self) -> str | int:
        """The number of sequences as kernels know it: an expression of `state`, or 1."""
        return f"state[{N_RECORDS}]" if self.n_sequences else 1

    def write_tokens(self, token_ids: Sequence[int] | np.ndarray, position: int) -> None:
        """Makes `token_ids` (at most max_tokens) the next step's input, at `position` of the cache."""
        ids, slots = np.asarray(token_ids, np.int32), np.array([position, len(token_ids)], np.int32)
        if len(ids) == 1:  # as in `_write_slots`
            self._device.fill(self.tokens, ids, 0, 4)
            self._device.fill(self.state, slots, 0, 8)
        else:
            send(self._device, self.tokens, ids)
            send(self._device, self.state, slots)

    def capacity(self, slot: int, keys: int) -> str:
        """What kernels know as the capacity of the KV cache, or of its copy: an expression, since with a build constant
        each length of the context would be compiled anew. slot: CAPACITY or COPY_CAPACITY, the same `keys` each time.
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
        if len(values) == 1:  # as decode goes on: a write would wait for the steps that are under way
            self._device.fill(self.state, np.int32(values[0]), 4 * first, 4)
        else:
            send(self._device, self.state, np.asarray(values, np.int32), 4 * first)

    def write_pages(self, pages: Sequence[int], sequence: int = 0) -> None:
        """Makes `pages` the page table of a sequence: what the device does not have yet is written."""
        written = self._page_tables.setdefault(sequence, [])
        n = min(len(written), len(pages))
        same = next((i for i in range(n) if written[i] != pages[i]), n)
        if same < len(pages):
            del written[same:]  # should this be interrupted, nobody knows what the device has there
            self._write_slots(pages[same:], self._first_slot(sequence) + N_SLOTS + same)
            written += pages[same:]

    def write_recurrent_slot(self, slot: int, sequence: int = 0) -> None:
        """Recurrent layers keep the state of a sequence in `slot`."""
        if self._recurrent_slots.get(sequence) != slot:
            self._recurrent_slots.pop(sequence, None)  # should this be interrupted, nobody knows what the device has
            self._write_slots([slot], self._first_slot(sequence) + RECURRENT)
            self._recurrent_slots[sequence] = slot

    def write_snapshot(self, slot: int, n_tokens: int) -> None:
        """Recurrent layers leave in `slot` the state after the first n_tokens of the next steps; 0: they do not."""
        wanted = (slot, n_tokens) if n_tokens else (0, 0)
        if self._snapshot != wanted:
            self._snapshot = None  # should this be interrupted, nobody knows what the device has
            self._write_slots(wanted, SNAPSHOT)
            self._snapshot = wanted

    def write_place(self, place: int, sequence: int = 0) -> None:
        """Mods are called with `place` as b for this sequence."""
        self._write_slots([place], self._first_slot(sequence) + CONSTANTS["STATE_PLACE"])

    def write_sequence(self, sequence: int, position: int, n_sampled: int) -> None:
        """Of several: the sequence's next row is at `position`, the next sampled token number n_sampled of its own."""
        self._write_slots([position, 1, n_sampled], self._first_slot(sequence))

    def write_rows(self, sequences: Sequence[int], step: int) -> None:
        """Of several: the next step, number `step`, has a row of each of these sequences."""
        self._write_slots([step], CONSTANTS["STATE_STEP"])
        if self._rows != sequences:
            self._rows = []
            rows = self.constants["STATE_ROWS"]
            assert isinstance(rows, int)
            self._write_slots(sequences, rows)
            self._write_slots([len(sequences)], CONSTANTS["STATE_N_TOKENS"])
            self._rows = [*sequences]

    def read_rows(self, step: int, n: int) -> Callable[[], list[int]]:
        """Of several: enqueues the reading of the n tokens sampled in step number `step`, 4 bytes each. The function
        returned waits for them.
        """
        first = step % RING * self.n_sequences
        target = self.host_sampled[first : first + n]
        wait = self._device.read_async(self.sampled, target, 4 * first)

        def tokens() -> list[int]:
            wait()
            return [int(token) for token in target]

        return tokens

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """Working memory of a step by name, made when it is first asked for; the same size each time."""
        if name not in self._scratch:
            self._scratch[name] = self._device.alloc(nbytes, name)
        found = self._scratch[name]
        if found.nbytes < nbytes:
            raise ValueError(f"working memory {name!r} has {found.nbytes} bytes; {nbytes} were asked for")
        return found

    @property
    def scratch_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._scratch.values())

    def read_sampled(self, i: int, n: int = 1) -> Callable[[], list[int]]:
        """Enqueues the reading of n sampled tokens from the i-th on, at most RING, 4 bytes each. The function returned
        waits for them.
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
        """The next sampled token is number i of its generation."""
        self._write_slots([i], CONSTANTS["STATE_STEP"])


def for_rows(step: StepState, *groups: int, n_rows: Callable[[], int] | None = None) -> Groups:
    """Work-groups of a kernel for one token: for each row of the step, or its first n_rows(), where it has several
    sequences.
    """
    if not step.n_sequences:
        return groups
    return (lambda n: (*groups, n)) if n_rows is None else (lambda n: (*groups, n_rows()))
