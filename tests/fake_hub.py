"""A stand-in for a Hugging Face hub: as much of its HTTP interface as huggingface_hub uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "org/gated": (403, "GatedRepo"),
    "org/forbidden": (403, ""),
    "org/private": (401, ""),
    "org/odd": (418, ""),
}


class FakeHub(ThreadingHTTPServer):
    """Serves models = {repo id: {file: bytes}}; `requests` records (method, path)."""

    daemon_threads = True

    def __init__(self, models: dict[str, dict[str, bytes]], port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.models = models
        self.requests: list[tuple[str, str]] = []
        self.commit = COMMIT
        self.failing = False
        self.serves_ranges = False
        self.ranges: list[tuple[str, int, int]] = []  # file, first and last byte of each range that was served
        self.broken_file: str | None = None
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def downloaded(self) -> set[str]:
        return {path.rsplit("/", 1)[1] for method, path in self.requests if method == "GET" and "/resolve/" in path}


class Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path))
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo_id = "/".join(parts[:2])
        files = self.server.models.get(repo_id)
        if parts[-1] == self.server.broken_file:
            self.close_connection = True  # without a word, as when the network breaks
        elif self.server.failing:
            self.send(500, b"out of order")
        elif repo_id in REFUSALS:
            status, code = REFUSALS[repo_id]
            self.send(status, b"refused", {"X-Error-Code": code} if code else {})
        elif files is None:
            self.send(404, b"no such model", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            info = {"id": repo_id, "modelId": repo_id, "sha": self.server.commit, "siblings": siblings}
            self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        elif (file := "/".join(parts[4:])) in files:
            etag = hashlib.sha256(files[file]).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.server.commit}
            data, span = files[file], re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if span is not None and self.server.serves_ranges and self.command == "GET":
                first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
                self.server.ranges.append((file, first, last))
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                self.send(206, data[first : last + 1], headers)
            else:
                self.send(200, data, headers)
        else:
            self.send(404, b"no such file", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.server.commit})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with suppress(ConnectionError):  # the client has seen enough
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
