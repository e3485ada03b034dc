"""A step with runs of tokens from several sequences as rows: prompt chunks, and decode rows.

    rows     0  1  2 | 3  4  5  6 | 7  8  9 10 11 12
    run      A  B  C | D  D  D  D | E  E  E  E  E  E       A, B, C decode; D and E are prompt chunks

Products only need the number of rows. Kernels that append to the cache or attend take a piece at a time, all from a
single run. The host divides the runs into pieces, once per step, and leaves a piece table on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.kernels.common.step_state import N_STEP_SLOTS, RECORDS, StepState
from llmcl.runtime.device import Device
from llmcl.runtime.staging import send

ROW_SLOTS = 3  # place, position, token
PIECE_SLOTS = 4  # place, first row, rows, position of the first
MAX_CUTS = 4
# Slots for the step itself, after StepState's slots: the first chunk row, the start of the wanted rows, and for each
# cut the start and number of pieces.
FIRST_CHUNK_ROW, WANTED, CUTS = N_STEP_SLOTS, N_STEP_SLOTS + 1, N_STEP_SLOTS + 2
HEADER = CUTS + 2 * MAX_CUTS


@dataclass(frozen=True)
class Run:
    """Rows of a step: tokens of the sequence at `place`, beginning at `position`.

    A decode row takes the token sampled last. Perhaps only the device knows the token.
    """

    place: int
    position: int
    token_ids: Sequence[int] | None = None  # None for a decode row

    @property
    def n_rows(self) -> int:
        return 1 if self.token_ids is None else len(self.token_ids)


@dataclass(frozen=True)
class Cut:
    """A rule for dividing runs into pieces."""

    size: int  # maximum rows per piece; 0: each run is a piece
    aligned: bool = False  # True: pieces begin at multiples of `size`; False: at each run's beginning


def pieces_of(runs: Sequence[Run], cut: Cut, first_row: int = 0) -> np.ndarray:
    """Returns the place, first row, row count and first position of each piece: int32 [pieces, 4].

    Pieces whose last row sees the most keys come first, short pieces then fill the gaps at the end.
    first_row: the first row of the first run.
    """
    pieces, row = [], first_row
    for run in runs:
        size = cut.size or run.n_rows
        offset = run.position % size if cut.aligned else 0
        for start in range(-offset, run.n_rows, size):
            first, end = max(start, 0), min(start + size, run.n_rows)
            pieces.append((run.place, row + first, end - first, run.position + first))
        row += run.n_rows
    pieces.sort(key=lambda piece: -piece[2] - piece[3])
    return np.array(pieces, np.int32).reshape(-1, PIECE_SLOTS)


class Pieces:
    """The pieces of a step's chunks for a given cut. constants: build constants that locate the pieces
    (step_pieces.cl).
    """

    def __init__(self, slot: int):
        self.constants: dict[str, object] = {"STATE_PIECES": f"state[{slot}]", "N_PIECES": f"state[{slot + 1}]"}
        self.n = 0


class RaggedStep(StepState):
    """The state of a ragged step with up to max_rows rows. Decode rows come first.

    state (int32): the step's own slots, the rows (place, position, token), wanted rows and pieces, then the page table
    of each place, as in `sampling`.
    sampling: the step state for sampling, with the same places.
    """

    def __init__(self, device: Device, max_rows: int, sampling: StepState):
        most = max_rows + sampling.n_sequences
        before = HEADER + ROW_SLOTS * max_rows + sampling.n_sequences + MAX_CUTS * PIECE_SLOTS * (most + 1)
        super().__init__(device, max_rows, sampling.n_pages, sampling.n_sequences, before=before)
        self.tokens = sampling.tokens
        self.constants |= {"STATE_ROWS": HEADER, "ROW_SLOTS": ROW_SLOTS}
        self.n_decoding = self.n_rows = self.n_wanted = 0
        self._cuts: dict[Cut, Pieces] = {}

    @property
    def n_chunk_rows(self) -> int:
        """Returns the number of chunk rows in the step."""
        return self.n_rows - self.n_decoding

    def pieces(self, cut: Cut) -> Pieces:
        """Returns the pieces for this cut. From now on, `write` fills them."""
        if cut not in self._cuts:
            assert len(self._cuts) < MAX_CUTS
            self._cuts[cut] = Pieces(CUTS + 2 * len(self._cuts))
        return self._cuts[cut]

    def write(self, runs: Sequence[Run], wanted: Sequence[int]) -> None:
        """Writes these runs as the next step, decode rows first. wanted: the rows collected by `gather_rows`."""
        self.n_decoding = sum(run.token_ids is None for run in runs)
        self.n_rows, self.n_wanted = sum(run.n_rows for run in runs), len(wanted)
        assert self.n_rows <= self.max_tokens and all(run.token_ids is None for run in runs[: self.n_decoding])
        rows = np.empty((self.n_rows, ROW_SLOTS), np.int32)
        row = 0
        for run in runs:
            of_run = rows[row : row + run.n_rows]
            of_run[:, 0] = run.place
            of_run[:, 1] = np.arange(run.position, run.position + run.n_rows)
            of_run[:, 2] = -1 if run.token_ids is None else run.token_ids
            row += run.n_rows
        header = np.zeros(HEADER, np.int32)
        header[1] = self.n_rows
        header[RECORDS:N_STEP_SLOTS] = self.layout
        for slot, keys in self._capacities.items():
            header[slot] = keys
        header[FIRST_CHUNK_ROW] = self.n_decoding
        parts, end = [header, rows.ravel()], HEADER + rows.size
        header[WANTED] = end
        parts.append(np.asarray(wanted, np.int32))
        end += len(wanted)
        for i, (cut, pieces) in enumerate(self._cuts.items()):
            parts.append(np.zeros(-end % PIECE_SLOTS, np.int32))
            end += parts[-1].size
            table = pieces_of(runs[self.n_decoding :], cut, self.n_decoding)
            pieces.n = len(table)
            header[CUTS + 2 * i : CUTS + 2 * i + 2] = end, pieces.n
            parts.append(table.ravel())
            end += table.size
        send(self._device, self.state, np.concatenate(parts))
