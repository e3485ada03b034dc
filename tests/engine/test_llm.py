"""The Python interface: load, stream, generate, chat, logits, and what they refuse."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config

import llmcl
from llmcl.checkpoint.quantize import check_quantize
from llmcl.convert import convert
from llmcl.engine.generation import AnswerOptions
from llmcl.engine.llm import LLM
from llmcl.errors import CheckpointError, ContextLengthError, UsageError
from llmcl.kernels.common.dtype import check_dtype
from llmcl.ops.attention_sizes import check_kernel_options
from llmcl.progress import COMPILING
from llmcl.runtime.device import Device

QUESTION = "Why is the sky blue?"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def small(default_device: Device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A small model with a tokenizer of characters, without a chat template, and with a context of 64 tokens."""
    config = small_config()
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=7))
    with llmcl.load(str(folder), device=default_device.entry.index, max_context=64) as llm:
        yield llm


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
    assert pieces[0].tbt_ms is None and all(piece.tbt_ms is not None and piece.tbt_ms > 0 for piece in pieces[1:])
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


def test_an_ordinary_token_that_ends_answers_is_not_their_text(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some models end with a token that is not marked as special and so has a text."""
    assert small.tokenizer is not None
    whole = small.generate("Hello", max_tokens=40, ignore_eos=True)
    end = next(token for token in whole.token_ids[1:] if small.tokenizer.decode([token]) != "")
    monkeypatch.setattr(small.tokenizer, "eos_token_ids", frozenset({end}))
    answer = small.generate("Hello", max_tokens=40)
    n = whole.token_ids.index(end)
    assert answer.token_ids == whole.token_ids[: n + 1] and answer.finish_reason == "stop"
    assert answer.text == small.tokenizer.decode(whole.token_ids[:n])


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


@pytest.mark.full
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


def test_a_full_context_ends_the_answer(small: LLM) -> None:
    for n_prompt in (1, 60, 64):
        answer = small.generate([5] * n_prompt, max_tokens=1000, ignore_eos=True)
        # The last token needs no place: nothing follows it.
        assert len(answer.token_ids) == 64 - n_prompt + 1
        assert answer.finish_reason == "length"
        assert len(small.generate([5] * n_prompt, max_tokens=1, ignore_eos=True).token_ids) == 1


def test_a_prompt_longer_than_the_context_is_refused(small: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"65 tokens, the context 64.*max_context"):
        small.generate([5] * 65)
    with pytest.raises(ContextLengthError, match="context of 64"):
        small.logits([5] * 65)
    assert len(small.generate([5], max_tokens=2, ignore_eos=True).token_ids) == 2


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repeat_penalty": 0.0}, "repeat_penalty is 0.0"),
        ({"temperature": 1e-50}, r"temperature is 1e-50; expected 0 \(the most likely token\), or 1e-30 to 1e\+30"),
        ({"temperature": 1e38}, r"temperature is 1e\+38"),
        ({"temperature": 10**400}, "temperature is a number of 401 digits"),
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"min_p": 1e-50}, r"min_p is 1e-50; expected 0 \(off\), or 1e-30 to 1"),
        ({"repeat_penalty": 1e-50}, r"repeat_penalty is 1e-50; expected 1e-06 to 1000000.0; 1 is off"),
        ({"presence_penalty": 101}, "presence_penalty is 101; expected -100 to 100; 0 is off"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan; expected a number"),
        ({"repeat_penalty": 1e39}, r"repeat_penalty is 1e\+39"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"seed": 1 << 64}, "seed is"),
        ({"seed": "one"}, "seed is 'one'; expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": b"ab"}, "stop is b'ab'; expected a string"),
        ({"logit_bias": {10**400: 1}}, "token id a number of 401 digits is not in the vocabulary"),
        ({"raw": "no"}, "raw is 'no'; expected True or False"),
        ({"ignore_eos": None}, "ignore_eos is None; expected True or False"),
        ({"wait": 5}, "wait is 5; expected True or False"),
        ({"progress": 5}, "progress is 5; expected a function, or None"),
        ({"begin": 5}, "begin is 5; expected a function, or None"),
        ({"sequence": 5}, "sequence is 5; expected a conversation's place"),
        ({"system_prompt": 5}, "system_prompt is 5; expected a string"),
        ({"system_prompt": "Be brief."}, "no chat template"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(options: dict[str, Any], message: str, small: LLM) -> None:
    before = small.device.traffic.copy()
    with pytest.raises(UsageError, match=message):
        small.stream("text", **options)
    assert small.device.traffic == before


def test_prompts_that_cannot_be_used(small: LLM) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        small.generate([{"role": "user", "content": "text"}])
    with pytest.raises(UsageError, match="no tokens"):
        small.generate([])
    with pytest.raises(UsageError, match="the prompt is None; expected text"):
        small.generate(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the prompt is b'text'; expected text"):
        small.generate(b"text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="token_ids is 'text'; expected token ids"):
        small.logits("text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="token id a number of 401 digits is not in the vocabulary"):
        small.generate([10**400])
    with pytest.raises(UsageError, match="stop string is empty"):
        small.generate("text", stop="")
    with pytest.raises(UsageError, match="no chat template"):
        small.chat()


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", None, float("nan"), 10**400, 1 << 61, b"1"])
def test_what_is_no_number_of_tokens_to_measure_with_is_refused(wrong: Any, small: LLM) -> None:
    for measure in small.bench_prefill, small.bench_decode, lambda n: small.bench_decode(1, n):
        with pytest.raises(
            (UsageError, ContextLengthError), match=r"(n_tokens|depth) is .*; expected|exceed the context"
        ):
            measure(wrong)
    with pytest.raises(UsageError, match="n_tokens is 0; expected a whole number, 1 or more"):
        small.bench_prefill(0)
    assert small.bench_prefill(np.int64(2)) > 0 and len(small.bench_decode(np.int64(2), np.int64(0))) == 2


def test_an_engine_takes_flags_and_functions_alone(small: LLM) -> None:
    for options, message in (
        ({"batch_invariant": "no"}, "batch_invariant is 'no'; expected True or False"),
        ({"progress": 5}, "progress is 5; expected a function, or None"),
    ):
        with pytest.raises(UsageError, match=message):
            small.engine(**options)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numpys_numbers_are_numbers(kind: type) -> None:
    """A range of 1e30 has no place in a float16."""
    options = AnswerOptions(temperature=kind(0.5), repeat_penalty=kind(1.5), top_k=np.int64(3), seed=np.uint8(1))
    assert (options.sampling.temperature, options.sampling.repeat_penalty) == (0.5, 1.5)


@pytest.mark.parametrize(
    "prompt",
    [5, {"role": "user"}, {1, 2}, iter([1, 2]), iter([{"role": "user", "content": "a"}]), np.array(5), np.eye(2)],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_is_a_text_or_a_list(prompt: Any) -> None:
    """The messages of an iterator were lost; with a system prompt the model was asked that alone."""
    cache = SimpleNamespace(max_context=9, sequence=lambda: None)
    llm = LLM("m", SimpleNamespace(config=None, device=None, cache=cache), "float32", "float32")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the prompt is .*expected text"):
        llm.encode(prompt, system_prompt="Be brief.")
    for work in llm.logits, llm.logprobs:
        with pytest.raises(UsageError, match=r"token_ids is .*; expected token ids"):
            work(prompt)


@pytest.mark.parametrize("name", ["seed", "top_k", "repeat_penalty", "temperature"])
def test_a_refused_number_of_any_length_is_cut(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is a number of 5001 digits; expected") as raised:
        AnswerOptions(**{name: -(10**5000)})
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize("wrong", [5, ["x"], {}])
def test_types_that_no_option_has_are_refused(wrong: Any) -> None:
    for check in check_quantize, lambda given: check_dtype(given, "dtype"):
        with pytest.raises(UsageError, match=r"is .*; expected|has 5; expected"):
            check(wrong)
    with pytest.raises(UsageError, match=r"is .*; expected|has 5; expected"):
        check_kernel_options({5: wrong})


def test_what_a_caller_does_with_his_options_later_changes_nothing() -> None:
    """A bias for a token that the model lacks failed in the step, and so for all requests."""
    bias, stops = {3: 1.0}, ["ab", "cd"]
    options = AnswerOptions(logit_bias=bias, stop=stops)
    bias[10**9], stops[0] = 1.0, ""
    assert options.sampling.logit_bias == options.logit_bias == {3: 1.0} and options.stop == ("ab", "cd")
    assert AnswerOptions(stop=iter(["ab"])).stop == ("ab",)  # type: ignore[arg-type]


def test_a_model_without_a_chat_template_says_so_once(small: LLM, caplog: pytest.LogCaptureFixture) -> None:
    small._warned_no_template = False
    with caplog.at_level(logging.WARNING, "llmcl"):
        raw = small.encode("text", raw=True)
        assert not caplog.messages
        assert small.encode("text") == small.encode("text") == raw
    (message,) = caplog.messages
    assert small.model_name in message and "no chat template" in message
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

    def load_weights(device: Device, checkpoint: Any, types: Any, progress: Any) -> None:
        for _ in range(2000):
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype.*int3"),
        ({"kv_dtype": "int3"}, "kv_dtype.*int3"),
        ({"max_context": 0}, "max_context is 0; expected a whole number, 1 or more"),
        ({"max_context": "100"}, "max_context is '100'"),
        ({"max_context": 100.5}, "max_context is 100.5"),
        ({"kv_page_tokens": "64"}, "kv_page_tokens is '64'"),
        ({"kv_page_tokens": 64, "kv_pages": 1.5}, "kv_pages is 1.5"),
        ({"kv_dtype": 10**5000}, "kv_dtype is a number of 5001 digits"),
        ({"activation_dtype": 10**5000}, "activation_dtype is a number of 5001 digits"),
        ({"offline": "no"}, "offline is 'no'; expected True or False"),
        ({"prompt_lookup": 5}, "prompt_lookup is 5; expected True or False"),
        ({"progress": 5}, "progress is 5; expected a function, or None"),
        ({"draft_model": 5}, "model is 5; expected smollm2"),
        ({"kernel_options": 5}, "kernel_options is 5; expected a dict of BLOCK_M"),
        ({"chat_template": 5}, "chat_template is 5; expected the text"),
        ({"dtype": "q4_0"}, "only random weights.*--quantize"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str, default_device: Device) -> None:
    with pytest.raises(UsageError, match=message):
        llmcl.load("smollm2", device=default_device.entry.index, **options)


@pytest.mark.parametrize("model", [None, 5, "", b"smollm2"])
def test_what_is_no_name_of_a_model_is_refused(model: Any, tmp_path: Path) -> None:
    for use in llmcl.load, lambda model: convert(model, tmp_path / "m.gguf"):
        with pytest.raises(UsageError, match=f"model is {model!r}; expected smollm2, a path"):
            use(model)


def test_a_name_may_be_a_path() -> None:
    with pytest.raises(CheckpointError, match="no/such/model: there is no such file or folder"):
        llmcl.load(Path("no/such/model"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (5, {}, "shape is 5; expected the name of a shape"),
        (["a"], {}, r"shape is \['a'\]; expected"),
        ("\ud800", {}, r"random shape '\\ud800' is neither one of .*config.json"),
        ("smollm2-135m", {"dtype": []}, r"dtype is \[\]; expected"),
        ("smollm2-135m", {"seed": "1"}, "seed is '1'; expected a whole number, 0 or more"),
        ("smollm2-135m", {"progress": 5}, "progress is 5; expected a function"),
    ],
)
def test_bad_settings_of_random_weights_are_refused(shape: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        llmcl.load_random(shape, **options)
    assert str(raised.value).isprintable()


def test_closing_ends_the_stream(default_device: Device, tmp_path: Path) -> None:
    config = small_config()
    folder = save_folder(tmp_path / "m", config, random_weights(config, seed=9))
    with llmcl.load(str(folder), device=default_device.entry.index) as llm:
        compiled = len(llm.device._programs)
        stream = llm.stream([5, 6], max_tokens=100, ignore_eos=True)
        next(stream)
        assert len(llm.device._programs) == compiled, (
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
