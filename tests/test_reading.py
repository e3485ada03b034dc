"""docs/reading.md: a core that is short enough to be read, and that needs none of the optional rooms."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_imports import imported, modules

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reading.md"
MOST_FILES, MOST_LINES = 45, 8000
OPTIONAL = (
    *("serve", "tools", "convert", "cli", "grammar", "speculation", "vision", "attention"),
    *("kernels.cpu", "kernels.intel", "kernels.nvidia"),
)
HOOKED_ROOMS = "engine.", "models."  # they import speculation, grammar and vision through hooks alone

_ENTRY = re.compile(r"^(\d+)\. `(llmcl/[\w/]+\.(?:py|cl))`: \S", re.MULTILINE)
_HOOK = re.compile(r"^\| `(llmcl/[\w/]+\.py)` \| (.+) \|$", re.MULTILINE)


def entries() -> list[str]:
    return [file for _, file in _ENTRY.findall(PAGE.read_text(encoding="utf-8"))]


def module_of(file: str) -> str:
    return file.removeprefix("llmcl/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def hooks() -> dict[str, set[str]]:
    """The optional rooms that a module may import, by module."""
    rooms = {file: re.findall(r"`(llmcl/[\w/]+)/`", cell) for file, cell in _HOOK.findall(PAGE.read_text("utf-8"))}
    return {module_of(file): {module_of(room) for room in names} for file, names in rooms.items()}


def optional_rooms(module: str) -> set[str]:
    """The optional rooms that a module imports, in functions and for types, too."""
    known = modules()
    needed = set(imported(known[module], known))
    return {room for room in OPTIONAL if any(name == room or name.startswith(f"{room}.") for name in needed)}


def test_the_list_is_short() -> None:
    files = entries()
    numbers = [int(number) for number, _ in _ENTRY.findall(PAGE.read_text(encoding="utf-8"))]
    assert numbers == [*range(1, len(files) + 1)] and len({*files}) == len(files)
    assert 30 <= len(files) <= MOST_FILES
    assert not [file for file in files if not (ROOT / file).is_file()]
    lines = {file: len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files}
    assert sum(lines.values()) < MOST_LINES, f"{sum(lines.values())} lines: {lines}"


def test_the_pages_that_lead_to_it_say_how_long_it_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{len(entries())} files](docs/reading.md)" in readme
    assert len(readme.splitlines()) <= 120
    assert "(reading.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [file for file in entries() if file.endswith(".py")])
def test_the_core_needs_no_optional_room(file: str) -> None:
    assert optional_rooms(module_of(file)) == hooks().get(module_of(file), set())


def test_engine_and_models_have_one_hook_for_each_room() -> None:
    hooked = {
        module: rooms & {"speculation", "grammar", "vision"}
        for module in modules()
        if module.startswith(HOOKED_ROOMS) and (rooms := optional_rooms(module)) & {"speculation", "grammar", "vision"}
    }
    assert hooked == {module: rooms for module, rooms in hooks().items() if module.startswith(HOOKED_ROOMS)}
    assert len(hooked) == 3
