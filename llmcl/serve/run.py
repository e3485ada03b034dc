"""A server's life: listens at once, loads the model in a thread, serves, and lets answers finish after a signal."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from llmcl.errors import NO_MORE_FILES, UsageError, one_line
from llmcl.progress import Progress
from llmcl.serve.app import ALIASES, ANSWERING, make_app
from llmcl.serve.served import Served
from llmcl.serve.service import Service
from llmcl.serve.settings import Settings

MOST_FILES = 1 << 16
NOTE_S = 10.0  # between two identical warnings
_log = logging.getLogger(__name__)
_TRIES = 8  # attempts to find a port free on all addresses


def serve(
    settings: Settings,
    load: Callable[[Progress], Served],
    on_listening: Callable[[int], None] | None = None,
    on_ready: Callable[[Served], None] = lambda served: None,
) -> None:
    """Serves until a signal comes. load: builds the model, in a separate thread. on_listening: takes the port, in place
    of a line on standard error. on_ready: called once requests are answered. Raises any error from `load`.
    """
    service = Service(settings)
    listening = listen(settings.host, settings.port)
    start_loading(service, load, on_ready)
    if on_listening is not None:
        on_listening(listening[0].getsockname()[1])
    else:
        announce(settings, listening)
    run(Server(service), listening)
    service.kept.close()
    if service.failure is not None:
        raise service.failure
    if service.loaded is not None:
        service.loaded.close()


def announce(settings: Settings, listening: list[socket.socket]) -> None:
    """Says where the server listens."""
    if not settings.quiet:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        print(f"listening on http://{host}:{listening[0].getsockname()[1]}", file=sys.stderr, flush=True)


def run(server: Server, listening: list[socket.socket]) -> None:
    """Runs the server until a signal comes."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # asyncio warns about writes to clients that left
    allow_connections()
    server.run(sockets=listening)


def listen(host: str, port: int) -> list[socket.socket]:
    """Opens sockets on all addresses of a host name, on one port; 0 picks a free port. Skips addresses that this
    machine does not have. Raises UsageError if no address is usable or the port is taken.
    """
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = [*dict.fromkeys((family, address) for family, *_, address in resolved)]
        for left in reversed(range(_TRIES if port == 0 and len(addresses) > 1 else 1)):
            try:
                return _listen(addresses)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not left:  # a port free on one address may be taken on another
                    raise
        raise AssertionError
    except (OSError, ValueError) as error:  # an invalid name raises UnicodeError
        reason = one_line(getattr(error, "strerror", None) or error)
        raise UsageError(
            f"--host {one_line(host)} --port {port}: cannot listen there ({reason}); give another port"
        ) from error


def _listen(addresses: Sequence[tuple[socket.AddressFamily, Any]]) -> list[socket.socket]:
    listening: list[socket.socket] = []
    missing: OSError | None = None
    with ExitStack() as failed:
        for family, (host, port, *more) in addresses:
            if listening:
                port = listening[0].getsockname()[1]
            # A lone :: covers IPv4, too.
            both = family == socket.AF_INET6 and len(addresses) == 1 and socket.has_dualstack_ipv6()
            try:
                listener = socket.create_server((host, port, *more), family=family, backlog=1024, dualstack_ipv6=both)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
                continue
            listening.append(failed.enter_context(listener))
        if not listening:
            assert missing is not None
            raise missing
        failed.pop_all()
    return listening


def allow_connections() -> None:
    """Raises the limit on open files as far as the system allows: each idle connection needs a file, and 1024 is a
    common limit.
    """
    with suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def start_loading(service: Service, load: Callable[[Progress], Served], on_ready: Callable[[Served], None]) -> None:
    """Loads the model in a daemon thread, so the program can exit without waiting."""

    def work() -> None:
        try:
            service.ready(served := load(service.progress))
            on_ready(served)
        except BaseException as error:  # raised again when the server ends
            service.fail(error)

    Thread(target=work, name="loading", daemon=True).start()


class Server(uvicorn.Server):
    """Stops once asked to and nothing is under way, or drain_s later. A second signal stops at once.

    Does not raise the signal again, since the stop was requested.
    """

    def __init__(self, service: Service, app: ASGIApp | None = None):
        """app: the application; None: for one model, in this process."""
        settings = service.settings
        config = uvicorn.Config(
            app or make_app(service),
            interface="asgi3",
            http=_protocol(service),
            ws=WSProtocol,
            ws_max_size=settings.max_body_bytes,
            ws_per_message_deflate=False,  # a small compressed message may fill the memory
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.idle_s,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=settings.max_header_bytes,
        )
        super().__init__(config)
        self._service = service
        self._stop_at = float("inf")
        self._noted = float("-inf")

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note)
        await super().serve(sockets)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles loop errors. When no more files can be opened, asyncio logs at length every second for each waiting
        connection, then tries to listen again even on a socket closed meanwhile. So a short warning replaces these
        errors.
        """
        if isinstance(context.get("exception"), OSError) and context["exception"].errno in NO_MORE_FILES:
            if (now := time.monotonic()) > self._noted + NOTE_S:
                self._noted = now
                _log.warning("no connection can be taken on: too many files are open; raise their limit (`ulimit -n`)")
        elif not (self.should_exit and "_start_serving" in context["message"]):
            loop.default_exception_handler(context)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Extends uvicorn's handling: a closed terminal (SIGHUP) also stops the server, unless ignored (nohup)."""
        hang_up = getattr(signal, "SIGHUP", None)  # None on Windows
        takes_signals = current_thread() is main_thread()
        with ExitStack() as after, super().capture_signals():
            if takes_signals and hang_up is not None and signal.getsignal(hang_up) is not signal.SIG_IGN:
                # SIGHUP may come twice, from the terminal and from the shell.
                after.callback(signal.signal, hang_up, signal.signal(hang_up, lambda *_: self._service.stop()))
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.stopping:
            self.should_exit = self.force_exit = True
        self._service.stop()

    async def on_tick(self, counter: int) -> bool:
        service, now = self._service, time.monotonic()
        if service.stopping and self._stop_at == float("inf"):
            self._stop_at = now + service.settings.drain_s
        if service.failure is not None or (service.stopping and (not service.in_flight or now > self._stop_at)):
            self.should_exit = True
        return await super().on_tick(counter)


