"""Models with LoRA adapters against transformers with the sum of weights and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config, transformers_logits, transformers_model
from late_kernels import compile_when_used
from lora_adapters import changed, factors_of, save_peft, save_q8_0
from numpy.typing import NDArray
from parameters import slow_except

import llmcl
from llmcl.checkpoint import open_checkpoint
from llmcl.engine.engine import Engine
from llmcl.engine.llm import LLM
from llmcl.engine.requests import Request
from llmcl.errors import UsageError
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
CONFIG = small_config(n_layers=2)
WEIGHTS = random_weights(CONFIG, 3)
IDS = tuple(int(i) for i in np.random.default_rng(0).integers(3, 131, 40))


A, B = factors_of(CONFIG, seed=1), factors_of(CONFIG, ("q_proj", "down_proj"), rank=6, seed=2)
CHOICES = {"none": {}, "a": {"a": 1.0}, "b": {"b": -0.5}, "both": {"a": 1.0, "b": -0.5}, "only b": {"b": 1.0}}


def weights_with(choice: dict[str, float]) -> dict[str, Any]:
    weights = changed(WEIGHTS, A, 12 / 4 * choice.get("a", 0.0))
    return changed(weights, B, 12 / 6 * choice.get("b", 0.0))


@cache
def expected_logits(name: str, ids: tuple[int, ...]) -> NDArray[np.float32]:
    return transformers_logits(_transformers(name), ids)


@cache
def _transformers(name: str) -> Any:
    return transformers_model(CONFIG, weights_with(CHOICES[name]))


def greedy(name: str, prompt: list[int], n: int) -> list[int]:
    """The answer that transformers gives."""
    ids = [*prompt]
    for _ in range(n):
        ids.append(int(transformers_logits(_transformers(name), ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("base"), CONFIG, WEIGHTS)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [f"a={save_peft(folder / 'a', A)}", f"b={save_peft(folder / 'b', B, r=6)}"]


@pytest.fixture(scope="module")
def llm(device: Device, base: Path, adapters: list[str]) -> Iterator[LLM]:
    with llmcl.load(str(base), device=device) as llm:
        for adapter in adapters:
            llm.load_lora(adapter)
        yield llm


def test_merged_adapters_equal_transformers(device: Device, base: Path, adapters: list[str]) -> None:
    expected = expected_logits("both", IDS)
    assert relative_error(expected_logits("none", IDS), expected) > 0.1
    with llmcl.load(str(base), device=device, lora=[adapters[0], f"{adapters[1]}:-0.5"]) as llm:
        assert relative_error(llm.logits(IDS), expected) < BOUND


@pytest.mark.parametrize("name", slow_except(["none", "a", "both"], "both"))
def test_chosen_adapters_equal_transformers(llm: LLM, name: str) -> None:
    """Prompts are read by one kind of launches, and tokens decoded by another."""
    model, sequence, expected = llm.model, llm.sequence, expected_logits(name, IDS)
    model.cache.adapt(sequence, model.adapters.choice(CHOICES[name]))
    model.cache.truncate(sequence, 0)
    assert relative_error(model.logits(sequence, IDS), expected) < BOUND
    model.cache.truncate(sequence, 0)
    model.prefill(sequence, IDS[:-1])
    assert relative_error(llm.device.read(model.act.logits, np.float32, (131,)), expected[-2]) < BOUND
    model.decode_token(sequence, IDS[-1])
    assert relative_error(llm.device.read(model.act.logits, np.float32, (131,)), expected[-1]) < BOUND


@pytest.mark.slow
def test_conversations_forget_the_text_of_another_adapter(llm: LLM) -> None:
    for name in ("a", "none", "b", "a"):
        answer = llm.generate([*IDS], lora=CHOICES[name], temperature=0, max_tokens=4, ignore_eos=True)
        assert answer.token_ids == greedy(name, [*IDS], 4)


@pytest.fixture(scope="module")
def engine(llm: LLM) -> Iterator[Engine]:
    with llm.engine(max_sequences=4, kv_page_tokens=64, max_step_tokens=16) as engine:
        yield engine


def submit(engine: Engine, name: str, ids: list[int], n: int) -> Request:
    return engine.submit(ids, lora=CHOICES[name], temperature=0, max_tokens=n, ignore_eos=True)


@pytest.mark.slow
def test_a_batch_of_mixed_adapters_equals_transformers(engine: Engine) -> None:
    """Prompts differ in length, so that some are read beside others that decode."""
    asked = [(name, [*IDS[: 5 + 9 * i]]) for i, name in enumerate(["none", "a", "b", "both", "a"])]
    requests = [submit(engine, name, ids, 6) for name, ids in asked]
    assert [request.result().token_ids for request in requests] == [greedy(name, ids, 6) for name, ids in asked]


@pytest.mark.slow
def test_pages_of_one_adapter_serve_no_other(engine: Engine) -> None:
    prompt = [int(i) for i in np.random.default_rng(1).integers(3, 131, 70)]
    names, n_found = ("none", "a", "b", "a", "none"), []
    for name in names:
        request = submit(engine, name, prompt, 4)
        assert request.result().token_ids == greedy(name, prompt, 4)
        n_found.append(request.progress()[0])
    assert n_found == [0, 0, 0, 64, 64]


@pytest.mark.slow
def test_adapters_are_loaded_and_unloaded_between_steps(engine: Engine, adapters: list[str]) -> None:
    """A running answer keeps the adapter that was unloaded."""
    running = submit(engine, "only b", [*IDS], 20)
    next(running)
    engine.unload_lora("b")
    with pytest.raises(UsageError, match=r"there is no adapter 'b'; loaded are a \("):
        submit(engine, "b", [*IDS], 4)
    assert engine.load_lora(adapters[0].replace("a=", "c=", 1)) == "c"
    other = engine.submit([*IDS], lora="c", temperature=0, max_tokens=4, ignore_eos=True).result()
    assert [piece.token_id for piece in running] == greedy("only b", [*IDS], 20)[1:]
    assert other.token_ids == greedy("a", [*IDS], 4)
    engine.load_lora(adapters[1])


@pytest.mark.slow
def test_quantised_weights_stay_and_the_adapter_runs_beside(
    device: Device, tmp_path: Path, adapters: list[str]
) -> None:
    """Both sides have the values of Q8_0; the adapter's numbers are float16."""
    path = save_q8_0(tmp_path / "q8.gguf", CONFIG, WEIGHTS)
    with open_checkpoint(str(path)) as checkpoint:
        rounded = {name: checkpoint.array(name) for name in checkpoint.tensors}
    with llmcl.load(str(path), device=device, activation_dtype="float32", kv_dtype="float32", lora=adapters[0]) as llm:
        expected = transformers_logits(transformers_model(CONFIG, changed(rounded, A)), IDS)
        assert llm.dtype == "q8_0" and relative_error(llm.logits(IDS), expected) < 1e-2
