"""Tools over HTTP with the official clients and their types: shown to the model, called, results sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from fake_server import TEMPLATE, FakeEngine, Running, byte_tokenizer, events, running, strictly
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from llmcl.grammar import Grammar

TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[tool]{{ t.function | tojson }}\n{% endfor %}" + TEMPLATE + "{# <tool_call> #}"
)
CITY = '{"city": "Z\\u00fcrich"}'
ANSWER = (
    f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock"}},
]
FLAT_TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "description": "Of a city.", "parameters": WEATHER, "strict": False},
    {"type": "web_search"},
]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": "weather", "description": "Of a city.", "input_schema": WEATHER},
    {"name": "clock", "input_schema": {"type": "object"}},
    {"type": "web_search_20250305", "name": "web_search"},
]
USER: list[Any] = [{"role": "user", "content": "Hello"}]
CALLS = [("weather", CITY), ("clock", "{}")]


def answering(reply: str, template: str = TOOL_TEMPLATE) -> FakeEngine:
    engine = FakeEngine(byte_tokenizer(template))
    engine.reply = lambda text: reply
    return engine


@pytest.fixture(scope="module")
def calling() -> Iterator[Running]:
    """A server whose model always calls two tools."""
    with running(answering(ANSWER)) as server:
        yield server


@pytest.fixture
def client(calling: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        yield client


# ---- /v1/chat/completions -----------------------------------------------------------------------------


def test_a_chat_calls_tools(client: openai.OpenAI, calling: Running) -> None:
    answer = client.chat.completions.create(model="any", messages=USER, tools=CHAT_TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == CALLS
    assert len({call.id for call in calls}) == 2
    strictly(ChatCompletion, calling.chat(tools=CHAT_TOOLS).json())
    for n in range(16, 30):  # within the opening of the first call
        early = calling.chat(tools=CHAT_TOOLS, max_tokens=n).json()["choices"][0]
        assert early["finish_reason"] == "length" and early["message"]["content"] == "I look."
        streamed = calling.chat(tools=CHAT_TOOLS, max_tokens=n, stream=True).text
        chunks = [json.loads(data) for _, data in events(streamed) if data != "[DONE]"]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "I look."
    cut = calling.chat(tools=CHAT_TOOLS, max_tokens=60).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_calls_are_streamed(calling: Running) -> None:
    """The id, the type and the name with the first delta of a call, then pieces of its arguments."""
    answer = calling.chat(tools=CHAT_TOOLS, stream=True)
    found = [strictly(ChatCompletionChunk, json.loads(data)) for _, data in events(answer.text)[:-1]]
    deltas = [choice.delta for chunk in found for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls: dict[int, list[Any]] = {}
    for delta in deltas:
        for call in delta.tool_calls or []:
            is_first = call.index not in calls
            assert (call.id is not None) == (call.type is not None) == is_first and call.function is not None
            assert (call.function.name is not None) == is_first and call.function.arguments is not None
            calls.setdefault(call.index, []).append(call)
    assert [*calls] == [0, 1] and len(calls[0]) > 5
    for index, (name, arguments) in enumerate(CALLS):
        assert calls[index][0].function.name == name
        assert "".join(call.function.arguments for call in calls[index]) == arguments
    reasons = [choice.finish_reason for chunk in found for choice in chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_the_clients_helper_parses_arguments(client: openai.OpenAI) -> None:
    class weather(BaseModel):
        city: str

    class clock(BaseModel):
        pass

    tools = [openai.pydantic_function_tool(weather), openai.pydantic_function_tool(clock)]
    with client.chat.completions.stream(model="any", messages=USER, tools=tools) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [call.function.parsed_arguments for call in message.tool_calls] == [weather(city="Zürich"), clock()]


def test_one_call_alone(calling: Running) -> None:
    message = calling.chat(tools=CHAT_TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_without_tools_it_is_text(calling: Running) -> None:
    for fields in ({}, {"tools": []}, {"tools": CHAT_TOOLS, "tool_choice": "none"}):
        choice = strictly(ChatCompletion, calling.chat(**fields).json()).choices[0]
        assert choice.message.content == ANSWER and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None


def test_a_chat_goes_on_with_results(client: openai.OpenAI, calling: Running) -> None:
    first = client.chat.completions.create(model="any", messages=USER, tools=CHAT_TOOLS).choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.tool_calls or []
    ]
    client.chat.completions.create(
        model="any",
        messages=[*USER, first.to_dict(), *results],
        tools=CHAT_TOOLS,  # type: ignore[list-item]
    )
    assert calling.engine.asked[-1][0].endswith(
        '[assistant]I look.<weather{"city": "Zürich"}><clock{}>\n[tool]rain\n[tool]rain\n[assistant]'
    )


# ---- /v1/responses ------------------------------------------------------------------------------------


def test_a_response_calls_functions(client: openai.OpenAI, calling: Running) -> None:
    made = client.responses.create(model="any", input="Hello", tools=FLAT_TOOLS)
    message, call, other = made.output
    assert message.type == "message" and made.output_text == "I look."
    assert call.type == "function_call" and (call.name, call.arguments) == CALLS[0]
    assert other.type == "function_call" and (other.name, other.arguments) == CALLS[1]
    whole = strictly(Response, calling.post("/v1/responses", {"input": "Hello", "tools": FLAT_TOOLS}).json())
    assert whole.status == "completed" and [tool.type for tool in whole.tools] == ["function"]
    client.responses.create(
        model="any",
        input=[
            {"role": "user", "content": "Hello"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ],
        tools=FLAT_TOOLS,
    )
    assert calling.engine.asked[-1][0].endswith('[assistant]<weather{"city": "Zürich"}>\n[tool]rain\n[assistant]')


def test_events_of_function_calls(client: openai.OpenAI, calling: Running) -> None:
    """The deltas of a call's arguments together are those of its `done`, and of the item."""
    answer = calling.post("/v1/responses", {"input": "Hello", "tools": FLAT_TOOLS, "stream": True})
    found: list[Any] = [strictly(ResponseStreamEvent, json.loads(data)) for _, data in events(answer.text)]
    assert [event.sequence_number for event in found] == [*range(len(found))]
    arguments: dict[str, str] = {}
    for event in found:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] = arguments.get(event.item_id, "") + event.delta
    done = {e.item_id: e.arguments for e in found if e.type == "response.function_call_arguments.done"}
    items = {e.item.id: e.item for e in found if e.type == "response.output_item.done"}
    assert [*arguments.values()] == [call[1] for call in CALLS] and done == arguments
    assert found[-1].type == "response.completed" and [item.id for item in found[-1].response.output] == [*items]
    assert [item.type for item in items.values()] == ["message", "function_call", "function_call"]
    assert [e.output_index for e in found if e.type == "response.output_item.added"] == [0, 1, 2]
    with client.responses.stream(model="any", input="Hello", tools=FLAT_TOOLS) as stream:
        final = stream.get_final_response()
    assert [item.arguments for item in final.output if item.type == "function_call"] == [call[1] for call in CALLS]


