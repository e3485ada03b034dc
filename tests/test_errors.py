"""What a user can cause or meet, through the command line: each ends with its exit code, one message, no traceback.

Bad option values, no or unknown devices, unknown models and prompts that are too long are in test_cli.py and
test_cli_in_process.py; every kind of damage to a checkpoint file is in checkpoint/.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import ascii_tokenizer, option_variables, random_weights, relative_error, save_folder, small_config

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.cli import main
from llmcl.engine.llm import LLM
from llmcl.errors import (
    CheckpointError,
    ContextLengthError,
    DeviceError,
    HubError,
    KernelBuildError,
    LlmclError,
    OutOfDeviceMemoryError,
    UnsupportedModelError,
    UsageError,
    one_line,
    shown,
)
from llmcl.models.weights import all_plans
from llmcl.ops.attention import prefill_implementation
from llmcl.ops.linear import linear_scratch_bytes
from llmcl.runtime import device as device_module
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer

LAYER_TENSOR = "model.layers.1.mlp.down_proj.weight"
NORM_TENSOR = "model.layers.0.input_layernorm.weight"

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model in one float32 file."""
    config = small_config()
    return save_folder(tmp_path_factory.mktemp("sound") / "model", config, random_weights(config, seed=10))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy of the sound model, to be damaged."""
    target: Path = shutil.copytree(folder, tmp_path / "model")
    return target


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_tensors(folder: Path, **changes: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Rewrites the weights; a change that gives None leaves its tensor out. Names as keywords, dots as __."""
    from safetensors.numpy import load_file, save_file

    tensors: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        name = name.replace("__", ".")
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = np.ascontiguousarray(changed)
    save_file(tensors, folder / "model.safetensors")


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values.flat[values.size // 2] = value
        return values

    return change


def test_the_sound_model_runs(folder: Path, default_device: Device) -> None:
    with llmcl.load(str(folder), device=default_device.entry.index) as llm:
        assert llm.generate("Hello.", max_tokens=3, ignore_eos=True).finish_reason == "length"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("\x1b[31m\u202e\n\ud800", r"'\x1b[31m\u202e\n\ud800'"),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (10**400, "a number of 401 digits"),
        ([10**5000, {"a": ["\n"]}], r"[a number of 5001 digits, {'a': ['\n']}]"),
        (np.zeros(10**6), "ndarray of 1000000 values"),
        ([[["x" * 99] * 9] * 9], "[[['" + "x" * 73 + "..."),
        (None, "None"),
    ],
)
def test_values_in_messages_are_cut_and_escaped(value: object, text: str) -> None:
    assert shown(value) == text


def test_other_programs_messages_are_put_on_one_line() -> None:
    assert one_line(ValueError("a\n\x1b[2Jb")) == r"a\n\x1b[2Jb"
    assert one_line("\x07" * 10**6, 50) == r"\x07" * 11 + r"\x0" + "..."


# ---- files -------------------------------------------------------------------------------------------------------


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
    tokenizer["model"]["merges"] = [["<unk>", "<unk>"]]  # longer than any token: the library panics
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "cannot be read as a tokenizer: range end index" in fails(CheckpointError, copy)


@pytest.mark.parametrize("name", ["a--b/c", "org/" + "n" * 200])
def test_names_that_no_hub_has(name: str, fails: Failing) -> None:
    message = fails(HubError, name, "--offline")
    assert "is no name of a model of a hub" in message and len(message) < 500


def test_ctrl_c_does_not_wait_for_the_tokenizer(
    folder: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = threading.Event()
    monkeypatch.setattr(Tokenizer, "from_checkpoint", lambda checkpoint: done.wait(20))

    def interrupt(what: str, n_done: int, total: int) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        llmcl.load(str(folder), device=default_device.entry.index, progress=interrupt)
    assert time.monotonic() - start < 5
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
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
)
def test_models_that_need_more_than_llmcl_has(
    changes: dict[str, Any], feature: str, copy: Path, fails: Failing
) -> None:
    change_config(copy, **changes)
    message = fails(UnsupportedModelError, copy)
    assert feature in message and str(copy) in message


