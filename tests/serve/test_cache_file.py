"""--cache-file: a server's next start goes on with what the last one computed, and no file of others is harmed."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from echo_engine import Engine
from fake_server import free_port, wait_for
from helpers import random_weights, save_folder, small_config

from llmcl.errors import DeviceError
from llmcl.models.prefix_file import PrefixFileError
from llmcl.runtime.device import Device
from llmcl.serve.cache_file import CacheFile

PROMPT = "The prefix of this prompt is long enough for two pages of sixty-four characters. " * 2


def a_life(invoke: Callable[..., int], options: list[str]) -> dict[str, Any]:
    """Starts `llmcl serve`, asks it once, sends it a signal; what it answered."""
    port = str(free_port())
    answers: list[dict[str, Any]] = []

    def healthy(client: httpx.Client) -> bool:
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask() -> None:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False, trust_env=False) as client:
                wait_for(lambda: healthy(client), 120)
                body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
                answers.append(client.post("/v1/completions", json=body).json())
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert invoke("serve", "--port", port, "-c", "256", "--max-sequences", "1", *options) == 0
    finally:
        thread.join(130)
        signal.signal(signal.SIGTERM, before)
    return answers[0]


def test_the_next_start_finds_the_prompt(
    invoke: Callable[..., int], default_device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_folder(tmp_path / "model", small_config(), random_weights(small_config(), seed=7))
    options = ["-m", str(folder), "--device", str(default_device.entry.index), "--cache-file", str(tmp_path / "cache")]
    first, second = a_life(invoke, options), a_life(invoke, options)
    assert first["choices"] == second["choices"] and first["choices"][0]["text"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached == [0, 128]
    assert "prefix cache: 128 tokens of" in capsys.readouterr().err


class Keeps:
    """Stands in for an engine. fail: what it raises when it is to restore, or to store."""

    def __init__(self, fail: Exception | None = None):
        self.fail = fail
        self.stored: list[tuple[Path, int]] = []

    def restore_prefixes(self, file: Path) -> int:
        if self.fail is not None:
            raise self.fail
        return 0

    def store_prefixes(self, file: Path, max_bytes: int) -> int:
        if self.fail is not None:
            raise self.fail
        self.stored.append((file, max_bytes))
        return 64


@pytest.mark.parametrize("may_replace", [False, True])
def test_a_file_of_something_else_stays(may_replace: bool, caplog: pytest.LogCaptureFixture) -> None:
    refused, path = PrefixFileError("it is a thesis", may_replace=may_replace), Path("f")
    cache_file = CacheFile(path, 5)
    with caplog.at_level(logging.WARNING):
        assert cache_file.restore(Keeps(refused)) == ""
    assert "--cache-file: it is a thesis" in caplog.text
    engine = Keeps()
    cache_file.store(engine)
    assert engine.stored == ([(path, 5)] if may_replace else [])


def test_what_cannot_be_written_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for error in (OSError(28, "No space left on device"), DeviceError("the device is gone")):
        with caplog.at_level(logging.WARNING):
            CacheFile(Path("f"), 5).store(Keeps(error))
    assert "cannot be written (No space left on device); what it held stays" in caplog.text
    assert "not written: the device is gone" in caplog.text


@pytest.mark.parametrize("options", [["--cache-file", path] for path in ("no/such/folder/cache", ".", "/dev/zero")])
def test_where_no_file_can_be_is_said_at_once(
    options: list[str], engine: Engine, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("serve", "-m", "m", *options) == 2
    assert f"--cache-file {options[1]}: no file can be written there" in capsys.readouterr().err
    assert not engine.loaded