# ---- /v1/messages -------------------------------------------------------------------------------------


def test_a_message_uses_tools(calling: Running) -> None:
    with anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0) as client:
        given: dict[str, Any] = {"model": "any", "max_tokens": 500, "tools": ANTHROPIC_TOOLS}
        made = client.messages.create(messages=USER, **given)
        text, first, second = made.content
        assert text.type == "text" and text.text == "I look." and made.stop_reason == "tool_use"
        assert first.type == "tool_use" and (first.name, first.input) == ("weather", {"city": "Zürich"})
        assert second.type == "tool_use" and (second.name, second.input) == ("clock", {})
        with client.messages.stream(messages=USER, **given) as stream:
            final = stream.get_final_message()
        assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Zürich"}, {}]
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": first.id, "content": "rain"},
            {"type": "tool_result", "tool_use_id": second.id, "content": [{"type": "text", "text": "noon"}]},
            {"type": "text", "text": "So?"},
        ]
        said: list[Any] = [*USER, {"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
        client.messages.create(messages=said, **given)
        assert calling.engine.asked[-1][0].endswith(
            '[assistant]I look.<weather{"city": "Zürich"}><clock{}>\n[tool]rain\n[tool]noon\n[user]So?\n[assistant]'
        )
        counted = client.messages.count_tokens(model="any", messages=USER, tools=ANTHROPIC_TOOLS)
        assert counted.input_tokens == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    strictly(
        Message, calling.post("/v1/messages", {"messages": USER, "max_tokens": 500, "tools": ANTHROPIC_TOOLS}).json()
    )


def test_events_of_tool_use(calling: Running) -> None:
    fields = {"messages": USER, "max_tokens": 500, "tools": ANTHROPIC_TOOLS, "stream": True}
    answer = calling.post("/v1/messages", fields)
    found: list[Any] = [strictly(RawMessageStreamEvent, json.loads(data)) for _, data in events(answer.text)]
    starts = [event for event in found if event.type == "content_block_start"]
    assert [(start.index, start.content_block.type) for start in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert [event.index for event in found if event.type == "content_block_stop"] == [0, 1, 2]
    written = [
        "".join(e.delta.partial_json for e in found if e.type == "content_block_delta" and e.index == i) for i in (1, 2)
    ]
    assert written == [call[1] for call in CALLS]
    assert found[-2].delta.stop_reason == "tool_use"


# ---- what the model sees, and may write ---------------------------------------------------------------


def test_the_template_shows_the_tools(calling: Running) -> None:
    calling.chat(tools=CHAT_TOOLS)
    shown = calling.engine.asked[-1][0].splitlines()
    first = {"name": "weather", "description": "Of a city.", "parameters": WEATHER}
    assert json.loads(shown[0].removeprefix("[tool]")) == first and shown[2] == "[user]Hello"


DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{# message['content'] is none #}"
    "{% for tool in m['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
    "tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}"
    "{% endfor %}{% else %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)


def test_a_template_that_appends_arguments_to_a_text() -> None:
    """As DeepSeek's, which shows calls where a message has no content, and shows the model no tools."""
    reply = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    reply += f"{CITY}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    with running(answering(reply, DEEPSEEK)) as server:
        message = server.chat(tools=CHAT_TOOLS).json()["choices"][0]["message"]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [CITY]
        example = "function<｜tool▁sep｜><name of the function>\n```json\n<its arguments as a JSON object>\n```"
        assert example in server.engine.asked[-1][0]
        said = [*USER, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}]
        assert server.post("/v1/chat/completions", {"messages": said}).status_code == 200
        assert server.engine.asked[-1][0] == (
            '[user]Hello<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Zürich"}\n```'
            "<｜tool▁call▁end｜>[tool]rain"
        )


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    with running(answering(ANSWER, TEMPLATE)) as server:
        message = server.chat(tools=CHAT_TOOLS).json()["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
        prompt = server.engine.asked[-1][0]
        assert prompt.startswith("[system]You may call functions.") and '"name": "weather"' in prompt
        messages = [{"role": "system", "content": "Be brief."}, *USER]
        server.post("/v1/chat/completions", {"messages": messages, "tools": CHAT_TOOLS})
        assert server.engine.asked[-1][0].startswith("[system]Be brief.\n\nYou may call functions.")


TEMPLATES = {
    "hermes": "{# tools <tool_call> #}",
    "llama 3": "{# tools <|python_tag|> #}",
    "qwen": "{# tools <tool_call> <parameter= #}",
    "mistral": "{# tools [TOOL_CALLS] #}",
    "gemma 4": "{# tools <|tool_call> #}",
    "deepseek v3": "{# tools <｜tool▁sep｜> ```json #}",
}
W, B = '{"city": "Bern"}', '{"town": "Bern"}'
FENCED = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
FORMS: dict[str, tuple[list[str], list[str]]] = {
    "hermes": (
        [f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>'],
        [
            f'<tool_call>\n{{"name": "weather", "arguments": {B}}}\n</tool_call>',
            '<tool_call>\n{"name": "x", "arguments": {}}',
        ],
    ),
    "llama 3": ([f'{{"name": "weather", "parameters": {W}}}'], [f'{{"name": "weather", "parameters": {B}}}']),
    "qwen": (
        ["<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>"],
        [
            "<tool_call>\n<function=weather>\n<parameter=town>\nBern\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=x>\n",
        ],
    ),
    "mistral": (
        [f'[TOOL_CALLS][{{"name": "weather", "arguments": {W}}}]'],
        [f'[TOOL_CALLS][{{"name": "weather", "arguments": {B}}}]'],
    ),
    "gemma 4": (
        ['<|tool_call>call:weather{city:<|"|>Bern<|"|>}<tool_call|>'],
        ['<|tool_call>call:weather{town:<|"|>Bern<|"|>}<tool_call|>', "<|tool_call>call:x{"],
    ),
    "deepseek v3": ([FENCED.format(W)], [FENCED.format(B), FENCED.format(W).replace("weather", "x")]),
}


def allows(server: Running, text: str) -> bool:
    """Whether the grammar with which the engine was asked last allows this answer."""
    grammar = Grammar("grammar", server.engine.asked[-1][1]["grammar"])
    matcher = server.service.served().grammars.compile(grammar).matcher()
    ids = [*server.engine.tokenizer.encode(text), 1]
    return matcher.n_allowed(ids) == len(ids)


@pytest.mark.parametrize("family", FORMS)
def test_calls_are_constrained(family: str) -> None:
    """Those that have to be made, those of one tool, and with strict tools those that are made."""
    right, wrong = FORMS[family]
    with running(answering(right[0], TEMPLATE + TEMPLATES[family])) as server:
        strict = [{"type": "function", "function": {**CHAT_TOOLS[0]["function"], "strict": True}}, CHAT_TOOLS[1]]
        named = {"type": "function", "function": {"name": "weather"}}
        for tools, choice in (CHAT_TOOLS, "required"), (CHAT_TOOLS, named), (strict, "auto"):
            answer = server.chat(tools=tools, tool_choice=choice)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"
            texts = [*right, *wrong, "No.", f"Well. {right[0]}", f"Well. {wrong[0]}"]
            found = [text for text in texts if allows(server, text)]
            if choice != "auto":
                assert found == right
            elif family == "llama 3":  # a call is the whole answer
                assert found == [*right, *texts[-3:]]
            else:
                assert found == [*right, *texts[-3:-1]]
        server.chat(tools=CHAT_TOOLS)
        assert "grammar" not in server.engine.asked[-1][1]


def test_a_schema_beside_tools(calling: Running) -> None:
    """An answer is a call, or what the schema says."""
    assert calling.chat(tools=CHAT_TOOLS, json_schema=WEATHER).status_code == 200
    for text, allowed in ((FORMS["hermes"][0][0], True), (W, True), ("No.", False), (B, False)):
        assert allows(calling, text) == allowed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"tools": [CHAT_TOOLS[0], CHAT_TOOLS[0]]}, "tools"),
        ({"tools": CHAT_TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": CHAT_TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": CHAT_TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"tools": CHAT_TOOLS, "grammar": 'start: "a"'}, "tools"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "objec"}}}
                ]
            },
            "tools",
        ),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, calling: Running) -> None:
    answer = calling.chat(**fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_allowed_tools(calling: Running) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHAT_TOOLS[1]]}}
    assert calling.chat(tools=CHAT_TOOLS, tool_choice=choice).status_code == 200
    prompt = calling.engine.asked[-1][0]
    assert '"clock"' in prompt and '"weather"' not in prompt