def test_a_tensor_of_the_wrong_shape_and_one_that_is_missing(copy: Path, fails: Failing) -> None:
    name = LAYER_TENSOR.replace(".", "__")
    change_tensors(copy, **{name: lambda values: values[:, :-16]})
    message = fails(CheckpointError, copy)
    assert LAYER_TENSOR in message and "[64, 80]" in message and "[64, 96]" in message
    change_tensors(copy, **{name: lambda values: None})
    message = fails(CheckpointError, copy)
    assert LAYER_TENSOR in message and "missing" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [LAYER_TENSOR, NORM_TENSOR, "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_named(name: str, value: float, copy: Path, fails: Failing) -> None:
    change_tensors(copy, **{name.replace(".", "__"): with_value(value)})
    message = fails(CheckpointError, copy)
    assert name in message and "NaN or infinite" in message
    others = {LAYER_TENSOR, NORM_TENSOR, "model.embed_tokens.weight"} - {name}
    assert not any(other in message for other in others)


def test_weights_too_large_for_float16_are_named(copy: Path, fails: Failing, default_device: Device) -> None:
    change_tensors(copy, **{LAYER_TENSOR.replace(".", "__"): with_value(-1e5)})
    message = fails(CheckpointError, copy, "--dtype", "float16")
    assert LAYER_TENSOR in message and "--dtype bfloat16 or float32" in message
    with llmcl.load(str(copy), device=default_device.entry.index, dtype="bfloat16") as llm:
        assert np.isfinite(llm.logits([5, 6, 7])).all()


def test_logits_that_are_no_numbers_end_the_answer(copy: Path, fails: Failing) -> None:
    change_tensors(copy, **{LAYER_TENSOR.replace(".", "__"): lambda values: np.full_like(values, 3e38)})
    for options in [], ["--temp", "1", "--top-p", "0.9"]:
        message = fails(DeviceError, copy, *options)
        assert "no token can be chosen: all 131 logits are NaN; " in message and "another --device" in message


def scaled(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: (values * factor).astype(np.float32)


@pytest.mark.parametrize("paged", [(), ("--kv-page-size", "64")])
@pytest.mark.parametrize(("name", "what"), [("k", "keys"), ("v", "values")])
def test_a_cache_whose_numbers_are_too_small_is_named(
    copy: Path, fails: Failing, default_device: Device, paged: tuple[str, ...], name: str, what: str
) -> None:
    change_tensors(copy, **{f"model__layers__1__self_attn__{name}_proj__weight": scaled(1e8)})
    message = fails(DeviceError, copy, "--dtype", "bfloat16", *paged)
    assert f"{what} of layer 1 exceed 65504" in message and "--kv-dtype bfloat16" in message
    with llmcl.load(str(copy), device=default_device.entry.index, dtype="bfloat16", kv_dtype="bfloat16") as llm:
        assert llm.generate([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_squares_that_overflow_are_named(copy: Path, fails: Failing, kv_dtype: str) -> None:
    change_tensors(copy, model__embed_tokens__weight=scaled(1e25))
    message = fails(DeviceError, copy, "--kv-dtype", kv_dtype)
    assert "all 131 logits are NaN" in message and "keys of layer 0 are the first that are no finite" in message
    assert "exceed 1.8e+19" in message


def test_infinite_logits_are_named(copy: Path, fails: Failing) -> None:
    change_tensors(copy, lm_head__weight=scaled(3e38), model__norm__weight=scaled(1e5))
    for options in [], ["--temp", "1", "--top-k", "5"]:
        message = fails(DeviceError, copy, *options)
        assert "of 131 logits are infinite" in message or "logits are NaN" in message
        assert "all keys and values are finite" in message


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_of_zeros_are_named(
    copy: Path, name: str, default_device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    change_tensors(copy, **{name.replace(".", "__"): np.zeros_like})
    with llmcl.load(str(copy), device=default_device.entry.index) as llm:
        assert llm.generate([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids == [0, 0]
    (message,) = caplog.messages
    assert message.startswith(f"{name} holds nothing but zeros")


def test_a_tokenizer_that_belongs_to_another_model(copy: Path, fails: Failing) -> None:
    tokenizer = ascii_tokenizer()
    tokenizer.add_tokens([f"further {i}" for i in range(100)])
    tokenizer.save(str(copy / "tokenizer.json"))
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


# ---- context and memory ------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context(folder: Path, fails: Failing) -> None:
    message = fails(ContextLengthError, folder, "-c", "16", prompt="seventeen letters")
    assert "17 tokens" in message and "16" in message and "--ctx-size" in message


def test_a_context_beyond_the_memory_is_refused_before_loading(
    folder: Path, fails: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*args: Any) -> Any:
        raise AssertionError("the forecast comes before loading")

    monkeypatch.setattr("llmcl.engine.loading.load_weights", load_weights)
    message = fails(OutOfDeviceMemoryError, folder, "--ctx-size", "2000000000")
    # 2 (K and V) * 2 layers * 2 heads * 32 values * 4 bytes for each token
    assert "KV cache 1907.35 GiB" in message and "weights 0.00 GiB" in message and "--ctx-size" in message


@pytest.fixture
def limited(default_device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the device say that it has less than it has."""

    def limit(**changes: Any) -> None:
        entry = dataclasses.replace(default_device.entry, **changes)
        monkeypatch.setattr(device_module, "select_device", lambda request: entry)

    return limit


def test_weights_beyond_the_memory_are_refused_before_loading(
    fails: Failing, limited: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*args: Any) -> Any:
        raise AssertionError("the forecast comes before loading")

    monkeypatch.setattr("llmcl.engine.loading.load_weights", load_weights)
    for limit in ("global_mem_bytes", "host_available_bytes"):
        limited(**{limit: 500_000_000})
        message = fails(OutOfDeviceMemoryError, "smollm2", "--dtype", "float32", "-c", "512")
        assert "weights 0.50 GiB" in message and "has 0.47 GiB" in message and "--dtype" in message


def test_the_forecast_is_what_loading_takes(
    folder: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    forecasts: list[dict[str, int]] = []
    monkeypatch.setattr("llmcl.engine.loading.check_memory", lambda needed, device: forecasts.append(needed))
    variations: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16", "kv_dtype": "float16", "max_context": 100},
        {"max_context": 100, "kv_page_tokens": 128, "kv_pages": 3},
        {"max_context": 100, "kv_dtype": "q8_0"},
        {"max_context": 100, "quantize": "q8_0"},
    ]
    for options in variations:
        with llmcl.load(str(folder), device=default_device.entry.index, **options) as llm:
            needed = forecasts.pop()
            weights, cache = llm.model.weights, llm.model.cache
            n_bytes = weights.decode_bytes() + weights.embedding.nbytes  # the embedding is not tied
            assert needed["weights"] == n_bytes
            assert needed["KV cache"] == sum(buffer.nbytes for buffer in cache.buffers())
            assert llm.device.peak_bytes <= sum(needed.values())
            matrices, chunk = {(llm.dtype, plan.k) for plan in all_plans(llm.config)}, llm.model.chunk
            rounded = linear_scratch_bytes(llm.device, matrices, chunk, exact_activations=False)
            paired = prefill_implementation(llm.device, cache.shape).scratch_bytes(llm.device, cache.shape)
            assert llm.model.step.scratch_bytes == rounded + paired
            if llm.device.is_cpu:
                assert linear_scratch_bytes(llm.device, matrices, chunk, exact_activations=True) == 0


def test_a_cache_beyond_the_largest_allocation_is_named(
    folder: Path, fails: Failing, limited: Callable[..., None]
) -> None:
    limited(max_alloc_bytes=1_000_000)
    message = fails(OutOfDeviceMemoryError, folder, "-c", "4096")
    assert "keys of layer 0" in message and "1,048,576 bytes" in message and "1,000,000 bytes" in message
    assert "--ctx-size" in message and "--kv-dtype" in message


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_beyond_the_largest_allocation_are_split(
    tied: bool, dtype: str, tmp_path: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(vocab_size=1003, hidden_size=128, intermediate_size=288, max_position=64, tie_embeddings=tied)
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=11))
    ids = [5, 997, 6, 1002, 0, 500, 31]
    # Exact activations: room for rounded ones would be larger than these weights. NVIDIA's variants want 16 bits of
    # them, in buffers of 73,728 bytes.
    exact = {"activation_dtype": "float32"}
    options: dict[str, Any] = {"dtype": dtype, "kv_dtype": "float32", "max_context": 8, **exact}

    def use(llm: LLM) -> tuple[np.ndarray, list[int]]:
        return llm.logits(ids), llm.generate(ids[:3], max_tokens=6, ignore_eos=True).token_ids

    with llmcl.load(str(folder), device=default_device.entry.index, **options) as llm:
        expected, answer = use(llm)
        largest = max(llm.model.weights.head.nbytes, llm.model.weights.layers[0][1].gate_up.nbytes)
    limit = 80_000
    assert limit < largest
    # Staging stays far below what any real device allows.
    monkeypatch.setattr("llmcl.kernels.common.weight.STAGING_BYTES", 10_000)
    entry = dataclasses.replace(default_device.entry, max_alloc_bytes=limit)
    with llmcl.load(str(folder), device=entry, **options) as llm:  # type: ignore[arg-type]
        weights = llm.model.weights
        for weight in (weights.head, weights.embedding, weights.layers[1][1].gate_up, weights.layers[1][0].qkv):
            assert len(weight.parts) > 1 or weight.nbytes <= limit
            assert all(part.buffer.nbytes <= limit for part in weight.parts)
        assert len(weights.head.parts) > 2 and len(weights.layers[1][1].gate_up.parts) > 1
        logits, split_answer = use(llm)
    assert relative_error(logits, expected) <= 1e-6
    assert split_answer == answer


# ---- the hub -----------------------------------------------------------------------------------------------------


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens; held, so that nobody else can."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_an_unreachable_hub(closed_port: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LLMCL_", "HF_"))}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port}", "HF_HOME": str(tmp_path)}
    for options in ((), ("--offline",)):
        done = subprocess.run(
            [sys.executable, "-m", "llmcl.cli", "generate", "-m", "org/model", "-p", "x", *options],
            capture_output=True,
            text=True,
            env=environment,
            cwd=Path(__file__).resolve().parent.parent,
            timeout=120,
        )
        assert (done.returncode, done.stdout) == (HubError.exit_code, ""), done.stderr
        assert "org/model" in done.stderr and "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_errors_have_codes_of_their_own() -> None:
    classes = [
        UsageError,
        DeviceError,
        OutOfDeviceMemoryError,
        KernelBuildError,
        CheckpointError,
        UnsupportedModelError,
        HubError,
        ContextLengthError,
    ]
    assert len({error.exit_code for error in classes} | {0, 1}) == len(classes) + 2
