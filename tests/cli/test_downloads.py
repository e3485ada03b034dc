"""`llmcl list` and `llmcl rm`, on a cache folder as huggingface_hub lays it out, and `llmcl pull` from a hub."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_hub import COMMIT, FakeHub
from huggingface_hub import constants
from safetensors.numpy import save_file

CONFIG = {"model_type": "llama", "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "rms_norm_eps": 1e-5}
CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, files in {
        "many": {"m-Q4_K_M.gguf": 3000, "sub/m-Q8_0.gguf": 5000},
        "split": {f"m-BF16-0000{at}-of-00002.gguf": 700 for at in (1, 2)} | {"n-Q4_0.gguf": 100},
        "plain": {"model.safetensors": 2_000_000, "config.json": 10},
        "half": {"config.json": 10},
    }.items():
        repo = tmp_path / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        (repo / "blobs").mkdir()
        for at, (file, size) in enumerate(files.items()):
            blob, link = repo / "blobs" / f"{at:040}", repo / "snapshots" / COMMIT / file
            blob.write_bytes(b"x" * size)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blob)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def listed(invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, int]]:
    assert invoke("list", "--format", "json") == 0
    return {model["name"]: (model["format"], model["size"]) for model in json.loads(capsys.readouterr().out)}


def test_list_names_what_can_be_run(
    cache: Path, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(invoke, capsys) == {
        "org/many:m-Q4_K_M.gguf": ("GGUF Q4_K_M", 3000),
        "org/many:sub/m-Q8_0.gguf": ("GGUF Q8_0", 5000),
        "org/plain": ("safetensors", 2_000_010),
        "org/split:m-BF16-00001-of-00002.gguf": ("GGUF BF16", 1400),
        "org/split:n-Q4_0.gguf": ("GGUF Q4_0", 100),
    }
    assert invoke("list") == 0
    assert "2.0 MB" in capsys.readouterr().out


def test_list_and_show_name_the_quantisation_of_safetensors(
    cache: Path, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = cache / "models--org--plain" / "snapshots" / COMMIT
    settings = CONFIG | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64}}
    for config, format in ((settings, "safetensors awq"), ({"text_config": settings}, "safetensors awq")):
        (folder / "config.json").write_text(json.dumps(config))
        assert listed(invoke, capsys)["org/plain"][0] == format
    (folder / "config.json").write_text(json.dumps(settings))
    shapes = {"model.embed_tokens": (99, 64), "model.norm": (64,), "lm_head": (99, 64)}
    shapes |= {f"model.layers.0.{name}_layernorm": (64,) for name in ("input", "post_attention")}
    tensors = {f"{name}.weight": np.ones(shape, np.float16) for name, shape in shapes.items()}
    sizes = {"self_attn.q": (64, 64), "self_attn.k": (64, 32), "self_attn.v": (64, 32), "self_attn.o": (64, 64)}
    sizes |= {"mlp.gate": (64, 96), "mlp.up": (64, 96), "mlp.down": (96, 64)}
    for name, (k, n) in sizes.items():
        module, groups = f"model.layers.0.{name}_proj.", k // 32
        tensors[module + "qweight"] = np.zeros((k, n // 8), np.int32)
        tensors[module + "qzeros"] = np.arange(groups * n // 8, dtype=np.int32).reshape(groups, -1)
        tensors[module + "scales"] = np.ones((groups, n), np.float16)
    save_file(tensors, folder / "model.safetensors")
    assert invoke("show", str(folder), "--format", "json") == 0
    described = json.loads(capsys.readouterr().out)
    assert described["quantised by"] == "awq"
    assert described["weights"]["Q5_0"] == sum(k * n for k, n in sizes.values()) * 22 // 32


def test_rm_deletes_what_is_named_and_nothing_else(
    cache: Path, invoke: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("rm", "org/many:m-Q4_K_M.gguf", "--yes") == 0
    assert "1 model deleted, 3 KB free again" in capsys.readouterr().out
    assert "org/many:m-Q4_K_M.gguf" not in listed(invoke, capsys)
    assert len([*(cache / "models--org--many" / "blobs").iterdir()]) == 1
    assert invoke("rm", "https://huggingface.co/org/plain", "--yes") == 0
    assert not (cache / "models--org--plain").exists()
    assert invoke("rm", "org/split:m-BF16-00001-of-00002.gguf", "--yes") == 0  # all of its parts
    capsys.readouterr()
    assert [*listed(invoke, capsys)] == ["org/many:sub/m-Q8_0.gguf", "org/split:n-Q4_0.gguf"]
    assert [file.stat().st_size for file in (cache / "models--org--split" / "blobs").iterdir()] == [100]


def test_rm_asks(
    cache: Path,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert invoke("rm", "org/none") == 2
    assert "org/none is not downloaded; there are: org/many:m-Q4_K_M.gguf" in capsys.readouterr().err
    for terminal, answer, code, left in ((False, "y", 2, 5), (True, "\n", 0, 5), (True, "y\n", 0, 4)):
        stdin = io.StringIO(answer)
        monkeypatch.setattr(stdin, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr(sys, "stdin", stdin)
        assert invoke("rm", "org/plain") == code
        capsys.readouterr()
        assert len(listed(invoke, capsys)) == left


def test_pull_takes_a_folder_a_quantisation_or_a_pasted_address(
    tmp_path: Path,
    invoke: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": bytes(100)}
    parts = {f"Q8_0/m-Q8_0-0000{at}-of-00003.gguf": b"GGUF" + bytes(at) for at in (1, 2, 3)}
    other = {"m-Q4_K_M.gguf": b"GGUF" + bytes(20)}
    hub = FakeHub({"org/plain": plain | {"pytorch_model.bin": b"x"}, "org/many": parts | other})
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    try:
        assert invoke("pull", "https://huggingface.co/org/plain/tree/main") == 0
        assert invoke("pull", "org/many:q8_0") == 0
        assert hub.downloaded() == {*plain, *(Path(part).name for part in parts)}
        assert "org/many:q8_0: 18 bytes in " in capsys.readouterr().out
        assert listed(invoke, capsys) == {
            "org/many:Q8_0/m-Q8_0-00001-of-00003.gguf": ("GGUF Q8_0", 18),
            "org/plain": ("safetensors", sum(map(len, plain.values()))),
        }
        hub.requests.clear()
        assert invoke("pull", "org/many:Q8_0") == 0
        assert hub.downloaded() == set()
        assert invoke("pull", "org/many:Q5_K_M") == 8
        assert "no GGUF file of 'Q5_K_M'; it has: Q8_0, Q4_K_M." in capsys.readouterr().err
    finally:
        hub.stop()
