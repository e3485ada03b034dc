"""Texts in a model with recurrent layers that are cut, forked, shared or preempted: as if computed at once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config
from late_kernels import compile_when_used
from tiers import is_full

import llmcl
from llmcl.architectures.families.family import LayerSettings
from llmcl.architectures.families.recurrent import ShortConvSettings
from llmcl.engine.generation import reusable_prefix
from llmcl.engine.llm import LLM
from llmcl.errors import UnsupportedModelError
from llmcl.models.batch import Batch, make_batch
from llmcl.models.memory import forecast
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.recurrent_states import RecurrentStates, state_slots
from llmcl.models.sequence import SequenceState
from llmcl.models.weights import random_types
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.device import Device

if not is_full():  # the persistent kernels take seconds to compile
    pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

SAME = 2e-5  # two orders of summation, both in float32
PAGE = 64
LFM2 = {
    "model_type": "lfm2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "block_auto_adjust_ff_dim": False,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 2048,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
GREEDY = SamplingParams(seed=0)
QWEN35 = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "max_position_embeddings": 2048,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
GRANITE4 = {
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_local_experts": 0,
    "shared_intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_multiplier": 0.25,
    "vocab_size": 131,
    "max_position_embeddings": 2048,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_state": 32,
}
SHAPES = {"lfm2": LFM2, "qwen3_5": QWEN35, "granite_4": GRANITE4}


def ids(n: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 131, n)]


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5", pytest.param("granite_4", marks=pytest.mark.slow)])
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(SHAPES[request.param]))
    return str(path)


@pytest.fixture(scope="module", params=["contiguous", pytest.param("pages", marks=pytest.mark.slow)])
def llm(request: pytest.FixtureRequest, shape: str, default_device: Device) -> Iterator[LLM]:
    options: dict[str, Any] = {"kv_page_tokens": PAGE, "kv_pages": 40} if request.param == "pages" else {}
    device = default_device.entry.index
    with llmcl.load_random(shape, device=device, dtype="float32", max_context=512, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def paged(shape: str, default_device: Device) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_context": 512, "kv_page_tokens": PAGE, "kv_pages": 60}
    with llmcl.load_random(shape, device=default_device.entry.index, dtype="float32", **options) as llm:
        yield llm


def states(llm: LLM) -> RecurrentStates:
    found = llm.model.cache.states
    assert found is not None
    return found


def last_logits(llm: LLM) -> np.ndarray:
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


def read(llm: LLM, sequence: SequenceState, text: Sequence[int]) -> np.ndarray:
    """Logits after the text, of which the sequence keeps what it can."""
    cache = llm.model.cache
    cache.share_prefix(sequence, text)
    cache.truncate(sequence, reusable_prefix(sequence, text))
    assert sequence.token_ids == list(text[: sequence.position])
    llm.model.prefill(sequence, text[sequence.position :])
    return last_logits(llm)


def expected(llm: LLM, text: Sequence[int]) -> np.ndarray:
    """Of the text in steps of its own, with nothing kept."""
    logits = llm.logits(list(text))[-1]
    llm.clear()
    return logits


def test_a_state_is_copied_to_the_slot_beside_it(device: Device) -> None:
    values = np.arange(96, dtype=np.float32)
    buffer = device.upload(values, "states")
    device.copy_rows(buffer, 0, 128, row_bytes=128, n_rows=1, pitch_bytes=128)
    device.copy_rows(buffer, 128, 256, row_bytes=128, n_rows=1, pitch_bytes=128)
    np.testing.assert_array_equal(device.read(buffer, np.float32, (3, 32)), [values[:32]] * 3)


@pytest.mark.slow
def test_a_text_that_is_cut_goes_back_to_a_snapshot(llm: LLM) -> None:
    text, cache = ids(200, 1), llm.model.cache
    sequence = cache.sequence()
    cache.truncate(sequence, 0)
    llm.model.prefill(sequence, text)
    assert cache.kept(sequence, 200) == 200
    assert cache.kept(sequence, 199) == cache.kept(sequence, 193) == 192 and cache.kept(sequence, 191) == 0
    cache.truncate(sequence, 195)
    assert sequence.position == 192
    other = [*text[:192], *ids(20, 2)]
    assert relative_error(read(llm, sequence, other), expected(llm, other)) < SAME
    cache.truncate(sequence, 10)
    assert sequence.position == 0
    assert relative_error(read(llm, sequence, text[:7]), expected(llm, text[:7])) < SAME


def test_answers_do_not_depend_on_what_was_there_before(llm: LLM) -> None:
    """As a conversation does: a prompt, an answer, the same beginning with another end."""
    sequence = llm.model.cache.sequence()
    prompt = ids(150, 3)
    asked = [prompt, [*prompt, *ids(30, 4)], prompt[:100], [*prompt[:140], *ids(100, 5)], prompt]
    for i, text in enumerate(asked):
        found = llm.generate(text, max_tokens=12, ignore_eos=True, sequence=sequence).token_ids
        asked[i] = [*text, *found]
        assert found == llm.generate(text, max_tokens=12, ignore_eos=True).token_ids, i
    answered = [*asked[-1], *ids(5, 6)]  # goes on where the answer ended
    assert llm.model.cache.kept(sequence, len(asked[-1])) in (0, len(asked[-1]) - 1, len(asked[-1]), 128)
    found = llm.generate(answered, max_tokens=6, ignore_eos=True, sequence=sequence).token_ids
    assert found == llm.generate(answered, max_tokens=6, ignore_eos=True).token_ids


def test_what_an_interrupt_left_is_not_used(llm: LLM) -> None:
    """A step was enqueued whose token nobody noted: the state is ahead of the text."""
    cache, text = llm.model.cache, ids(90, 7)
    sequence = cache.sequence()
    cache.truncate(sequence, 0)
    llm.model.prefill(sequence, text)
    llm.model.decode_token(sequence, 5)
    del sequence.token_ids[-1]
    assert cache.kept(sequence, 90) == 64
    assert relative_error(read(llm, sequence, [*text, 9]), expected(llm, [*text, 9])) < SAME


def test_a_fork_has_a_state_of_its_own(paged: LLM) -> None:
    cache, text = paged.model.cache, ids(100, 8)
    first = cache.sequence()
    cache.own(first)
    read(paged, first, text)
    second = cache.fork(first)
    assert second.position == 100
    ends = [*text, *ids(20, 9)], [*text, *ids(30, 10)]
    found = [read(paged, sequence, end) for sequence, end in zip((first, second), ends, strict=True)]
    for logits, end in zip(found, ends, strict=True):
        assert relative_error(logits, expected(paged, end)) < SAME


def test_texts_that_begin_alike_share_pages_up_to_a_snapshot(paged: LLM) -> None:
    """The first text leaves one before its end, the second shows where texts part, and leaves one there."""
    cache, common = paged.model.cache, ids(150, 11)
    assert isinstance(cache, PagedKVCache)
    texts = [[*common, *ids(100, seed)] for seed in (12, 13, 14)]
    held, kept = [], []
    for text in texts:
        sequence = cache.sequence()
        cache.own(sequence)
        cache.share_prefix(sequence, text)
        kept.append(sequence.position)
        logits = read(paged, sequence, text)
        assert relative_error(logits, expected(paged, text)) < SAME
        held.append(sequence)
    assert kept == [0, 0, 128]


def test_more_conversations_than_states(paged: LLM) -> None:
    """Those that spoke least recently begin anew, snapshots go first; whoever speaks again is right."""
    cache = paged.model.cache
    texts = [ids(70 + i, 20 + i) for i in range(states(paged).n_slots + 3)]
    sequences = [cache.sequence() for _ in texts]
    for _ in range(2):
        for i, sequence in enumerate(sequences):
            texts[i] = [*texts[i], i + 3, 7]
            cache.own(sequence)
            assert relative_error(read(paged, sequence, texts[i]), expected(paged, texts[i])) < SAME
    assert sum(sequence.position > 0 for sequence in sequences) <= states(paged).n_slots


@pytest.fixture(scope="module")
def batch(paged: LLM) -> Batch:
    return make_batch(paged.model, 4, 512, PAGE)


def test_steps_of_several_sequences(paged: LLM, batch: Batch) -> None:
    """They join and leave; one is alone at times, and comes back."""
    prompts = [ids(n, 40 + n) for n in (70, 3, 129)]
    alone = [paged.generate(prompt, max_tokens=14, ignore_eos=True).token_ids for prompt in prompts]
    running: list[tuple[SequenceState, list[int]]] = []

    def decode(*which: int) -> None:
        tokens = batch.decode([running[i][0] for i in which])()
        for i, token in zip(which, tokens, strict=True):
            running[i][0].token_ids.append(running[i][1][-1])
            running[i][1].append(token)

    for prompt in prompts:
        sequence = batch.cache.sequence()
        batch.start(sequence, GREEDY)
        running.append((sequence, batch.read([(sequence, prompt)])()))
        decode(*range(len(running)))
    for which in ((0, 1, 2), (1,), (1,), (2, 0), (0, 1, 2), (2,), (0, 2)):
        decode(*which)
    for (sequence, found), one in zip(running, alone, strict=True):
        assert found == one[: len(found)]
        batch.end(sequence)
        batch.cache.truncate(sequence, 0)


def test_an_engine_with_few_pages_preempts_and_shares(paged: LLM) -> None:
    common = ids(80, 60)
    prompts = [[*common, *ids(20 + i, 61 + i)] for i in range(5)]
    alone = [paged.generate(prompt, max_tokens=60, ignore_eos=True).token_ids for prompt in prompts]
    with paged.engine(max_sequences=3, max_context=256, kv_pages=6, max_step_tokens=48) as engine:
        found = [answer.token_ids for answer in engine.generate(prompts, max_tokens=60, ignore_eos=True)]
        assert engine.n_preempted > 0
    assert found == alone


def test_an_invariant_engine_gives_the_same_ids_in_any_company(paged: LLM) -> None:
    """Snapshots are then taken and found at the ends of cells alone."""
    common = ids(140, 80)
    prompts = [[*common, *ids(20 + 50 * i, 81 + i)] for i in range(3)]
    sizes = {"max_sequences": 3, "max_context": 512, "batch_invariant": True}
    found = []
    for company in (prompts[:1], prompts, prompts[::-1]):
        with paged.engine(**sizes) as engine:
            answers = engine.generate([*company, *company], max_tokens=20, ignore_eos=True)
            found += [answer.token_ids for answer in answers if answer.prompt_token_ids == prompts[0]]
    assert len(found) == 6 and all(answer == found[0] for answer in found)


def test_speculative_decoding_is_refused(default_device: Device, tmp_path: Path) -> None:
    recurrent = small_config(
        "lfm2", settings=[LayerSettings(recurrent=ShortConvSettings()), LayerSettings()], head_dim=16
    )
    folders = {}
    for config in (recurrent, small_config()):
        folder = save_folder(tmp_path / config.architecture, config, random_weights(config, seed=1))
        folders[config.architecture] = str(folder)
    device = default_device.entry.index
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        llmcl.load(folders["lfm2"], device=device, prompt_lookup=True)
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        llmcl.load(folders["llama"], device=device, draft_model=folders["lfm2"])


def test_the_forecast_counts_states(shape: str, default_device: Device) -> None:
    config = random_shape_config(shape)
    types = random_types(config, "float32")
    needed = forecast(config, types, "float32", 512, default_device, 512)
    with llmcl.load_random(shape, device=default_device.entry.index, dtype="float32", max_context=512) as llm:
        assert needed["recurrent states"] == states(llm).nbytes == state_slots(1) * config.state_bytes
        assert needed["KV cache"] == sum(buffer.nbytes for buffer in llm.model.cache.buffers())
    more = forecast(config, types, "float32", 512, default_device, 512, 1)
    assert more["recurrent states"] > needed["recurrent states"]
    assert "recurrent states" not in forecast(small_config(), types, "float32", 512, default_device, 512)


def test_prompts_are_scored(paged: LLM) -> None:
    texts = [ids(150, 1), ids(90, 2)]
    with paged.engine(max_sequences=2, max_context=200) as engine:
        requests = [engine.submit(text, max_tokens=3, ignore_eos=True, prompt_logprobs=1) for text in texts]
        found = [list(request) for request in requests]
        again = [engine.submit(text, max_tokens=3, ignore_eos=True).result().token_ids for text in texts]
    for text, pieces, answer in zip(texts, found, again, strict=True):
        assert [piece.token_id for piece in pieces] == answer
        rows = paged.logits(text).astype(np.float64)
        log_p = rows - np.log(np.sum(np.exp(rows), axis=1, keepdims=True))
        of_prompt = pieces[0].prompt_logprobs
        assert of_prompt is not None
        for logprob, token, row in zip(of_prompt[1:], text[1:], log_p, strict=False):
            assert logprob is not None and logprob.logprob == pytest.approx(row[token], abs=1e-3)


def test_answers_are_scored_after_a_prompt_that_is_read_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is behind its last snapshot."""
    prompt, answers, extend, read = ids(70, 3), [[5, 6], [7], [5, 8, 9]], llm.model.prefill, list[int]()
    monkeypatch.setattr(llm.model, "prefill", lambda sequence, part: (read.append(len(part)), extend(sequence, part)))
    scores = llm.score(prompt, answers)
    assert read == [69, 69 - 64, 69 - 64]
    for answer, score in zip(answers, scores, strict=True):
        rows = llm.logits([*prompt, *answer]).astype(np.float64)[len(prompt) - 1 : -1]
        log_p = rows - np.log(np.sum(np.exp(rows), axis=1, keepdims=True))
        assert score == pytest.approx(sum(log_p[range(len(answer)), answer]), abs=1e-3)
