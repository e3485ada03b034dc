"""The Python interface: load, stream, generate, chat, logits."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import CheckpointError, ContextLengthError, UsageError
from llmcl.progress import COMPILING
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used)

QUESTION = "Why is the sky blue?"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "ignore_eos": True, "max_tokens": 12}


def prefilled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each prefill from now on."""
    counts: list[int] = []
    prefill = llm.model.prefill

    def counted(sequence: Any, token_ids: Any, **options: Any) -> None:
        counts.append(len(token_ids))
        prefill(sequence, token_ids, **options)

    monkeypatch.setattr(llm.model, "prefill", counted)
    return counts


# ---- stream and generate -----------------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_are_the_generated_text(smollm2: LLM) -> None:
    pieces = list(smollm2.stream(QUESTION, max_tokens=20))
    answer = smollm2.generate(QUESTION, max_tokens=20)
    assert smollm2.tokenizer is not None
    assert "".join(piece.text for piece in pieces) == answer.text == smollm2.tokenizer.decode(answer.token_ids)
    assert [piece.token_id for piece in pieces] == answer.token_ids
    assert [piece.finish_reason for piece in pieces] == [None] * 19 + ["length"]
    assert [piece.stats is None for piece in pieces] == [True] * 19 + [False]
    # 0: a token that arrived with the one before
    assert pieces[0].tbt_ms is None and all(piece.tbt_ms is not None and piece.tbt_ms >= 0 for piece in pieces[1:])
    assert sum(piece.tbt_ms or 0 for piece in pieces) > 0
    assert answer.finish_reason == "length"


def test_statistics_agree_with_the_answer(smollm2: LLM) -> None:
    pieces = list(smollm2.stream(QUESTION, max_tokens=8))
    stats = pieces[-1].stats
    assert stats is not None
    assert stats.prompt_tokens == len(smollm2.encode(QUESTION)) and stats.generated_tokens == 8
    times = [piece.tbt_ms for piece in pieces if piece.tbt_ms is not None]
    assert stats.tbt_ms["max"] == pytest.approx(max(times)) and stats.tpot_ms == pytest.approx(np.mean(times))
    assert stats.ttft_ms is not None and stats.ttft_ms > 0
    assert stats.load_ms == smollm2.load_ms > 0
    assert stats.peak_device_bytes == smollm2.device.peak_bytes > smollm2.weight_bytes_per_token


def test_a_prompt_is_text_messages_or_ids(smollm2: LLM) -> None:
    as_text = smollm2.generate(QUESTION, max_tokens=6)
    assert smollm2.generate([{"role": "user", "content": QUESTION}], max_tokens=6).token_ids == as_text.token_ids
    assert smollm2.generate(as_text.prompt_token_ids, max_tokens=6).token_ids == as_text.token_ids
    assert smollm2.generate(np.array(as_text.prompt_token_ids), max_tokens=6).token_ids == as_text.token_ids  # type: ignore[arg-type]
    assert smollm2.tokenizer is not None
    raw = smollm2.encode(QUESTION, raw=True)
    assert raw == smollm2.tokenizer.encode(QUESTION) and raw != as_text.prompt_token_ids
    assert smollm2.generate(QUESTION, raw=True, max_tokens=1).prompt_token_ids == raw
    with_system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    assert smollm2.encode(QUESTION, system_prompt="Be brief.") == smollm2.encode(with_system)


def test_an_end_of_text_token_ends_the_answer_and_is_not_its_text(smollm2: LLM) -> None:
    question = "Answer with one word: what is the capital of France?"
    answer = smollm2.generate(question, max_tokens=200)
    assert smollm2.tokenizer is not None
    assert answer.finish_reason == "stop" and len(answer.token_ids) < 200
    assert answer.token_ids[-1] in smollm2.tokenizer.eos_token_ids
    assert not set(answer.token_ids[:-1]) & smollm2.tokenizer.eos_token_ids
    assert "<|im_end|>" not in answer.text and answer.text == smollm2.tokenizer.decode(answer.token_ids[:-1])
    n = len(answer.token_ids)
    longer = smollm2.generate(question, max_tokens=n + 5, ignore_eos=True)
    assert longer.finish_reason == "length" and len(longer.token_ids) == n + 5
    assert longer.token_ids[:n] == answer.token_ids


