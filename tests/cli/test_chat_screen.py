"""How an answer is written to a terminal: a small terminal of our own shows what comes out."""

from __future__ import annotations

import re

import pytest

from llmcl.cli.chat_screen import BOLD, CODE, DIM, PLAIN, Screen

TEXT = "# Title\n\nThe **quick** brown fox jumps over the lazy dog, and `code here` stays; 2 ** 3 * 4.\n"


def written(text: str, columns: int = 40, *, coloured: bool = False, step: int = 3) -> str:
    out: list[str] = []
    screen = Screen(out.append, lambda: columns, coloured=coloured)
    for start in range(0, len(text), step):
        screen.write(text[start : start + step])
    screen.end()
    return "".join(out)


def shown(output: str, columns: int) -> list[str]:
    """The rows of a terminal after this output: it knows colours, going left, erasing to the right, and its edge."""
    rows, column = [""], 0
    for code, count, char in re.findall(r"\x1b\[(\d*)([mDK])|(.)", output, re.DOTALL):
        if char == "\n":
            rows.append("")
            column = 0
        elif char:
            assert column < columns, "it never relies on the terminal's own wrapping"
            rows[-1] = rows[-1][:column] + char
            column += 1
        elif count == "D":
            column -= int(code)
        elif count == "K":
            rows[-1] = rows[-1][:column]
    return rows


@pytest.mark.parametrize("columns", [20, 60, 120])
@pytest.mark.parametrize("step", [1, 4, 1000])
def test_lines_break_between_words_and_nothing_is_lost(columns: int, step: int) -> None:
    text = " ".join(f"word{n % 13 * 'x'}" for n in range(60))
    rows = shown(written(text, columns, step=step), columns)
    assert " ".join(row.rstrip() for row in rows if row) == text
    assert max(map(len, rows)) < columns and len(rows) > len(text) // columns


def test_a_word_longer_than_a_line_is_cut() -> None:
    rows = shown(written("ab " + "x" * 30, 20), 20)
    assert "".join(rows).replace(" ", "") == "ab" + "x" * 30


def test_all_of_the_text_is_there_with_and_without_colours() -> None:
    assert written(TEXT, 200) == TEXT + "\n"
    assert re.sub(r"\x1b\[\d*m", "", written(TEXT, 200, coloured=True)) == TEXT + "\n"


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_what_is_coloured(step: int) -> None:
    output = written(TEXT, 200, coloured=True, step=step)
    assert f"{BOLD}# Title{PLAIN}\n" in output
    assert f"{BOLD}**quick**{PLAIN}" in output and f"{CODE}`code here`{PLAIN}" in output
    assert "2 ** 3 * 4." in output, "asterisks between spaces are none of Markdown's"
    fenced = written("a\n```python\n# no heading **x**\n```\nb\n", 200, coloured=True, step=step)
    assert f"{DIM}```python{PLAIN}\n" in fenced and f"{CODE}# no heading **x**{PLAIN}\n" in fenced
    assert fenced.endswith(f"{DIM}```{PLAIN}\nb\n{PLAIN}\n")


def test_an_answer_cannot_steer_the_terminal() -> None:
    assert written("a\x1b]52;c;eA==\x07b", 80) == "a\\x1b]52;c;eA==\\x07b\n"
