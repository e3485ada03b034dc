"""Grammars of calls where the marks of a family are special tokens, as in Mistral's and some of Qwen's tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from llguidance import grammar_from
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llmcl.grammar import Grammar, Grammars, Matcher, trial
from llmcl.serve.answer_reader import AnswerReader
from llmcl.serve.tool_families import FAMILIES, ToolFamily
from llmcl.serve.tool_grammar import grammar_of
from llmcl.serve.tools import Tool, ToolUse
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.special_markers import special_markers
from llmcl.tokenizer.tokenizer import byte_level_alphabet

MARKS = ["<s>", "</s>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|tool_call|>", "</think>", "<|python_tag|>"]
MARKS += ["<|tool_call_start|>", "<|tool_call_end|>", "<function_calls>", "<|tool_call>", "<tool_call|>", '<|"|>']
MARKS += ["[CALL_ID]", "[ARGS]", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"]
MARKS += ["｜DSML｜", "<|START_ACTION|>", "<|END_ACTION|>", "<|tools_prefix|>", "<|tools_suffix|>"]
MARKS += [f"<|tool_{name}|>" for name in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end")]
MARKS += ["<|tool_calls_section_end|>", "<TOOLCALL>", "</TOOLCALL>"]
MARKS += [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
ADD = Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, True, "tools[0]")
CALL = '{"name": "add", "arguments": {"a": 1}}'
TAGGED = "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"
KEYED = "add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
FENCED = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
NAMED = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
GEMMA = "<|tool_call>call:add{a:1}<tool_call|>"
SEED = "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>"
INVOKE = '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>'
DSML = (
    '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
NUMBERED = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
ACTION = '{"tool_name": "add", "parameters": {"a": 1}}'
ANSWERS = {
    "mistral 3.2": (
        '[TOOL_CALLS]add[CALL_ID]9Ae3bDc2F[ARGS]{"a": 1}',
        '[TOOL_CALLS]add[CALL_ID]9Ae3bDc2F[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]000000000[ARGS]{"a": 1}',
    ),
    "mistral 3": ('[TOOL_CALLS]add[ARGS]{"a": 1}', '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}'),
    "seed-oss": (SEED, f"{SEED}\n{SEED}"),
    "minimax m2": (
        f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>",
        f"<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>",
    ),
    "deepseek v3.2": (
        f"<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>",
        f"<｜DSML｜function_calls>\n{DSML}\n{DSML}\n</｜DSML｜function_calls>",
    ),
    "kimi k2": (
        f"<|tool_calls_section_begin|>{NUMBERED}<|tool_calls_section_end|>",
        f"<|tool_calls_section_begin|>{NUMBERED}{NUMBERED}<|tool_calls_section_end|>",
    ),
    "cohere": (f"<|START_ACTION|>[{ACTION}]<|END_ACTION|>", f"<|START_ACTION|>[{ACTION}, {ACTION}]<|END_ACTION|>"),
    "apertus": (
        '<|tools_prefix|>[{"add": {"a": 1}}]<|tools_suffix|>',
        '<|tools_prefix|>[{"add": {"a": 1}}, {"add": {"a": 1}}]<|tools_suffix|>',
    ),
    "gemma 4": (GEMMA, GEMMA + GEMMA),
    "deepseek v3": (
        f"<｜tool▁calls▁begin｜>{FENCED}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{FENCED}\n{FENCED}<｜tool▁calls▁end｜>",
    ),
    "deepseek v3.1": (
        f"<｜tool▁calls▁begin｜>{NAMED}<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜>{NAMED}{NAMED}<｜tool▁calls▁end｜>",
    ),
    "mistral": (f"[TOOL_CALLS][{CALL}]", f"[TOOL_CALLS][{CALL}, {CALL}]"),
    "hermes": (
        f"<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    ),
    "qwen": (
        f"<tool_call>\n{TAGGED}\n</tool_call>",
        f"<tool_call>\n{TAGGED}\n</tool_call>\n<tool_call>\n{TAGGED}\n</tool_call>",
    ),
    "glm": (f"<tool_call>{KEYED}", f"<tool_call>{KEYED}\n<tool_call>{KEYED}"),
    "lfm2": (
        "<|tool_call_start|>[add(a=1)]<|tool_call_end|>",
        "<|tool_call_start|>[add(a=1), add(a=1)]<|tool_call_end|>",
    ),
    "olmo 3": (
        "<function_calls>add(a=1)</function_calls>",
        "<function_calls>add(a=1)\nadd(a=1)</function_calls>",
    ),
    "nemotron": (f"<TOOLCALL>[{CALL}]</TOOLCALL>", f"<TOOLCALL>[{CALL}, {CALL}]</TOOLCALL>"),
    "granite": (f"<|tool_call|>[{CALL}]", f"<|tool_call|>[{CALL}, {CALL}]"),
    "llama 3": (CALL.replace("arguments", "parameters"), ""),
}
BY_NAME = {family.name: family for family in reversed(FAMILIES)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return made(MARKS)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """In which no mark is a token."""
    return made(MARKS[:2])


def made(marks: list[str]) -> Tokenizer:
    symbols = [*marks, *byte_level_alphabet()]
    backend = Backend(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return Tokenizer(backend, vocab_size=len(symbols), eos_token_ids=[1])


@pytest.fixture(autouse=True, scope="module")
def compiled_here() -> Iterator[None]:
    """No grammar is tried in a process first: hundreds would be started, and none of these comes from a user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "compiled_in_time", lambda grammar: grammar_from(grammar.kind, grammar.source))
        yield


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.n_vocab)


