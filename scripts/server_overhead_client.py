"""Many streams of one server at once, in a process of its own that does as little as it can: its processor time is not
the server's.

Of each line of standard input it reads a JSON object (url, bodies: one request of /v1/completions for each stream), and
writes one: seconds from the first request to the last token, tokens of all answers, ttft_ms and tbt_ms, a list of each,
and cpu_s, its own processor time. Each connection has had another request before, as those of a client that keeps them:
else the server takes on all connections while it reads the first requests. What comes is only noted with its time until
all has come.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

RECEIVED_BYTES = 1 << 16
END = b"data: [DONE]"


class Stream:
    """A connection with a request, and what came of its answer with the time at which it did."""

    def __init__(self, address: tuple[str, int], host: str, body: dict[str, Any]):
        data = json.dumps(body).encode("ascii")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
        self._request = head.encode("ascii") + data
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._have_had_a_request(host)
        self.begun = 0.0
        self.came: list[tuple[float, bytes]] = []
        self._tail = b""  # the end of what came last, where END may have begun

    def _have_had_a_request(self, host: str) -> None:
        self.socket.sendall(f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n".encode("ascii"))
        with self.socket.makefile("rb", 0) as answer:
            lines = [*iter(answer.readline, b"\r\n")]
            answer.read(next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:")))

    def ask(self) -> None:
        self.begun = time.perf_counter()
        self.socket.sendall(self._request)

    def receive(self) -> bool:
        """Whether the answer goes on."""
        data = self.socket.recv(RECEIVED_BYTES)
        self.came.append((time.perf_counter(), data))
        end, self._tail = self._tail + data, data[1 - len(END) :]
        return bool(data) and END not in end

    def read(self) -> tuple[int, list[float]]:
        """Tokens of the answer, and the times of its events with text. Raises SystemExit where it is none."""
        n_tokens, is_done, times, held = 0, False, [], b""
        for at, data in self.came:
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    if b'"usage": {' in line:
                        n_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                    elif b'"text": ""' not in line:
                        times.append(at)
                elif line.startswith(END):
                    is_done = True
                elif line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200 "):
                    raise SystemExit(f"the server answers {line.decode('latin-1').strip()}")
        if not is_done:
            raise SystemExit("the server ended a stream before its end")
        return n_tokens, times


def all_streams(url: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    streams = [Stream((parts.hostname, parts.port), parts.netloc, body) for body in bodies]
    cpu_s, start = time.process_time(), time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
            stream.ask()
        left = len(streams)
        while left:
            for key, _ in selector.select():
                if not key.data.receive():
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
                    left -= 1
    cpu_s = time.process_time() - cpu_s
    found = [(stream.begun, *stream.read()) for stream in streams]
    return {
        "seconds": max(stream.came[-1][0] for stream in streams) - start,
        "tokens": sum(n_tokens for _, n_tokens, _ in found),
        "ttft_ms": [1e3 * (times[0] - begun) for begun, _, times in found if times],
        "tbt_ms": [1e3 * (b - a) for *_, times in found for a, b in pairwise(times)],
        "cpu_s": cpu_s,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(all_streams(asked["url"], asked["bodies"])), flush=True)
