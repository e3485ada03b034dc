"""gpt-oss' format of a conversation: its template is given and writes what it does with transformers."""

from __future__ import annotations

from typing import Any

import pytest

from llmcl.errors import UsageError
from llmcl.tokenizer.chat_template import render

# The constructs of gpt-oss' own: macros that call themselves, namespaces, the date, tools, channels.
HARMONY = """{%- macro type_of(spec) -%}
    {%- if spec.type == "array" -%}{{ type_of(spec['items']) + "[]" }}
    {%- elif spec.type == "object" and spec.properties is defined -%}
        {{- "{\n" }}
        {%- for name, inner in spec.properties.items() -%}
            {{- name + ("" if name in (spec.required or []) else "?") + ": " + type_of(inner) }}
            {%- if not loop.last %}{{ "," }}{% endif -%}{{- "\n" }}
        {%- endfor -%}
        {{- "}" }}
    {%- elif spec is mapping and spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.oneOf is defined -%}{%- for one in spec.oneOf -%}{{- type_of(one) if one else "any" }}{%- endfor -%}
    {%- else -%}{{- spec.type }}{%- endif -%}
{%- endmacro -%}
{%- macro system_message() -%}
    {%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
    {{- model_identity + "\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\n\n" }}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\n\n" }}
    {{- "# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- system_message() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer_message or tools %}
    {{- "<|start|>developer<|message|>" }}
    {%- if developer_message %}{{- "# Instructions\n\n" + developer_message + "\n\n" }}{%- endif %}
    {%- for tool in tools or [] %}{{- "type " + tool.name + " = (_: " + type_of(tool.parameters) + ") => any;" }}
    {%- endfor %}
    {{- "<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>final" in message.content %}
            {{- raise_exception("A message has channels of its own.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future = namespace(found=false) %}
            {%- for later in loop_messages[loop.index:] %}
                {%- if later.role == 'assistant' and "tool_calls" not in later %}{%- set future.found = true %}
                {%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.thinking and not future.found %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary "
                + (call.content_type if call.content_type is defined else "json") + "<|message|>" }}
            {{- call.arguments | tojson }}{{- "<|call|>" }}
            {%- set last_tool_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
            {%- set last_tool_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("A result without a call.") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}
        {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
CALLS = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "What is the weather in <b>Bern</b>?"},
    {
        "role": "assistant",
        "content": "",
        "thinking": "Look it up.",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Bern é", "days": [1, 2]}}}],
    },
    {"role": "tool", "content": '{"sky": "clear"}'},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("n_messages", [2, 3, 4, 5])
def test_harmony_with_calls_of_tools(n_messages: int, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: list[dict[str, Any]] = [*CALLS, {"role": "assistant", "content": "Clear."}][:n_messages]
    how = {"add_generation_prompt": add_generation_prompt}
    theirs = render_jinja_template([messages], chat_template=HARMONY, **how)
    ours = render(HARMONY, messages, special_tokens={}, **how)
    assert ours == theirs[0][0] and ours.startswith("<|start|>system<|message|>")
    with pytest.raises(UsageError, match="A result without a call"):
        render(HARMONY, [CALLS[0], CALLS[3]], add_generation_prompt=True, special_tokens={})
