"""Files that are damaged, hostile or of another model, and hubs that are out of reach.

Each ends with its exit code, one message and no traceback. Bad option values, no or unknown devices and unknown models
are in cli/; every kind of damage to a checkpoint file is in checkpoint/.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ascii_tokenizer
from programs import ROOT

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.errors import CheckpointError, HubError, UnsupportedModelError
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer

Failing = Callable[..., str]


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_the_sound_model_runs(folder: Path, default_device: Device) -> None:
    with llmcl.load(str(folder), device=default_device.entry.index) as llm:
        assert llm.generate("Hello.", max_tokens=3, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize("n_bytes", [0, 5, 100, -1])
def test_truncated_safetensors(n_bytes: int, copy: Path, fails: Failing) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:n_bytes])
    message = fails(CheckpointError, copy)
    assert str(copy) in message and "model.safetensors" in message and "fetch it again" in message.lower()


def test_hostile_safetensors(copy: Path, fails: Failing) -> None:
    file = copy / "model.safetensors"
    for header in (
        b'{"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 18446744073709551615]}}',
        b'{"model.norm.weight": {"dtype": "F32", "shape": [4611686018427387905], "data_offsets": [0, 4]}}',
        b'{"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [-256, 0]}}',
        b"[" * 100_000,
    ):
        file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(1024))
        assert "model.safetensors" in fails(CheckpointError, copy)
    file.write_bytes(struct.pack("<Q", 1 << 63) + bytes(100))
    assert str(1 << 63) in fails(CheckpointError, copy)


def test_a_file_that_shrinks_while_it_is_loaded(copy: Path, default_device: Device) -> None:
    """To read on in its mapping would end the process."""

    def progress(what: str, done: int, total: int) -> None:
        if what == "loading weights":
            os.truncate(copy / "model.safetensors", 4096)

    with pytest.raises(CheckpointError, match=r"the file had \d+ bytes when it was opened and has 4096 now"):
        llmcl.load(str(copy), device=default_device.entry.index, progress=progress)


def test_values_of_another_type_in_the_tokenizer(copy: Path, fails: Failing) -> None:
    """All of them are in checkpoint/test_hostile_values.py."""
    (copy / "tokenizer_config.json").write_text('{"chat_template": [{"name": {}, "template": "x"}]}')
    assert "the name of a chat_template is {}, expected a string" in fails(CheckpointError, copy)
    (copy / "tokenizer_config.json").unlink()
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [["<unk>", "<unk>"]]  # longer than any token: the library would panic
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "its merges have '<unk>' and '<unk>', which make no token" in fails(CheckpointError, copy)


@pytest.mark.parametrize("name", ["a--b/c", "org/" + "n" * 200])
def test_names_that_no_hub_has(name: str, fails: Failing) -> None:
    message = fails(HubError, name, "--offline")
    assert "is no name of a model of a hub" in message and len(message) < 500


def test_ctrl_c_does_not_wait_for_the_tokenizer(
    folder: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(Tokenizer, "from_checkpoint", lambda checkpoint: done.wait(120))

    def interrupt(what: str, n_done: int, total: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llmcl.load(str(folder), device=default_device.entry.index, progress=interrupt)
    assert time.monotonic() - start < 60
    assert not any(thread.name == "tokenizer" and not thread.daemon for thread in threading.enumerate())
    done.set()


def test_an_index_that_names_a_file_elsewhere(copy: Path, fails: Failing) -> None:
    (copy / "model.safetensors").rename(copy.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "../outside.safetensors" in fails(CheckpointError, copy)


def test_truncated_gguf(tmp_path: Path, fails: Failing) -> None:
    with open_checkpoint("smollm2") as demo, demo.path.open("rb") as whole:
        start = whole.read(3_000_000)
    file = tmp_path / "model.gguf"
    for n_bytes in (0, 3, 20, 1000, len(start)):
        file.write_bytes(start[:n_bytes])
        message = fails(CheckpointError, file)
        assert str(file) in message


def test_hostile_gguf(tmp_path: Path, fails: Failing) -> None:
    file = tmp_path / "model.gguf"
    for header in (
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0),  # tensors
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60),  # metadata
        struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 62),  # the length of a key
        b"GGML" + bytes(100),
    ):
        file.write_bytes(header + bytes(64))
        assert str(file) in fails(CheckpointError, file)
    file.write_bytes(struct.pack("<4sIQQ", b"GGUF", 99, 0, 0) + bytes(64))
    assert "version 99" in fails(UnsupportedModelError, file)


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"num_experts": 8}, "num_experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "su"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
)
def test_models_that_need_more_than_llmcl_has(
    changes: dict[str, Any], feature: str, copy: Path, fails: Failing
) -> None:
    change_config(copy, **changes)
    message = fails(UnsupportedModelError, copy)
    assert feature in message and str(copy) in message


def test_a_tokenizer_that_belongs_to_another_model(copy: Path, fails: Failing) -> None:
    content = json.loads(ascii_tokenizer().to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"further {i}": len(vocabulary) + i for i in range(100)}
    (copy / "tokenizer.json").write_text(json.dumps(content))
    message = fails(CheckpointError, copy)
    assert "199 tokens" in message and "131 embeddings" in message
    (copy / "tokenizer.json").write_text("{")
    assert "tokenizer.json" in fails(CheckpointError, copy)
    (copy / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in fails(CheckpointError, copy)


def test_a_tokenizer_with_an_id_beyond_the_embeddings(copy: Path, fails: Failing) -> None:
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["H"] = 5000
    file.write_text(json.dumps(content))
    message = fails(CheckpointError, copy)
    assert "5000" in message and "131" in message


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens; held, so that nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.slow
def test_an_unreachable_hub(closed_port: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LLMCL_", "HF_"))}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HOME": str(tmp_path)}
    for options in ((), ("--offline",)):
        done = subprocess.run(
            [sys.executable, "-m", "llmcl", "generate", "-m", "org/model", "-p", "x", *options],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (HubError.exit_code, ""), done.stderr
        assert "org/model" in done.stderr and "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
