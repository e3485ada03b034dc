"""Leases: a model does one thing at a time, whichever threads ask.

A lease is a generator that owns the model from `Leases.begin` until the generator ends, is closed or is collected. The
thread that began or last read a lease may end the lease with the next call. Calls from different threads are refused,
or wait. The interpreter's generator state says whether a lease runs or is over, so an interrupt leaves no stale flag.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from inspect import GEN_CLOSED, GEN_RUNNING, getgeneratorstate
from typing import Any, TypeVar

from llmcl.errors import UsageError, check_flags
from llmcl.runtime import driver_calls

Item = TypeVar("Item")
RECHECK_S = 0.05  # polling interval, in case a wake-up was missed


def _steps(start: Callable[[], Iterable[Item]]) -> Generator[Any, None, None]:
    items = start()
    yield  # begun
    yield from items


class Lease(Generator[Item, None, None]):
    """Owns a model until it is over."""

    def __init__(
        self, leases: Leases, start: Callable[[], Iterable[Item]], is_last: Callable[[Item], bool], kept: bool
    ):
        self.kept = kept
        self.woken = threading.Lock()  # released when it may be this lease's turn
        self.woken.acquire()
        self.began_in = self._last = threading.current_thread()
        self.steps = _steps(start)
        self._leases, self._is_last = leases, is_last
        self._cut_short = False  # by another thread that closed the model

    @property
    def over(self) -> bool:
        return getgeneratorstate(self.steps) == GEN_CLOSED

    @property
    def runs(self) -> bool:
        return getgeneratorstate(self.steps) == GEN_RUNNING

    @property
    def is_mine(self) -> bool:
        """Returns whether this thread's next call may end the lease."""
        return not self.kept and threading.current_thread() in (self.began_in, self._last)

    def send(self, value: None) -> Item:
        if self.runs:
            raise self._leases.busy()
        self._last = threading.current_thread()
        try:
            item: Item = next(self.steps)
        except BaseException as error:
            self._leases.wake()
            if self._cut_short and isinstance(error, StopIteration):
                raise self._leases.closed_error() from None
            raise
        if self._is_last(item):
            self.end()
        elif self._leases.closed:
            self.end(cut_short=True)
        return item

    def throw(self, *error: Any) -> Item:
        self.close()
        return super().throw(*error)

    def close(self) -> None:
        if not self.end():
            raise self._leases.busy()

    def end(self, *, cut_short: bool = False) -> bool:
        """Ends the lease. Returns False while another thread runs the lease. Raises UsageError if the current thread
        does.
        """
        if self.runs and self._last is threading.current_thread():
            raise UsageError(f"{self._leases.name} is used from within its own work (by a callback); use it afterwards")
        self._cut_short |= cut_short
        try:
            self.steps.close()
        except ValueError:  # another thread runs it
            return self.over
        self._leases.wake()
        return True

    def __del__(self) -> None:
        with suppress(AttributeError):  # interrupted in __init__
            self.end()


class Leases:
    """Tracks who owns the named model and who waits: first come, first served.

    The queue changes in single interpreter steps. No lock exists that an interrupt or the garbage collector could find
    locked: an interrupt at the end of a `with` block may leave the lock held.
    """

    def __init__(self, name: str):
        self.name = name
        self.closed = False
        self._queue: list[weakref.ref[Lease[Any]]] = []  # the first unfinished lease owns the model

    def begin(
        self,
        start: Callable[[], Iterable[Item]],
        is_last: Callable[[Item], bool] = lambda item: False,
        *,
        wait: bool = False,
        kept: bool = False,
    ) -> Lease[Item]:
        """Begins a lease over the items from `start`, which is called now, while the model is owned.

        is_last: returns whether an item ends the lease, so nobody needs to ask for another. kept: this thread's own
        calls do not end the lease either.

        Raises UsageError if another thread owns the model (unless `wait`: then it waits) or if the model was closed.
        """
        driver_calls.check()
        check_flags(wait=wait)
        lease = Lease(self, start, is_last, kept)
        try:
            while not self._enter(lease, wait):
                lease.woken.acquire(timeout=RECHECK_S)
            next(lease.steps, None)  # None: closed meanwhile
        except BaseException:
            lease.end()
            raise
        return lease

    def call(self, work: Callable[[], Item], *, wait: bool = False, beside: bool = False) -> Item:
        """Returns the result of `work`, called as the owner. beside: this thread's resting lease goes on afterwards."""
        if beside and any(lease.is_mine and not lease.runs for lease in self._unfinished()[:1]):
            return work()
        (result,) = self.begin(lambda: (work(),), wait=wait)
        return result

    def close(self) -> None:
        """Ends the current lease after its step, and refuses all calls from then on."""
        while not driver_calls.forked():  # after a fork the lease runs in the other process
            for lease in self._unfinished()[:1]:
                lease.end(cut_short=not lease.is_mine)
            self.closed = True
            if not self._unfinished():
                return
            time.sleep(RECHECK_S)

    def wake(self) -> None:
        """Wakes the first thread in the queue."""
        for lease in self._unfinished()[:1]:
            with suppress(RuntimeError):  # already woken
                lease.woken.release()

    def busy(self) -> UsageError:
        if any(lease.kept for lease in self._unfinished()[:1]):
            return UsageError(
                f"an engine of {self.name} is open and has it until it is closed: give the request to the engine, "
                "close that first, or use wait=True in another thread, which waits for it"
            )
        return UsageError(
            f"{self.name} is generating in another thread, or that one has not read its answer to the end; use "
            "wait=True, which waits for it, or load the model once for each thread"
        )

    def closed_error(self) -> UsageError:
        return UsageError(f"{self.name} was closed and gave its device memory back; load it again")

    def _enter(self, lease: Lease[Any], wait: bool) -> bool:
        """Puts the lease into the queue, and returns whether the lease owns the model now."""
        if (place := weakref.ref(lease)) not in self._queue:
            self._queue.append(place)
        if self.closed:  # asked after the entry: `close` asks in the opposite order
            raise self.closed_error()
        owner = self._unfinished()[0]
        if owner.is_mine and owner is not lease and owner.end():
            owner = self._unfinished()[0]
        if owner is not lease and (not wait or (owner.kept and owner.began_in is lease.began_in)):
            raise self.busy()
        return owner is lease

    def _unfinished(self) -> list[Lease[Any]]:
        unfinished = []
        for place in [*self._queue]:
            lease = place()
            if lease is not None and not lease.over:
                unfinished.append(lease)
                continue
            with suppress(ValueError):  # another thread removed it
                self._queue.remove(place)
        return unfinished
