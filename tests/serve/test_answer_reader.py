"""Thoughts, text and calls of tools in an answer, however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from written_calls import ANSWERS, NAMES, A, W

from llmcl.serve.answer_reader import AnswerReader
from llmcl.serve.gemma_scanner import QUOTE, GemmaForm
from llmcl.serve.thoughts import thought_marks
from llmcl.serve.tool_families import FAMILIES, HERMES, family_of
from llmcl.tokenizer.answer_parts import CallPart, Said, Thought

BY_NAME = {family.name: family for family in reversed(FAMILIES)}


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


def test_ids_that_models_write_are_kept() -> None:
    for name, ids in (
        ("mistral 3.2", ["9Ae3bDc2F", "000000001"]),
        ("kimi k2", ["functions.weather:0", "functions.add:1"]),
        ("kimi k2, names alone", ["add:3", None]),
        ("kimi k2, the same number", ["functions.add:0", None]),
        ("mistral 3", [None, None]),
        ("cohere", [None, None]),  # it counts from 0 in each answer
    ):
        family, answer, _, _ = ANSWERS[name]
        reader = AnswerReader(BY_NAME[family], NAMES)
        reader.push(answer, 0)
        for call, expected in zip(reader.calls, ids, strict=True):
            assert call.id == expected if expected else len(call.id) >= 9, name


def test_signs_of_mistral_that_are_tokens() -> None:
    """They have no text of their own, so the name and the id ran together."""
    special = {7: "[TOOL_CALLS]", 8: "[CALL_ID]", 9: "[ARGS]"}
    reader = AnswerReader(BY_NAME["mistral 3.2"], NAMES, special=special)
    for text, token in (("", 7), ("weather", 0), ("", 8), ("9Ae3bDc2F", 0), ("", 9), (W, 0)):
        reader.push(text, token)
    reader.finish()
    assert [(call.id, call.name, call.arguments) for call in reader.calls] == [("9Ae3bDc2F", "weather", W)]
    assert {*special.values()} <= {*BY_NAME["mistral 3.2"].markers}


@pytest.mark.parametrize(
    ("template", "answer", "thoughts", "text"),
    [
        ("[THINK]", "[THINK]I should call get_weather.[/THINK]Hello", "I should call get_weather.", "Hello"),
        ("<seed:think>", "<seed:think>\nHm.\n</seed:think>Hello", "Hm.", "Hello"),
        ("<|START_THINKING|>", "<|START_THINKING|>Hm.<|END_THINKING|>Hello", "Hm.", "Hello"),
        ("<|inner_prefix|>", "<|inner_prefix|>Hm.<|inner_suffix|>Hello", "Hm.", "Hello"),
        ("<|channel>thought", "<|channel>thought\n<channel|>Hello<channel|>", "", "Hello"),
        ("<|channel>thought", "Hello<channel|> you<channel|>", "", "Hello you"),
        ("<|channel>thought", "<|channel>thought\nHm.<channel|>Hello <channel", "Hm.", "Hello <channel"),
        ("", "Hello</think>", "", "Hello</think>"),
    ],
)
@pytest.mark.parametrize("family", [None, "mistral"])
def test_thoughts_of_other_families(template: str, answer: str, thoughts: str, text: str, family: str | None) -> None:
    for pieces in cuts(answer):
        reader = read(AnswerReader(BY_NAME[family] if family else None, NAMES, marks=thought_marks(template)), pieces)
        assert (reader.thoughts, reader.text) == (thoughts, text), pieces


def test_a_call_in_a_thought_is_none() -> None:
    answer = f"[THINK]I write [TOOL_CALLS]add[ARGS]{A}.[/THINK][TOOL_CALLS]weather[ARGS]{W}"
    for pieces in cuts(answer):
        reader = read(AnswerReader(BY_NAME["mistral 3"], NAMES, marks=thought_marks("[THINK]")), pieces)
        assert [(call.name, call.arguments) for call in reader.calls] == [("weather", W)] and not reader.text
        assert reader.thoughts == f"I write [TOOL_CALLS]add[ARGS]{A}."


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
        ('<TOOLCALL>[{{"name": "tool_name1", "arguments": "tool_args1"}}]</TOOLCALL>', "nemotron"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma 4"),
        ("tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'", "deepseek v3"),
        ("tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']", "deepseek v3.1"),
        ("'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments", "mistral 3.2"),
        ("'[TOOL_CALLS]' + name + '[ARGS]' + arguments", "mistral 3"),
        ("set toolcall_begin_token = '<seed:tool_call>' <function=name> <parameter=key>", "seed-oss"),
        ("set toolcall_begin_token = '<minimax:tool_call>' <parameter name=", "minimax m2"),
        ("set dsml_token = '｜DSML｜'", "deepseek v3.2"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi k2"),
        ("<|START_ACTION|>[", "cohere"),
        ("set tools_prefix_token = '<|tools_prefix|>'", "apertus"),
        ("{{ messages }}", "hermes"),
    ):
        assert family_of(text).name == name
