"""The batch that answers a list of prompts stays with the model, until its memory is needed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.engine import llm as llm_module
from llmcl.engine.kept_batch import BatchSizes
from llmcl.engine.llm import LLM
from llmcl.errors import DeviceError, OutOfDeviceMemoryError, UsageError
from llmcl.models.batch import Batch
from llmcl.runtime.platforms import DeviceEntry

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

OPTIONS: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_folder(tmp_path_factory.mktemp("small"), small_config(), random_weights(small_config(), seed=7)))


@pytest.fixture
def llm(default_entry: DeviceEntry, folder: str) -> Iterator[LLM]:
    with llmcl.load(folder, device=default_entry, max_context=192) as llm:
        yield llm


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Batch]]:
    """All that were made."""
    made: list[weakref.ref[Batch]] = []
    real = llm_module.make_batch

    def make_batch(*arguments: Any, **options: Any) -> Batch:
        batch = real(*arguments, **options)
        made.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(llm_module, "make_batch", make_batch)
    return made


def prompts(n: int, length: int = 5) -> list[list[int]]:
    return np.random.default_rng(n).integers(3, 99, (n, length)).tolist()


def ids(llm: LLM, asked: list[list[int]], **options: Any) -> list[list[int]]:
    return [answer.token_ids for answer in llm.generate(asked, **{**OPTIONS, **options})]


def test_a_second_list_uses_the_batch_of_the_first(llm: LLM, batches: list[weakref.ref[Batch]]) -> None:
    first = ids(llm, prompts(3))
    held = llm.device.allocated_bytes
    assert ids(llm, prompts(3)) == first
    assert ids(llm, prompts(3)[:2]) == first[:2]  # of more places than prompts
    answers: list[list[int]] = [[] for _ in first]
    for i, piece in llm.stream(prompts(3), **OPTIONS):
        answers[i].append(piece.token_id)
    assert answers == first
    with llm.engine(max_sequences=3) as engine:
        assert [answer.token_ids for answer in engine.generate(prompts(3), **OPTIONS)] == first
    assert len(batches) == 1 and llm.device.allocated_bytes == held
    ids(llm, prompts(4))  # more places: the smaller batch goes first
    gc.collect()
    assert len(batches) == 2 and batches[0]() is None


def test_an_answer_knows_nothing_of_the_list_before(llm: LLM) -> None:
    """Neither prefixes, nor penalties, biases and masks of who had the same place."""
    asked = prompts(2, 130)
    plain = ids(llm, asked)
    bias = dict.fromkeys(plain[0], -100.0)
    other = ids(llm, asked, logit_bias=bias, repeat_penalty=1.7, presence_penalty=1.0)
    assert other != plain
    ids(llm, asked, temperature=1.5, seed=3)
    again = llm.generate(asked, **OPTIONS)
    assert [answer.token_ids for answer in again] == plain
    assert [answer.stats.cached_tokens for answer in again] == [0, 0]


def test_other_engines_leave_no_batch(llm: LLM, batches: list[weakref.ref[Batch]]) -> None:
    ids(llm, prompts(2))
    held = llm.device.allocated_bytes
    for options in {"max_sequences": 1}, {"max_sequences": 2, "max_context": 64}, {"kv_pages": 2, "max_sequences": 2}:
        with llm.engine(**options) as engine:
            engine.generate(prompts(1), max_tokens=1)
            assert llm.device.allocated_bytes > held
        del engine
        gc.collect()
        assert llm.device.allocated_bytes == held
    assert len(batches) == 4 and batches[0]() is not None


def test_closing_the_model_gives_the_batch_back(
    default_entry: DeviceEntry, folder: str, batches: list[weakref.ref[Batch]]
) -> None:
    llm = llmcl.load(folder, device=default_entry, max_context=192)
    ids(llm, prompts(2))
    assert batches[0]() is not None
    llm.close()
    gc.collect()
    assert batches[0]() is None
    with pytest.raises(UsageError, match="was closed"):
        ids(llm, prompts(2))


def test_memory_that_is_needed_is_given_back(
    llm: LLM, batches: list[weakref.ref[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = llm.device
    before = device.allocated_bytes
    ids(llm, prompts(2))
    kept = device.allocated_bytes - before
    assert kept > 0
    # The device has room for the model and one batch.
    limited = replace(device.entry, global_mem_bytes=device.allocated_bytes + kept // 2, host_available_bytes=None)
    monkeypatch.setattr(device, "entry", limited)
    with llm.engine(max_sequences=2, max_context=128):
        gc.collect()
        assert batches[0]() is None
    ids(llm, prompts(2))
    first = batches[-1]
    assert first() is not None
    buffer = device.alloc(kept, "another")
    gc.collect()
    assert first() is None
    with pytest.raises(OutOfDeviceMemoryError, match="2 sequences at once would need"):
        ids(llm, prompts(2))
    buffer.release()
    ids(llm, prompts(2))


def test_what_the_driver_refuses_is_asked_for_again(
    llm: LLM, batches: list[weakref.ref[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids(llm, prompts(2))
    real = llm.device._alloc

    def refuses(*arguments: Any) -> Any:
        if batches[0]() is not None:
            raise OutOfDeviceMemoryError("no room")
        return real(*arguments)

    monkeypatch.setattr(llm.device, "_alloc", refuses)
    assert llm.device.alloc(64, "another").nbytes == 64
    ids(llm, prompts(1))
    error = OutOfDeviceMemoryError("no room at all")
    monkeypatch.setattr(llm.device, "_alloc", Mock(side_effect=error))
    with pytest.raises(OutOfDeviceMemoryError, match="no room at all"):
        llm.device.alloc(64, "another")


def test_a_batch_whose_device_failed_is_not_kept(
    llm: LLM, batches: list[weakref.ref[Batch]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise DeviceError("it was reset")

    with monkeypatch.context() as patched:
        patched.setattr(Batch, "step", fails)
        with pytest.raises(DeviceError, match="it was reset"):
            ids(llm, prompts(2))
    ids(llm, prompts(2))
    assert len(batches) == 2


def test_threads_take_turns(llm: LLM, batches: list[weakref.ref[Batch]]) -> None:
    expected = {n: ids(llm, prompts(n)) for n in (4, 2, 3)}
    answers: list[tuple[int, list[list[int]]]] = []

    def ask(n: int) -> None:
        answers.append((n, ids(llm, prompts(n), wait=True)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in (2, 3, 4, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        llm.device.give_back_spares()
    for thread in threads:
        thread.join()
    assert len(answers) == 5 and all(expected[n] == answer for n, answer in answers)


def test_a_batch_serves_where_only_places_differ() -> None:
    sizes = BatchSizes(4, 128, 64, None, invariant=False, max_rows=None)
    assert sizes.serves(sizes) and sizes.serves(replace(sizes, max_sequences=2))
    for other in ({"max_sequences": 5}, {"max_context": 64}, {"n_pages": 3}, {"invariant": True}, {"max_rows": 9}):
        assert not sizes.serves(replace(sizes, **other))  # type: ignore[arg-type]
