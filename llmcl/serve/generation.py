"""Answers a text request, whole or as a stream, in the format of any API."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from os import environ
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from llmcl.errors import LlmclError
from llmcl.serve.access_log import CLIENT_GONE, Record, record_of
from llmcl.serve.errors import RequestError, of_llmcl
from llmcl.serve.events import EVENT_STREAM, ClientGoneError, EventSender, Reporting, unless_gone
from llmcl.serve.served import Answer, Ask, Served, cached_tokens
from llmcl.serve.service import Service, arrived
from llmcl.serve.streams import Streams
from llmcl.tools import json_text

if TYPE_CHECKING:
    from llmcl.engine.generation import Piece


class Form(Protocol):
    """How an API writes answers. Each method but `whole` returns the bytes of zero or more events."""

    def begin(self) -> bytes: ...
    def text(self, answer: Answer, text: str) -> bytes: ...
    def finish(self, answer: Answer) -> bytes:
        """Writes the end of one answer."""
        ...

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Writes the end of the response, after all answers."""
        ...

    def error(self, body: dict[str, Any]) -> bytes: ...
    def alive(self, answer: Answer) -> bytes:
        """Returns an empty event that clients count as a sign of life. answer: an unfinished answer."""
        ...

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]: ...


class AsciiJSONResponse(JSONResponse):
    """A JSON response that can hold any model text, even half a surrogate pair."""

    def render(self, content: Any) -> bytes:
        return json_text.dumps(content).encode("ascii")


class GenerationResponse:
    """Runs the engine on each of `asks` and sends the answers in `form`. The work ends when the client leaves.

    progress: makes the event for prefill progress; None: no such events.
    """

    def __init__(
        self,
        service: Service,
        served: Served,
        asks: Sequence[Ask],
        form: Form,
        *,
        stream: bool,
        progress: Callable[[Answer, dict[str, Any]], bytes] | None = None,
        media_type: bytes = EVENT_STREAM,
    ):
        self._progress, self._media_type = progress, media_type
        for ask in asks:
            served.check(ask.prompt)
        self._service, self._served, self._form, self._stream = service, served, form, stream
        self._answers = [Answer(ask, index) for index, ask in enumerate(asks)]
        for answer in self._answers:
            if not answer.ask.needs_engine:
                answer.finish_reason = "length"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as admitted:
            admitted.enter_context(self._service.admit(len(self._answers)))
            admitted.callback(self._note, scope)
            # Slots are freed before the client sees the end: it may send the next request at once.
            leave = admitted.close
            if self._stream:
                work = self._send_events(scope, send, leave)
            else:
                work = self._send_whole(scope, receive, send, leave)
            try:
                await unless_gone(receive, work)
            except ClientGoneError:
                record_of(scope).status = CLIENT_GONE

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send, leave: Callable[[], None]) -> None:
        record = record_of(scope)
        try:
            async with Streams(self._served, self._answers) as streams:
                arrived(scope)
                await streams.pass_on(lambda answer, piece: self._note_time(record, piece), lambda: None)
            self._check_ended()
            whole = self._form.whole(self._answers)
        except Exception as error:
            raise as_refusal(error, self._served) from error
        leave()
        await AsciiJSONResponse(whole)(scope, receive, send)

    async def _send_events(self, scope: Scope, send: Send, leave: Callable[[], None]) -> None:
        try:
            await self._stream_events(scope, send, leave)
        except Exception as error:
            raise error if isinstance(error, ClientGoneError) else as_refusal(error, self._served) from error

    async def _stream_events(self, scope: Scope, send: Send, leave: Callable[[], None]) -> None:
        form, settings, record = self._form, self._service.settings, record_of(scope)
        async with (
            Streams(self._served, self._answers) as streams,
            EventSender(
                send, ping_s=settings.ping_s, send_s=settings.send_s, alive=self._alive, media_type=self._media_type
            ) as sender,
            Reporting(self._report(streams, sender)),
        ):
            arrived(scope)
            events: list[bytes] = []

            def take(answer: Answer, piece: Piece) -> None:
                self._note_time(record, piece)
                text = piece.text if piece.prompt_logprobs is None else answer.ask.head + piece.text
                if text or piece.logprob is not None:
                    events.append(form.text(answer, text))
                if piece.finish_reason is not None:
                    events.append(form.finish(answer))

            def after() -> None:
                sender.put(b"".join(events))
                events.clear()

            sender.hold(form.begin())
            try:
                for answer in self._answers:
                    if answer.ask.head and answer.ask.prompt_logprobs is None:
                        sender.hold(form.text(answer, answer.ask.head))
                    if answer.finish_reason is not None:
                        sender.hold(form.finish(answer))
                await streams.pass_on(take, after)
                leave()
                self._check_ended()
            except ClientGoneError:
                raise
            except Exception as error:
                leave()
                if not sender.is_begun:
                    raise
                # Too late for a status: the stream carries the error.
                refusal = as_refusal(error, self._served)
                record.error = refusal.message
                sender.put(form.error(refusal.body(scope["path"])))
            else:
                sender.put(form.end(self._answers))

    def _alive(self) -> bytes:
        """Returns a sign of life for the first unfinished answer; nothing once all have ended."""
        return next((self._form.alive(answer) for answer in self._answers if answer.finish_reason is None), b"")

    def _report(self, streams: Streams, sender: EventSender) -> Callable[[], bool] | None:
        """Returns a function that sends prefill progress and tells whether more will follow; None if not requested."""
        if (progress := self._progress) is None:
            return None
        start, told = time.monotonic(), dict[int, int]()

        def report() -> bool:
            waiting = [each for each in streams.progress() if not each[0].token_ids]
            for answer, cached, read in waiting:
                if read > told.get(answer.index, 0):
                    told[answer.index] = read
                    numbers = {"total": len(answer.ask.prompt), "cache": cached, "processed": read}
                    sender.put(progress(answer, numbers | {"time_ms": round((time.monotonic() - start) * 1e3)}))
            return bool(waiting)

        return report

    def _check_ended(self) -> None:
        for answer in self._answers:
            if answer.finish_reason is None:
                raise RequestError(503, "the answer was ended before its last token: the server is stopping")

    def _note_time(self, record: Record, piece: Piece) -> None:
        metrics = self._service.metrics
        if record.ttft_ms is None:
            record.ttft_ms = round(record.since_start_ms(), 3)
        if piece.tbt_ms is None:
            metrics.ttft.observe(record.since_start_ms() / 1e3)
        else:
            metrics.tbt.observe(piece.tbt_ms / 1e3)

    def _note(self, scope: Scope) -> None:
        record, metrics = record_of(scope), self._service.metrics
        record.prompt_tokens = sum(len(answer.ask.prompt) for answer in self._answers)
        record.cached_tokens = cached_tokens(self._answers)
        record.tokens = sum(len(answer.token_ids) for answer in self._answers)
        times_ms = [tbt_ms for answer in self._answers for tbt_ms in answer.tbt_ms]
        record.note_tbt(times_ms)
        metrics.tokens_predicted.inc(record.tokens)
        metrics.predicted_seconds.inc(sum(times_ms) / 1e3)


def as_refusal(error: Exception, served: Served | None) -> RequestError:
    """Converts any exception to the error sent to the client. An unexpected exception reveals only that it is a defect
    in llmcl. served: the model, if ready.
    """
    if isinstance(error, RequestError):
        return error
    if environ.get("LLMCL_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, LlmclError):
        return of_llmcl(error, None if served is None else served.max_context)
    return RequestError(500, f"unexpected {type(error).__name__}: a defect of llmcl; LLMCL_DEBUG=1 shows where")
