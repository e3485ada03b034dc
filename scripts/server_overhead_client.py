"""Many streams of one server at once, in a process of its own that does as little as it can: its processor time is not
the server's.

Of each line of standard input it reads a JSON object (url, bodies: one request of /v1/completions for each stream), and
writes one: seconds from the first request to the last token, tokens of all answers, ttft_ms and tbt_ms, a list of each,
and cpu_s, its own processor time.
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


class Stream:
    """A request and the times of what came: of its beginning, and of each event with text."""

    def __init__(self, address: tuple[str, int], host: str, body: dict[str, Any]):
        data = json.dumps(body).encode("ascii")
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.times = [time.perf_counter()]
        self.socket.sendall(head.encode("ascii") + data)
        self.n_tokens = 0
        self.done = False
        self._held = b""

    def receive(self) -> None:
        data = self.socket.recv(RECEIVED_BYTES)
        now = time.perf_counter()
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                if b'"usage": {' in line:
                    self.n_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                elif b'"text": ""' not in line:
                    self.times.append(now)
            elif line.startswith(b"data: [DONE]"):
                self.done = True
            elif line.startswith(b"HTTP/1.1 ") and not line.startswith(b"HTTP/1.1 200 "):
                raise SystemExit(f"the server answers {line.decode('latin-1').strip()}")
        if not data and not self.done:
            raise SystemExit("the server ended a stream before its end")


def all_streams(url: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    parts, cpu_s, start = urlsplit(url), time.process_time(), time.perf_counter()
    assert parts.hostname is not None and parts.port is not None
    streams = [Stream((parts.hostname, parts.port), parts.netloc, body) for body in bodies]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            for key, _ in selector.select():
                key.data.receive()
                if key.data.done:
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
    return {
        "seconds": max(stream.times[-1] for stream in streams) - start,
        "tokens": sum(stream.n_tokens for stream in streams),
        "ttft_ms": [1e3 * (stream.times[1] - stream.times[0]) for stream in streams if len(stream.times) > 1],
        "tbt_ms": [1e3 * (b - a) for stream in streams for a, b in pairwise(stream.times[1:])],
        "cpu_s": time.process_time() - cpu_s,
    }


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(all_streams(asked["url"], asked["bodies"])), flush=True)
