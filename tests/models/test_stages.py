"""One model's layers on several devices, against the same model on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import found_devices
from family_configs import FAMILIES, ids_for
from helpers import random_weights, relative_error, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import DeviceError, UnsupportedModelError, UsageError
from llmcl.models.stages import StagedModel
from llmcl.runtime.device import Device, Launch
from llmcl.runtime.platforms import DeviceEntry

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)
pytestmark = pytest.mark.usefixtures("separate_launches_in_module")

BOUND = 1e-4
SAMPLED = {"temperature": 0.7, "repeat_penalty": 1.2, "seed": 5}
slow = pytest.mark.slow
CONFIGS = FAMILIES | {
    "llama": small_config(n_layers=3),
    "llama-tied": small_config(n_layers=3, tie_embeddings=True),
}
FIRST = "llama"


@pytest.fixture(scope="module")
def pair(default_entry: DeviceEntry) -> Iterator[list[Device]]:
    """One driver twice, each with a context of its own."""
    devices = [Device.open(default_entry) for _ in range(2)]
    yield devices
    for device in devices:
        device.close()


def another_driver(entry: DeviceEntry) -> DeviceEntry:
    """Another device than this. Where only one is there, the same."""
    return next((other for other in found_devices().values() if other.index != entry.index), entry)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def folder_of(name: str) -> Path:
        config = CONFIGS[name]
        return save_folder(tmp_path_factory.mktemp(name), config, random_weights(config, seed=1))

    return folder_of


def load(folder: Path, devices: Any, **options: Any) -> LLM:
    """Divided by layers if there are several devices."""
    split = {} if isinstance(devices, Device | str) else {"split": "layer"}
    return llmcl.load(str(folder), device=devices, **{"dtype": "float32", "max_context": 128} | split | options)


def decoded(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """The logits after all ids, of which the last three are decoded."""
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.prefill(llm.sequence, ids[:-3], chunk=7)
    for token in ids[-3:]:
        llm.model.decode_token(llm.sequence, token)
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


OTHERS = "llama-tied", "gemma3_text", "qwen3_moe", "lfm2", "deepseek_v3"


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=slow) for name in OTHERS)])
def test_a_divided_model_computes_what_one_device_does(
    name: str, pair: list[Device], folder_of: Callable[[str], Path]
) -> None:
    ids = ids_for(CONFIGS[name])
    with load(folder_of(name), Device.open(pair[0].entry)) as one:
        expected, last = one.logits(ids), decoded(one, ids)
        answer = one.generate(ids[:33], max_tokens=40, ignore_eos=True, temperature=0.0).token_ids
    llm = load(folder_of(name), pair)
    assert isinstance(llm.model, StagedModel)
    assert [*map(len, (stage.layers for stage in llm.model.stages))] != [llm.config.n_layers]
    assert relative_error(llm.logits(ids), expected) < BOUND
    assert relative_error(decoded(llm, ids), last) < BOUND
    assert llm.generate(ids[:33], max_tokens=40, ignore_eos=True, temperature=0.0).token_ids == answer


def test_a_device_that_fails_ends_the_answer_with_an_error(
    pair: list[Device], folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first device fails after three tokens. Without it the model answers again."""
    llm = load(folder_of(FIRST), pair)
    answer = llm.stream([5, 6, 7], max_tokens=20, ignore_eos=True)
    first = [next(answer).token_id for _ in range(3)]

    def fail(launch: Launch, n_tokens: int = 1) -> None:
        raise DeviceError(f"{launch.name}: the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "enqueue", fail)
        with pytest.raises(DeviceError, match="is lost"):
            list(answer)
    assert llm.generate([5, 6, 7], max_tokens=3, ignore_eos=True).token_ids == first


def test_the_report_has_shares_and_what_passes_the_host(pair: list[Device], folder_of: Callable[[str], Path]) -> None:
    with load(folder_of(FIRST), pair) as llm:
        stats = llm.generate([5, 6, 7], max_tokens=20, ignore_eos=True).stats
    assert stats.stage_shares is not None and sum(stats.stage_shares) == pytest.approx(1.0)
    assert all(0.02 < share < 0.98 for share in stats.stage_shares) and "stages    " in stats.report()
    row = 4 * CONFIGS[FIRST].hidden_size
    assert stats.device_to_host_bytes_per_token == pytest.approx(row + 8, rel=0.1)  # the token is read twice
    assert stats.host_to_device_bytes_per_token == pytest.approx(row, rel=0.1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"split": "tensor"}, "'tensor'.*not supported yet"),
        ({"split": "rows"}, "split .*'rows'; expected 'auto' or 'layer'"),
        ({"split_shares": [1, 2, 3]}, "3 shares for 2 devices"),
        ({"split_shares": [1, 0]}, "expected numbers above 0"),
        ({"split_shares": [1, 2], "split": "auto"}, "leave split_shares out"),
        ({"prompt_lookup": True}, "speculative decoding .*one device only"),
    ],
)
def test_a_split_that_cannot_be_is_refused(
    options: dict[str, object], what: str, pair: list[Device], folder_of: Callable[[str], Path]
) -> None:
    with pytest.raises(UsageError, match=what):
        load(folder_of(FIRST), pair, **options)


