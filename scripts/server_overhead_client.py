"""Many streams of one server at once, in a process of its own and with the standard library alone.

Of each line of standard input it reads a JSON object (url, bodies: one request of /v1/completions for each stream), and
writes one: seconds from the first request to the last token, tokens of all answers, ttft_ms and tbt_ms, a list of each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

LIMIT_BYTES = 1 << 20  # of a line


async def one_stream(url: str, body: dict[str, Any]) -> tuple[list[float], int]:
    """Times of what was sent and of each event with text, and the number of tokens that the server counted."""
    parts, data = urlsplit(url), json.dumps(body).encode("ascii")
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=LIMIT_BYTES)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(data)}\r\n\r\n"
    times, n_tokens = [time.perf_counter()], 0
    writer.write(head.encode("ascii") + data)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answers {status.decode('latin-1').strip()}: {(await reader.read(2000))!r}")
    while not (line := await reader.readline()).startswith(b"data: [DONE]"):
        if not line:
            raise SystemExit("the server ended a stream before its end")
        if line.startswith(b"data: "):
            found = json.loads(line[6:])
            if found["choices"] and found["choices"][0]["text"]:
                times.append(time.perf_counter())
            n_tokens = (found.get("usage") or {}).get("completion_tokens", n_tokens)
    writer.close()
    return times, n_tokens


async def all_streams(url: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    streams = await asyncio.gather(*(one_stream(url, body) for body in bodies))
    return {
        "seconds": max(times[-1] for times, _ in streams) - start,
        "tokens": sum(n_tokens for _, n_tokens in streams),
        "ttft_ms": [1e3 * (times[1] - times[0]) for times, _ in streams if len(times) > 1],
        "tbt_ms": [1e3 * (b - a) for times, _ in streams for a, b in pairwise(times[1:])],
    }


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asyncio.run(all_streams(asked["url"], asked["bodies"]))), flush=True)
