"""The batch that answers a list of prompts stays with the model: the next list binds no launches and makes no buffers.

Its memory counts as the device's other memory does. It is given back when another allocation needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcl.engine.speculation import Speculation
from llmcl.models.batch import Batch


@dataclass(frozen=True)
class BatchSizes:
    """What a batch is made for: arguments of `make_batch`."""

    max_sequences: int
    max_context: int
    page_tokens: int
    n_pages: int | None
    invariant: bool
    max_rows: int | None

    def serves(self, wanted: BatchSizes) -> bool:
        """Whether a batch of these sizes computes what a `wanted` one does. It may have more places."""
        return (
            self.max_sequences >= wanted.max_sequences and replace(self, max_sequences=wanted.max_sequences) == wanted
        )


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch with all launches bound, those that verify drafts included."""

    sizes: BatchSizes
    batch: Batch
    speculation: Speculation


class KeptBatch:
    """Holds at most one batch while nobody uses it. Threads may call it at any time: one step of the interpreter takes
    the batch out.
    """

    def __init__(self) -> None:
        self._ready: list[ReadyBatch] = []
        self._closed = False

    def take(self, wanted: BatchSizes, *, exact: bool) -> ReadyBatch | None:
        """Hands the batch over if it has the sizes. exact: also its number of places; else another one is given back,
        since the caller will keep a new one in its place.
        """
        ready = self._pop()
        if ready is None or (ready.sizes == wanted if exact else ready.sizes.serves(wanted)):
            return ready
        if exact:
            self._put(ready)
        return None

    def keep(self, ready: ReadyBatch) -> None:
        """Keeps a batch that nobody uses any more. It forgets all texts, so the next answers are those of a new one."""
        ready.batch.forget_all()
        self._put(ready)

    def give_back(self) -> None:
        """Gives the batch's memory back to the device."""
        self._ready.clear()

    def close(self) -> None:
        """Gives the memory back, and keeps nothing from now on."""
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