def allows(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    ids = [*tokenizer.encode(text), 1]
    return matcher.n_allowed(ids) == len(ids)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("after_thought", [False, True])
def test_calls_with_special_tokens(name: str, after_thought: bool, tokenizer: Tokenizer, grammars: Grammars) -> None:
    family, (one, two) = BY_NAME[name], ANSWERS[name]
    front = "Hm.</think>\n\n" if after_thought else ""
    for must in (False, True):
        for several in (False, True):
            use = ToolUse((ADD,), must, several)
            source = grammar_of(family, use, tokenizer, thought_end="</think>" if after_thought else None)
            compiled = grammars.compile(Grammar("grammar", source))
            assert allows(compiled.matcher(), tokenizer, front + one)
            assert allows(compiled.matcher(), tokenizer, front + "No.") == (not must)
            if two:
                assert allows(compiled.matcher(), tokenizer, front + two) == several
            if family.opening:
                assert allows(compiled.matcher(), tokenizer, f"{front}Well. {one}") == (not must)
            assert not allows(compiled.matcher(), tokenizer, front + one.replace("1", '"x"'))


ORDER = Tool(
    "order",
    "",
    {
        "type": "object",
        "properties": {
            "what": {"type": "string"},
            "size": {"enum": ["small", "large"]},
            "code": {"type": "string", "pattern": "^[0-9]{3}$"},
            "of": {"$ref": "#/$defs/Of"},
        },
        "required": ["what", "of"],
        "$defs": {"Of": {"type": "array", "items": {"type": "integer"}}},
    },
    True,
    "tools[0]",
)


@pytest.mark.parametrize(
    ("written", "allowed"),
    [
        ('what="tea", of=[1, 2]', True),
        ('what="", size="large", code="123", of=[]', True),
        ('what="tea", size="huge", of=[]', False),
        ('what="tea", of="tea"', False),
        ('what="tea"', False),
        (", of=[]", False),
        ('what="tea", of=[], more=1', False),
        ("", False),
    ],
)
def test_values_of_python_match_their_schemas(
    written: str, allowed: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    source = grammar_of(BY_NAME["lfm2"], ToolUse((ORDER,), True), tokenizer)
    matcher = grammars.compile(Grammar("grammar", source)).matcher()
    assert allows(matcher, tokenizer, f"<|tool_call_start|>[order({written})]<|tool_call_end|>") == allowed


def test_a_tool_without_arguments(tokenizer: Tokenizer, grammars: Grammars) -> None:
    use = ToolUse((Tool("now", "", {"type": "object", "properties": {}}, True, "tools[0]"),), True)
    for name, text in (
        ("qwen", "<tool_call>\n<function=now>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>now\n</tool_call>"),
        ("lfm2", "<|tool_call_start|>[now()]<|tool_call_end|>"),
        ("gemma 4", "<|tool_call>call:now{}<tool_call|>"),
    ):
        source = grammar_of(BY_NAME[name], use, tokenizer)
        assert allows(grammars.compile(Grammar("grammar", source)).matcher(), tokenizer, text), name


TRIP = Tool(
    "trip",
    "",
    {
        "type": "object",
        "properties": {
            "to": {"type": "string"},
            "class": {"enum": ["first", "second"]},
            "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}},
            "names": {"type": "array", "items": {"type": "string"}},
            "who": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
            "code": {"type": "string", "pattern": "^[0-9]{3}$"},
            "a:b": {"type": "boolean"},
        },
        "required": ["to"],
        "$defs": {"Stop": {"type": "integer"}},
    },
    True,
    "tools[0]",
)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('to:<|"|>Bern, {"old"}<|"|>', {"to": 'Bern, {"old"}'}),
        ('to:<|"|><|"|>,class:<|"|>first<|"|>,stops:[1,2]', {"to": "", "class": "first", "stops": [1, 2]}),
        ('to:<|"|>x<|"|>,names:[<|"|>a<|"|>,<|"|>b<|"|>]', {"to": "x", "names": ["a", "b"]}),
        ('to:<|"|>x<|"|>,names:[]', {"to": "x", "names": []}),
        ('to:<|"|>x<|"|>,who:{name:<|"|>A<|"|>,age:3}', {"to": "x", "who": {"name": "A", "age": 3}}),
        ('to:<|"|>x<|"|>,who:{}', {"to": "x", "who": {}}),
        ('to:<|"|>x<|"|>,code:"123"', {"to": "x", "code": "123"}),
        ('to:<|"|>x<|"|>,<|"|>a:b<|"|>:true', {"to": "x", "a:b": True}),
        ('class:<|"|>first<|"|>', None),
        ('to:<|"|>x<|"|>,class:<|"|>third<|"|>', None),
        ('to:<|"|>x<|"|>,stops:[<|"|>1<|"|>]', None),
        ('to:<|"|>x<|"|>,more:1', None),
        ("to:x", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("special", [True, False])
def test_values_of_gemma_match_their_schemas(
    written: str, read: dict[str, object] | None, special: bool, tokenizer: Tokenizer, plain: Tokenizer
) -> None:
    tokens = tokenizer if special else plain
    grammars = Grammars(tokens, tokens.n_vocab)
    source = grammar_of(BY_NAME["gemma 4"], ToolUse((TRIP,), True), tokens)
    text = f"<|tool_call>call:trip{{{written}}}<tool_call|>"
    assert allows(grammars.compile(Grammar("grammar", source)).matcher(), tokens, text) == (read is not None)
    if read is not None:
        reader = AnswerReader(BY_NAME["gemma 4"], {"trip": TRIP.parameters})
        reader.push(text, 0)
        assert [json.loads(call.arguments) for call in reader.calls] == [read]


def tagged(**values: str) -> str:
    keys = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=order>\n{keys}</function>\n</tool_call>"


def test_values_between_tags_match_their_schemas(tokenizer: Tokenizer, grammars: Grammars) -> None:
    source = grammar_of(BY_NAME["qwen"], ToolUse((ORDER,), True), tokenizer)
    compiled = grammars.compile(Grammar("grammar", source))
    for text, allowed in (
        (tagged(what='tea,\n"hot" </b>', of="[1, 2]"), True),
        (tagged(what="", size="large", code='"123"', of="[]"), True),
        (tagged(what="tea", size="huge", of="[]"), False),
        (tagged(what="tea", code='"12"', of="[]"), False),
        (tagged(what="tea", of="tea"), False),
        (tagged(what="tea"), False),
        (tagged(of="[]"), False),
        (tagged(what="tea", of="[]", more="1"), False),
    ):
        assert allows(compiled.matcher(), tokenizer, text) == allowed, text
    reader = AnswerReader(BY_NAME["qwen"], {"order": ORDER.parameters})
    reader.push(tagged(what="tea", code='"123"', of="[1]"), 0)
    assert [call.arguments for call in reader.calls] == ['{"what": "tea", "code": "123", "of": [1]}']


@pytest.mark.parametrize("name", sorted(set(ANSWERS) - {"llama 3"}))
def test_what_is_allowed_is_read(name: str, tokenizer: Tokenizer) -> None:
    """The tokens that are marks have no text of their own in an answer."""
    family: ToolFamily = BY_NAME[name]
    special = special_markers(family.markers, tokenizer)
    assert special
    for text, n_calls in zip(ANSWERS[name], (1, 2), strict=True):
        reader = AnswerReader(family, {"add": ADD.parameters}, special=special)
        for token in tokenizer.encode(text):
            reader.push(tokenizer.decode([token]), token)
        reader.finish()
        assert reader.text == "" and [call.arguments for call in reader.calls] == ['{"a": 1}'] * n_calls
