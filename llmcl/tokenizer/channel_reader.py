"""Reads answers in channels, gpt-oss's format (harmony): thoughts, text and calls are messages inside one answer.

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcl.tokenizer.answer_parts import AnswerParts, Call, n_begun

START, CHANNEL, CONSTRAIN, MESSAGE, END = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"
_ENDS = (END, "<|call|>", "<|return|>", START)
MARKS = (CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
FINAL = f"{CHANNEL}final{MESSAGE}"  # precedes an answer without thoughts
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=\s*([^\s<]+)")
_FUNCTIONS = "functions."
_PEOPLE = frozenset(("assistant", "user", "all"))  # recipients that are not tools


def has_channels(template: str | None) -> bool:
    return all(mark in (template or "") for mark in (CHANNEL, MESSAGE))


@dataclass
class ChannelReader(AnswerParts):
    """Reads one answer. schemas, several, special: see AnswerReader.

    Messages to the user outside the final channel count as answer text, too.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    several: bool = True
    special: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._held = ""
        self._kind: str | None = None  # kind of the current message: "text", "thought", "call", "nothing"
        self._seen: set[str] = set()
        self._has_begun = False

    @property
    def is_thinking(self) -> bool:
        return self._kind == "thought"

    def push(self, text: str, token_id: int) -> None:
        self._held += text + self.special.get(token_id, "")
        while self._read(final=False):
            pass

    def finish(self, *, is_cut: bool = False) -> None:
        while self._read(final=True):
            pass

    def _read(self, *, final: bool) -> bool:
        """Reads a message head, or as much body text as available. Returns whether to read on at once."""
        if self._kind is None:
            head, mark, rest = self._held.partition(MESSAGE)
            if mark:
                self._held = rest
                self._begin(head)
            elif final and not self._has_begun and CHANNEL not in head:  # no message at all
                self._say(head)
                self._held = ""
            return bool(mark)
        ends = [(at, mark) for mark in _ENDS if (at := self._held.find(mark)) >= 0]
        n, end = min(ends) if ends else (len(self._held) - (0 if final else n_begun(self._held, _ENDS)), "")
        self._go_on(self._held[:n], is_last=bool(ends))
        if final and self._kind == "call" and not self.calls[-1].arguments:
            self._go_on("{}", is_last=False)
        self._held = self._held[n + len(end) :]
        if ends:
            self._kind = None
        return bool(ends)

    def _begin(self, head: str) -> None:
        self._has_begun = True
        channels = _NAMED.findall(head)  # a model may change the channel before the message begins
        tools = [name.removeprefix(_FUNCTIONS) for name in _RECIPIENT.findall(head) if name not in _PEOPLE]
        channel = channels[-1] if channels else "final"
        if tools:  # without tools, a call (say, to a tool known from training) is not shown
            self._kind = "call" if self.schemas and (self.several or not self.calls) else "nothing"
            if self._kind == "call":
                self._call("", new=Call("call_" + secrets.token_hex(12), tools[-1]))
            return
        self._kind = "thought" if channel == "analysis" else "text"
        if self._kind in self._seen:  # a second message of the same kind
            self._go_on("\n\n", is_last=False)
        self._seen.add(self._kind)

    def _go_on(self, text: str, *, is_last: bool) -> None:
        if self._kind == "text":
            self._say(text)
        elif self._kind == "thought":
            self._think(text)
        elif self._kind == "call":
            nothing = is_last and not (self.calls[-1].arguments + text).strip()
            self._call("{}" if nothing else text, is_last=is_last)
