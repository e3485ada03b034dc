"""Renders chat templates in a process of its own, started by template_process.py; the package does not import it.

The process bounds a template: it limits its own memory, may open no file and start no process, and is ended when it
takes too long. Inside it Jinja's sandbox shows a template plain data only.

A request is its length (8 bytes, the greatest first) and JSON: `template`, and `variables`, null to compile it only. An
answer is a letter, the length and UTF-8: T the text, R the template's reason to refuse the messages, F how it failed,
S why it is no Jinja, M where the memory did not suffice.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import textwrap
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import constants, debug, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Jinja imports these when they are first needed, and by then no file can be opened.
_NEEDED_LATER = constants, debug, textwrap


class _Refused(Exception):
    """The template called `raise_exception`: the conversation is not one that this model takes."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what to train on; no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way to name an extension's tags)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def serve(memory: int, seconds: float) -> None:
    """Answers requests until their end, one after the other, in at most `memory` bytes of address space.

    seconds: ends a request that nobody waits for any more. Whoever waits has a clock of their own.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal
    _answer(b'{"template": "{{ strftime_now(\'%c\') }}", "variables": {}}')  # reads the time zone, and is quicker later
    _limit(memory)
    answers.write(b"+")
    answers.flush()
    while len(header := requests.read(8)) == 8:
        _alarm(seconds)
        try:
            kind, text = _answer(requests.read(int.from_bytes(header, "big")))
            data = text.encode("utf-8", "surrogatepass")
        except MemoryError:
            kind, data = b"M", b""
        answers.write(kind + len(data).to_bytes(8, "big"))
        answers.write(data)
        answers.flush()
        _alarm(0)
        if kind == b"M":
            return  # the next request gets a process with all of its memory


def _answer(request: bytes) -> tuple[bytes, str]:
    """Raises MemoryError alone."""
    wanted = json.loads(request)
    try:
        template = _compiled(wanted["template"])
    except MemoryError:
        raise
    except Exception as error:  # a template nested too deeply is a RecursionError, not a TemplateError
        where = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        return b"S", f"{where}: {_text(error)}"
    try:
        return b"T", "" if wanted["variables"] is None else template.render(wanted["variables"])
    except MemoryError:
        raise
    except _Refused as refusal:
        return b"R", _text(refusal)
    except Exception as error:  # whatever Python operation the template tried
        return b"F", f"{type(error).__name__}: {_text(error)}"


def _text(error: Exception) -> str:
    try:
        return str(error)
    except MemoryError:
        raise
    except Exception as unprintable:  # Python writes no number of more than 4300 digits
        return str(unprintable)


@lru_cache(maxsize=4)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: Any) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limit(memory: int) -> None:
    """Gives up for good what a template has no need of. Windows has no such limits, and macOS none of memory."""
    if sys.platform != "win32":
        import resource

        for name, limit in (("AS", memory), ("NOFILE", 0), ("NPROC", 0), ("FSIZE", 0), ("CORE", 0)):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # not every system has each of them
                what = getattr(resource, f"RLIMIT_{name}")
                most = resource.getrlimit(what)[1]
                limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
                resource.setrlimit(what, (limit, limit))


def _alarm(seconds: float) -> None:
    """Ends this process after so many seconds; 0 takes the alarm back."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)
