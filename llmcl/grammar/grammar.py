"""A grammar as the user gives it: a schema, a regular expression, a grammar text, or texts to choose from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmcl.errors import UsageError, shown
from llmcl.grammar.python_types import is_type, schema_of

MAX_CHARACTERS = 128 << 10


@dataclass(frozen=True)
class Grammar:
    """A grammar's kind, named like the option, and its text. Not compiled yet, so it may still be refused."""

    kind: Literal["schema", "regex", "grammar", "choices"]
    source: str

    @classmethod
    def of(cls, *, schema: Any = None, regex: Any = None, grammar: Any = None, choices: Any = None) -> Grammar | None:
        """Builds a grammar from an option. Returns None without any option.

        schema: a JSON schema as a mapping or JSON text, a pydantic class, or a Python type (python_types.py). regex: a
        regular expression in Rust's syntax for the whole answer. grammar: a text in llguidance's Lark syntax or in
        llama.cpp's GBNF. choices: texts, one of which is the answer.

        Raises UsageError for several options, a wrong type, or more than MAX_CHARACTERS.
        """
        options = {"schema": schema, "regex": regex, "grammar": grammar, "choices": choices}
        names = [name for name, value in options.items() if value is not None]
        if len(names) > 1:
            raise UsageError(f"{' and '.join(names)} both say what the answer is to match; give one of them")
        if not names:
            return None
        if schema is not None:
            result = cls("schema", _schema_text(schema))
        elif choices is not None:
            result = cls("choices", _choices_text(choices))
        else:
            result = _text_of(names[0], options[names[0]])
        if len(result.source) > MAX_CHARACTERS:
            raise UsageError(
                f"{result.kind} has {len(result.source)} characters; expected at most {MAX_CHARACTERS}: make it shorter"
            )
        return result


# The text formats known to llguidance. JSON Schema treats all remaining formats as annotations.
_FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"]
)
_VALUES = frozenset(("const", "enum", "default", "examples"))  # keywords with values in place of schemas
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def without_unknown_formats(schema: Any) -> Any:
    """Removes each `format` that is only an annotation. Returns a schema with too deep nesting unchanged."""
    try:
        return _known(schema)
    except RecursionError:  # compiling it will report the error
        return schema


def _known(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_known(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            kept[key] = {name: _known(each) for name, each in value.items()}
        elif key in _VALUES:
            kept[key] = value
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            kept[key] = _known(value)
    return kept


def _text_of(kind: Any, source: Any) -> Grammar:
    if not isinstance(source, str) or not source.strip():
        raise UsageError(f"{kind} is {shown(source)}; expected a text that is not empty")
    return Grammar(kind, source)


def _choices_text(choices: Any) -> str:
    """A regular expression of the texts. Both Python and Rust read what `re.escape` writes."""
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise UsageError(f"choices is {shown(choices)}; expected a list of texts, one of which is the answer")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise UsageError(f"choices[{i}] is {shown(choice)}; expected a text that is not empty")
    return "|".join(map(re.escape, choices))


def _schema_text(schema: Any) -> str:
    """Returns the schema as canonical JSON text, so that equal schemas are compiled once."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    elif is_type(schema):
        schema = schema_of(schema)
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise UsageError(f"schema is {shown(schema)}; expected a JSON schema, which is an object, or a type")
        return json.dumps(without_unknown_formats(schema), allow_nan=False)
    except UsageError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"schema is no JSON ({error}); expected a JSON schema") from None
