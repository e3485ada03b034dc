"""The prefix cache in a file: what is read again is what was computed, and a file that is not sound is not taken."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.architectures.families.family import LayerSettings
from llmcl.architectures.families.recurrent import ShortConvSettings
from llmcl.engine.engine import Engine
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.models.prefix_file import MAGIC, PrefixFileError
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

LIMIT = 1 << 30
PAGE = 64
FIRST, SECOND = ([3 + (i * step) % 90 for i in range(200)] for step in (7, 11))
GREEDY = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_folder(tmp_path_factory.mktemp("small"), small_config(), random_weights(small_config(), seed=7))
    with llmcl.load(str(folder), device=default_device, max_context=384) as llm:
        yield llm


@pytest.fixture(scope="module")
def stored(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A file with three pages of FIRST, and how FIRST is answered."""
    path = tmp_path_factory.mktemp("stored") / "cache"
    with llm.engine(max_sequences=2) as engine:
        answer = engine.submit(FIRST, **GREEDY).result()
        assert answer.stats.cached_tokens == 0
        assert engine.store_prefixes(path, LIMIT) == 3 * PAGE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [*path.parent.iterdir()] == [path]
    return path, answer.token_ids


def cached(engine: Engine, prompt: list[int]) -> int:
    return engine.submit(prompt, **GREEDY).result().stats.cached_tokens


def test_a_second_engine_goes_on_where_the_first_ended(llm: LLM, stored: tuple[Path, list[int]]) -> None:
    path, expected = stored
    with llm.engine(max_sequences=2) as engine:
        assert engine.restore_prefixes(path) == 3 * PAGE
        answer = engine.submit(FIRST, **GREEDY).result()
        assert answer.token_ids == expected and answer.stats.cached_tokens == 3 * PAGE
        assert cached(engine, [*FIRST[:100], 5]) == PAGE and cached(engine, FIRST[1:]) == 0
        assert engine.restore_prefixes(path.with_name("none")) == 0


def test_a_step_later_it_is_stored_again(llm: LLM, stored: tuple[Path, list[int]], tmp_path: Path) -> None:
    """What was restored and what came since; of too much, what was used last."""
    path = tmp_path / "cache"
    with llm.engine(max_sequences=2) as engine:
        engine.restore_prefixes(stored[0])
        cached(engine, SECOND)
        assert engine.store_prefixes(path, LIMIT) == 6 * PAGE
        page_nbytes = (path.stat().st_size - len(MAGIC)) // 6
        assert engine.store_prefixes(tmp_path / "half", 4 * page_nbytes) == 4 * PAGE
        assert (tmp_path / "half").stat().st_size < 5 * page_nbytes
        assert engine.store_prefixes(tmp_path / "nothing", 1) == 0
    for file, found in (path, (192, 192)), (tmp_path / "half", (64, 192)), (tmp_path / "nothing", (0, 0)):
        with llm.engine(max_sequences=2) as engine:
            engine.restore_prefixes(file)
            assert (cached(engine, FIRST), cached(engine, SECOND)) == found
    with llm.engine(max_sequences=1, max_context=256, kv_pages=4) as engine:  # as many as there is room for
        assert engine.restore_prefixes(path) == 4 * PAGE
        answer = engine.submit(SECOND, **GREEDY).result()
    assert answer.stats.cached_tokens == 192 and answer.token_ids == llm.generate(SECOND, **GREEDY).token_ids


def cut(data: bytes) -> bytes:
    return data[:-1]


def longer(data: bytes) -> bytes:
    return data + b"\0"


def other_page(data: bytes) -> bytes:
    return data[: len(MAGIC) + 99] + bytes([data[len(MAGIC) + 99] ^ 1]) + data[len(MAGIC) + 100 :]


def other_index(data: bytes) -> bytes:
    return data[:-60] + bytes([data[-60] ^ 1]) + data[-59:]


def no_end(data: bytes) -> bytes:
    return data[: len(MAGIC)]


def huge_index(data: bytes) -> bytes:
    return data[:-8] + (1 << 62).to_bytes(8, "little")