# A request target in absolute form, as sent to a proxy, RFC 9112 3.2.2.
_ABSOLUTE_FORM = re.compile(rb"(?i:https?)://(?P<host>[^/?#@]+)(?P<target>(?:[/?][^#]*)?)")
_OF_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})


class _Connection(h11.Connection):
    """Frames body chunks like h11, in a fraction of the time. Headers go out in one write with the data that follows.
    Request targets are converted to origin form.
    """

    _is_chunked = False  # whether the response body is chunked
    _head = b""  # headers still to be sent

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request) and {b"content-length", b"transfer-encoding"} <= {*dict(event.headers)}:
            raise h11.RemoteProtocolError("two lengths")  # a proxy may trust the other length: RFC 9112 6.1
        if isinstance(event, h11.Request) and (named := _ABSOLUTE_FORM.fullmatch(event.target)):
            headers = [(name, value) for name, value in event.headers if name != b"host"]
            target = named["target"] if named["target"].startswith(b"/") else b"/" + named["target"]
            headers.append((b"host", named["host"]))  # the target's host takes precedence
            return h11.Request(method=event.method, target=target, headers=headers, http_version=event.http_version)
        return event

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]  # which tells events apart
        if self._is_chunked and self.our_state is h11.SEND_BODY and isinstance(event, h11.Data) and event.data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        if isinstance(event, h11.Response):
            self._head = self._head_of(event)
            return b""
        sent = super().send(event)
        self._is_chunked = isinstance(event, h11.Data) and sent == b"%x\r\n%b\r\n" % (len(event.data), event.data)
        if self._head and sent is not None:
            sent, self._head = self._head + sent, b""
        return sent

    def _head_of(self, response: h11.Response) -> bytes:
        """Returns the encoded head. h11 checks each header three times, so headers unrelated to framing bypass h11."""
        headers = response.headers.raw_items()
        if not _OF_FRAMING.isdisjoint([name.lower() for name, _ in headers]):
            return super().send(response) or b""
        bare = super().send(h11.Response(status_code=response.status_code, headers=[], reason=response.reason)) or b""
        return bare[:-2] + b"".join([b"%b: %b\r\n" % header for header in headers]) + b"\r\n"


class _Lingering:
    """The transport of a request whose body has not fully arrived, `of`. Closing a socket with unread bytes resets the
    connection, and a client still sending would lose the answer. So `close` first ends only the sending side.
    """

    def __init__(self, of: Any, protocol: Any, linger_s: float):
        self._of, self._protocol, self._linger_s = of, protocol, linger_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def close(self) -> None:
        if self._of.is_closing() or not self._protocol.cycle.more_body:
            self._of.close()
            return
        self._protocol.forgets = True
        self._of.write_eof()
        self._of.resume_reading()
        self._protocol.loop.call_later(self._linger_s, self._of.close)


def _protocol(service: Service) -> type[asyncio.Protocol]:
    settings = service.settings

    class Protocol(H11Protocol):
        """Closes a connection whose request line and headers do not arrive within header_s after the first byte, or
        that stays silent for header_s from the start. Between requests idle_s applies.

        Tells the service about a request as soon as the body is complete, because endpoints start one after another.
        """

        _whole: object = None  # the last request that has fully arrived
        _deadline: asyncio.TimerHandle | None = None
        forgets = False  # further data is dropped: the request was refused and the client keeps sending

        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            self.conn = _Connection(h11.SERVER, settings.max_header_bytes)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Two events are two writes: without NODELAY the second would wait 40 ms for the client's delayed
            # acknowledgement.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._arm()

        def data_received(self, data: bytes) -> None:
            if self.forgets:
                return
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._disarm()
            elif self._deadline is None:
                self._arm()
            cycle = self.cycle
            if cycle is not None and cycle.more_body and cycle.transport is self.transport:
                cycle.transport = cast(asyncio.Transport, _Lingering(self.transport, self, settings.linger_s))
            if cycle is not None and not cycle.more_body and cycle is not self._whole:
                self._whole = cycle
                path = cycle.scope["path"]
                if ALIASES.get(path, path) in ANSWERING:
                    service.expect(cast(dict[str, Any], cycle.scope))

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            self._deadline = self.loop.call_later(settings.header_s, self.transport.close)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return Protocol
