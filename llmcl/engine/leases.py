"""Leases: a model does one thing at a time, whichever threads ask.

A lease is a generator that owns the model from `Leases.begin` until the generator ends, is closed or is collected. The
thread that began or last read a lease may end the lease with the next call. Calls from different threads are refused,
or wait. The interpreter's generator state says whether a lease runs, rests or is over, so an interrupt leaves no stale
flag.
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
        self._leases = leases
        self._is_last = is_last
        self._steps = _steps(start)
        self._began = self._last = threading.current_thread()
        self._cut_short = False  # by another thread that closed the model

    @property
    def over(self) -> bool:
        return getgeneratorstate(self._steps) == GEN_CLOSED

    @property
    def is_mine(self) -> bool:
        """Returns whether this thread's next call may end the lease."""
        return not self.kept and threading.current_thread() in (self._began, self._last)

    @property
    def began_here(self) -> bool:
        return self._began is threading.current_thread()

    @property
    def runs(self) -> bool:
        return getgeneratorstate(self._steps) == GEN_RUNNING

    def send(self, value: None) -> Item:
        if self.runs:
            raise self._leases.busy()
        self._last = threading.current_thread()
        try:
            item: Item = next(self._steps)
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
            self._steps.close()
        except ValueError:  # another thread runs it
            return self.over
        self._leases.wake()
        return True

    def __del__(self) -> None:
        with suppress(AttributeError):  # interrupted in __init__
            self.end()


class Leases:
    """Tracks who owns the named model and who waits: first come, first served.

    Each lease has a seat. A lease enters by being first to write a new seat into the previous seat, in a single
    interpreter step. Therefore no lock exists that an interrupt or the garbage collector could find locked.
    """

    def __init__(self, name: str):
        self.name = name
        self.closed = False
        self._seat: dict[str, Any] = {"lease": lambda: None}  # the last seat, or an earlier one
        self._waiting: list[weakref.ref[Any]] = []  # one lock per waiting thread; its release wakes the thread

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
        gate: Any = None
        try:
            while not self._taken(lease, gate):
                if not wait or self._waits_for_itself():
                    raise self.busy()
                if gate is None:
                    gate = threading.Lock()
                    gate.acquire()
                    self._waiting.append(weakref.ref(gate))
                gate.acquire(timeout=RECHECK_S)
            next(lease._steps)
        except BaseException:
            gate = None  # otherwise the traceback would keep the place in the queue
            lease.end()
            raise
        return lease

    def call(self, work: Callable[[], Item], *, wait: bool = False, beside: bool = False) -> Item:
        """Returns the result of `work`, called while the model is owned. beside: the current thread's resting lease
        continues afterwards.
        """
        holder = self._last()["lease"]()
        if beside and holder is not None and holder.is_mine and not (holder.over or holder.runs):
            return work()
        (result,) = self.begin(lambda: (work(),), wait=wait)
        return result

    def close(self) -> None:
        """Ends the current lease after its step, and refuses all calls from then on."""
        nobody = {"lease": lambda: None}
        while not driver_calls.forked():  # after a fork the lease runs in the other process
            seat = self._last()
            holder = seat["lease"]()
            over = holder is None or holder.end(cut_short=not holder.is_mine)
            self.closed = True
            if over and seat.setdefault("next", nobody) is nobody:
                return
            time.sleep(RECHECK_S)

    def wake(self) -> None:
        """Wakes the first waiting thread."""
        gate = self._first_waiting()
        if gate is not None:
            with suppress(RuntimeError):  # already woken
                gate.release()

    def busy(self) -> UsageError:
        holder = self._last()["lease"]()
        if holder is not None and holder.kept:
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

    def _waits_for_itself(self) -> bool:
        holder = self._last()["lease"]()
        return holder is not None and holder.kept and holder.began_here

    def _taken(self, lease: Lease[Any], gate: Any) -> bool:
        """Returns whether the lease took a seat. gate: the current thread's lock, if waiting."""
        if self.closed:
            raise self.closed_error()
        seat, first = self._last(), self._first_waiting()
        holder = seat["lease"]()
        if holder is None or holder.over:
            if first is not None and first is not gate:
                return False
        elif not holder.is_mine or not holder.end():
            return False
        own = {"lease": weakref.ref(lease)}
        if seat.setdefault("next", own) is not own:
            return False
        self._seat = own
        return True

    def _last(self) -> dict[str, Any]:
        seat = self._seat
        while "next" in seat:
            seat = seat["next"]
        return seat

    def _first_waiting(self) -> Any:
        for waiting in list(self._waiting):
            if (gate := waiting()) is not None:
                return gate
            with suppress(ValueError):  # the thread gave up, and another thread may have removed it already
                self._waiting.remove(waiting)
        return None
