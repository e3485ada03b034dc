"""Chat templates: what they are given, and what they may not do."""

from __future__ import annotations

import math
from typing import Any

import fake_vision
import pytest

from llmcl.errors import CheckpointError, UsageError
from llmcl.tokenizer import chat_template


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


def test_variables_that_are_given_reach_the_template() -> None:
    template = "{{ enable_thinking | default('none') }}{{ messages | length }}"
    messages = [{"role": "user", "content": "Hi"}]
    for variables, expected in ((None, "none1"), ({}, "none1"), ({"enable_thinking": False}, "False1")):
        shown = chat_template.render(
            template, messages, add_generation_prompt=True, special_tokens={}, variables=variables
        )
        assert shown == expected


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"messages": []}, "messages is reserved"),
        ({"raise_exception": 1}, "raise_exception is reserved"),
        ({"bos_token": "x"}, "bos_token is reserved"),
        ({"not a name": 1}, "no name of a variable"),
        ({"n" * 201: 1}, "no name of a variable"),
        ({f"n{i}": i for i in range(65)}, "65 variables"),
        ({"n": "x" * 100_000}, "as JSON"),
        ({"n": object()}, "strings, numbers, lists and dicts"),
        ({"n": "x"}, "with the variables that were given"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variables_that_no_template_can_get(variables: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        chat_template.render(
            "{{ 1 + n }}",
            [{"role": "user", "content": "Hi"}],
            add_generation_prompt=True,
            special_tokens={},
            variables=variables,
        )


# What published templates are made of.
CONSTRUCTS = [
    "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ m.role %}"
    "{% endfor %}{{ ns.n }}{{ ns.s }}",
    "{%- macro turn(m, end='\n') -%}{{ '<' + m['role'] + '>' }}{{ caller() if caller else '' }}{{ end }}"
    "{%- endmacro -%}"
    "{% for m in messages %}{% call turn(m) %}{{ m.content }}{% endcall %}{% endfor %}{{ turn(messages[0]) }}",
    "{% for m in messages[1:] %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index0 }}{{ loop.last }}"
    "{% break %}{% else %}none{% endfor %}{{ messages[::-1] | length }}{{ messages[-1].role }}",
    "{{ messages | tojson }}{{ messages | tojson(indent=4) }}{{ {'b': '<é>'} | tojson(separators=(',', ':')) }}",
    "{% set c = messages[2].content %}{{ c.split('</think>')[-1].lstrip('\n') }}{{ c.strip().startswith('<think>') }}"
    "{{ c.replace('hm', 'a').rstrip().endswith('i') }}{{ c.upper()[2:7] }}{{ c.title() }}",
    "{{ tools is defined and tools is not none }}{{ x is defined }}{{ messages is string }}{{ messages is iterable }}"
    "{{ messages[0] is mapping }}{{ 1 is number }}{{ false is false }}{{ x | default('d') }}{{ x }}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('no', 'none') }}"
    "{{ dict(a=1, **{'b': 2}) }}{{ messages[0] | dictsort }}{{ messages[0] | items | list }}",
    "{{ ([1] + [2, 3]) | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    "{{ messages | rejectattr('role', 'in', ['user', 'system']) | map(attribute='content') | first | trim }}",
    "{{ '%s and %d' % ('a', 2) }}{{ '{} {x}'.format('a', x='b') }}{{ 'a' 'b' }}{{ 1.0 }}{{ 7 // 2 }}{{ none }}"
    "{{ '-' * 3 }}",
    "x\n  {% if true %}  \n  {%- set a %}block {{ bos_token }}{% endset %}\n{{ a | upper }}  {#- gone #}\n"
    "{% endif %} \n\n",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}{{ eos_token }}{{ strftime_now('%Y-%m') }}",
    "{{ 'a b c' | wordwrap(2) }}{{ [1, [2]] | pprint }}{{ '<é>' | e }}{{ 'x' | center(5) }}{{ lipsum() is string }}"
    "{{ 'é'.encode('utf-8') }}{{ 'a,b' | list | unique | sort(reverse=true) }}{{ range(3) | sum }}",
    "{% filter trim %}  {% raw %}{{ raw }}{% endraw %} {% endfilter %}{% with y = 1 %}{{ y }}{% endwith %}{{ not 1 }}",
]


@pytest.mark.parametrize("number", range(len(CONSTRUCTS)))
def test_chat_template_writes_what_transformers_writes(number: int) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    talk = [
        {"role": "system", "content": "Be brief & <b>clear</b>. \ud800"},
        {"role": "user", "content": " Hé\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi"},
        {"role": "user", "content": "Bye 😀", "n": 1.5, "more": [None, True, {"a": []}]},
    ]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs = render_jinja_template([talk], chat_template=CONSTRUCTS[number], add_generation_prompt=True, **tokens)
    ours = chat_template.render(CONSTRUCTS[number], talk, add_generation_prompt=True, special_tokens=tokens)
    assert ours == theirs[0][0] != ""


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


@pytest.mark.parametrize("length", [chat_template.MAX_CHARACTERS + 1, 34_000_000])
def test_chat_template_that_is_too_long_is_refused(length: int) -> None:
    message = f"template has {length} characters, expected at most 1000000.*--chat-template-file"
    with pytest.raises(CheckpointError, match=message):
        render("x" * length)
    with pytest.raises(CheckpointError, match=message):
        chat_template.check("x" * length)


def test_a_chat_templates_own_words_are_cut_and_escaped() -> None:
    with pytest.raises(UsageError) as refusal:
        render("{{ raise_exception('é\x1b[31m\n' ~ 'x' * 9999) }}")
    assert "messages: é\\x1b[31m\\nxxx" in str(refusal.value) and len(str(refusal.value)) < 500
    with pytest.raises(CheckpointError) as failure:
        render("{{ messages['\x1b' * 9999]() }}")
    assert "failed: UndefinedError: " in str(failure.value) and len(str(failure.value)) < 700
    assert str(failure.value).isprintable()


def test_a_refusal_that_is_a_huge_number_is_named() -> None:
    with pytest.raises(UsageError, match="does not accept these messages: Exceeds the limit"):
        render("{% set n = 10 %}{{ raise_exception(n ** 5000) }}")


def test_refusal_of_a_chat_template_is_the_users_to_mend() -> None:
    with pytest.raises(UsageError, match=r"these messages: roles must alternate/\.\.\. Give other"):
        render("{{ raise_exception('roles must alternate/...') }}")


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
        ([{"role": "user", "content": [10**5000]}], "only strings, numbers, lists and dicts"),
        ([{"role": "user", "content": 10**5000}], r"messages\[0\]: its content is a number of 5001 digits, expected"),
        ([{"role": "user", "content": math.nan}], r"messages\[0\]: its content is nan, expected a string"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        chat_template.render("x", messages, add_generation_prompt=True, special_tokens={})


def test_chat_template_sees_parts_of_a_message_as_they_are() -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "image"}]
    template = "{% for p in messages[0].content %}{{ p.type }}={{ p.text }};{% endfor %}"
    assert render(template, parts) == "text=Hi;image=;"


def test_a_template_for_parts_alone_shows_plain_texts_too() -> None:
    """SmolVLM's loop over parts reads a string character by character, and writes nothing."""
    loop = "{% for m in messages %}{{ m.role }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}"
    tokenizer = fake_vision.image_tokenizer(loop + "{% endif %}{% endfor %}{% endfor %}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"type": "text", "text": "ho"}]}]
    assert tokenizer.render_chat(messages) == "user:Hiuser:ho"
    assert chat_template.needs_parts(str(tokenizer.chat_template))
    assert not chat_template.needs_parts(fake_vision.TEMPLATE) and not chat_template.needs_parts("{{ messages }}")
