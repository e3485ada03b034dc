"""The engine's thread, which drives the device: accepts requests between steps and hands out pieces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

from llmcl.engine.engine_metrics import StepTotals
from llmcl.engine.generation import Piece, PieceWriter, is_last
from llmcl.engine.scheduler import Job
from llmcl.engine.step_loop import Sampled, StepLoop
from llmcl.errors import DeviceError, LlmclError, UsageError

# How long an idle engine waits for the next announced request, and for all of them, so that requests share a step.
GATHER_S, GATHER_ALL_S = 0.005, 0.02
T = TypeVar("T")
End = LlmclError | None
"""What comes after the last piece: None, or why there is none."""


def nothing() -> None:
    """Does nothing: the default for callbacks."""


@dataclass(eq=False)
class Answering:
    """A request in progress. give: called in the worker's thread with each piece, then once with the End. wake: called
    after all pieces of a step were given.
    """

    job: Job
    writer: PieceWriter
    give: Callable[[Piece | End], None]
    wake: Callable[[], None] = nothing
    ended: bool = field(default=False, init=False)


class Worker:
    """Makes answers until stopped.

    vocab_size: ids from vocab_size on mean that no token could be chosen. leave: called once at the end, after the
    worker released the device, unless something failed. A device failure ends all answers and fails later requests.
    """

    def __init__(self, loop: StepLoop, name: str, vocab_size: int, leave: Callable[[], None] = nothing):
        self._loop = loop
        self._leave = leave
        self._vocab_size = vocab_size
        self._name = name
        self._stopped = self._over = False
        self._failure: LlmclError | None = None
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()  # a destructor may put into it
        self.metrics = loop.metrics
        self.totals = StepTotals()
        self._answering: dict[Job, Answering] = {}
        self._given: list[Answering] = []  # not woken yet
        self._expected: set[object] = set()
        self._gathers = False
        self._thread = threading.Thread(target=self._work, name=f"engine of {name}", daemon=True)
        self._thread.start()

    def submit(self, answering: Answering) -> None:
        """Queues the request. Raises the device's failure, or UsageError after `stop`."""
        self._check()
        self._commands.put(lambda: self._begin(answering))
        if self._over:  # the worker may have ended in between
            self._drain()

    def expect(self) -> Callable[[], None]:
        """Announces a request. The returned function says that it was submitted, or never will be."""
        token = object()
        self._expected.add(token)

        def come() -> None:
            self._expected.discard(token)
            if self._gathers and not self._expected:
                self._commands.put(nothing)  # wakes the worker

        return come

    def cancel(self, answering: Answering) -> None:
        """Ends the answer before the next step. No further pieces are given."""
        if not answering.ended:
            self._commands.put(lambda: self._end(answering, None))

    def call(self, work: Callable[[StepLoop], T]) -> T:
        """Calls `work` between two steps and returns its result. Raises the errors of `work` and of `submit`."""
        self._check()
        future: Future[T] = Future()

        def command() -> None:
            try:
                self._check()
                future.set_result(work(self._loop))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(command)
        if self._over:
            self._drain()
        return future.result()

    def stop(self) -> None:
        """Ends all answers after the running step, and the thread."""
        self._stopped = True
        self._commands.put(nothing)  # wakes the worker
        if self._thread is not threading.current_thread():
            try:
                self._thread.join()
            except BaseException:  # an interrupt: keep the model until the step ends
                while not self._over:  # a thread may count as ended after an interrupted join
                    time.sleep(0.001)
                raise

    def _closed(self) -> UsageError:
        return UsageError(f"the engine of {self._name} was closed; open another one")

    def _check(self) -> None:
        if self._stopped:
            raise self._closed()
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _work(self) -> None:
        try:
            while not self._stopped:
                self._take_commands()
                if self._loop.has_work and not self._stopped:
                    came: set[Job] = set()
                    for sampled in self._loop.step():
                        self._hand_out(sampled, together=sampled.job in came)
                        came.add(sampled.job)
                    for job, error in self._loop.failures().items():
                        self._fail(job, error)
                    self._wake()
                    self.totals = self.metrics.totals()
        except LlmclError as error:
            self._failure = error
        except BaseException as error:
            self._failure = DeviceError(f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            for answering in self._answering.values():  # not through the loop, which may have failed half-way
                answering.ended = True
                self._give(answering, self._failure or self._closed())
            self._wake()
            leave = nothing if self._failure else self._leave
            # Releases device memory that finished requests no longer need.
            del self._loop, self._leave
            leave()
            del leave
            self._over = True
            self._drain()

    def _take_commands(self) -> None:
        """Runs all queued commands. If idle, waits for a command."""
        if not self._loop.has_work:
            self._commands.get()()
            self._gather()
        while True:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            command()
        self._wake()

    def _gather(self) -> None:
        """Waits before an idle engine's first step: takes announced requests that arrive within GATHER_S of each other,
        while the step has room. Otherwise the first request would run a step alone while the others wait.
        """
        self._gathers, until = True, time.monotonic() + GATHER_ALL_S
        while self._expected and self._loop.has_work and self._loop.has_room and not self._stopped:
            try:
                self._commands.get(timeout=max(0.0, min(GATHER_S, until - time.monotonic())))()
            except Empty:
                break
        self._gathers = False

    def _drain(self) -> None:
        """Handles commands that arrived after the end."""
        while True:
            try:
                self._commands.get_nowait()()
            except Empty:
                break
        self._wake()

    def _give(self, answering: Answering, item: Piece | End) -> None:
        answering.give(item)
        self._given.append(answering)

    def _wake(self) -> None:
        given, self._given = self._given, []
        for answering in given:
            answering.wake()

    def _begin(self, answering: Answering) -> None:
        try:
            self._check()
            self._loop.submit(answering.job)
        except LlmclError as error:
            self._end(answering, error)
        else:
            self._answering[answering.job] = answering

    def _hand_out(self, sampled: Sampled, *, together: bool) -> None:
        answering = self._answering.get(sampled.job)
        if answering is None:  # ended by an earlier token in the same step
            return
        if not 0 <= sampled.token < self._vocab_size:
            self._end(
                answering,
                DeviceError(
                    "no token can be chosen: the logits have no finite numbers; generate the prompt without an "
                    "engine, which finds out where that begins"
                ),
            )
            return
        piece = answering.writer.push(sampled.token, sampled.logprob, together=together)
        if sampled.job.prompt_logprobs is not None and piece.tbt_ms is None:
            piece = replace(piece, prompt_logprobs=tuple(sampled.job.scored))
        self._give(answering, piece)
        if is_last(piece):
            self._end(answering, None)

    def _fail(self, job: Job, error: LlmclError) -> None:
        """Ends an answer with an error, unless the previous token already ended it."""
        if (answering := self._answering.get(job)) is not None:
            self._end(answering, error)

    def _end(self, answering: Answering, end: End) -> None:
        if answering.ended:
            return
        answering.ended = True
        if self._answering.pop(answering.job, None) is not None:
            self._loop.end(answering.job)
        self._give(answering, end)
