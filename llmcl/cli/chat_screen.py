"""Shows an answer on a terminal: wraps lines between words, colours Markdown lightly, redraws at most a word."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable

PLAIN, BOLD, CODE, DIM = "\x1b[0m", "\x1b[1m", "\x1b[36m", "\x1b[2m"
_MIN_COLUMNS = 10
_TAB = "    "


def screen() -> Screen | None:
    """Returns a writer for the terminal; None if standard output is not a terminal or cannot move the cursor."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return None
    return Screen(_write, lambda: shutil.get_terminal_size().columns, coloured=not os.environ.get("NO_COLOR"))


def _write(text: str) -> None:
    print(text, end="", flush=True)


class Screen:
    """Writes one answer, piece by piece. Shows all text, including Markdown marks; `end` comes last.

    A word crossing the right edge is erased and rewritten on the next line, to avoid holding text back. The terminal
    wraps code lines itself, which keeps them easy to copy.
    """

    def __init__(self, write: Callable[[str], None], columns: Callable[[], int], *, coloured: bool):
        self._write = write
        self._columns = columns
        self._coloured = coloured
        self._fenced = False  # between two ``` lines
        self._out: list[str] = []
        self._new_line()

    def write(self, text: str) -> None:
        limit = max(self._columns(), _MIN_COLUMNS) - 1  # a cursor after the last column stands on it
        for char in text.replace("\t", _TAB):
            if self._head is not None and not self._push_head(char, limit):
                continue
            self._push(char, limit)
        self._write("".join(self._out))
        self._out.clear()

    def end(self) -> None:
        """Writes the text held back, and ends colours and the line."""
        limit = max(self._columns(), _MIN_COLUMNS) - 1
        self._flush_head(limit)
        self._flush_stars("", limit)
        self._write("".join(self._out) + (PLAIN if self._coloured else "") + "\n")
        self._out.clear()

    def _new_line(self) -> None:
        self._head: str | None = ""  # the line's first characters, while a fence or heading is possible
        self._column = 0
        self._word, self._word_width = "", 0  # text since the last possible line break, colours included
        self._stars, self._before = "", " "  # asterisks held back; the character before them
        self._line = self._bold = self._code = ""  # colours in use

    def _push_head(self, char: str, limit: int) -> bool:
        """Collects the marks at a line's start. Returns True if `char` comes after them and must be written."""
        head = (self._head or "") + char
        mark = head.lstrip(" ")
        if len(head) - len(mark) <= 3 and (mark in ("", "`", "``") or (set(mark) == {"#"} and not self._fenced)):
            self._head = head
            return False
        if mark == "```":
            self._head = None
            self._fenced = not self._fenced
            self._colour_line(DIM)
            self._emit(head, limit)
            return False
        if self._fenced:
            self._colour_line(CODE)
        elif mark.startswith("#") and char == " " and len(mark) <= 7:
            self._colour_line(BOLD)
        self._flush_head(limit)
        return True

    def _flush_head(self, limit: int) -> None:
        head, self._head = self._head or "", None
        for char in head:
            self._push(char, limit)

    def _push(self, char: str, limit: int) -> None:
        if char == "\n":
            self._flush_stars("", limit)
            self._out.append((PLAIN if self._line or self._bold or self._code else "") + "\n")
            self._new_line()
        elif self._line:
            self._emit(char, limit)
        elif char == "*" and not self._code:
            self._stars += char
        else:
            self._flush_stars(char, limit)
            if char == "`":
                closing, self._code = self._code, "" if self._code else self._colour(CODE)
                if not closing:
                    self._style()
                self._emit(char, limit)
                if closing:
                    self._style()
            else:
                self._emit(char, limit)
            self._before = char

    def _flush_stars(self, following: str, limit: int) -> None:
        """Writes the asterisks held back. Two asterisks begin or end bold text if they touch a word."""
        stars, self._stars = self._stars, ""
        opens = len(stars) == 2 and not self._bold and following not in ("", " ")
        closes = len(stars) == 2 and self._bold and self._before != " "
        if opens:
            self._bold = self._colour(BOLD)
            self._style()
        self._emit(stars, limit)
        if closes:
            self._bold = ""
            self._style()
        if stars:
            self._before = "*"

    def _colour(self, colour: str) -> str:
        return colour if self._coloured else ""

    def _colour_line(self, colour: str) -> None:
        self._line = self._colour(colour)
        self._style()

    def _style(self) -> None:
        if self._coloured:
            codes = PLAIN + self._line + self._bold + self._code
            self._out.append(codes)
            self._word += codes

    def _emit(self, text: str, limit: int) -> None:
        for char in text:
            if not char.isprintable() and char not in "\u200c\u200d":  # invisible joiners in emoji and scripts
                char = ascii(char)[1:-1]  # an answer must not steer the terminal
            width = _width(char)
            if self._column + width > limit and not self._fenced:
                if char == " ":
                    self._break_line()
                    continue
                if self._word_width and self._word_width < self._column:
                    word, n = self._word, self._word_width
                    self._out.append(f"\x1b[{n}D\x1b[K\n{word}")
                    self._column = n
                else:
                    self._break_line()
            self._out.append(char)
            self._column += width
            if char == " " or width == 2:  # a line may break after a Chinese character
                self._word, self._word_width = "", 0
            else:
                self._word += char
                self._word_width += width

    def _break_line(self) -> None:
        self._out.append("\n")
        self._column, self._word, self._word_width = 0, "", 0


def _width(text: str) -> int:
    """Returns how many terminal columns the text takes."""
    return sum(
        0
        if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf")
        else 2
        if unicodedata.east_asian_width(char) in "WF"
        else 1
        for char in text
    )
