"""Schemas, expressions and grammars: which are taken, which are refused and why, and what hostile ones cost."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, NewType, Optional, TypedDict

import numpy as np
import pytest
from ascii_tokenizer import ascii_tokenizer
from pydantic import BaseModel
from typing_extensions import NotRequired

from llmcl.errors import LlmclError, UsageError
from llmcl.grammar import CompiledGrammar, Grammar, Grammars, trial
from llmcl.grammar.grammar import MAX_CHARACTERS
from llmcl.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ascii_tokenizer(), vocab_size=99, eos_token_ids=(2,))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 99)


def compiled(grammars: Grammars, **given: Any) -> CompiledGrammar:
    grammar = Grammar.of(**given)
    assert grammar is not None
    return grammars.compile(grammar)


def matches(tokenizer: Tokenizer, found: CompiledGrammar, text: str) -> bool:
    """Whether the text is a whole answer."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), 2]
    return found.matcher().n_allowed(ids) == len(ids)


class Fish(BaseModel):
    name: str
    legs: int


class Colour(Enum):
    RED = "red"
    GREEN = 2


class Size(TypedDict):
    length: float
    unit: NotRequired[Literal["m", "cm"]]


Name = NewType("Name", str)


@dataclass
class Animal:
    """Refers to itself, and to other kinds of classes."""

    name: Annotated[Name, "short"]
    colour: Colour | None
    size: Size
    eats: list[Animal] = field(default_factory=list)
    legs: int = 4
    n_made: ClassVar[int] = 0
    secret: int = field(init=False, default=0)


@dataclass
class Bowl:
    fish: list[Fish]
    twin: Optional[Fish] = None  # noqa: UP045  # both ways to write it


MARKS = "".join(map(chr, range(32, 127)))
FISH = '{"name": "x", "legs": 0}'
SIZE = '{"length": 1.5}'

TAKEN: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"schema": {"type": "object"}}, ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}', "{} "]),
    ({"schema": '{"enum": ["a", 1]}'}, ['"a"', "1"], ['"b"', "a"]),
    ({"schema": {}}, ["1", "[{}]", '"x"'], ["x"]),
    (
        {"schema": Fish},
        ['{"name": "x", "legs": 0}', '{\n  "name": "x",\n  "legs": 0\n}'],
        ['{"name": 1, "legs": 0}', "{}"],
    ),
    ({"schema": list[int]}, ["[]", "[1, -2]"], ["1", '["a"]', "[1.5]", "[1, null]"]),
    ({"schema": dict[str, bool]}, ["{}", '{"a": true}'], ['{"a": 1}', "[]"]),
    ({"schema": tuple[int, str]}, ['[1, "a"]'], ["[1]", '["a", 1]', '[1, "a", 2]']),
    ({"schema": tuple[int, ...]}, ["[]", "[1, 2, 3]"], ['["a"]']),
    ({"schema": Literal["a", 1, True, None]}, ['"a"', "1", "true", "null"], ['"b"', "2", "false"]),
    ({"schema": int | str}, ["1", '"a"'], ["null", "1.5"]),
    ({"schema": Optional[float]}, ["null", "1.5"], ['"a"']),  # noqa: UP045
    ({"schema": str}, ['"a"'], ["a", "1"]),
    ({"schema": datetime.date}, ['"2026-01-31"'], ['"2026-13-31"', '"yesterday"']),
    ({"schema": Colour}, ['"red"', "2"], ['"RED"', "1"]),
    ({"schema": Size}, [SIZE, '{"length": 1, "unit": "cm"}'], ["{}", '{"length": 1, "unit": "km"}', '{"unit": "m"}']),
    (
        {"schema": Animal},
        [
            '{"name": "x", "colour": "red", "size": ' + SIZE + "}",
            '{"name": "x", "colour": null, "size": ' + SIZE + ', "eats": [], "legs": 3}',
            f'{{"name": "x", "colour": 2, "size": {SIZE}, "eats": [{{"name": "y", "colour": 2, "size": {SIZE}}}]}}',
        ],
        [
            '{"name": "x", "colour": "red"}',
            '{"name": "x", "colour": "red", "size": ' + SIZE + ', "n_made": 1}',
            '{"name": "x", "colour": "red", "size": ' + SIZE + ', "secret": 1}',
            f'{{"name": "x", "colour": 2, "size": {SIZE}, "eats": [{{"name": 1, "colour": 2, "size": {SIZE}}}]}}',
        ],
    ),
    ({"schema": Bowl}, [f'{{"fish": [{FISH}]}}', f'{{"fish": [], "twin": {FISH}}}'], ['{"fish": [{"name": "x"}]}']),
    ({"schema": list[Fish]}, ["[]", f"[{FISH}, {FISH}]"], [FISH, '[{"name": 1, "legs": 0}]']),
    ({"choices": ["a", "ab", "c.d|e"]}, ["a", "ab", "c.d|e"], ["b", "abc", "cxd|e", "c.d", "e"]),
    ({"choices": (MARKS, "\\d \n")}, [MARKS, "\\d \n"], ["1 \n", MARKS[1:]]),
    ({"regex": "[0-9]{3}-[a-z]+"}, ["123-abc"], ["12-abc", "123-", "x123-abc"]),
    ({"grammar": 'start: "a" b\nb: /[0-9]+/ | "(" b ")"'}, ["a1", "a((12))"], ["a", "a((1)"]),
    ({"grammar": 'root ::= "a" b\nb ::= [0-9]+ | "(" b ")"'}, ["a1", "a((12))"], ["a", "a((1)"]),
]


