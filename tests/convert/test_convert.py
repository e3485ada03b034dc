"""llmcl convert: what is written is what was read, in another form, or nothing is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_reference import assert_read_as_by_gguf
from helpers import LINEAR_SCALING, LLAMA3_SCALING, random_weights, relative_error, save_folder, small_config

import llmcl
from llmcl import convert as convert_module
from llmcl.checkpoint import open_checkpoint
from llmcl.checkpoint.gguf import read_gguf
from llmcl.checkpoint.quantize import quantize_rows
from llmcl.cli import main
from llmcl.convert import convert
from llmcl.convert import target as target_module
from llmcl.convert.tensors import encode
from llmcl.errors import CheckpointError, UnsupportedModelError, UsageError
from llmcl.models.config import ModelConfig
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer, gguf_tokenizer
from llmcl.tokenizer.gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN

TEXT = "The quick brown fox, 1234 times.\n  It's na\u00efve \u4f60\u597d"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# Rows of 256 values suit every format.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "n_q_heads": 4, "n_kv_heads": 2, "head_dim": 64}


def byte_level_metadata() -> dict[str, Any]:
    """Byte-level BPE with a few merges, as GGUF metadata."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["t h", "th e", "\u0120 the", "\u0120 \u0120", "1 2", "i n", "' s", "\u0120 f", "o x"]
    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2),
        "tokenizer.ggml.merges": merges,
    }


def sentencepiece_metadata() -> dict[str, Any]:
    words = ["\u2581t", "he", "\u2581the", "qu", "\u2581f", "ox"]
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,0123456789"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
    }


def model_folder(folder: Path, metadata: dict[str, Any], dtype: str = "float32", **changes: Any) -> Path:
    """A small model with the tokenizer of the metadata and a chat template."""
    config = config_for(metadata, **changes)
    save_folder(folder, config, random_weights(config, seed=5), dtype)
    backend, _ = gguf_tokenizer.build(metadata)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def config_for(metadata: dict[str, Any], **changes: Any) -> ModelConfig:
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {"bos_token_id": tokens.index("<s>"), "eos_token_ids": (tokens.index("</s>"),)}
    return small_config(vocab_size=len(tokens) + 5, **{**SIZES, **ids, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("folder"), byte_level_metadata())


@pytest.fixture(scope="module")
def gguf_file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(str(folder), tmp_path_factory.mktemp("gguf") / "float32.gguf", dtype="float32")


def logits(path: Path, device: Device, **options: Any) -> np.ndarray:
    ids = list(range(3, 40))
    with llmcl.load(str(path), device=device.entry.index, **{"dtype": "float32", **options}) as llm:
        return llm.logits(ids)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- what is written ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0, "tie_embeddings": True},
        {"rope_scaling": LINEAR_SCALING},
    ],
    ids=["plain", "llama3-tied", "linear"],
)
def test_a_folder_becomes_a_gguf_file_with_the_same_logits(
    tmp_path: Path, default_device: Device, changes: dict[str, Any]
) -> None:
    source = model_folder(tmp_path / "folder", byte_level_metadata(), **changes)
    target = convert(str(source), tmp_path / "model.gguf", dtype="float32")
    assert relative_error(logits(target, default_device), logits(source, default_device)) < 1e-5
    with open_checkpoint(str(source)) as before, open_checkpoint(str(target)) as after:
        assert set(before.tensors) == set(after.tensors)
        for name in before.tensors:
            np.testing.assert_array_equal(before.array(name), after.array(name), err_msg=name)


@pytest.mark.parametrize("metadata", [byte_level_metadata(), sentencepiece_metadata()], ids=["bytes", "sentencepiece"])
def test_tokenizer_and_chat_template_survive_both_ways(tmp_path: Path, metadata: dict[str, Any]) -> None:
    source = model_folder(tmp_path / "folder", metadata)
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
        assert other.chat_template == TEMPLATE
        assert other.bos_token_id == tokenizer.bos_token_id and other.eos_token_ids == tokenizer.eos_token_ids


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "q4_k"])
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

    target = convert(str(folder), tmp_path / "copy")
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


# ---- what is refused, and what is left then ----------------------------------------------------------------------


