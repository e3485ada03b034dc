"""Imports go one way: a room of the package uses only those below it, and no two modules need each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import llmcl

PACKAGE = Path(llmcl.__file__).parent
# From the bottom to the top; a room inside another is named on its own where it stands lower.
ROOMS = (
    "errors",
    "progress",
    "sampling_options",
    "architectures",
    "runtime",
    "checkpoint",
    "tokenizer",
    "grammar",
    "reference",
    "kernels",
    "ops",
    "attention",
    "models",
    "vision",
    "speculation",
    "engine",
    "convert",
    "tools",
    "serve",
    "cli",
    "__main__",
)


def modules() -> dict[str, Path]:
    """Every module by its name within the package; a room's `__init__.py` has the room's name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del found[""]  # the public names, which anything may have
    return found


def imported(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of the package that a file imports anywhere, in functions and for types, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmcl."):
            module = (node.module or "").removeprefix("llmcl.")
            for alias in node.names:
                yield f"{module}.{alias.name}" if f"{module}.{alias.name}" in known else module
        elif isinstance(node, ast.Import):
            yield from (name.name.removeprefix("llmcl.") for name in node.names if name.name.startswith("llmcl."))


def room(module: str) -> str:
    return max((name for name in ROOMS if module == name or module.startswith(name + ".")), key=len, default=module)


def test_every_module_has_a_room() -> None:
    assert {room(module) for module in modules()} == set(ROOMS)


def test_rooms_use_only_rooms_below() -> None:
    known = modules()
    upwards = [
        f"{module} imports {other}"
        for module, path in known.items()
        for other in imported(path, known)
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
    ]
    assert not upwards


def test_no_module_needs_one_that_needs_it() -> None:
    known = modules()
    needs = {module: set(imported(path, known)) - {module} for module, path in known.items()}
    while free := [module for module, others in needs.items() if not others & needs.keys()]:
        for module in free:
            del needs[module]
    assert not needs, "these import each other in a circle, or use some that do"
