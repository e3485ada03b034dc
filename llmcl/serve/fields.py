"""Reads request fields. null means absent, unknown fields are ignored, a wrong type gives a 400 naming the field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcl.errors import MAX_NUMBER, shown
from llmcl.serve.errors import RequestError, unsupported


def wrong(name: str, value: object, expected: str) -> RequestError:
    return RequestError(400, f"{name}: got {shown(value)}, expected {expected}", name, "invalid_value")


def as_whole(value: object) -> int | None:
    """Returns a whole number from JSON, where 16.0 counts as 16; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Fields:
    """A JSON object and the place in the request where it stands, such as `messages[0]` ("" for the whole body)."""

    def __init__(self, value: object, place: str = ""):
        if not isinstance(value, dict):
            raise wrong(place or "the body", value, "a JSON object")
        self._values: dict[str, Any] = value
        self.place = place

    def name(self, field: str) -> str:
        """Returns a field's place in the request."""
        return f"{self.place}.{field}" if self.place else field

    @property
    def values(self) -> dict[str, Any]:
        """The JSON object, unchanged."""
        return self._values

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """Returns the object with values for fields that are absent or null. Other null fields are left out."""
        values = {name: value for name, value in self._values.items() if value is not None}
        return Fields({**defaults, **values}, self.place)

    def names(self) -> list[str]:
        """Returns the names of all fields present."""
        return [*self._values]

    def given(self, field: str) -> Any:
        """Returns the raw value; None if absent or null."""
        return self._values.get(field)

    def required(self, field: str, expected: str) -> Any:
        if (value := self.given(field)) is None:
            name = self.name(field)
            what = "is null" if field in self._values else "is missing"
            raise RequestError(400, f"{name}: {what}, expected {expected}", name, "missing_required_parameter")
        return value

    def text(self, field: str) -> str | None:
        value = self.given(field)
        if value is not None and not isinstance(value, str):
            raise wrong(self.name(field), value, "a string")
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.given(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(self.name(field), value, "true or false")
        return value

    def number(self, field: str, default: float, low: float, high: float) -> float:
        """Returns a number from `low` to `high`."""
        value = self.given(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise wrong(self.name(field), value, "a number")
        if not low <= value <= high:  # before conversion: it may overflow a float
            raise wrong(self.name(field), value, f"a number from {low:g} to {high:g}")
        return float(value)

    def whole(self, field: str, default: int | None, low: int, high: int = MAX_NUMBER) -> int | None:
        """Returns a whole number from `low` to `high`."""
        value = self.given(field)
        if value is None:
            return default
        if (value := as_whole(value)) is None:
            raise wrong(self.name(field), self.given(field), "a whole number")
        if not low <= value <= high:
            raise wrong(self.name(field), value, f"a whole number from {low} to {high}")
        return value

    def one_of(self, field: str, *names: str) -> str | None:
        value = self.given(field)
        if value is not None and value not in names:
            raise wrong(self.name(field), value, f"one of {', '.join(names)}")
        return None if value is None else str(value)

    def strings(self, field: str, most: int) -> tuple[str, ...]:
        """Returns a string or a list of up to `most` strings. Empty strings are dropped."""
        value = self.given(field)
        if value is None:
            return ()
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most or not all(isinstance(text, str) for text in texts):
            raise wrong(self.name(field), value, f"a string or a list of up to {most}")
        return tuple(text for text in texts if text)

    def strings_by_name(self) -> dict[str, str]:
        """Returns the whole object if all values are strings."""
        for name, value in self._values.items():
            if not isinstance(value, str):
                raise wrong(self.name(name), value, "a string")
        return self._values

    def items(self, field: str) -> list[Any]:
        """Returns a list; empty if absent."""
        value = self.given(field)
        if value is None:
            return []
        if not isinstance(value, list):
            raise wrong(self.name(field), value, "a list")
        return value

    def objects(self, field: str) -> Iterator[Fields]:
        """Yields the objects in a list."""
        for index, item in enumerate(self.items(field)):
            yield Fields(item, f"{self.name(field)}[{index}]")

    def object(self, field: str) -> Fields:
        """Returns an object; empty if absent."""
        value = self.given(field)
        return Fields({} if value is None else value, self.name(field))

    def refuse(self, what: str, *fields: str) -> None:
        """Refuses fields that ask for a missing feature. what: the message, "... is not supported"."""
        for field in fields:
            if self.given(field) not in (None, False, [], {}):
                raise unsupported(self.name(field), what)
