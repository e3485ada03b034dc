"""The Jinja environment of chat templates: a sandbox whose programs end.

Every turn of a loop and every call looks at the clock, and no single operation takes long: `*` and `**` are limited,
as Jinja limits `range`. The text that a template writes is limited as well; the memory of its own values is not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

TIME_LIMIT_S = 10.0
MAX_CHARACTERS = 1 << 26  # far more than any context takes
MAX_PRODUCT = 1 << 20  # elements of a repeated sequence, or bits of a number

_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class LimitError(Exception):
    """A template went beyond what one may take."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way to name an extension's tags)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    """With the loop controls `break` and `continue`, and without `lipsum`, whose time has no limit."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag])
        del self.globals["lipsum"]

    def compiled(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateSyntaxError, or RecursionError for a template nested too deeply."""
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            turn = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(turn).set_lineno(loop.lineno))
        return self.from_string(tree)

    @staticmethod
    def turn() -> None:
        """What each turn of a loop calls, so that `call` is asked."""

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() > _deadline.get():
            raise LimitError(f"it ran for more than {TIME_LIMIT_S:g} s")
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        else:
            factors = [len(x) if hasattr(x, "__len__") else abs(x) for x in (left, right) if not isinstance(x, float)]
            size = factors[0] * factors[1] if len(factors) == 2 else 0
        if size > MAX_PRODUCT:
            raise LimitError(f"`{operator}` would make a value of more than {MAX_PRODUCT} elements or bits")
        return super().call_binop(context, operator, left, right)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The template's text. Raises LimitError, or whatever the template raises: it is a program."""
    token = _deadline.set(time.monotonic() + TIME_LIMIT_S)
    try:
        pieces: list[str] = []
        length = 0
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise LimitError(f"its text has more than {MAX_CHARACTERS} characters")
        return "".join(pieces)
    finally:
        _deadline.reset(token)