@pytest.mark.parametrize("damage", [cut, longer, other_page, other_index, no_end, huge_index])
def test_a_damaged_file_is_refused(
    damage: Callable[[bytes], bytes], llm: LLM, stored: tuple[Path, list[int]], tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(damage(stored[0].read_bytes()))
    with llm.engine(max_sequences=2) as engine:
        with pytest.raises(PrefixFileError, match="is damaged") as error:
            engine.restore_prefixes(path)
        assert error.value.may_replace and cached(engine, FIRST) == 0


def test_files_of_others_are_refused_and_stay(llm: LLM, stored: tuple[Path, list[int]], tmp_path: Path) -> None:
    (tmp_path / "thesis").write_bytes(b"Chapter 1")
    with llm.engine(max_sequences=2) as engine:
        for path, said in (tmp_path / "thesis", "is no prefix cache of llmcl"), (tmp_path, "it is no plain file"):
            with pytest.raises(PrefixFileError, match=said) as error:
                engine.restore_prefixes(path)
            assert not error.value.may_replace
    for options, said in (
        ({"kv_page_tokens": 128}, "page tokens is 64 where this one has 128"),
        ({"batch_invariant": True, "max_step_tokens": 257}, "batch invariant is False where this one has True"),
    ):
        with llm.engine(max_sequences=2, **options) as engine:  # type: ignore[arg-type]
            with pytest.raises(PrefixFileError, match=said) as error:
                engine.restore_prefixes(stored[0])
            assert not error.value.may_replace and cached(engine, FIRST) == 0


@pytest.mark.parametrize("owner", ["another user", "this one, but all may write"])
def test_a_file_that_another_user_could_have_written_is_refused_and_stays(
    llm: LLM, stored: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """Its pages would be taken for this user's texts."""
    path = tmp_path / "planted"
    shutil.copyfile(stored[0], path)
    path.chmod(0o600)
    if owner == "another user":
        user = path.stat().st_uid + 1
        monkeypatch.setattr("os.geteuid", lambda: user)
        if user == 1:  # root's files are trusted by all
            os.chown(path, 2, -1)
        said = "belongs to user .* and not to user"
    else:
        path.chmod(0o622)
        said = "others may write to it"
    with llm.engine(max_sequences=2) as engine:
        with pytest.raises(PrefixFileError, match=said) as error:
            engine.restore_prefixes(path)
        assert not error.value.may_replace and cached(engine, FIRST) == 0


def test_an_empty_file_is_filled(llm: LLM, tmp_path: Path) -> None:
    """As mktemp makes it."""
    path = tmp_path / "empty"
    path.touch(0o600)
    with llm.engine(max_sequences=2) as engine:
        assert engine.restore_prefixes(path) == 0
        cached(engine, FIRST)
        assert engine.store_prefixes(path, LIMIT) == 3 * PAGE == engine.restore_prefixes(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(llm: LLM, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with llm.engine(max_sequences=2) as engine, pytest.raises(PrefixFileError, match="no plain file"):
        engine.restore_prefixes(tmp_path / "pipe")


def test_other_weights_are_another_model(
    llm: LLM, stored: tuple[Path, list[int]], default_device: Device, tmp_path: Path
) -> None:
    weights = random_weights(small_config(), seed=7)
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    for folder, options, said in (
        (save_folder(tmp_path, small_config(), weights), {}, "model is another one"),
        (llm.model_name, {"dtype": "float16", "kv_dtype": "float32"}, "model is another one"),
        (llm.model_name, {"kv_dtype": "float16"}, "kv dtype is 'float32' where this one has 'float16'"),
    ):
        with (
            llmcl.load(str(folder), device=default_device, max_context=384, **options) as other,  # type: ignore[arg-type]
            other.engine(max_sequences=1) as engine,
            pytest.raises(PrefixFileError, match=said),
        ):
            engine.restore_prefixes(stored[0])


def test_another_version_is_replaced(llm: LLM, stored: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcl.models.prefix_file.FORMAT", 0)
    with llm.engine(max_sequences=1) as engine:
        with pytest.raises(PrefixFileError, match="of another version of llmcl; it is replaced") as error:
            engine.restore_prefixes(stored[0])
        assert error.value.may_replace


def test_what_cannot_be_written_leaves_the_file(
    llm: LLM, stored: tuple[Path, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    path.write_bytes(before := stored[0].read_bytes())
    with llm.engine(max_sequences=1) as engine:
        cached(engine, SECOND)
        with pytest.raises(FileNotFoundError):
            engine.store_prefixes(tmp_path / "no folder" / "cache", LIMIT)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(OSError, match="No space"):
                engine.store_prefixes(path, LIMIT)
        assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
        assert cached(engine, SECOND) == 192
    with pytest.raises(UsageError, match="was closed"):
        engine.store_prefixes(path, LIMIT)


def test_snapshots_of_recurrent_layers(default_device: Device, tmp_path: Path) -> None:
    """Without them the pages of such a model would be of no use."""
    settings = [LayerSettings(recurrent=ShortConvSettings()), LayerSettings()]
    config = small_config("lfm2", settings=settings, head_dim=16)
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=5))
    path = tmp_path / "cache"
    with llmcl.load(str(folder), device=default_device, max_context=384) as llm:
        with llm.engine(max_sequences=1) as engine:
            expected = engine.submit(FIRST, **GREEDY).result().token_ids
            assert engine.store_prefixes(path, LIMIT) == 3 * PAGE
        with llm.engine(max_sequences=1) as engine:
            engine.restore_prefixes(path)
            answer = engine.submit(FIRST, **GREEDY).result()
            assert answer.token_ids == expected and answer.stats.cached_tokens == 3 * PAGE
            with open(path, "r+b") as file:
                data = file.read()
                at = data.index(b'{"origin"') - 1
                assert json.loads(data[at + 1 : -40])["snapshots"]
                file.seek(at)  # the end of the last snapshot
                file.write(bytes([data[at] ^ 1]))
            with pytest.raises(PrefixFileError, match="is damaged"):
                engine.restore_prefixes(path)
