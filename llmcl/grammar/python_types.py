"""A JSON schema of a Python type: dataclasses, TypedDict, Literal, Enum, list[int], int | None and what they hold."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import types
import typing
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from llmcl.errors import UsageError, shown

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_LISTS, _MAPPINGS = (list, Sequence), (dict, Mapping)
_UNIONS = (typing.Union, types.UnionType)


def is_type(value: object) -> bool:
    """Whether a value is a class or a type hint, such as `list[int]`, which `schema_of` takes."""
    return isinstance(value, (type, typing.NewType)) or typing.get_origin(value) is not None


def schema_of(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type. An object has the fields of its class and no other; those with a default may be left
    out. Pydantic models give their own schema.

    Raises UsageError for a type that JSON has no values of, and for one whose fields' types cannot be found.
    """
    writer = _Writer()
    schema = writer.schema(hint, "schema")
    return {**schema, "$defs": writer.definitions} if writer.definitions else schema


class _Writer:
    """Classes are written once, in `definitions`, so that they may refer to themselves."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def schema(self, hint: Any, where: str) -> dict[str, Any]:
        """where: what has this type, for messages."""
        try:
            plain = _PLAIN.get(hint)
        except TypeError:  # it cannot be a key, as Annotated[int, []]
            plain = None
        if plain is not None:
            return dict(plain)
        if isinstance(hint, typing.NewType):
            return self.schema(hint.__supertype__, where)
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if origin is not None:
            return self._of_parts(hint, origin, parts, where)
        if isinstance(hint, type):
            if hasattr(hint, "model_json_schema"):
                return self._pydantic(hint)
            if issubclass(hint, enum.Enum):
                return {"enum": [_value(member.value, where) for member in hint]}
            if dataclasses.is_dataclass(hint) or typing.is_typeddict(hint):
                return self._reference(hint)
        raise _refused(hint, where)

    def _of_parts(self, hint: Any, origin: Any, parts: tuple[Any, ...], where: str) -> dict[str, Any]:
        if origin is typing.Literal:
            return {"enum": [_value(part, where) for part in parts]}
        if origin in _UNIONS:
            return {"anyOf": [self.schema(part, where) for part in parts]}
        if origin is typing.Annotated or _qualifier(origin):
            return self.schema(parts[0], where)
        if origin in _LISTS:
            return {"type": "array", "items": self.schema(parts[0], f"an item of {where}")}
        if origin is tuple and len(parts) == 2 and parts[1] is ...:
            return {"type": "array", "items": self.schema(parts[0], f"an item of {where}")}
        if origin is tuple:
            items = [self.schema(part, f"item {i} of {where}") for i, part in enumerate(parts) if part != ()]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        if origin in _MAPPINGS and parts[0] is str:
            return {"type": "object", "additionalProperties": self.schema(parts[1], f"a value of {where}")}
        raise _refused(hint, where)

    def _reference(self, kind: Any) -> dict[str, Any]:
        """A class with fields."""
        if kind not in self._names:
            name = self._names[kind] = self._free_name(kind.__name__)
            self.definitions[name] = {}  # its place, for a class that refers to itself
            fields = _fields(kind)
            self.definitions[name] = {
                "type": "object",
                "properties": {
                    each: self.schema(hint, f"{kind.__name__}.{each}") for each, (hint, _) in fields.items()
                },
                "required": [each for each, (_, is_required) in fields.items() if is_required],
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def _pydantic(self, kind: Any) -> dict[str, Any]:
        if kind not in self._names:
            name = self._names[kind] = self._free_name(kind.__name__)
            schema = dict(kind.model_json_schema())
            for each, definition in {name: schema, **schema.pop("$defs", {})}.items():
                if self.definitions.setdefault(each, definition) != definition:
                    raise UsageError(f"schema: two classes are called {each}; rename one of them")
        return {"$ref": f"#/$defs/{self._names[kind]}"}

    def _free_name(self, name: str) -> str:
        n = sum(each.partition(".")[0] == name for each in self.definitions)
        return f"{name}.{n + 1}" if n else name


def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass or a TypedDict, and whether it must be there."""
    hints = _hints(kind)
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return {
            field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
            for field in dataclasses.fields(kind)
            if field.init
        }
    said = {"Required": True, "NotRequired": False}
    keys = kind.__required_keys__
    return {name: (hint, said.get(_qualifier(typing.get_origin(hint)), name in keys)) for name, hint in hints.items()}


def _qualifier(origin: Any) -> str:
    """The name of Required, NotRequired and ReadOnly, which Python 3.10 has in typing_extensions alone."""
    name = getattr(origin, "_name", None)
    return name if name in ("Required", "NotRequired", "ReadOnly") else ""


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise UsageError(
            f"schema: the types of {kind.__name__}'s fields cannot be found ({error}); define them at the top of the "
            "module, or leave out `from __future__ import annotations` there"
        ) from error


def _value(value: Any, where: str) -> Any:
    if value is not None and not isinstance(value, (str, int, float)):
        raise UsageError(f"{where} has the value {shown(value)}; expected text, numbers, True, False or None")
    return value


def _refused(hint: Any, where: str) -> UsageError:
    return UsageError(
        f"{where} has the type {shown(hint)}, which no JSON value has; expected dataclasses, TypedDict, Literal, Enum, "
        "str, int, float, bool, None, list[...], tuple[...], dict[str, ...] or a union of them"
    )
