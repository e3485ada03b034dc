"""The command line on a model that a test damages: `fails` gives the message that it ends with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import option_variables, random_weights, save_folder, small_config

from llmcl.cli import main
from llmcl.errors import LlmclError
from llmcl.runtime.device import Device

Failing = Callable[..., str]


@pytest.fixture
def fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, default_device: Device
) -> Iterator[Failing]:
    """fails(error class, model, *options) runs `llmcl generate` and gives the message of the error it ends with."""
    for name in option_variables():
        monkeypatch.delenv(name)

    def run(error: type[LlmclError], model: object, *options: str, prompt: str = "Hello.") -> str:
        device = () if "--device" in options else ("--device", str(default_device.entry.index))
        monkeypatch.setattr(sys, "argv", ["llmcl", "generate", "-m", str(model), "-p", prompt, *device, *options])
        with pytest.raises(SystemExit) as exit:
            main()
        out, errors = capsys.readouterr()
        assert exit.value.code == error.exit_code, errors
        assert out == "" and "Traceback" not in errors
        _, found, message = errors.partition("error: ")
        assert found and "error: " not in message, errors
        assert message.endswith("\n") and message.count("\n") == 1, "a message is one line"
        return message

    yield run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model in one float32 file."""
    config = small_config()
    return save_folder(tmp_path_factory.mktemp("sound") / "model", config, random_weights(config, seed=10))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the sound model, to be damaged."""
    target: Path = shutil.copytree(folder, tmp_path / "model")
    return target
