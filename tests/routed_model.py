"""A model's process for tests of the router, without llmcl: speaks the router's protocol and answers by rule.

The model's source says what it does: `needs=8,limit=10` for the memory that it forecasts, `fails=6` for an exit code,
`slow=0.3` for seconds before it is ready.
A request's fields say how it is answered: `say`, `crash`, `refuse`, `stream` (texts or true), `crash_later`, `hold`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from threading import Thread
from typing import Any

RESPONSE = "resp_" + "0" * 20


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def answer(client: socket.socket, spec: dict[str, Any]) -> None:
    """Answers the one request of a connection, with what was asked unless its fields say otherwise."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += client.recv(65536)
    text, _, data = head.partition(b"\r\n\r\n")
    first, *lines = text.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(data) < int(headers.get("content-length", 0)):
        data += client.recv(65536)
    method, path, _ = first.split()
    body = json.loads(data) if data else {}
    if "say" in body:
        print(body["say"], file=sys.stderr, flush=True)
    if "crash" in body:
        os._exit(body["crash"])
    if body.get("stream"):
        try:
            stream(client, spec["name"], body)
        except OSError:
            print("the client left", file=sys.stderr, flush=True)
        return
    seen = {"model": spec["name"], "method": method, "path": path, "bytes": data.decode(), "names": sorted(headers)}
    seen |= {"has_key": headers["authorization"] == f"Bearer {spec['key']}"}
    if method == "POST" and path.endswith("/responses"):
        seen = {"id": RESPONSE + spec["name"][0].encode().hex() * 2} | seen
    if path.startswith("/props"):
        seen["default_generation_settings"] = {"n_ctx": 64}
    sent = json.dumps(seen).encode()
    status = "400 Bad Request" if body.get("refuse") else "200 OK"
    kind = f"content-type: application/json\r\ncontent-length: {len(sent)}\r\nx-request-id: req_of_{spec['name']}"
    client.sendall(f"HTTP/1.1 {status}\r\n{kind}\r\n\r\n".encode() + sent)


def stream(client: socket.socket, name: str, body: dict[str, Any]) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = json.dumps({"choices": [{"delta": {"content": f"I am {name}"}, "finish_reason": "stop"}]})
    for text in [chunk, "[DONE]"] if body["stream"] is True else body["stream"]:
        send_part(client, f"data: {text}\n\n".encode())
        time.sleep(0.02)
    if "crash_later" in body:
        os._exit(body["crash_later"])
    while body.get("hold"):
        send_part(client, b": ping\n\n")
        time.sleep(0.02)
    send_part(client, b"")


def send_part(client: socket.socket, data: bytes) -> None:
    client.sendall(b"%x\r\n%b\r\n" % (len(data), data))


def serve(listening: socket.socket, spec: dict[str, Any]) -> None:
    while True:
        client, _ = listening.accept()
        Thread(target=one, args=(client, spec), daemon=True).start()


def one(client: socket.socket, spec: dict[str, Any]) -> None:
    with client:
        answer(client, spec)


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    source = dict(part.split("=") for part in spec["model"].split(","))
    if "fails" in source:
        print("a line before it", file=sys.stderr)
        print("error: the file is damaged\na remedy", file=sys.stderr, flush=True)
        os._exit(int(source["fails"]))
    listening = socket.create_server(("127.0.0.1", 0))
    Thread(target=serve, args=(listening, spec), daemon=True).start()
    tell(port=listening.getsockname()[1])
    needs, limit = int(source["needs"]), int(source.get("limit", 100))
    memory = {"where": source.get("where", "gpu"), "needs": needs, "limit": limit}
    tell(memories=[{**memory, "is_measured": source.get("measured") == "1"}])
    if sys.stdin.readline():
        time.sleep(float(source.get("slow", 0)))
        tell(max_context=64, facts={"family": "llama", "n_bytes": 5})
    sys.stdin.readline()  # until the router closes the pipe, or is dead
    os._exit(0)


if __name__ == "__main__":
    main()
