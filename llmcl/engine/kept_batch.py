"""Keeps the batch that answered a list of prompts. The next list binds no launches and allocates no buffers.

The batch counts as device memory in use. It is released when another allocation needs the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcl.engine.speculation import MakeDrafts
from llmcl.models.batch import Batch


@dataclass(frozen=True)
class BatchSizes:
    """A batch's sizes: arguments of `make_batch`."""

    max_sequences: int
    max_context: int
    page_tokens: int
    n_pages: int | None
    invariant: bool
    max_rows: int | None

    def serves(self, wanted: BatchSizes) -> bool:
        """Returns whether the batch can replace a `wanted` batch: same results, and at least as many slots."""
        return (
            self.max_sequences >= wanted.max_sequences and replace(self, max_sequences=wanted.max_sequences) == wanted
        )


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch with all launches bound, draft verification included."""

    sizes: BatchSizes
    batch: Batch
    make_drafts: MakeDrafts


class KeptBatch:
    """Holds at most one idle batch. Any thread may call it at any time: a single interpreter step takes the
    batch out.
    """

    def __init__(self) -> None:
        self._ready: list[ReadyBatch] = []
        self._closed = False

    def take(self, wanted: BatchSizes, *, exact: bool) -> ReadyBatch | None:
        """Returns the batch if the sizes fit. exact: the slot count must match too; otherwise the batch is released,
        because the caller will keep a new one instead.
        """
        ready = self._pop()
        if ready is None or (ready.sizes == wanted if exact else ready.sizes.serves(wanted)):
            return ready
        if exact:
            self._put(ready)
        return None

    def keep(self, ready: ReadyBatch) -> None:
        """Keeps an idle batch and clears all texts, so later answers equal a new batch's answers."""
        ready.batch.forget_all()
        self._put(ready)

    def give_back(self) -> None:
        """Releases the batch's device memory."""
        self._ready.clear()

    def close(self) -> None:
        """Releases the memory and keeps nothing from now on."""
        self._closed = True
        self.give_back()

    def _pop(self) -> ReadyBatch | None:
        try:
            return self._ready.pop()
        except IndexError:
            return None

    def _put(self, ready: ReadyBatch) -> None:
        self._ready[:] = [ready]
        if self._closed:
            self.give_back()
