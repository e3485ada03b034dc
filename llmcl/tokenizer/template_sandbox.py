"""Renders chat templates in a separate process, started by template_process.py; the package does not import this file.

The process bounds a template: it limits its memory, cannot open files or start processes, and is killed when it takes
too long. Inside, Jinja's sandbox shows a template plain data only.

A request is a length (8 bytes, big-endian) and JSON: `template`, and `variables`, which is null to compile only. An
answer is a letter, a length and UTF-8 text: T the rendered text, R the template's reason for refusing the messages, F a
failure, S a syntax error in the template, M out of memory.
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

# Jinja imports these modules on first use, when files can no longer be opened.
_NEEDED_LATER = constants, debug, textwrap


class _Refused(Exception):
    """The template called `raise_exception`: the model does not accept this conversation."""


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training text; no effect here."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's way to name an extension's tags)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def serve(memory: int, seconds: float) -> None:
    """Answers requests one after another until the input ends, in at most `memory` bytes of address space.

    seconds: kills a request that nobody waits for any more. The waiting side has a separate timer.
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes in a terminal
    _answer(b'{"template": "{{ strftime_now(\'%c\') }}", "variables": {}}')  # loads the time zone while files open
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
            return  # the next request gets a fresh process with full memory


def _answer(request: bytes) -> tuple[bytes, str]:
    """Returns a request's answer. Raises MemoryError only."""
    wanted = json.loads(request)
    try:
        template = _compiled(wanted["template"])
    except MemoryError:
        raise
    except Exception as error:  # deep nesting is a RecursionError, not a TemplateError
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
    except Exception as unprintable:  # Python does not print numbers with more than 4300 digits
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
    """Gives up for good what a template does not need. Windows has no such limits, macOS none on memory."""
    if sys.platform != "win32":
        import resource

        for name, limit in (("AS", memory), ("NOFILE", 0), ("NPROC", 0), ("FSIZE", 0), ("CORE", 0)):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # systems lack some limits
                what = getattr(resource, f"RLIMIT_{name}")
                most = resource.getrlimit(what)[1]
                limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
                resource.setrlimit(what, (limit, limit))


def _alarm(seconds: float) -> None:
    """Ends this process after the given seconds; 0 cancels."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)
