"""The Python interface: what load, generate, an engine and options refuse, and with what message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest

import llmcl
from llmcl.checkpoint.quantize import check_quantize
from llmcl.convert import convert
from llmcl.engine.answer_settings import AnswerSettings
from llmcl.engine.generation import ANSWER_OPTIONS, AnswerOptions
from llmcl.engine.llm import LLM
from llmcl.errors import CheckpointError, ContextLengthError, UsageError
from llmcl.kernels.common.dtype import check_dtype
from llmcl.ops.attention_sizes import check_kernel_options
from llmcl.runtime.device import Device
from llmcl.sampling_options import SamplingOptions

# ---- prompts and options -----------------------------------------------------------------------------------------


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
        ({"stop_token_ids": 5}, "stop_token_ids is 5; expected a list of token ids"),
        ({"stop_token_ids": [1, "2"]}, r"stop_token_ids is \[1, '2'\]; expected a list of token ids"),
        ({"min_tokens": -1}, "min_tokens is -1; expected a whole number, 0 or more"),
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
def test_bad_values_are_refused_before_anything_runs(options: dict[str, Any], message: str, small_llm: LLM) -> None:
    before = small_llm.device.traffic.copy()
    with pytest.raises(UsageError, match=message):
        small_llm.stream("text", **options)
    assert small_llm.device.traffic == before


def test_prompts_that_cannot_be_used(small_llm: LLM) -> None:
    with pytest.raises(UsageError, match="no chat template"):
        small_llm.generate([{"role": "user", "content": "text"}])
    with pytest.raises(UsageError, match="no tokens"):
        small_llm.generate([])
    with pytest.raises(UsageError, match="the prompt is None; expected text"):
        small_llm.generate(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the prompt is b'text'; expected text"):
        small_llm.generate(b"text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="token_ids is 'text'; expected token ids"):
        small_llm.logits("text")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="token id a number of 401 digits is not in the vocabulary"):
        small_llm.generate([10**400])
    with pytest.raises(UsageError, match="stop string is empty"):
        small_llm.generate("text", stop="")
    with pytest.raises(UsageError, match="no chat template"):
        small_llm.chat()


@pytest.mark.parametrize("wrong", [-1, 1.5, "3", None, float("nan"), 10**400, 1 << 61, b"1"])
def test_what_is_no_number_of_tokens_to_measure_with_is_refused(wrong: Any, small_llm: LLM) -> None:
    for measure in small_llm.bench_prefill, small_llm.bench_decode, lambda n: small_llm.bench_decode(1, n):
        with pytest.raises(
            (UsageError, ContextLengthError), match=r"(n_tokens|depth) is .*; expected|exceed the context"
        ):
            measure(wrong)
    with pytest.raises(UsageError, match="n_tokens is 0; expected a whole number, 1 or more"):
        small_llm.bench_prefill(0)
    assert small_llm.bench_prefill(np.int64(2)) > 0 and len(small_llm.bench_decode(np.int64(2), np.int64(0))) == 2


def test_an_engine_takes_flags_and_functions_alone(small_llm: LLM) -> None:
    for options, message in (
        ({"batch_invariant": "no"}, "batch_invariant is 'no'; expected True or False"),
        ({"progress": 5}, "progress is 5; expected a function, or None"),
    ):
        with pytest.raises(UsageError, match=message):
            small_llm.engine(**options)  # type: ignore[arg-type]


def test_an_option_that_there_is_not_is_named(small_llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature is no option of an answer; expected some of max_tokens, "):
        small_llm.generate(["text"], temprature=1.0)


def test_type_checkers_know_the_options_of_an_answer() -> None:
    hints = get_type_hints(AnswerSettings)
    assert set(ANSWER_OPTIONS) <= set(hints)
    for name, hint in get_type_hints(SamplingOptions).items():
        assert hints[name] == hint


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numpys_numbers_are_numbers(kind: type) -> None:
    """A range of 1e30 has no place in a float16."""
    options = AnswerOptions(temperature=kind(0.5), repeat_penalty=kind(1.5), top_k=np.int64(3), seed=np.uint8(1))
    assert (options.sampling.temperature, options.sampling.repeat_penalty) == (0.5, 1.5)


@pytest.mark.parametrize(
    "prompt",
    [
        *(5, {"role": "user"}, {1, 2}, iter([1, 2]), iter([{"role": "user", "content": "a"}])),
        *(memoryview(b"text"), np.array(5), np.eye(2)),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_is_a_text_or_a_list(prompt: Any) -> None:
    """The messages of an iterator were lost; with a system prompt the model was asked that alone."""
    cache, device = SimpleNamespace(max_context=9, sequence=lambda: None), SimpleNamespace(spares=set())
    llm = LLM("m", SimpleNamespace(config=None, device=device, devices=[device], cache=cache), "float32", "float32")  # type: ignore[arg-type]
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


# ---- loading -----------------------------------------------------------------------------------------------------


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
        ("bad", {}, r"random shape 'bad' is neither one of .*config.json \(there is no such file\)"),
        ("smollm2-135m", {"dtype": []}, r"dtype is \[\]; expected"),
        ("smollm2-135m", {"seed": "1"}, "seed is '1'; expected a whole number, 0 or more"),
        ("smollm2-135m", {"progress": 5}, "progress is 5; expected a function"),
        ("smollm2-135m", {"compile_kernels": 1}, "compile_kernels is 1; expected True or False"),
    ],
)
def test_bad_settings_of_random_weights_are_refused(shape: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        llmcl.load_random(shape, **options)
    assert str(raised.value).isprintable()