@pytest.mark.slow
def test_an_ordinary_token_that_ends_answers_is_not_their_text(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models end with a token that is not marked as special and so has a text."""
    assert small_llm.tokenizer is not None
    whole = small_llm.generate("Hello", max_tokens=40, ignore_eos=True)
    end = next(token for token in whole.token_ids[1:] if small_llm.tokenizer.decode([token]) != "")
    monkeypatch.setattr(small_llm.tokenizer, "eos_token_ids", frozenset({end}))
    answer = small_llm.generate("Hello", max_tokens=40)
    n = whole.token_ids.index(end)
    assert answer.token_ids == whole.token_ids[: n + 1] and answer.finish_reason == "stop"
    assert answer.text == small_llm.tokenizer.decode(whole.token_ids[:n])


def test_a_stop_string_may_be_cut_across_tokens(smollm2: LLM) -> None:
    pieces = list(smollm2.stream(QUESTION, max_tokens=24))
    whole = "".join(piece.text for piece in pieces)
    edge = len("".join(piece.text for piece in pieces[:12]))
    stop = whole[edge - 2 : edge + 2]
    before = whole[: whole.index(stop)]
    shown: list[str] = []
    for piece in smollm2.stream(QUESTION, max_tokens=24, stop=["never said", stop]):
        shown.append(piece.text)
        assert before.startswith("".join(shown)), "text was shown that belongs to the stop string"
    assert "".join(shown) == before
    assert piece.finish_reason == "stop" and piece.stats is not None
    assert smollm2.generate(QUESTION, max_tokens=24, stop=stop).text == before
    # What only looked like the beginning of a stop string is shown at the end.
    assert smollm2.generate(QUESTION, max_tokens=24, stop=whole[-3:] + "\0").text == whole


def test_characters_of_several_tokens_are_shown_whole(smollm2: LLM) -> None:
    pieces = list(smollm2.stream("Repeat: \U0001f600\U0001f680 \u65e5\u672c\u8a9e", max_tokens=40, ignore_eos=True))
    assert all("\ufffd" not in piece.text for piece in pieces[:-1])
    assert smollm2.tokenizer is not None
    assert "".join(piece.text for piece in pieces) == smollm2.tokenizer.decode([piece.token_id for piece in pieces])
    assert any(piece.text == "" for piece in pieces) and any(len(piece.text.encode()) > 2 for piece in pieces)


def test_a_seed_repeats_the_answer(smollm2: LLM) -> None:
    first, again, other = (smollm2.generate(QUESTION, seed=seed, **SAMPLED).token_ids for seed in (11, 11, 12))
    assert first == again != other
    unseeded = [smollm2.generate(QUESTION, **{**SAMPLED, "temperature": 2.0}).token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert smollm2.generate(QUESTION, **{**SAMPLED, "top_k": 1}, seed=5).token_ids == (
        smollm2.generate(QUESTION, max_tokens=12, ignore_eos=True).token_ids
    )


@pytest.mark.slow
def test_the_repetition_penalty_has_an_effect(smollm2: LLM) -> None:
    request: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "raw": True}
    text = "one two one two one two one two one two one"
    plain = smollm2.generate(text, **request).token_ids
    penalised = smollm2.generate(text, repeat_penalty=1.8, **request).token_ids
    assert len(set(plain)) < 20 < len(set(penalised))


def test_closing_a_stream_leaves_no_trace(smollm2: LLM) -> None:
    fresh = smollm2.generate(QUESTION, max_tokens=8).token_ids
    other = smollm2.stream("Tell me a long story.", max_tokens=200)
    for _ in range(3):
        next(other)
    other.close()
    steps = smollm2.model.decode_steps
    assert next(other, None) is None
    assert smollm2.model.decode_steps == steps
    assert smollm2.generate(QUESTION, max_tokens=8).token_ids == fresh


def test_a_second_stream_ends_the_first(smollm2: LLM) -> None:
    alone = smollm2.generate(QUESTION, max_tokens=8).token_ids
    first = smollm2.stream("Tell me a long story.", max_tokens=200)
    next(first)
    second = smollm2.stream(QUESTION, max_tokens=8)
    assert next(first, None) is None
    assert [piece.token_id for piece in second] == alone
    third = smollm2.stream(QUESTION, max_tokens=8)
    next(third)
    smollm2.logits([1, 2, 3])
    assert next(third, None) is None


def test_logits_do_not_disturb_what_follows(smollm2: LLM) -> None:
    logits = smollm2.logits([5, 6, 7])
    assert logits.dtype == np.float32 and logits.shape == (3, smollm2.config.vocab_size)
    assert np.isfinite(logits).all()
    smollm2.generate(QUESTION, max_tokens=3)
    np.testing.assert_array_equal(smollm2.logits([5, 6, 7]), logits)
    np.testing.assert_array_equal(smollm2.logits(np.array([5, 6, 7])), logits)  # type: ignore[arg-type]


def test_a_full_context_ends_the_answer(small_llm: LLM) -> None:
    for n_prompt in (1, 60, 64):
        answer = small_llm.generate([5] * n_prompt, max_tokens=1000, ignore_eos=True)
        # The last token needs no place: nothing follows it.
        assert len(answer.token_ids) == 64 - n_prompt + 1
        assert answer.finish_reason == "length"
        assert len(small_llm.generate([5] * n_prompt, max_tokens=1, ignore_eos=True).token_ids) == 1


def test_a_prompt_longer_than_the_context_is_refused(small_llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"65 tokens, the context 64.*max_context"):
        small_llm.generate([5] * 65)
    with pytest.raises(ContextLengthError, match="context of 64"):
        small_llm.logits([5] * 65)
    assert len(small_llm.generate([5], max_tokens=2, ignore_eos=True).token_ids) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_when_used")  # nothing is computed
def test_a_prompt_of_megabytes_is_refused_before_it_is_encoded(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten megabytes took half a minute, and of a hundred the chat template was blamed."""
    assert smollm2.tokenizer is not None
    text = "word " * 10**6
    monkeypatch.setattr(smollm2.tokenizer, "_backend", None)
    asks = (
        lambda: smollm2.stream(text),
        lambda: smollm2.generate(text, raw=True),
        lambda: smollm2.chat().send(text),
        lambda: smollm2.generate([text, text]),
    )
    for ask in asks:
        with pytest.raises(ContextLengthError, match=r"at least \d{5} tokens, the context \d+; shorten the prompt"):
            ask()
    with pytest.raises(ContextLengthError, match=r"the conversation has 76 MiB, which its chat template cannot make"):
        smollm2.generate("word " * 16 * 10**6)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loaded_model_is_not_copied(copied: Callable[[Any], Any], small_llm: LLM) -> None:
    with pytest.raises(UsageError, match="neither copied nor pickled; share it"):
        copied(small_llm)


def test_a_model_without_a_chat_template_says_so_once(small_llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    small_llm._warned_no_template = False
    with caplog.at_level(logging.WARNING, "llmcl"):
        raw = small_llm.encode("text", raw=True)
        assert not caplog.messages
        assert small_llm.encode("text") == small_llm.encode("text") == raw
    (message,) = caplog.messages
    assert small_llm.model_name in message and "no chat template" in message
    assert "--raw (raw=True)" in message and "--chat-template-file (chat_template)" in message


# ---- chat --------------------------------------------------------------------------------------------------------


def test_a_second_turn_prefills_only_what_is_new(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = prefilled(smollm2, monkeypatch)
    chat = smollm2.chat()
    first = "".join(piece.text for piece in chat.send(QUESTION, max_tokens=16))
    second = list(chat.send("And at sunset?", max_tokens=8))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[1]["content"] == first
    assert counts[0] == len(smollm2.encode(QUESTION))
    whole = smollm2.encode(chat.messages[:3])
    assert counts[1] < len(whole) - counts[0], (counts, len(whole))
    assert counts[1] < 30
    # The cache holds what a fresh prefill of the whole conversation would have put there.
    fresh = smollm2.generate(chat.messages[:3], max_tokens=8)
    assert [piece.token_id for piece in second] == fresh.token_ids
    assert second[-1].stats is not None and second[-1].stats.prompt_tokens == len(whole)


def test_a_later_turn_samples_as_a_fresh_request_does(smollm2: LLM) -> None:
    """The repetition penalty sees the tokens of earlier turns too, which no prefill passes again."""
    sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "repeat_penalty": 1.6, "seed": 21, "max_tokens": 12}
    chat = smollm2.chat()
    list(chat.send("Count from one to ten.", **sampling))
    second = [piece.token_id for piece in chat.send("Again.", **sampling)]
    assert second == smollm2.generate(chat.messages[:3], **sampling).token_ids


def test_a_chat_goes_on_after_an_interruption(smollm2: LLM) -> None:
    chat = smollm2.chat()
    answer = chat.send("Tell me a long story.", max_tokens=100)
    said = "".join(next(answer).text for _ in range(6))
    answer.close()
    assert chat.messages == [
        {"role": "user", "content": "Tell me a long story."},
        {"role": "assistant", "content": said},
    ]
    going_on = [piece.token_id for piece in chat.send("Stop. What is 1 + 1?", max_tokens=8)]
    assert going_on == smollm2.generate(chat.messages[:3], max_tokens=8).token_ids


def test_an_answer_that_a_stop_string_ends_at_once_is_a_turn(smollm2: LLM) -> None:
    chat = smollm2.chat()
    first = next(iter(smollm2.stream("Say hello.", max_tokens=1))).text
    (piece,) = chat.send("Say hello.", max_tokens=8, stop=first)
    assert (piece.text, piece.finish_reason) == ("", "stop")
    assert chat.messages == [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": ""}]
    going_on = [piece.token_id for piece in chat.send("And now?", max_tokens=4)]
    assert going_on == smollm2.generate(chat.messages[:3], max_tokens=4).token_ids


def test_two_conversations_share_the_model(smollm2: LLM) -> None:
    one, other = smollm2.chat(), smollm2.chat()
    for chat, text in ((one, "My name is Ada."), (other, QUESTION)):
        assert list(chat.send(text, max_tokens=6))
    answer = [piece.token_id for piece in one.send("What is my name?", max_tokens=6)]
    assert answer == smollm2.generate(one.messages[:3], max_tokens=6).token_ids


def test_a_turn_is_text(smollm2: LLM) -> None:
    """Anything else reached the chat template, which was blamed."""
    chat = smollm2.chat()
    for wrong in (5, None, b"hi", ["a"], float("nan")):
        with pytest.raises(UsageError, match=r"text is .*; expected a string"):
            chat.send(wrong)  # type: ignore[arg-type]
        if wrong is not None:
            with pytest.raises(UsageError, match=r"system_prompt is .*; expected a string"):
                chat.send("Hello.", system_prompt=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"messages\[0\]: its content is 5, expected a string"):
        smollm2.generate([{"role": "user", "content": 5}])  # type: ignore[list-item]
    assert chat.messages == []
    with pytest.raises(UsageError, match="llm is 5; expected a loaded model"):
        llmcl.Chat(5)  # type: ignore[arg-type]


def test_a_chat_can_be_reset_and_has_a_system_prompt(smollm2: LLM) -> None:
    chat = smollm2.chat()
    first = [piece.token_id for piece in chat.send(QUESTION, max_tokens=6, system_prompt="Be brief.")]
    assert chat.messages[0] == {"role": "system", "content": "Be brief."}
    assert first == smollm2.generate(QUESTION, max_tokens=6, system_prompt="Be brief.").token_ids
    list(chat.send("And at sunset?", max_tokens=6, system_prompt="Be brief."))
    assert [message["role"] for message in chat.messages].count("system") == 1
    chat.reset()
    assert chat.messages == []
    again = [piece.token_id for piece in chat.send(QUESTION, max_tokens=6)]
    assert again == smollm2.generate(QUESTION, max_tokens=6).token_ids


def test_a_turn_that_does_not_fit_leaves_the_conversation_as_it_was(smollm2: LLM) -> None:
    chat = smollm2.chat()
    too_long = "word " * 2000
    with pytest.raises(ContextLengthError):
        chat.send(too_long, system_prompt="Be brief.")
    assert chat.messages == []
    list(chat.send(QUESTION, max_tokens=4))
    before = list(chat.messages)
    with pytest.raises(ContextLengthError):
        chat.send(too_long)
    assert chat.messages == before
    assert list(chat.send("And at sunset?", max_tokens=4))


def test_a_turn_stopped_before_its_first_token_never_happened(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = smollm2.chat()

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2.model, "prefill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(chat.send("Hello.", max_tokens=4))
    assert chat.messages == []
    answer = [piece.token_id for piece in chat.send(QUESTION, max_tokens=6)]
    assert answer == smollm2.generate(QUESTION, max_tokens=6).token_ids


# ---- loading -----------------------------------------------------------------------------------------------------


def test_loading_reports_progress_and_the_defaults(default_device: Device, tmp_path: Path) -> None:
    config = small_config(max_position=8192)
    folder = save_folder(tmp_path / "m", config, random_weights(config, seed=8), "bfloat16")
    seen: list[tuple[str, int, int]] = []
    settings: dict[str, Any] = {"chat_template": "{{ messages[0].content }}!", "progress": lambda *s: seen.append(s)}
    with llmcl.load(str(folder), device=default_device.entry.index, **settings) as llm:
        assert llm.encode("text") == llm.encode("text!", raw=True)
        assert (llm.dtype, llm.kv_dtype, llm.max_context) == ("bfloat16", "float16", 4096)
        assert llm.model_name == str(folder)
        assert llm.device.entry.label == default_device.entry.label
    for steps in ([step for step in seen if (step[0] == COMPILING) == compiling] for compiling in (False, True)):
        done = [step[1] for step in steps]
        assert done == sorted(done) and (not done or done[-1] == steps[-1][2] > 0)
    assert [step[0] for step in seen[:2]] == ["opening the device", "loading weights"]


def test_a_chat_template_of_the_users_is_checked_before_the_weights_are_loaded(
    default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder(tmp_path / "m", small_config(), random_weights(small_config(), seed=8))

    def load_weights(device: Device, checkpoint: Any, types: Any, progress: Any, span: Any) -> None:
        for _ in range(12000):
            progress("loading weights", 0, 1)
            time.sleep(0.005)
        raise AssertionError("loaded whole before the template was looked at")

    monkeypatch.setattr("llmcl.engine.loading.load_weights", load_weights)
    with pytest.raises(CheckpointError, match="not valid Jinja in line 2"):
        llmcl.load(str(folder), device=default_device.entry.index, chat_template="x\n{{ x")


def test_a_context_beyond_the_trained_one_is_warned_of(
    default_device: Device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(max_position=128)
    folder = save_folder(tmp_path / "m", config, random_weights(config, seed=8))
    for max_context, warned in (None, False), (128, False), (129, True):
        caplog.clear()
        llmcl.load(str(folder), device=default_device.entry.index, max_context=max_context).close()
        assert ("context of 129 tokens exceeds the 128 that" in caplog.text) == warned


def test_closing_ends_the_stream(default_device: Device, tmp_path: Path) -> None:
    config = small_config()
    folder = save_folder(tmp_path / "m", config, random_weights(config, seed=9))
    with llmcl.load(str(folder), device=default_device.entry.index) as llm:
        compiled = len(llm.device.programs)
        stream = llm.stream([5, 6], max_tokens=100, ignore_eos=True)
        next(stream)
        assert len(llm.device.programs) == compiled, (
            "a kernel was compiled after loading, in the time to the first token"
        )
        memory = [weakref.ref(part) for part in (llm.model, llm.model.cache, llm.model.weights)]
    assert next(stream, None) is None
    llm.close()
    gc.collect()
    assert [part() for part in memory] == [None, None, None]
    for use in (llm.reset, lambda: llm.generate([5]), lambda: llm.logits([5]), lambda: llm.model):
        with pytest.raises(UsageError, match="was closed"):
            use()
