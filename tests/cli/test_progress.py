"""Progress of what takes a while: the calls that the engine makes, and what the command line draws of them."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_engine import Engine
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.cli import loading
from llmcl.progress import READING, Progress
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_reading_a_prompt_is_reported_and_changes_nothing(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path / "m", small_config(), random_weights(small_config(), seed=8))
    calls: list[tuple[str, int, int]] = []
    with llmcl.load(str(folder), device=device.entry.index, max_context=128) as llm:
        llm.model.chunk = 48
        prompt = np.random.default_rng(0).integers(3, 131, 100).tolist()
        expected = llm.generate(prompt, max_tokens=4).token_ids
        assert llm.generate(prompt, max_tokens=4, progress=lambda *call: calls.append(call)).token_ids == expected
        check_reading(calls, 100)
        logits = llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))
        monkeypatch.setattr(Device, "is_cpu", False)  # then the host is a part ahead, as with a GPU
        calls.clear()
        llm.reset()
        llm.model.prefill(llm.sequence, [*prompt, *expected[:3]], progress=lambda *call: calls.append(call))
        np.testing.assert_allclose(
            llm.device.read(llm.model.act.logits, np.float32, logits.shape), logits, atol=1e-2 * np.abs(logits).max()
        )
        check_reading(calls, 103)


def check_reading(calls: list[tuple[str, int, int]], n: int) -> None:
    done = [call[1] for call in calls]
    assert {(what, total) for what, _, total in calls} == {(READING, n)}
    assert done == sorted(done) and done.count(n) == 1 and done[-1] == n
    assert len({n // 48 for n in done}) == 3, "something is heard of every chunk"


def test_a_callback_that_raises_leaves_a_conversation_as_it_was(default_device: Device, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done >= stop_at:
            raise KeyboardInterrupt

    folder = save_folder(tmp_path / "m", small_config(), random_weights(small_config(), seed=8))
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "repeat_penalty": 1.3, "max_tokens": 6}
    settings: dict[str, Any] = {"max_context": 256, "kv_page_tokens": 64}
    with llmcl.load(str(folder), device=default_device.entry.index, **settings) as llm:
        llm.model.chunk = 48
        for stop_at in (0, 60, 150):  # before a chunk is whole, within the second, after the last
            prompt = np.random.default_rng(stop_at).integers(3, 131, 150).tolist()  # that no page is left of
            llm.reset()
            sequence = llm.model.cache.sequence()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompt, sequence=sequence, progress=stop, **options)
            assert sequence.token_ids == prompt[: stop_at // 48 * 48] or stop_at == 150
            answer = llm.generate(prompt, sequence=sequence, **options)
            llm.model.cache.truncate(sequence, 0)
            assert answer.token_ids == llm.generate(prompt, **options).token_ids


@pytest.mark.parametrize(
    ("seconds", "terminal_type", "options", "shown"),
    [
        (0.0, "xterm", [], True),
        (60.0, "xterm", [], False),
        (0.0, "dumb", [], False),
        (0.0, "xterm", ["-q"], False),
    ],
    ids=str,
)
def test_a_terminal_shows_a_prompt_that_takes_long(
    engine: Engine,
    invoke: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    terminal_type: str,
    options: list[str],
    shown: bool,
) -> None:
    def read() -> None:
        if engine.progress:
            engine.progress(READING, 1536, 4096)
            engine.progress(READING, 4096, 4096)
            at_first_token.append(len(terminal.getvalue()))

    at_first_token: list[int] = []
    engine.before = read
    monkeypatch.setattr(loading, "READING_DELAY_S", seconds)
    monkeypatch.setenv("TERM", terminal_type)
    for command in (["generate", "-p", "one two"], ["chat"]):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one two\n")))
        assert invoke(*command, "-m", "m", *options) == 0
        text = terminal.getvalue()
        assert ("reading the prompt" in text and "1536/4096" in text) == shown
        assert not shown or "/4096" not in text[at_first_token[-1] :], "it is gone before the answer"


def test_lines_of_the_log_stand_above_a_bar(
    engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(model: str, progress: Progress, **settings: object) -> Engine:
        progress("compiling kernels", 1, 2)
        logging.getLogger("llmcl").info("compiled one")
        written.append(terminal.getvalue())
        return engine

    terminal, written = Terminal(), list[str]()
    monkeypatch.setattr(llmcl, "load", load)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert invoke("generate", "-m", "m", "-p", "one", "-v") == 0
    bar, line = written[0].rfind("compiling kernels"), written[0].find("compiled one")
    assert 0 <= line < bar


def test_a_pipe_shows_no_progress(engine: Engine, invoke: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert invoke("generate", "-m", "m", "-p", "one") == 0
    assert engine.progress is None and engine.loaded["progress"] is None
