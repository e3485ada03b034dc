"""What programs send that nobody here wrote: other names of paths, of fields, and of no limit."""

from __future__ import annotations

from typing import Any

import pytest
from echo_engine import stats
from fake_server import END, FakeEngine, Running, byte_tokenizer, running

from llmcl.engine.generation import AnswerOptions, Piece, PieceWriter
from llmcl.engine.stats import Recorder
from llmcl.errors import UsageError

USER = {"role": "user", "content": "hi"}
SKY = {"role": "assistant", "content": "The sky"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen 3.5's and later ones: a system message stands at the beginning, and a user has to say something.
STRICT = """{%- set ns = namespace(q=false) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.q = true %}
{%- endif %}{%- endfor %}{%- if not ns.q %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
{{- '<' + m.role + '>' + (m.content or '') }}{%- endfor %}{%- if add_generation_prompt %}<assistant>{%- endif %}"""


@pytest.fixture(scope="module")
def chatml() -> Any:
    with running(FakeEngine(byte_tokenizer(CHATML))) as server:
        yield server


def prompt_of(server: Running, path: str, fields: dict[str, Any]) -> str:
    """The text of the prompt that a request has answered."""
    answer = server.post(path, {"max_tokens": 3, **fields})
    assert answer.status_code == 200, answer.text
    return server.engine.asked[-1][0]


# ---- paths and tokens -----------------------------------------------------------------------------------


def test_responses_without_v1(shared: Running) -> None:
    answer = shared.post("/responses", {"input": "hi", "max_output_tokens": 2})
    assert answer.status_code == 200 and answer.json()["object"] == "response"


def test_tokens_with_their_texts(shared: Running) -> None:
    """Bytes that are no character by themselves are numbers, as llama-server writes them."""
    asked = {"content": "hé</s>", "with_pieces": True, "add_special": True}
    tokens = shared.post("/tokenize", asked).json()["tokens"]
    assert [token["piece"] for token in tokens] == ["h", [0xC3], [0xA9], "</s>"]
    assert [token["id"] for token in tokens] == shared.post("/tokenize", asked | {"with_pieces": False}).json()[
        "tokens"
    ]


# ---- where a prompt ends --------------------------------------------------------------------------------


def test_an_answer_goes_on_from_the_last_message(chatml: Running) -> None:
    fields = {"messages": [USER, SKY], "continue_final_message": True, "add_generation_prompt": False}
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe sky"
    assert prompt_of(chatml, "/v1/chat/completions", fields) == expected
    del fields["add_generation_prompt"]
    assert prompt_of(chatml, "/v1/chat/completions", fields) == expected
    assert chatml.post("/apply-template", fields).json() == {"prompt": expected}
    assert prompt_of(chatml, "/v1/messages", {"messages": [USER, SKY]}) == expected
    counted = chatml.post("/v1/messages/count_tokens", {"messages": [USER, SKY]}).json()
    assert counted == {"input_tokens": len(expected)}


def test_white_space_at_its_end_stays(chatml: Running) -> None:
    """Though the template trims what it shows."""
    said = [USER, {"role": "assistant", "content": "The sky\n "}]
    assert prompt_of(chatml, "/v1/messages", {"messages": said}).endswith("assistant\nThe sky\n ")


def test_a_prompt_without_the_opening_of_an_answer(chatml: Running) -> None:
    fields = {"messages": [USER], "add_generation_prompt": False}
    expected = "<|im_start|>user\nhi<|im_end|>\n"
    assert chatml.post("/apply-template", fields).json() == {"prompt": expected}
    assert prompt_of(chatml, "/v1/chat/completions", fields) == expected


@pytest.mark.parametrize(
    ("messages", "more", "word"),
    [
        ([USER], {}, "assistant"),
        ([USER, SKY], {"add_generation_prompt": True}, "contradicts"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], {}, "calls"),
        ([USER, SKY], {"continue_final_message": "yes"}, "true or false"),
    ],
)
def test_what_no_answer_can_go_on_from(messages: list[Any], more: dict[str, Any], word: str, chatml: Running) -> None:
    for path in "/v1/chat/completions", "/apply-template":
        answer = chatml.post(path, {"messages": messages, "continue_final_message": True} | more)
        assert answer.status_code == 400 and word in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "continue_final_message"


def test_a_template_that_hides_the_last_message() -> None:
    with running(FakeEngine(byte_tokenizer("{{ messages[0].content }}"))) as server:
        answer = server.post("/v1/messages", {"messages": [USER, SKY], "max_tokens": 3})
        assert answer.status_code == 400 and "does not show the last message" in answer.text


# ---- templates that take one system message -------------------------------------------------------------


