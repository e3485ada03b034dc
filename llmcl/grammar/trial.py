"""Compiles a grammar for the first time in a separate process with time and memory limits.

Schemas and grammars come from strangers. llguidance bounds most compile costs, but not all: intersecting some regular
expressions takes minutes. A grammar that compiles in time there is cheap to compile here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess

from llmcl.errors import LlmclError, UsageError, one_line
from llmcl.grammar.grammar import Grammar
from llmcl.runtime.child_process import interpreter

CPU_LIMIT_S = 3
# If the system counts CPU seconds, a process on a busy machine may wait long.
WALL_LIMIT_S = 600.0 if importlib.util.find_spec("resource") else 30.0
MEMORY_LIMIT = 1 << 30

# Whitespace in JSON is a space, or a line break and some indentation: without a bound, a model could write it forever.
JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
# Stricter step limits than llguidance's defaults, and no parser state in messages.
LIMITS = {"step_max_items": 20_000, "step_lexer_fuel": 100_000, "verbose_errors": False}

_PROGRAM = """
import json, sys
cpu, memory, *folders = sys.argv[1:]
sys.path.extend(folders)
from llguidance import LLMatcher, LLParserLimits, grammar_from
try:
    import resource
    for name, limit in ("RLIMIT_CPU", int(cpu)), ("RLIMIT_AS", int(memory)), ("RLIMIT_CORE", 0):
        resource.setrlimit(getattr(resource, name), (limit, limit))
except (ImportError, ValueError, OSError):
    pass
given = json.load(sys.stdin)
try:
    if given["kind"] == "schema":
        grammar = LLMatcher.grammar_from_json_schema(given["source"], overrides=given["options"])
    elif given["kind"] in ("regex", "choices"):
        grammar = LLMatcher.grammar_from_regex(given["source"])
    else:
        grammar = grammar_from("grammar", given["source"])
    failed, words = LLMatcher.validate_grammar_with_warnings(grammar, limits=LLParserLimits(**given["limits"]))
    print(json.dumps({"refused": words[0] if failed else None, "grammar": grammar}))
except ValueError as error:
    print(json.dumps({"refused": str(error), "grammar": ""}))
"""


def compiled_in_time(grammar: Grammar) -> str:
    """Returns the grammar in llguidance's format.

    Raises UsageError if llguidance refuses the grammar, or compiling takes too much time or memory. Raises LlmclError
    if no process can be started.
    """
    package = importlib.util.find_spec("llguidance")
    assert package is not None and package.origin is not None  # already imported
    folder = os.path.dirname(os.path.dirname(os.path.abspath(package.origin)))
    request = {"kind": grammar.kind, "source": grammar.source, "options": JSON_OPTIONS, "limits": LIMITS}
    try:
        process = subprocess.run(
            [interpreter(), "-I", "-S", "-c", _PROGRAM, str(CPU_LIMIT_S), str(MEMORY_LIMIT), folder],
            input=json.dumps(request).encode("ascii"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            timeout=WALL_LIMIT_S,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        answer = json.loads(process.stdout)
    except OSError as error:
        raise LlmclError(f"grammars are tried in a process of their own, which cannot be started: {error}") from error
    except (subprocess.TimeoutExpired, ValueError):
        raise UsageError(
            f"{grammar.kind} takes more than {CPU_LIMIT_S} s or {MEMORY_LIMIT >> 20} MiB to compile; make it simpler"
        ) from None
    if answer["refused"] is not None:
        raise refused(grammar, answer["refused"])
    compiled: str = answer["grammar"]
    return compiled


def refused(grammar: Grammar, reason: str) -> UsageError:
    """Returns the error for a grammar refused by llguidance. reason: llguidance's message."""
    words = " ".join(reason.partition("<backtrace>")[0].split())
    if "oneOf" in words:  # llguidance names its own option here
        words = (
            "oneOf is supported where no value can match two of its branches, such as objects whose required "
            "property has another const in each; give anyOf in its place"
        )
        return UsageError(f"{grammar.kind} is refused: {words}")
    return UsageError(f"{grammar.kind} is refused: {one_line(words, 300)}; change it")
