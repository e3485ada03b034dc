"""Chat templates: what they are given, and what they may not do."""

from __future__ import annotations

from typing import Any

import pytest

from llmcl.errors import CheckpointError, UsageError
from llmcl.tokenizer import chat_template, template_sandbox


def render(template: str, content: Any = "Hi", **tokens: str) -> str:
    return chat_template.render(
        template, [{"role": "user", "content": content}], add_generation_prompt=True, special_tokens=tokens
    )


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # trim_blocks and lstrip_blocks
        ("{% if true %}\n  {% set x = 1 %}\nline\n{% endif %}\nend", "line\nend"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}"
         "{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é&\'>"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("{{ tools is none and documents is none and add_generation_prompt }}", "True"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "<é&'>!"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = 5 %}{% endfor %}{{ ns.n }}", "5"),
        ("{{ bos_token }}{{ unk_token }}", "<s>"),
    ],
)  # fmt: skip
def test_chat_template_has_what_transformers_gives_it(template: str, expected: str) -> None:
    assert render(template, "<é&'>", bos_token="<s>") == expected


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[0].content.format.__globals__['os'] }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_chat_template_cannot_leave_the_sandbox(attack: str) -> None:
    with pytest.raises(CheckpointError, match="chat template failed"):
        render(attack)


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("{% set r = range(99999) %}" + "{% for a in r %}" * 3 + "{% endfor %}" * 3, "it ran for more than 0.2 s"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "it ran for more"),
        ("{% for a in range(999) %}{{ 'x' * 999 }}{% endfor %}", "its text has more than 10000 characters"),
        ("{{ 'x' * 10 ** 9 }}", r"`\*` would make a value of more than"),
        ("{{ [[0]] * 999999999 }}", r"`\*` would make a value of more than"),
        ("{{ 9 ** 999999999 }}", r"`\*\*` would make a value of more than"),
        ("{{ lipsum(n=999999999) }}", "'lipsum' is undefined"),
    ],
)
def test_chat_template_ends(attack: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(template_sandbox, "MAX_CHARACTERS", 10000)
    with pytest.raises(CheckpointError, match=f"chat template failed: .*{message}"):
        render(attack)


def test_chat_template_may_compute() -> None:
    assert render("{% for a in [2, 3] %}{{ a ** 2 * 1.5 }}{{ '-' * a }}{{ a * [a] }}{% endfor %}") == (
        "6.0--[2, 2]13.5---[3, 3, 3]"
    )


def test_chat_template_that_is_no_jinja_names_the_line() -> None:
    with pytest.raises(CheckpointError, match="not valid Jinja in line 2"):
        render("fine\n{% if %}")


def test_chat_template_that_makes_no_text_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"chat template made an empty text.*--chat-template-file"):
        render("{% for message in [] %}{{ message }}{% endfor %}")


def test_refusal_of_a_chat_template_is_the_users_to_mend() -> None:
    with pytest.raises(UsageError, match="does not accept these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "expected a list like"),
        ("Hello", "expected a list like"),
        ({"role": "user", "content": "Hello"}, "expected a list like"),
        (["Hello"], r"messages\[0\]: got 'Hello', expected a dict"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\]: got .*expected a dict"),
        ([{"role": 1, "content": "b"}], r"messages\[0\]"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": object()}], "only strings, numbers, lists and dicts"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        chat_template.render("x", messages, add_generation_prompt=True, special_tokens={})


def test_chat_template_sees_parts_of_a_message_as_they_are() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "image"}]
    template = "{% for p in messages[0].content %}{{ p.type }}={{ p.text }};{% endfor %}"
    assert render(template, parts) == "text=Hi;image=;"
