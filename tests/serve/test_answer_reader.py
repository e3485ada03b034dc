"""Thoughts, text and calls of tools in an answer, however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from llmcl.serve.answer_reader import AnswerReader
from llmcl.serve.gemma_scanner import QUOTE, GemmaForm
from llmcl.serve.thoughts import thought_marks
from llmcl.serve.tool_families import FAMILIES, HERMES, family_of
from llmcl.tokenizer.answer_parts import CallPart, Said, Thought

BY_NAME = {family.name: family for family in reversed(FAMILIES)}
NAMES = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"enum": ["C", "F"]}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "c": {"type": ["string", "null"]}}},
}
W, A = '{"city": "Z\\u00fcrich, \\"old\\" {town}"}', '{"a": 1, "b": [2, {"c": "}"}]}'

# Family; the answer; its text; (name, arguments) of its calls.
ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes": ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>', "", [("weather", W)]),
    "hermes, two": (
        "hermes",
        f'I look.\n\n<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>\n<tool_call>\n'
        f'{{"name": "add", "arguments": {A}}}\n</tool_call>\n',
        "I look.",
        [("weather", W), ("add", A)],
    ),
    "hermes, text behind": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {A}}}</tool_call>\nThat is it.',
        "That is it.",
        [("add", A)],
    ),
    "arguments first": ("hermes", f'<tool_call>\n{{"arguments": {A}, "name": "add"}}\n</tool_call>', "", [("add", A)]),
    "none": ("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>', "", [("add", "{}")]),
    "in a string": (
        "hermes",
        f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(A)}}}\n</tool_call>',
        "",
        [("add", A)],
    ),
    "text alone": (
        "hermes",
        "1 < 2 and <tool> is \n no call <tool_cal",
        "1 < 2 and <tool> is \n no call <tool_cal",
        [],
    ),
    "no object": ("hermes", "<tool_call> is a word", "<tool_call>is a word", []),
    "no call": ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    "llama": ("llama 3", f'{{"name": "add", "parameters": {A}}}', "", [("add", A)]),
    "llama, two": (
        "llama 3",
        f'{{"type": "function", "name": "add", "parameters": {A}}}; {{"name": "weather", "parameters": {W}}}',
        "",
        [("add", A), ("weather", W)],
    ),
    "llama, tag": ("llama 3", f'<|python_tag|>{{"name": "add", "parameters": {A}}}', "", [("add", A)]),
    "llama, other JSON": ("llama 3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    "llama, text": ("llama 3", 'Say {"name": "add"}', 'Say {"name": "add"}', []),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}, {{"name": "weather", "arguments": {W}}}]',
        "",
        [("add", A), ("weather", W)],
    ),
    "mistral, without its token": ("mistral", f'[{{"name": "add", "arguments": {A}}}]', "", [("add", A)]),
    "mistral, newer": (
        "mistral",
        f"[TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]weather[ARGS]{W}",
        "",
        [("add", A), ("weather", W)],
    ),
    "mistral, a list": ("mistral", "[1, 2]", "[1, 2]", []),
    "qwen": (
        "qwen",
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nZ\u00fcrich,\n"old" <town>\n</parameter>\n'
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n"
        '1\n</parameter>\n<parameter=b>\n[2, {"c": "}"}]\n</parameter>\n</function>\n</tool_call>\n',
        "I look.",
        [
            ("weather", '{"city": "Z\u00fcrich,\\n\\"old\\" <town>", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, {"c": "}"}]}'),
        ],
    ),
    "qwen, without its opening": (
        "qwen",
        "<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=other>\n3\n</parameter>\n</function>\n"
        "</tool_call>",
        "",
        [("weather", '{"city": "12", "other": "3"}')],
    ),
    "qwen, values of their own": (
        "qwen",
        "<tool_call><function=add><parameter=a>True</parameter><parameter=b>two</parameter><parameter=c>\nnull\n"
        "</parameter></function></tool_call>\nDone.",
        "Done.",
        [("add", '{"a": true, "b": "two", "c": null}')],
    ),
    "qwen, none": ("qwen", "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [("add", "{}")]),
    "qwen, no call": ("qwen", "<tool_call> is a word", "<tool_call>is a word", []),
    "qwen, no name": ("qwen", "See <function=a b>c", "See<function=a b>c", []),
    "glm": (
        "glm",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern\n</arg_value>\n<arg_key>unit</arg_key>\n"
        "<arg_value>C</arg_value>\n</tool_call>\n<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        "",
        [("weather", '{"city": "Bern\\n", "unit": "C"}'), ("add", '{"a": 1}')],
    ),
    "lfm2": (
        "lfm2",
        """Well. <|tool_call_start|>[weather(city='Z\u00fcrich, "old" (town)', unit="C"), """
        """add(a=1, b=[2, {'c': ")"}])] <|tool_call_end|>""",
        "Well.",
        [
            ("weather", '{"city": "Z\u00fcrich, \\"old\\" (town)", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, {"c": ")"}]}'),
        ],
    ),
    "lfm2, values of their own": (
        "lfm2",
        "[add(a=True, b=null, c=007, from='it\\'s', e=x)]",
        "",
        [("add", '{"a": true, "b": null, "c": "007", "from": "it\'s", "e": "x"}')],
    ),
    "olmo 3": (
        "olmo 3",
        """I look.\n<function_calls>weather(city="Z\u00fcrich, (old)\\n", unit='C')\nadd(a=1, b=[2, null])\n"""
        "add(b=true)</function_calls>\nDone.",
        "I look.Done.",
        [
            ("weather", '{"city": "Z\u00fcrich, (old)\\n", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, null]}'),
            ("add", '{"b": true}'),
        ],
    ),
    "olmo 3, cut": ("olmo 3", "<function_calls>add(a=1)\nadd(", "", [("add", '{"a": 1}'), ("add", "{")]),
    "olmo 3, lines between": (
        "olmo 3",
        "<function_calls>\nadd(a=1)\n\nadd()\n</function_calls>",
        "",
        [("add", '{"a": 1}'), ("add", "{}")],
    ),
    "olmo 3, no call": ("olmo 3", "<function_calls> is a word", "<function_calls>is a word", []),
    "lfm2, none": ("lfm2", "<|tool_call_start|>[a.b-c()]<|tool_call_end|>Done.", "Done.", [("a.b-c", "{}")]),
    "lfm2, no call": ("lfm2", "[1] says (so)", "[1] says (so)", []),
    "lfm2, of no tool": ("lfm2", "[see(x=1)]", "[see(x=1)]", []),
    "gemma": (
        "gemma 4",
        'I look.\n<|tool_call>call:weather{city:<|"|>Zürich, "old" {town}\n<b><|"|>,unit:<|"|>C<|"|>}<tool_call|>'
        "<|tool_call>call:add{a:1,b:[2,{c:true}]}<tool_call|>",
        "I look.",
        [
            ("weather", '{"city": "Zürich, \\"old\\" {town}\\n<b>", "unit": "C"}'),
            ("add", '{"a": 1, "b": [2, {"c": true}]}'),
        ],
    ),
    "gemma, none": ("gemma 4", "<|tool_call>call:add{}<tool_call|>\nDone.", "Done.", [("add", "{}")]),
    "gemma, as JSON": ("gemma 4", f"<|tool_call>call:add{A}<tool_call|>", "", [("add", A)]),
    "gemma, values of their own": (
        "gemma 4",
        '<|tool_call>add { a : 007, <|"|>b<|"|>:None, c:[x y,], d, e: }<tool_call|>',
        "",
        [("add", '{"a": "007", "b": null, "c": ["x y"], "d": null, "e": null}')],
    ),
    "gemma, signs left out": (
        "gemma 4",
        '<|tool_call>call:add{{1}<|"|>a<|"|>[<|"|>b<|"|><|"|>c<|"|>}}<tool_call|>',
        "",
        [("add", '{"": {"1": null}, "a": null, "": ["b", "c"]}')],
    ),
    "gemma, cut": ("gemma 4", '<|tool_call>call:add{a:1,b:<|"|>tw<|"', "", [("add", '{"a": 1, "b": "tw')]),
    "gemma, no call": ("gemma 4", "<|tool_call> is a word", "<|tool_call>is a word", []),
    "deepseek": (
        "deepseek v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{A}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
        [("weather", W), ("add", A)],
    ),
    "deepseek, newer": (
        "deepseek v3.1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{A}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done.",
        "Done.",
        [("weather", W), ("add", A)],
    ),
    "deepseek, without the first opening": (
        "deepseek v3",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>\n```json\n{A}\n```\n<｜tool▁call▁end｜>",
        "",
        [("add", A)],
    ),
    "deepseek, none": (
        "deepseek v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add<｜tool▁call▁end｜>",
        "",
        [("add", "{}")],
    ),
    "deepseek, cut": (
        "deepseek v3.1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a',
        "",
        [("add", '{"a')],
    ),
    "deepseek, no call": (
        "deepseek v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b{}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b{}",
        [],
    ),
    "granite": ("granite", f'<|tool_call|>[{{"name": "add", "arguments": {A}}}]', "", [("add", A)]),
}


def read(reader: AnswerReader, pieces: list[str]) -> AnswerReader:
    """Checks that the parts of an answer are what the reader has in all."""
    text, thoughts, arguments, ended = "", "", {}, set()
    for piece in (*pieces, None):
        if piece is None:
            reader.finish()
        else:
            reader.push(piece, 0)
        for part in reader.take():
            if isinstance(part, Said):
                text += part.text
            elif isinstance(part, Thought):
                thoughts += part.text
            else:
                assert isinstance(part, CallPart)
                assert part.is_first == (part.index not in arguments) and part.index not in ended
                arguments[part.index] = arguments.get(part.index, "") + part.delta
                ended |= {part.index} if part.is_last else set()
    assert (text, thoughts) == (reader.text, reader.thoughts)
    assert [*arguments.values()] == [call.arguments for call in reader.calls]
    assert len({call.id for call in reader.calls}) == len(reader.calls)
    return reader


def cuts(text: str) -> list[list[str]]:
    """The text in one piece, in pieces of one to three characters, and in two, cut anywhere."""
    sizes = [[text[i : i + n] for i in range(0, len(text), n)] for n in (len(text), 1, 2, 3)]
    return sizes + [[text[:i], text[i:]] for i in range(1, len(text))]


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_however_it_is_cut(name: str) -> None:
    family, answer, text, calls = ANSWERS[name]
    for pieces in cuts(answer):
        reader = read(AnswerReader(BY_NAME[family], NAMES), pieces)
        assert (reader.text, [(call.name, call.arguments) for call in reader.calls]) == (text, calls), pieces


@pytest.mark.parametrize("name", [name for name, (_, _, _, calls) in ANSWERS.items() if calls])
def test_the_opening_of_a_call_is_no_text_where_an_answer_is_cut(name: str) -> None:
    """At whatever character max_tokens cuts it; a few characters of an opening may be anything."""
    family, answer, text, _ = ANSWERS[name]
    openings = [opening.strip() for opening in (BY_NAME[family].opening, *BY_NAME[family].other_openings)]
    for n in range(len(answer)):
        reader = AnswerReader(BY_NAME[family], NAMES)
        reader.push(answer[:n], 0)
        reader.finish(is_cut=True)
        opened = any(opening and opening in answer[:n] for opening in openings)
        if opened:
            assert not reader.text.removeprefix(text[: len(reader.text)]).strip(), (answer[:n], reader.text)
        for opening in openings:
            assert not opening or opening[: len(opening) // 2 + 1] not in reader.text, (answer[:n], reader.text)


def test_text_is_text_where_an_answer_is_cut() -> None:
    for family, answer, text in (
        ("hermes", "1 <", "1 <"),
        ("hermes", "1 <tool", "1 <tool"),
        ("hermes", "1 \n<tool_c", "1"),
        ("hermes", "<tool_call> is a w", "<tool_call>is a w"),
        ("hermes", "see [", "see ["),
        ("mistral", "[1, ", "[1, "),
        ("mistral", "[TOOL_", "[TOOL_"),
        ("mistral", "[TOOL_C", ""),
        ("mistral", f'[TOOL_CALLS][{{"name": "add", "arguments": {A}}}, ', ""),
        ("llama 3", '{"na', '{"na'),
        ("llama 3", '{"name": "Bob", "parameters', '{"name": "Bob", "parameters'),
        ("llama 3", '{"name": "add", "param', ""),
        ("qwen", "Well. <function=ad", "Well."),
    ):
        reader = AnswerReader(BY_NAME[family], NAMES)
        for character in answer:
            reader.push(character, 0)
        reader.finish(is_cut=True)
        assert reader.text == text, answer


def test_arguments_come_as_they_are_written() -> None:
    reader = AnswerReader(HERMES, NAMES)
    reader.push('<tool_call>\n{"name": "weather", "arguments": {"city', 0)
    (part,) = reader.take()
    assert isinstance(part, CallPart) and part.is_first and part.call.name == "weather" and part.delta == '{"city'
    reader.push('": "Bern', 0)
    (part,) = reader.take()
    assert isinstance(part, CallPart) and not part.is_first and part.delta == '": "Bern'
    reader.finish(is_cut=True)
    assert reader.calls[0].arguments == '{"city": "Bern' and reader.text == ""


def test_values_between_tags_come_as_they_are_written() -> None:
    reader = AnswerReader(BY_NAME["qwen"], NAMES)
    reader.push("<tool_call>\n<function=weather>\n<parameter=city>\nBe", 0)
    assert [part.delta for part in reader.take() if isinstance(part, CallPart)] == ['{"city": "Be']
    reader.push("rn\n</para", 0)
    assert [part.delta for part in reader.take() if isinstance(part, CallPart)] == ["rn"]
    reader.push("meter>\n", 0)
    assert [part.delta for part in reader.take() if isinstance(part, CallPart)] == ['"']
    reader.finish(is_cut=True)
    assert reader.calls[0].arguments == '{"city": "Bern"' and reader.text == ""


def test_texts_of_gemma_come_as_they_are_written() -> None:
    reader = AnswerReader(BY_NAME["gemma 4"], NAMES, special={7: "<|tool_call>", 8: QUOTE, 9: "<tool_call|>"})
    for text, token, deltas in (
        ("", 7, []),
        ("call:weather{ci", 1, ["{"]),
        ("ty:", 1, ['"city": ']),
        ("", 8, ['"']),
        ('Be"', 1, ['Be\\"']),
        ("rn <", 1, ["rn "]),
        ("x", 1, ["<x"]),
        ("", 8, ['"']),
        ("}", 1, ["}"]),
        ("", 9, []),
    ):
        reader.push(text, token)
        assert [part.delta for part in reader.take() if isinstance(part, CallPart)] == deltas, text
    reader.finish()
    assert reader.text == "" and reader.calls[0].arguments == '{"city": "Be\\"rn <x"}'


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from([*'{}[],: \n"a1', QUOTE, "null", "\\", "<|", "é"])))
def test_what_gemma_writes_becomes_json(parts: list[str]) -> None:
    scanner = GemmaForm().scanner({})
    text = "call:f{" + "".join(parts)
    n_taken = scanner.push(text)
    if scanner.done:
        assert n_taken <= len(text) and isinstance(json.loads(scanner.arguments), dict)
    again = GemmaForm().scanner({})
    for character in text[:n_taken]:
        assert again.push(character) == 1
    assert again.arguments == scanner.arguments and again.done == scanner.done


def test_thoughts_in_other_marks() -> None:
    marks = thought_marks("{{ '<|channel>thought\n<channel|>' }}")
    answer = "<|channel>thought\nHm.\n<channel|>It is 4."
    for pieces in cuts(answer):
        reader = read(AnswerReader(marks=marks), pieces)
        assert (reader.thoughts, reader.text) == ("Hm.", "It is 4."), pieces
    assert thought_marks("<think>") == thought_marks(None) and thought_marks(None).begin == "<think>"


def test_thoughts() -> None:
    for answer, thinks, thoughts, text in (
        ("<think>\nHm.\n\nYes.\n</think>\n\nIt is 4.", False, "Hm.\n\nYes.", "It is 4."),
        ("Hm.\n</think>\n\nIt is 4.", True, "Hm.", "It is 4."),
        ("\nHm. <b>", True, "Hm. <b>", ""),
        ("<thin", False, "", "<thin"),
        ("4 <think>", False, "", "4 <think>"),
    ):
        for pieces in cuts(answer):
            reader = read(AnswerReader(thinks=thinks), pieces)
            assert (reader.thoughts, reader.text) == (thoughts, text), pieces
    answer = '<think>\n<tool_call>?\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for pieces in cuts(answer):
        reader = read(AnswerReader(HERMES, NAMES), pieces)
        assert (reader.thoughts, reader.text, len(reader.calls)) == ("<tool_call>?", "", 1)


def test_special_tokens_have_their_texts() -> None:
    reader = AnswerReader(BY_NAME["mistral"], NAMES, special={7: "[TOOL_CALLS]"})
    for text, token in (("Well.", 1), ("", 7), ('[{"name": "add", "argu', 2), ('ments": {}}]', 3), ("", 4)):
        reader.push(text, token)
    reader.finish()
    assert reader.text == "Well." and [(call.name, call.arguments) for call in reader.calls] == [("add", "{}")]
    assert len(reader.calls[0].id) == 9  # which Mistral's templates insist on


def test_one_call_where_one_is_wanted() -> None:
    answer = ANSWERS["hermes, two"][1]
    for pieces in cuts(answer):
        reader = read(AnswerReader(HERMES, NAMES, several=False), pieces)
        assert [call.name for call in reader.calls] == ["weather"] and reader.text == "I look."


def test_families_are_known_by_their_templates() -> None:
    for text, name in (
        ("{%- if tools %}<tools>{{ tools }}</tools> <tool_call>", "hermes"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama 3"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama 3"),
        ("<tool_call>\n<function=name>\n<parameter=key>", "qwen"),
        ("<tool_call>{function-name}<arg_key>", "glm"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("Output any function calls within <function_calls></function_calls> XML tags.", "olmo 3"),
        ("[AVAILABLE_TOOLS] {{ tools }} [TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "granite"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma 4"),
        ("tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'", "deepseek v3"),
        ("tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']", "deepseek v3.1"),
        ("{{ messages }}", "hermes"),
    ):
        assert family_of(text).name == name