def test_nothing_is_left_of_a_conversion_that_fails(folder: Path, tmp_path: Path) -> None:
    for name in ("model.gguf", "folder"):
        for error in (KeyboardInterrupt, RuntimeError):

            def fail(what: str, done: int, total: int, error: type[BaseException] = error) -> None:
                raise error

            with pytest.raises(error):
                convert(str(folder), tmp_path / name, progress=fail)
            assert left_over(tmp_path) == []


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_a_killed_conversion_leaves_nothing_under_the_name(tmp_path: Path, number: int, left: int) -> None:
    command = [sys.executable, "-m", "llmcl.cli", "convert", "smollm2", str(tmp_path / "model.gguf"), "-q"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    end = time.monotonic() + 60
    while not any(path.stat().st_size > 1 << 20 for path in tmp_path.glob(".model.gguf.*")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) in (128 + number, -number)
    assert not (tmp_path / "model.gguf").exists() and len(left_over(tmp_path)) == left  # SIGKILL leaves .NAME.PID.part


def test_what_exists_is_replaced_only_by_force_and_only_by_the_whole_result(folder: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "model.gguf", tmp_path / "copy"
    file.write_text("precious")
    convert(str(folder), copy)
    old = (copy / "model.safetensors").read_bytes()
    for target in (file, copy):
        with pytest.raises(UsageError, match="exists; give another name, or --force"):
            convert(str(folder), target)

        def fail(what: str, done: int, total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(str(folder), target, force=True, progress=fail)
    assert file.read_text() == "precious" and (copy / "model.safetensors").read_bytes() == old
    convert(str(folder), file, force=True)
    convert(str(folder), copy, force=True, dtype="float16")
    assert read_gguf(file)[0]["general.architecture"] == "llama"
    assert (copy / "model.safetensors").read_bytes() != old
    assert left_over(tmp_path) == ["copy", "model.gguf"]


def test_targets_that_make_no_sense_are_refused(folder: Path, gguf_file: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "letters.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "link.gguf").symlink_to("file")
    for target, options, message in [
        (tmp_path / "none" / "model.gguf", {}, "there is no folder"),
        (Path("/proc/model.gguf"), {}, r"the folder /proc cannot be written \(.+\); write the result elsewhere"),
        (plain, {"force": True}, "is a folder without a model"),
        (tmp_path / "file", {"force": True}, "is a file; --force would not replace it with a folder"),
        (tmp_path / ("x" * 300 + ".gguf"), {}, "File name too long"),
        (tmp_path / "pipe.gguf", {"force": True}, "is neither a file nor a folder"),
        (tmp_path / "link", {"force": True}, "is a link to plain; give the name"),
        (tmp_path / "link.gguf", {"force": True}, "is a link to file; give the name"),
        (Path("~nobody-of-that-name/new"), {}, "no home folder is known for its ~"),
        (tmp_path / "new", {"quantize": "q8_0"}, "a safetensors folder holds no q8_0 blocks"),
        (tmp_path / "new.gguf", {"quantize": "q3_k"}, "expected one of q8_0, q4_0, q4_k"),
        (tmp_path / "new.gguf", {"dtype": "int4"}, "expected one of float32, float16, bfloat16"),
    ]:
        with pytest.raises(UsageError, match=message):
            convert(str(folder), target, **options)  # type: ignore[arg-type]
    for source in (folder, gguf_file):
        with pytest.raises(UsageError, match="is the model that is to be read"):
            convert(str(source), source, force=True)
    assert left_over(tmp_path) == ["file", "link", "link.gguf", "pipe.gguf", "plain"]
    assert (plain / "letters.txt").read_text() == "mine"


def add_notes(folder: Path) -> None:
    (folder / "notes.md").write_text("mine")


def add_hidden(folder: Path) -> None:
    (folder / ".git").mkdir()


def add_link(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(folder.parent / "elsewhere")


def add_shard(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_text("mine")


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (add_notes, "holds notes.md,"),
        (add_hidden, "holds .git,"),
        (add_link, "holds tokenizer.json,"),
        (add_shard, "holds model-00001-of-00002.safetensors,"),
    ],
)
def test_a_folder_that_holds_anything_else_is_not_replaced(
    folder: Path, tmp_path: Path, add: Callable[[Path], None], named: str
) -> None:
    target = convert(str(folder), tmp_path / "copy")
    add(target)
    before = sorted(os.listdir(target))
    with pytest.raises(UsageError, match=f"{named} which this conversion would not write"):
        convert(str(folder), target, force=True)
    assert sorted(os.listdir(target)) == before


def test_a_folder_that_holds_its_source_is_not_replaced(folder: Path, tmp_path: Path) -> None:
    """Neither the file's folder nor the folder's; what lies in the source folder and is no part of it is fine."""
    outer = convert(str(folder), tmp_path / "outer")
    file = convert(str(folder), outer / "model.gguf")
    inner = convert(str(folder), outer / "inner")
    for source in (file, inner):
        with pytest.raises(UsageError, match=r"holds inner, model\.gguf, which"):
            convert(str(source), outer, force=True)
    os.link(file, tmp_path / "same.gguf")
    with pytest.raises(UsageError, match="is the model that is to be read"):
        convert(str(file), tmp_path / "same.gguf", force=True)
    with open_checkpoint(str(inner)), open_checkpoint(str(file)):
        pass


def test_an_empty_folder_is_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(str(folder), tmp_path / "empty", force=True)
    with open_checkpoint(str(tmp_path / "empty")):
        assert left_over(tmp_path) == ["empty"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_folder_that_is_replaced_is_whole_at_any_moment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Where the system cannot let two folders trade places, one killed between two steps leaves the old one beside."""
    copy = convert(str(folder), tmp_path / "copy")
    old = (copy / "model.safetensors").read_bytes()
    if not at_once:
        monkeypatch.setattr(target_module, "_rename", lambda *_: False)
    rename = Path.rename
    seen: list[bytes] = []

    def renamed(source: Path, target: Path) -> Path:
        result = rename(source, target)
        (whole,) = (path for path in tmp_path.iterdir() if (path / "model.safetensors").read_bytes() == old)
        seen.append((whole / "model.safetensors").read_bytes())
        return result

    monkeypatch.setattr(Path, "rename", renamed)
    convert(str(folder), copy, force=True, dtype="float16")
    assert len(seen) == (0 if at_once else 3)
    assert (copy / "model.safetensors").read_bytes() != old and left_over(tmp_path) == ["copy"]


def test_what_a_killed_conversion_left_is_cleared_up_by_the_next(folder: Path, tmp_path: Path) -> None:
    copy = convert(str(folder), tmp_path / "copy")
    weights = (copy / "model.safetensors").read_bytes()
    part, old, other = (tmp_path / f".copy.{name}" for name in ("123.part", "124.old", "x.part"))
    copy.rename(old)  # killed before the new folder got the name
    part.mkdir()
    (part / "config.json").write_text("{")
    other.write_text("mine")
    with pytest.raises(UsageError, match="exists; give another name"):
        convert(str(folder), copy)
    assert (copy / "model.safetensors").read_bytes() == weights
    assert left_over(tmp_path) == [".copy.x.part", "copy"]
    part.mkdir()
    (part / "mine.txt.bak").write_text("mine")
    convert(str(folder), copy, force=True)
    assert left_over(tmp_path) == [".copy.123.part", ".copy.x.part", "copy"] and os.listdir(part) == ["mine.txt.bak"]


def test_another_conversion_to_the_same_name_is_left_alone(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    other = tmp_path / ".model.gguf.1.part"
    begun = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import fcntl; f = open({str(other)!r}, 'w'); fcntl.flock(f, 2); print(1, flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert begun.stdout is not None and begun.stdout.read(1) == b"1"
    convert(str(folder), target)
    assert left_over(tmp_path) == [other.name, target.name]
    begun.communicate(b"\n")
    convert(str(folder), target, force=True)
    assert left_over(tmp_path) == [target.name]


@pytest.mark.parametrize("name", ["model.gguf", "folder", "y" * 250 + ".gguf"])
def test_a_disk_that_fills_up_while_writing_leaves_what_was_there(folder: Path, tmp_path: Path, name: str) -> None:
    """A limit of the file size stands in for the end of the disk: it, too, makes a write fail in the middle."""
    import resource

    target = convert(str(folder), tmp_path / name)
    before = target.stat().st_ino
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            UsageError, match=r"writing stopped \((File too large|\d+ requested and .*)\), and nothing of it is left"
        ):
            convert(str(folder), target, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert left_over(tmp_path) == [name] and target.stat().st_ino == before
    with open_checkpoint(str(target)):
        pass


def test_a_full_disk_is_found_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = convert_module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"needs 0.07 GB, but its disk has 0.00 GB free"):
        convert(str(folder), tmp_path / "model.gguf")
    assert left_over(tmp_path) == []


def test_rows_that_a_format_cannot_hold_are_named(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "folder", byte_level_metadata(), hidden_size=64)
    with pytest.raises(UsageError, match=r"self_attn.q_proj.weight has rows of 64 values, which q4_k cannot hold"):
        convert(str(source), tmp_path / "model.gguf", quantize="q4_k")
    assert left_over(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    ("value", "options"), [(np.nan, {}), (np.inf, {"quantize": "q8_0"}), (1e6, {"dtype": "float16"})]
)
def test_a_weight_that_cannot_be_written_is_named(tmp_path: Path, value: float, options: dict[str, Any]) -> None:
    from safetensors.numpy import load_file, save_file

    source = model_folder(tmp_path / "folder", byte_level_metadata())
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor blk.1.ffn_up.weight: a weight is"):
        convert(str(source), tmp_path / "model.gguf", **options)
    assert left_over(tmp_path) == ["folder"]


def test_what_the_target_cannot_say_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    source = model_folder(tmp_path / "folder", byte_level_metadata(), rope_scaling=LLAMA3_SCALING)
    file = convert(str(source), tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match="rotary scaling as a factor for each frequency"):
        convert(str(file), tmp_path / "new")
    backend = Backend.from_file(str(source / "tokenizer.json"))
    odd = Split("h", "isolated")  # cuts "the" in two
    backend.pre_tokenizer = Sequence([odd, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.save(str(source / "tokenizer.json"))
    with pytest.raises(UnsupportedModelError, match="no pre-tokenizer known here"):
        convert(str(source), tmp_path / "new.gguf")
    assert left_over(tmp_path) == ["folder", "model.gguf"]


# ---- the command ------------------------------------------------------------------------------------------------


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
