"""Answers in channels, as gpt-oss writes them: read however they are cut, in each API, and constrained."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message
from fake_server import FakeEngine, Running, events, running, strictly
from made_tokenizers import channel_tokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from llmcl.grammar import Grammar
from llmcl.tokenizer.answer_parts import CallPart, Said, Thought
from llmcl.tokenizer.channel_reader import ChannelReader

C, M, E, S = "<|channel|>", "<|message|>", "<|end|>", "<|start|>"
CITY = '{"city": "Bern"}'
THOUGHT = f"{C}analysis{M}Hm.\nYes.{E}{S}assistant"
CALL = f"{C}commentary to=functions.weather <|constrain|>json{M}{CITY}"
FINAL = f"{C}final{M}It is 4."
SCHEMAS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMAS["weather"]}}]

# The answer; its text, thoughts and (name, arguments) of its calls.
ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "text": (f"{FINAL}<|return|>", "It is 4.", "", []),
    "thought": (f"{THOUGHT}{FINAL}", "It is 4.", "Hm.\nYes.", []),
    "call": (f"{THOUGHT}{CALL}<|call|>", "", "Hm.\nYes.", [("weather", CITY)]),
    "head as in the template": (
        f" to=functions.weather{C}commentary json{M}{CITY}<|call|>",
        "",
        "",
        [("weather", CITY)],
    ),
    "preamble": (
        f"{C}commentary{M}I look.{E}{S}assistant{CALL}",
        "I look.",
        "",
        [("weather", CITY)],
    ),
    "two calls": (f"{CALL}{E}{S}assistant{CALL}", "", "", [("weather", CITY)] * 2),
    "no arguments": (f"{C}commentary to=functions.weather{M}<|call|>", "", "", [("weather", "{}")]),
    "two thoughts": (f"{THOUGHT}{THOUGHT}{FINAL}", "It is 4.", "Hm.\nYes.\n\nHm.\nYes.", []),
    "another channel": (f"{C}commentary to=assistant{C}analysis{M}I'm thinking", "", "I'm thinking", []),
    "to nobody": (f"{C}commentary to={C}final{M}It is 4.", "It is 4.", "", []),
    "to the user": (f"{C}commentary to=user{M}I look.", "I look.", "", []),
    "not offered": (f"{C}analysis to=python code{M}print(4)<|call|>", "", "", [("python", "print(4)")]),
    "cut": (f"{C}analysis{M}Hm", "", "Hm", []),
    "cut head": (f"{THOUGHT}{C}fin", "", "Hm.\nYes.", []),
    "no channel": ("It is 4.", "It is 4.", "", []),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_however_it_is_cut(name: str) -> None:
    answer, text, thoughts, calls = ANSWERS[name]
    sizes = [[answer[i : i + n] for i in range(0, len(answer), n)] for n in (len(answer), 1, 2, 3)]
    for pieces in sizes + [[answer[:i], answer[i:]] for i in range(1, len(answer))]:
        reader = ChannelReader(SCHEMAS)
        for piece in pieces:
            reader.push(piece, 0)
        reader.finish()
        assert (reader.text, reader.thoughts) == (text, thoughts), pieces
        assert [(call.name, call.arguments) for call in reader.calls] == calls, pieces
        parts = reader.take()
        assert "".join(part.text for part in parts if isinstance(part, Said)) == text
        assert "".join(part.text for part in parts if isinstance(part, Thought)) == thoughts
        deltas = [part for part in parts if isinstance(part, CallPart)]
        assert sum(part.is_first for part in deltas) == len(calls)
        assert "".join(part.delta for part in deltas) == "".join(arguments for _, arguments in calls)


def test_code_for_a_tool_is_no_text_where_there_are_no_tools() -> None:
    reader = ChannelReader()
    reader.push(f"{THOUGHT}{C}commentary to=python code{M}print(4)<|call|>{S}assistant{FINAL}", 0)
    reader.finish()
    assert (reader.text, reader.thoughts, reader.calls) == ("It is 4.", "Hm.\nYes.", [])


def test_one_call_where_one_is_wanted() -> None:
    reader = ChannelReader(SCHEMAS, several=False)
    reader.push(ANSWERS["two calls"][0], 0)
    reader.finish()
    assert len(reader.calls) == 1


# ---- over HTTP ------------------------------------------------------------------------------------------


def answering(reply: str) -> FakeEngine:
    engine = FakeEngine(channel_tokenizer())
    engine.reply = lambda text: reply
    return engine


def allows(server: Running, text: str) -> bool:
    option = server.engine.asked[-1][1]
    (kind,) = {"grammar", "regex"} & set(option)
    matcher = server.service.served().grammars.compile(Grammar(kind, option[kind])).matcher()  # type: ignore[arg-type]
    ids = [*server.engine.tokenizer.encode(text), 1]
    return matcher.n_allowed(ids) == len(ids)


def test_thoughts_and_text() -> None:
    with running(answering(f"{THOUGHT}{FINAL}")) as server:
        made = server.chat()
        message = made.json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("It is 4.", "Hm.\nYes.")
        told = strictly(Response, server.post("/v1/responses", {"input": "x"}).json())
        assert [item.type for item in told.output] == ["reasoning", "message"] and told.output_text == "It is 4."
        user = [{"role": "user", "content": "x"}]
        blocks = strictly(Message, server.post("/v1/messages", {"messages": user, "max_tokens": 99}).json()).content
        assert [block.type for block in blocks] == ["thinking", "text"]


def test_calls_of_tools() -> None:
    with running(answering(f"{THOUGHT}{CALL}")) as server:
        choice = strictly(ChatCompletion, without_thoughts(server.chat(tools=TOOLS).json())).choices[0]
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and (call.function.name, call.function.arguments) == ("weather", CITY)
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        chunks = [json.loads(data) for _, data in events(server.chat(tools=TOOLS, stream=True).text)[:-1]]
        written = ""
        for chunk in chunks:
            for piece in chunk["choices"]:
                piece["delta"].pop("reasoning_content", None)
            found = strictly(ChatCompletionChunk, chunk)
            for piece in found.choices:
                written += "".join(
                    call.function.arguments or "" for call in piece.delta.tool_calls or [] if call.function
                )
        assert written == CITY and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        flat = [{"type": "function", **TOOLS[0]["function"]}]
        streamed = server.post("/v1/responses", {"input": "x", "tools": flat, "stream": True})
        last: Any = [strictly(ResponseStreamEvent, json.loads(data)) for _, data in events(streamed.text)][-1]
        assert [item.type for item in last.response.output] == ["reasoning", "function_call"]


def without_thoughts(answer: dict[str, Any]) -> dict[str, Any]:
    answer["choices"][0]["message"].pop("reasoning_content", None)
    return answer


def test_calls_are_constrained() -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    wrong = CALL.replace("Bern", '", "x": "')
    with running(answering(CALL)) as server:
        for tools, choice, texts in (
            (TOOLS, "required", [CALL, THOUGHT + CALL]),
            (strict, "auto", [CALL, THOUGHT + CALL, FINAL, f"{C}commentary{M}I look.{E}{S}assistant{CALL}"]),
        ):
            assert server.chat(tools=tools, tool_choice=choice).status_code == 200
            for text in (CALL, THOUGHT + CALL, FINAL, ANSWERS["preamble"][0], CALL.replace("city", "town"), "It is 4."):
                assert allows(server, text) == (text in texts), text
        assert not allows(server, wrong.replace("functions.weather", "functions.x"))


def test_structured_output_stands_in_the_final_channel() -> None:
    with running(answering(f'{C}final{M}{{"city": "Bern"}}')) as server:
        assert server.chat(json_schema=SCHEMAS["weather"]).json()["choices"][0]["message"]["content"] == CITY
        for text, allowed in (
            (f"{C}final{M}{CITY}", True),
            (f"{THOUGHT}{C}final{M}{CITY}", True),
            (CITY, False),
            (FINAL, False),
        ):
            assert allows(server, text) == allowed, text
    with running(answering("abc")) as server:
        answer = server.chat(structured_outputs={"regex": "[a-c]+"})
        assert answer.json()["choices"][0]["message"]["content"] == "abc"
        assert server.engine.asked[-1][0].endswith("assistantfinal") and allows(server, "abc")
