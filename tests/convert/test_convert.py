"""llmcl convert: what is written is what was read, in another form; what cannot be said in it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_reference import assert_read_as_by_gguf
from helpers import LINEAR_SCALING, LLAMA3_SCALING, relative_error
from late_kernels import compile_when_used
from made_tokenizers import byte_level_gguf, sentencepiece_gguf

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.gguf import read_gguf
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.cli import main
from llmcl.convert import convert
from llmcl.convert.tensors import encode
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

Making = Callable[..., Path]
TEXT = "The quick brown fox, 1234 times.\n  It's na\u00efve \u4f60\u597d"


def logits(path: Path, device: Device, **options: Any) -> np.ndarray:
    ids = list(range(3, 40))
    with llmcl.load(str(path), device=device, **{"dtype": "float32", **options}) as llm:
        return llm.logits(ids)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5, "tie_embeddings": True}, marks=pytest.mark.slow
        ),
        {"rope_scaling": LINEAR_SCALING},
    ],
    ids=["plain", "llama3-tied", "linear"],
)
def test_a_folder_becomes_a_gguf_file_with_the_same_logits(
    tmp_path: Path, make_folder: Making, default_device: Device, changes: dict[str, Any]
) -> None:
    source = make_folder(tmp_path / "folder", **changes)
    target = convert(str(source), tmp_path / "model.gguf", dtype="float32")
    assert relative_error(logits(target, default_device), logits(source, default_device)) < 1e-5
    with open_checkpoint(str(source)) as before, open_checkpoint(str(target)) as after:
        assert set(before.tensors) == set(after.tensors)
        for name in before.tensors:
            np.testing.assert_array_equal(before.array(name), after.array(name), err_msg=name)


def test_a_head_of_its_own_is_kept_though_the_configuration_says_tied(
    make_folder: Making, default_device: Device, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "source")
    expected = logits(source, default_device)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    target = convert(str(source), tmp_path / "target.gguf", dtype="float32")
    assert relative_error(logits(target, default_device), expected) < 1e-5


@pytest.mark.parametrize("metadata", [byte_level_gguf, sentencepiece_gguf])
def test_tokenizer_and_chat_template_survive_both_ways(
    tmp_path: Path, make_folder: Making, metadata: Callable[[], dict[str, Any]]
) -> None:
    source = make_folder(tmp_path / "folder", metadata())
    file = convert(str(source), tmp_path / "model.gguf")
    back = convert(str(file), tmp_path / "back")
    with open_checkpoint(str(source)) as checkpoint:
        tokenizer = Tokenizer.from_checkpoint(checkpoint)
        eos = checkpoint.config.eos_token_ids
    for path in (file, back):
        with open_checkpoint(str(path)) as checkpoint:
            other = Tokenizer.from_checkpoint(checkpoint)
            assert checkpoint.config.eos_token_ids == eos
        for text in (TEXT, "the fox", "", "  a", "</s>b"):
            assert other.encode(text) == tokenizer.encode(text), (path, text)
            assert other.decode(other.encode(text)) == tokenizer.decode(tokenizer.encode(text))
        assert other.chat_template and other.chat_template == tokenizer.chat_template
        assert other.bos_token_id == tokenizer.bos_token_id and other.eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.parametrize(
    "quantize", [pytest.param("q8_0", marks=pytest.mark.slow), pytest.param("q4_0", marks=pytest.mark.slow), "q4_k"]
)
def test_matrices_are_quantised_and_nothing_else_changes(
    gguf_file: Path, tmp_path: Path, default_device: Device, quantize: str
) -> None:
    target = convert(str(gguf_file), tmp_path / "model.gguf", quantize=quantize)
    assert_read_as_by_gguf(target)
    source_metadata, source = read_gguf(gguf_file)
    metadata, stored = read_gguf(target)
    assert list(stored) == list(source)
    for name, tensor in stored.items():
        values = source[name].data.view(np.float32).reshape(source[name].shape)
        embedding = name in ("token_embd.weight", "output.weight")
        expected = "F32" if values.ndim == 1 else "Q8_0" if embedding else quantize.upper()
        assert (tensor.format, tensor.shape) == (expected, source[name].shape), name
        if values.ndim == 2:
            np.testing.assert_array_equal(tensor.data, quantize_rows(values, expected).reshape(-1))
        else:
            np.testing.assert_array_equal(tensor.data, source[name].data)
    changed = {"general.file_type"}
    assert metadata.keys() - changed == source_metadata.keys() - changed
    for key in metadata.keys() - changed:
        np.testing.assert_array_equal(metadata[key], source_metadata[key], err_msg=key)
    # llmcl computes with the values that the blocks stand for
    exact = convert(str(target), tmp_path / "exact.gguf", dtype="float32")
    assert relative_error(logits(target, default_device), logits(exact, default_device)) < 0.02
    assert relative_error(logits(exact, default_device), logits(gguf_file, default_device)) > 1e-4


def test_the_gguf_package_reads_the_same_metadata_types(gguf_file: Path, tmp_path: Path) -> None:
    from gguf import GGUFReader

    again = convert(str(gguf_file), tmp_path / "again.gguf", dtype="float32")
    before, after = GGUFReader(gguf_file).fields, GGUFReader(again).fields
    assert {key: field.types for key, field in before.items()} == {key: field.types for key, field in after.items()}


def test_a_gguf_file_becomes_a_folder_that_transformers_reads(
    gguf_file: Path, tmp_path: Path, default_device: Device
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = convert(str(gguf_file), tmp_path / "folder", dtype="float32")
    ours = logits(target, default_device)
    assert relative_error(ours, logits(gguf_file, default_device)) == 0.0
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.arange(3, 40)[None]).logits[0].numpy()
    assert relative_error(ours, theirs) < 1e-4
    with open_checkpoint(str(gguf_file)) as checkpoint:
        expected = Tokenizer.from_checkpoint(checkpoint).encode(TEXT)
    assert AutoTokenizer.from_pretrained(target)(TEXT)["input_ids"] == expected


def test_a_folder_in_bfloat16_keeps_the_tokenizer_files(folder: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    target = convert(str(folder), tmp_path / "copy", dtype="bfloat16")
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (target / name).read_bytes() == (folder / name).read_bytes()
    before, after = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        expected = tensor.to(torch.bfloat16) if tensor.ndim == 2 else tensor
        assert after[name].dtype == expected.dtype and torch.equal(after[name], expected), name


def test_bfloat16_is_rounded_to_the_nearest_even() -> None:
    import torch

    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    values[0, :4] = [1.00390625, 1.01171875, -0.0, 1e-40]  # ties and a subnormal
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    np.testing.assert_array_equal(encode(values, "BF16").view(np.int16), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_sources_precision_is_kept(folder: Path, tmp_path: Path, dtype: str) -> None:
    source = convert(str(folder), tmp_path / "source", dtype=dtype)
    copy = convert(str(source), tmp_path / "copy")
    assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert json.loads((copy / "config.json").read_text())["dtype"] == dtype
    _, stored = read_gguf(convert(str(source), tmp_path / "model.gguf"))
    formats = {tensor.format for tensor in stored.values() if len(tensor.shape) == 2}
    assert formats == {{"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]}


def test_a_quantised_file_is_copied_as_it_is(gguf_file: Path, tmp_path: Path) -> None:
    source = convert(str(gguf_file), tmp_path / "source.gguf", quantize="q4_0")
    _, before = read_gguf(source)
    _, after = read_gguf(convert(str(source), tmp_path / "copy.gguf"))
    assert {name: tensor.format for name, tensor in before.items()} == {n: t.format for n, t in after.items()}
    for name in before:
        np.testing.assert_array_equal(before[name].data, after[name].data, err_msg=name)


def test_rows_that_a_format_cannot_hold_are_named(tmp_path: Path, make_folder: Making) -> None:
    source = make_folder(tmp_path / "folder", hidden_size=64)
    with pytest.raises(UsageError, match=r"self_attn.q_proj.weight has rows of 64 values, which q4_k cannot hold"):
        convert(str(source), tmp_path / "model.gguf", quantize="q4_k")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("value", "options"), [(np.nan, {}), (np.inf, {"quantize": "q8_0"}), (1e6, {"dtype": "float16"})]
)
def test_a_weight_that_cannot_be_written_is_named(
    tmp_path: Path, make_folder: Making, value: float, options: dict[str, Any]
) -> None:
    from safetensors.numpy import load_file, save_file

    source = make_folder(tmp_path / "folder")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor blk.1.ffn_up.weight: a weight is"):
        convert(str(source), tmp_path / "model.gguf", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_the_target_cannot_say_is_refused(tmp_path: Path, make_folder: Making) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    source = make_folder(tmp_path / "folder", rope_scaling=LLAMA3_SCALING)
    file = convert(str(source), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="rotary scaling as a factor for each frequency"):
        convert(str(file), tmp_path / "new")
    backend = Backend.from_file(str(source / "tokenizer.json"))
    odd = Split("h", "isolated")  # cuts "the" in two
    backend.pre_tokenizer = Sequence([odd, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.save(str(source / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="no pre-tokenizer known here"):
        convert(str(source), tmp_path / "new.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "model.gguf"]


def test_the_command_writes_says_what_and_refuses_to_do_so_twice(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.gguf"
    codes = []
    for options in (["--quantize", "q4_0"], [], ["--force", "-q"], ["--quantize", "q9"]):
        monkeypatch.setattr("sys.argv", ["llmcl", "convert", str(folder), str(target), *options])
        with pytest.raises(SystemExit) as end:
            main()
        codes.append(end.value.code)
    out, err = capsys.readouterr()
    assert codes == [0, 2, 0, 2] and out == ""
    assert f"{target}: " in err and " MB\n" in err and "exists; give another name" in err
    assert "expected one of q8_0, q4_0, q4_k" in err
