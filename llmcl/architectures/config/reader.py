"""Typed reading of config.json and GGUF metadata. Errors name the key, the value and the file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from llmcl.errors import CheckpointError, UnsupportedModelError, shown

_log = logging.getLogger(__name__)


def unsupported(feature: str, remedy: str = "use another model") -> NoReturn:
    raise UnsupportedModelError(f"llmcl does not support {feature}; {remedy}.")


class Reader:
    """Typed access to a JSON object or metadata table. Every error names the key and the file."""

    def __init__(self, values: Mapping[str, Any], source: str):
        if not isinstance(values, Mapping):
            raise CheckpointError(f"{source}: it holds {type(values).__name__}, expected an object with named values.")
        self.values = values
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the raw value. null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def fail(self, key: str, value: object, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.source}: {key} is {shown(value)}, expected {expected}. The checkpoint is damaged or not what it "
            "claims to be; fetch or convert it again."
        )

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(
                f"{self.source}: {key} is missing. Without it the model cannot be computed; fetch or convert it again."
            )
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            self.fail(key, value, "a string")
        return value

    def size(self, key: str, maximum: int, default: int | None = None, minimum: int = 1) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.fail(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, above: float, limit: float, default: float | None = None) -> float:
        """Reads a finite number x with above < x <= limit."""
        value = self._required(key, default)
        # Compare before converting: float() of a 400-digit integer raises OverflowError.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= limit:
            self.fail(key, value, f"a number above {above:g} and at most {limit:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Reads one id or a list of ids. Returns () if the key is absent.

        Ids outside the vocabulary are dropped with a warning, because no text can contain them.
        """
        value = self.get(key)
        ids = [token_id for token_id in (value if isinstance(value, list) else [value]) if token_id is not None]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                self.fail(key, value, f"token ids from 0 to {vocab_size - 1}")
        if outside := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
            _log.warning(
                "%s: %s has %s, ignored: the vocabulary ends at %d", self.source, key, shown(outside), vocab_size - 1
            )
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id not in outside))

    def table(self, key: str) -> Reader | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(key, value, "an object")
        return Reader(value, f"{self.source}: {key}")