def system(text: str, role: str = "system") -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.mark.parametrize(
    ("messages", "strict", "lenient"),
    [
        (
            [system("a"), system("b", "developer"), USER],
            "<system>a\n\nb<user>hi<assistant>",
            "<|im_start|>system\na\n\nb<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [system("a"), USER, system("b"), SKY, USER, system("c", "developer")],
            "<system>a\n\nb\n\nc<user>hi<assistant>The sky<user>hi<assistant>",
            "<|im_start|>system\na<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nb<|im_end|>\n"
            "<|im_start|>assistant\nThe sky<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
            "<|im_start|>system\nc<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [USER, system("b")],
            "<system>b<user>hi<assistant>",
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
    ids=["leading", "later", "late alone"],
)
def test_system_messages(messages: list[Any], strict: str, lenient: str, chatml: Running) -> None:
    assert prompt_of(chatml, "/v1/chat/completions", {"messages": messages}) == lenient
    with running(FakeEngine(byte_tokenizer(STRICT))) as server:
        assert prompt_of(server, "/v1/chat/completions", {"messages": messages}) == strict
        assert server.post("/apply-template", {"messages": messages}).json()["prompt"] == strict
        assert prompt_of(server, "/v1/responses", {"input": messages}) == strict
        if all(message["role"] != "developer" for message in messages):
            assert prompt_of(server, "/v1/messages", {"messages": messages}) == strict


def test_instructions_and_items_of_codex() -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ]
    with running(FakeEngine(byte_tokenizer(STRICT))) as server:
        asked = {"instructions": "You are Codex.", "input": items}
        assert prompt_of(server, "/v1/responses", asked) == "<system>You are Codex.\n\nrules<user>hi<assistant>"
        said = {"system": "s", "messages": [USER, system("later")]}
        assert prompt_of(server, "/v1/messages", said) == "<system>s\n\nlater<user>hi<assistant>"
        refused = server.post("/v1/chat/completions", {"messages": [system("a"), SKY]})
        assert refused.status_code == 400 and "No user query found in messages" in refused.text


# ---- where an answer ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_no_limit_is_written_as_minus_one(field: str, server: Running) -> None:
    server.engine.reply = lambda text: "x" * 100
    paths = {"/v1/chat/completions": {"messages": [USER]}, "/v1/completions": {"prompt": "a"}}
    if field == "max_output_tokens":
        paths = {"/v1/responses": {"input": "hi"}}
    elif field == "max_tokens":
        paths["/v1/messages"] = {"messages": [USER]}
    else:
        del paths["/v1/completions"]
    for path, fields in paths.items():
        answer = server.post(path, {**fields, field: -1})
        assert answer.status_code == 200 and "x" * 100 in answer.text, answer.text
        assert server.engine.asked[-1][1] is not None
        assert server.post(path, {**fields, field: -2}).status_code == 400


@pytest.mark.parametrize("stop", ["", [], [""], ["", ""]], ids=str)
def test_an_empty_text_stops_nothing(stop: Any, shared: Running) -> None:
    assert shared.chat("Hello", stop=stop).json()["choices"][0]["message"]["content"] == "Hello"
    answer = shared.post("/v1/messages", {"messages": [USER], "max_tokens": 9, "stop_sequences": stop})
    assert answer.json()["content"][0]["text"] == "hi" and answer.json()["stop_reason"] == "end_turn"


def test_ends_reach_the_engine(server: Running) -> None:
    server.chat("Hello", ignore_eos=True, min_tokens=4, stop_token_ids=[70, 71.0])
    options = server.engine.asked[-1][1]
    assert options["ignore_eos"] is True and options["min_tokens"] == 4 and options["stop_token_ids"] == (70, 71)
    server.chat("Hello", ignore_eos=False, min_tokens=0, stop_token_ids=None)
    assert not {"ignore_eos", "min_tokens", "stop_token_ids"} & {*server.engine.asked[-1][1]}


def written(ids: list[int], **options: Any) -> tuple[str, int, str | None]:
    """The text of these tokens, of how many it was made, and why it ended."""
    writer = PieceWriter(byte_tokenizer(), AnswerOptions(**options), len(ids), Recorder(1), stats)
    pieces: list[Piece] = []
    for token in ids:
        pieces.append(writer.push(token))
        if pieces[-1].finish_reason is not None:
            break
    return "".join(piece.text for piece in pieces), len(pieces), pieces[-1].finish_reason


def test_where_an_answer_ends() -> None:
    a, b = byte_tokenizer().encode("ab")
    ids = [a, END, a, b, END, a]
    assert written(ids) == ("a", 2, "stop")
    assert written(ids, ignore_eos=True) == ("aaba", 6, "length")
    assert written(ids, min_tokens=1) == ("a", 2, "stop")
    assert written(ids, min_tokens=2) == ("aab", 5, "stop")
    assert written(ids, min_tokens=5) == ("aaba", 6, "length")
    assert written(ids, min_tokens=2, stop_token_ids=[b]) == ("aab", 4, "stop")
    assert written(ids, stop_token_ids=[a]) == ("a", 1, "stop")
    assert written(ids, ignore_eos=True, stop_token_ids=[b]) == ("aab", 4, "stop")
    assert written(ids, ignore_eos=True, stop_token_ids=[b], stop="ab") == ("a", 4, "stop")


def test_what_matches_a_schema_ends_by_itself() -> None:
    with pytest.raises(UsageError, match="min_tokens and schema exclude each other"):
        AnswerOptions(schema={"type": "object"}, min_tokens=3)