def test_shares_need_several_devices_and_layers_enough(pair: list[Device], folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(FIRST)
    with pytest.raises(UsageError, match="needs several devices, and there is one"):
        load(folder, pair[0], split_shares=[1])
    with pytest.raises(UsageError, match="needs several devices, and there is one"):
        load(folder, [pair[0]])
    with pytest.raises(UsageError, match="4 devices for 3 layers"):
        load(folder, pair * 2)
    with pytest.raises(DeviceError, match="device 99 was not found"):
        load(folder, [0, 99])
    with pytest.raises(UsageError, match="expected one device or several"):
        load(folder, "0,")


def test_layers_that_share_keys_cannot_be_divided(pair: list[Device], folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="read the keys of earlier layers"):
        load(folder_of("gemma4_text-late"), pair)


@pytest.mark.parametrize("name", [FIRST, pytest.param("lfm2", marks=slow)])
def test_texts_beside_each_other_get_the_tokens_of_one_device(
    name: str, pair: list[Device], folder_of: Callable[[str], Path]
) -> None:
    """Prompts of several lengths, read in chunks while others decode. lfm2 reads them in turn."""
    rng = np.random.default_rng(3)
    prompts = [[int(i) for i in rng.integers(3, CONFIGS[name].vocab_size, n)] for n in (70, 3, 21)]

    def answers(devices: Any) -> list[list[int]]:
        with (
            load(folder_of(name), devices, compile_kernels=False) as llm,
            llm.engine(max_sequences=3, max_step_tokens=32) as engine,
        ):
            return [each.token_ids for each in engine.generate(prompts, max_tokens=24, ignore_eos=True, **SAMPLED)]

    assert answers(pair) == answers(pair[0])


@slow
def test_two_drivers_answer_as_one_device(smollm2: LLM) -> None:
    """Without rounded activations, where drivers differ in the last bits alone."""
    entries = smollm2.device.entry, another_driver(smollm2.device.entry)
    devices = [Device.open(entry) for entry in entries]
    options: dict[str, Any] = {"activation_dtype": "float32", "kv_dtype": "float32", "max_context": 1024}
    asked: dict[str, Any] = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    question = "Explain how rain forms."
    expected = smollm2.generate(question, **asked).token_ids
    with llmcl.load("smollm2", device=devices, split="layer", split_shares=[2, 1], **options) as llm:
        assert [len(stage.layers) for stage in llm.model.stages] == [20, 10]
        assert llm.generate(question, **asked).token_ids == expected


def test_texts_share_and_copy_pages_on_each_device(pair: list[Device], folder_of: Callable[[str], Path]) -> None:
    """The second text shares a page of 64 tokens with the first, and a copy of the begun next page."""
    rng = np.random.default_rng(5)
    first = [int(i) for i in rng.integers(3, CONFIGS[FIRST].vocab_size, 100)]
    second = [*first[:90], 7, 8, 9]
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    with load(folder_of(FIRST), pair, kv_page_tokens=64, kv_pages=6) as llm:
        cache = llm.model.cache
        texts = cache.sequence(), cache.sequence()
        answers = [
            llm.generate(prompt, sequence=text, **options)
            for prompt, text in ((first, texts[0]), (second, texts[1]), (first, texts[0]))
        ]
        assert [each.stats.cached_tokens for each in answers] == [0, 90, 99]
    with load(folder_of(FIRST), pair[0]) as one:
        expected = [one.generate(prompt, **options).token_ids for prompt in (first, second, first)]
    assert [each.token_ids for each in answers] == expected