@pytest.mark.parametrize(("given", "right", "wrong"), TAKEN, ids=lambda value: str(value)[:40])
def test_what_matches(
    given: dict[str, Any], right: list[str], wrong: list[str], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    found = compiled(grammars, **given)
    assert [text for text in right if not matches(tokenizer, found, text)] == []
    assert [text for text in wrong if matches(tokenizer, found, text)] == []
    assert compiled(grammars, **given) is found  # compiled once


def test_whitespace_ends(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """A model could write it for ever."""
    found = compiled(grammars, schema={"type": "object"})
    assert not matches(tokenizer, found, "{" + " " * 30 + "}") and not matches(tokenizer, found, "{\n\n}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schema": {}, "regex": "a"}, "schema and regex both say what the answer is to match"),
        ({"schema": "{"}, "schema is no JSON"),
        ({"schema": True}, "schema is True; expected a JSON schema"),
        ({"schema": [1]}, r"schema is \[1\]; expected a JSON schema"),
        ({"schema": {"a": float("nan")}}, "schema is no JSON"),
        ({"schema": {1, 2}}, "schema is "),
        ({"schema": set}, "schema has the type <class 'set'>, which no JSON value has; expected dataclasses"),
        ({"schema": list[complex]}, "an item of schema has the type <class 'complex'>"),
        ({"schema": dict[int, str]}, r"schema has the type dict\[int, str\], which no JSON value has"),
        ({"schema": make_dataclass("Bad", [("at", bytes)])}, "Bad.at has the type <class 'bytes'>"),
        ({"schema": make_dataclass("Far", [("at", "Nowhere")])}, "the types of Far's fields cannot be found .*Nowhere"),
        ({"schema": Literal[b"x"]}, "schema has the value b'x'; expected text, numbers"),
        ({"choices": []}, r"choices is \[\]; expected a list of texts, one of which is the answer"),
        ({"choices": "ab"}, "choices is 'ab'; expected a list of texts"),
        ({"choices": ["a", 5]}, r"choices\[1\] is 5; expected a text that is not empty"),
        ({"choices": ["a", ""]}, r"choices\[1\] is ''; expected a text that is not empty"),
        ({"choices": ["a"], "regex": "a"}, "regex and choices both say what the answer is to match"),
        ({"regex": ""}, "regex is ''; expected a text that is not empty"),
        ({"grammar": 5}, "grammar is 5; expected a text"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, f"regex has {MAX_CHARACTERS + 1} characters; expected at most"),
        ({"schema": {"type": "objec"}}, "schema is refused: Invalid type: objec"),
        ({"schema": {"type": "object", "not": {}}}, r'schema is refused: Unimplemented keys: \["not"\]'),
        ({"schema": {"$ref": "http://example.com/x.json"}}, "schema is refused: .*not present in a registry"),
        ({"schema": {"$ref": "file:///etc/passwd"}}, "schema is refused: .*not present in a registry"),
        ({"schema": json.loads('{"items":' * 300 + "{}" + "}" * 300)}, "schema is refused: recursion limit"),
        (
            {"schema": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "schema is refused: oneOf is supported where no value can match two of its branches",
        ),
        ({"regex": "a("}, "regex is refused: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex is refused: .*look-around"),
        ({"grammar": "start: a"}, "grammar is refused: .*unknown name"),
        ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "grammar is refused: .*recursion"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused(given: dict[str, Any], message: str, grammars: Grammars) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        compiled(grammars, **given)
    assert len(str(refused.value)) < 500


# Intersections of such expressions take minutes, which no limit of llguidance bounds.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*b.*c"} for n in range(3, 30)]}


def test_what_takes_too_long_is_ended(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 1)
    with pytest.raises(UsageError, match="schema takes more than 1 s or 1024 MiB to compile; make it simpler"):
        compiled(grammars, schema=ENDLESS)
    monkeypatch.setattr(trial, "CPU_LIMIT_S", 60)
    monkeypatch.setattr(trial, "WALL_LIMIT_S", 0.5)
    with pytest.raises(UsageError, match="schema takes more than 60 s"):
        compiled(grammars, schema=ENDLESS)


def nested(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"anyOf": [{"type": "object", "properties": {name: schema}} for name in "ab"]}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "a wide choice": {"schema": nested(10)},
    "a long enum": {"schema": {"enum": [f"value {n}" for n in range(5000)]}},
    "many properties": {"schema": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}},
    "a long string": {"schema": {"type": "string", "minLength": 10**6}},
    "many items": {"schema": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}}},
    "itself": {"schema": {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "array"}]}}}},
    "many states": {"regex": "(.*a.{20})"},
    "nested repetition": {"regex": "((((a*)*)*)*)*b"},
    "large repetition": {"regex": "((a{0,100}){0,100}){0,100}x"},
    "ambiguous": {"grammar": 'start: a\na: a a | "x" | '},
    "doubling": {"grammar": "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(25)) + 'a25: "x"\n'},
    "without end": {"grammar": "start: a\na: a"},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_hostile_ones_cost(name: str, grammars: Grammars) -> None:
    """It works, or it is refused, with at most a second of CPU time for 40 steps. Compiling has limits of its own."""
    rng = np.random.default_rng(0)
    try:
        matcher = compiled(grammars, **HOSTILE[name]).matcher()
        start = time.thread_time()
        for _ in range(40):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            matcher.accept([int(rng.choice(allowed))])
            assert time.thread_time() - start < 1.0
    except UsageError as error:
        assert len(str(error)) < 500


def test_models_that_cannot_match() -> None:
    grammar = Grammar("regex", "a")
    with pytest.raises(UsageError, match="regex: the model has no tokenizer"):
        Grammars(None, 99).compile(grammar)
    with pytest.raises(UsageError, match="has no end-of-text token"):
        Grammars(Tokenizer(ascii_tokenizer(), vocab_size=99), 99).compile(grammar)


def test_without_the_package_the_remedy_is_named(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r'needs the package llguidance: pip install "llmcl\[grammar\]"'):
        Grammars(tokenizer, 99).compile(Grammar("regex", "a"))


def test_where_no_process_can_be_started(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise OSError("none here")

    monkeypatch.setattr(trial, "interpreter", none)
    with pytest.raises(LlmclError, match="cannot be started: none here"):
        Grammars(tokenizer, 99).compile(Grammar("regex", "a"))