# ---- models that think --------------------------------------------------------------------------------

THINKING = TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"


def test_thoughts_are_no_part_of_the_answer() -> None:
    with running(answering("Hm.\n\nYes.\n</think>\n\nIt is 4.", THINKING)) as server:
        message = server.chat().json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("It is 4.", "Hm.\n\nYes.")
        chunks = [json.loads(data) for _, data in events(server.chat(stream=True).text)[:-1]]
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "It is 4."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm.\n\nYes."
        made = strictly(Response, server.post("/v1/responses", {"input": "x"}).json())
        assert [item.type for item in made.output] == ["reasoning", "message"] and made.output_text == "It is 4."
        streamed = server.post("/v1/responses", {"input": "x", "stream": True})
        for _, data in events(streamed.text):
            strictly(ResponseStreamEvent, json.loads(data))
        told = strictly(Message, server.post("/v1/messages", {"messages": USER, "max_tokens": 99}).json())
        assert [block.type for block in told.content] == ["thinking", "text"]
        assert (
            made.usage is not None and made.usage.output_tokens_details.reasoning_tokens == 17
        )  # all before the last byte of </think>
        assert server.chat().json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 17}
        assert server.chat(json_schema={"type": "object"}).status_code == 200
        for text, allowed in (("Hm. {</think>\n\n{}", True), ("{}", False), ("Hm.</think>No.", False)):
            assert allows(server, text) == allowed


# ---- calls that are cut --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"city": "Be', {}),
        ('{"city": "Bern", "un', {"city": "Bern"}),
        ('{"city": "a, b", "days": [1, 2, ', {"city": "a, b"}),
        ('{"city": "Bern", "at": {"x": 1, "y": 2}, "z": {"a": 1,', {"city": "Bern", "at": {"x": 1, "y": 2}}),
        ("{", {}),
        ("", {}),
    ],
)
def test_a_call_that_is_cut_has_no_made_up_keys(written: str, expected: dict[str, Any]) -> None:
    answer = f'<tool_call>\n{{"name": "weather", "arguments": {written}'
    with running(answering(answer)) as server:
        asked = {"messages": USER, "max_tokens": len(answer.encode()), "tools": ANTHROPIC_TOOLS}
        message = strictly(Message, server.post("/v1/messages", asked).json())
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == "max_tokens" and [call.input for call in calls] == [expected] * bool(written)
