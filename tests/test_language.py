"""Docstrings, comments and pages are plain English: few vague words, and no sentence that begins with "Of".

A room is a folder of llmcl/. The tables *_ABOVE name rooms and pages that do not keep a rule yet, each with its present
figure as its limit: it may only fall. A name leaves a table when it keeps the rule.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmcl"
VAGUE = frozenset(
    "of that those what whose which it its them these one ones so such".split()  # noqa: SIM905  a list that is read
    + "they their this where others other".split()  # noqa: SIM905
)
ROOM_LIMIT, PAGE_LIMIT = 7.5, 7.0  # vague words in percent
MOST_FIELDS = 4  # "name: meaning" in a class docstring; more are commented on the fields' lines
VAGUE_LOCALS = frozenset({"of", "own", "found", "given", "made", "to"})

ROOMS_ABOVE: dict[str, float] = {}
PAGES_ABOVE: dict[str, float] = {}
OF_ABOVE: dict[str, int] = {}
FIELDS_ABOVE: dict[str, int] = {}
LOCALS_ABOVE: dict[str, int] = {
    "cli": 1,
    "engine": 7,
    "reference": 2,
    "tools": 1,
}

ROOMS = sorted({path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")})
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "notes" not in path.parts
)
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def vague_percent(texts: list[str]) -> float:
    words = [word for text in texts for word in re.findall(r"[a-z][a-z'-]*", re.sub(r"`[^`]*`", " ", text).lower())]
    return round(100 * sum(word in VAGUE for word in words) / max(1, len(words)), 1)


def sentences_with_of(texts: list[str]) -> list[str]:
    return [found[0].strip() for text in texts for found in re.finditer(r"(?:^|[.!?:]\s+|\n\n)Of\s[^.]*", text)]


def trees(room: str) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted((PACKAGE / room).glob("*.py"))]


def python_texts(path: Path) -> list[str]:
    source = path.read_text(encoding="utf-8")
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    comments = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
    ]
    return docstrings + joined([(token.start[0], token.string.lstrip("#: "), token.line) for token in comments], "#")


def opencl_texts(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return joined([(i, line.partition("//")[2].strip(), line) for i, line in enumerate(lines) if "//" in line], "//")


def joined(comments: list[tuple[int, str, str]], mark: str) -> list[str]:
    """Comments as texts. Lines of nothing but comments that follow one another are one text."""
    texts: list[str] = []
    last = -2
    for number, comment, line in comments:
        if number == last + 1 and line.lstrip().startswith(mark):
            texts[-1] += "\n" + comment
        else:
            texts.append(comment)
        last = number
    return texts


@cache
def room_texts(room: str) -> list[str]:
    texts = [text for path in sorted((PACKAGE / room).glob("*.py")) for text in python_texts(path)]
    return texts + [text for path in sorted((PACKAGE / room).glob("*.cl")) for text in opencl_texts(path)]


def page_text(page: str) -> str:
    """A page without code blocks, tables and links' addresses."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"^\|.*\n", "", text, flags=re.MULTILINE))


def check(name: str, value: float, limit: float, above: dict[str, float], what: str) -> None:
    allowed = above.get(name, limit)
    assert value <= allowed, f"{name}: {what}: {value}, at most {allowed} allowed"
    assert name not in above or value > limit, f"{name}: {what}: {value} keeps the rule; take it out of its table"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_few_vague_words(room: str) -> None:
    check(room, vague_percent(room_texts(room)), ROOM_LIMIT, ROOMS_ABOVE, "percent of vague words")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_few_vague_words(page: str) -> None:
    check(page, vague_percent([page_text(page)]), PAGE_LIMIT, PAGES_ABOVE, "percent of vague words")


@pytest.mark.parametrize("name", [*ROOMS, *PAGES])
def test_no_sentence_begins_with_of(name: str) -> None:
    sentences = sentences_with_of(room_texts(name) if name in ROOMS else [page_text(name)])
    check(name, len(sentences), 0, {**OF_ABOVE}, f"sentences that begin with Of, such as {sentences[:3]}")


@pytest.mark.parametrize("room", ROOMS)
def test_fields_are_commented_on_their_lines(room: str) -> None:
    classes = [node for tree in trees(room) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    long = [
        node.name
        for node in classes
        if len(re.findall(r"(?:^|[.;]\s+|\n)[a-z_]\w*(?:, [a-z_]\w*)*: ", ast.get_docstring(node) or "")) > MOST_FIELDS
    ]
    check(room, len(long), 0, {**FIELDS_ABOVE}, f"class docstrings that list fields, such as {long[:3]}")


@pytest.mark.parametrize("room", ROOMS)
def test_locals_say_what_they_hold(room: str) -> None:
    names = [
        node.id
        for tree in trees(room)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_LOCALS
    ]
    check(room, len(names), 0, {**LOCALS_ABOVE}, "assignments to a local of, own, found, given, made or to")


def test_no_public_class_name_stands_for_two_things() -> None:
    places: dict[str, list[str]] = {}
    for room in ROOMS:
        for tree in trees(room):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(room)
    assert {name: rooms for name, rooms in places.items() if len(rooms) > 1} == {}
