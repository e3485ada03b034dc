"""A real browser without a window, spoken to through a pipe (Chrome's DevTools protocol); for tests of the page."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The browser reads from number 3 and writes to number 4.
_AS_3_AND_4 = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
TIMEOUT_S = 120.0  # of a command; the machine may be busy


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Browser:
    """One page. events: what it told of without being asked, such as errors of scripts, by method."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int):
        self._process, self._write, self._read = process, write, read
        self._rest = b""
        self._n = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its result."""
        self._n += 1
        asked = {"id": self._n, "method": method, "params": params}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            told = self._next(end)
            if told.get("id") == self._n:
                assert "error" not in told, told["error"]
                result: dict[str, Any] = told["result"]
                return result
            if "method" in told:
                self.events.append((told["method"], told["params"]))

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "the browser is silent"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def open(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        done = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, condition: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not self.js(f"(async () => !!(await ({condition})))()"):
            assert time.monotonic() < end, f"it never came to hold: {condition}"
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.command("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}
        code, text = codes[key]
        same = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **same)
        self.command("Input.dispatchKeyEvent", type="keyUp", **same)

    def problems(self) -> list[str]:
        """Errors of scripts, and what the page's policy refused."""
        told = [json.dumps(params) for method, params in self.events if method == "Runtime.exceptionThrown"]
        entries = (params["entry"] for method, params in self.events if method == "Log.entryAdded")
        return told + [entry["text"] for entry in entries if entry["level"] == "error"]

    def addresses(self) -> set[str]:
        """Of all that it asked for."""
        requests = (params["request"] for method, params in self.events if method == "Network.requestWillBeSent")
        return {request["url"] for request in requests}


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """folder: for what it writes."""
    program = find_browser()
    assert program is not None
    to_read, write = os.pipe()
    read, to_write = os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "--lang=en"]
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _AS_3_AND_4, str(to_read), str(to_write), program, *options],
        pass_fds=(to_read, to_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(process, write, read)
    finally:
        process.kill()
        process.wait()
        os.close(write)
        os.close(read)
