"""Splits an answer into thoughts, text and tool calls while the model writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llmcl.serve.call_scanner import CallScanner, Scanner
from llmcl.serve.thoughts import THINK, ThoughtMarks
from llmcl.serve.tool_families import ToolFamily
from llmcl.serve.tools import Schemas
from llmcl.tokenizer.answer_parts import AnswerParts, Call, n_begun

# The head of a call in Mistral's newer format. The id is optional.
_NAME_FIRST = re.compile(r"(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[\w\-]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGUN = re.compile(r"[\w.\-]+\s*(?:\[(?:C[A-Z_]*\]?\s*[\w\-]*\s*)?)?(?:\[?A?R?G?S?\]?\s*)?$")


@dataclass
class AnswerReader(AnswerParts):
    """Reads one answer."""

    family: ToolFamily | None = None  # how calls are written; None: tools are off
    schemas: Schemas = field(default_factory=dict)  # tool name -> JSON schema of the arguments
    several: bool = True  # whether further calls count, too
    special: Mapping[int, str] = field(default_factory=dict)  # token id -> text of a special token, which decodes to ""
    thinks: bool = False  # whether the prompt has already opened a thought
    marks: ThoughtMarks = THINK  # begin and end of a thought

    def __post_init__(self) -> None:
        self._held = ""
        self._opening = ""  # opening of the current call
        self._in_list = False  # after an opening that covers several calls
        self._scanner: Scanner = CallScanner()
        self._n_sent = -1  # characters of the call's arguments sent so far; -1: the call has not begun
        self._is_cut = False
        self._read: Callable[[bool], bool] = self._read_thought if self.thinks else self._read_begin

    @property
    def is_thinking(self) -> bool:
        return self._read == self._read_thought

    def push(self, text: str, token_id: int) -> None:
        self._held += text + self.special.get(token_id, "")
        self._run(False)

    def finish(self, *, is_cut: bool = False) -> None:
        self._is_cut = is_cut
        self._run(True)

    def _run(self, final: bool) -> None:
        """Runs the states. Each reads the held text's front and returns whether the next may run at once."""
        while self._read(final):
            pass

    # ---- text ---------------------------------------------------------------------------------------

    def _read_begin(self, final: bool) -> bool:
        """Reads the start of the answer, before anything but white space."""
        begun = self._held.lstrip()
        if begun.startswith(self.marks.begin):
            self._held, self._read = begun[len(self.marks.begin) :], self._read_thought
            return True
        if not final and any(mark.startswith(begun) for mark in (self.marks.begin, *self._openings)):
            return False
        if self._begins_with_a_call(begun) and not self._is_an_opening(begun):
            self._held, self._opening, self._in_list = begun, "", False
            self._read = self._read_call
        else:
            self._read = self._read_text
        return True

    def _begins_with_a_call(self, begun: str) -> bool:
        """Returns whether an answer without an opening may be a call. Later text may still show that none is."""
        family = self.family
        if family is None or begun.startswith(self._openings):
            return False
        return begun.startswith("[" if family.is_list else "{") and (family.is_list or not family.opening)

    @property
    def _openings(self) -> tuple[str, ...]:
        family = self.family
        texts = () if family is None else (family.opening, *family.other_openings)
        return tuple(text.strip() for text in texts if text.strip())

    def _read_thought(self, final: bool) -> bool:
        if not self.thoughts:
            self._held = self._held.lstrip("\n")
        thought, ending, rest = self._held.partition(self.marks.end)
        if ending:
            self._think(thought.rstrip("\n"))
            self._held, self._read = rest, self._read_begin_again
            return True
        n_kept = 0 if final else n_begun(self._held, (self.marks.end,), spaces=True)
        self._think(self._held[: len(self._held) - n_kept])
        self._held = self._held[len(self._held) - n_kept :]
        return False

    def _read_begin_again(self, final: bool) -> bool:
        """Reads on after a thought and drops the white space in front of the answer."""
        begun = self._held = self._held.lstrip()
        if not begun or (not final and any(opening.startswith(begun) for opening in self._openings)):
            return False
        is_call = self._begins_with_a_call(begun) and not self._is_an_opening(begun)
        self._read = self._read_call if is_call else self._read_text
        return True

    def _read_text(self, final: bool) -> bool:
        strays = (self.marks.end,) if self.marks.strays else ()
        if self.family is None and not strays:
            self._say(self._held)
            self._held = ""
            return False
        marks = [(at, mark) for mark in (*self._openings, *strays) if (at := self._held.find(mark)) >= 0]
        if marks:
            at, mark = min(marks)
            if mark in strays:
                self._say(self._held[:at])
                self._held = self._held[at + len(mark) :]
                return True
            assert self.family is not None
            self._say(self._held[:at].rstrip())
            self._opening = "" if mark == self.family.form.front else mark  # "": the opening was left out
            self._held, self._in_list, self._read = self._held[at + len(self._opening) :], False, self._read_call
            return True
        n_kept = n_begun(self._held, (*self._openings, *strays), spaces=self.family is not None)
        if final and not (self._is_cut and self._is_an_opening(self._held[len(self._held) - n_kept :].lstrip())):
            n_kept = 0
        self._say(self._held[: len(self._held) - n_kept])
        self._held = self._held[len(self._held) - n_kept :]
        return False

    def _is_an_opening(self, begun: str) -> bool:
        """Returns whether a partial opening is certain: more than half the characters of some opening are there."""
        openings = self._openings
        return any(opening.startswith(begun) for opening in openings) and any(
            opening.startswith(begun[: len(opening) // 2 + 1]) and 2 * len(begun) > len(opening) for opening in openings
        )

    # ---- calls --------------------------------------------------------------------------------------

    def _read_call(self, final: bool) -> bool:
        """Reads on after an opening, or between the calls of a list."""
        assert self.family is not None
        begun = self._held.lstrip()
        self._in_list |= self.family.is_lines
        if self.family.is_list and not self._in_list and begun.startswith("["):
            self._in_list, self._opening = True, self._opening + "["
            begun = begun[1:].lstrip()
        begins = self.family.form.begins(begun)
        if begins:
            self._scanner, self._n_sent = self.family.form.scanner(self.schemas), -1
            self._held, self._read = begun, self._read_object
            return True
        if self.family.is_list and self._opening and (named := _NAME_FIRST.match(begun)):
            self._scanner, self._n_sent = CallScanner(named["name"]), -1
            self._scanner.id = named["id"] or ""
            self._held, self._read = begun[named.end() :], self._read_object
            return True
        if self._is_opened and begun.startswith("{"):  # JSON instead of the family's own format
            self._scanner, self._n_sent = CallScanner(), -1
            self._held, self._read = begun, self._read_object
            return True
        is_open = begins is None or not begun or (self.family.is_list and bool(_NAME_BEGUN.match(begun)))
        self._held = begun
        if is_open and (not final or (self._is_cut and self._is_opened)):
            return False
        return self._no_call()

    def _read_object(self, final: bool) -> bool:
        scanner = self._scanner
        self._held = self._held[scanner.push(self._held) :]
        is_ours = scanner.is_call and (self._is_opened or scanner.name in self.schemas)
        if is_ours:
            self._send()
        if scanner.done and is_ours:
            self._read = self._read_after
            return True
        if scanner.done or (final and not is_ours and not (self._is_cut and self._is_begun)):
            self._opening += scanner.raw
            return self._no_call()
        return False

    @property
    def _is_opened(self) -> bool:
        """Whether an unambiguous opening has come."""
        return bool(self._opening.strip("["))

    @property
    def _is_begun(self) -> bool:
        """Whether the current text is certainly a call, though neither name nor arguments need be there yet."""
        assert self.family is not None
        return self._is_opened or bool(self.family.form.front) or self._scanner.name in self.schemas

    def _no_call(self) -> bool:
        """Turns a supposed call into text, along with everything up to the next opening."""
        assert self.family is not None
        self._say(self._opening)
        self._read = self._read_text
        return True

    def _send(self) -> None:
        """Sends the new part of the current call."""
        assert self.family is not None and self._scanner.name is not None
        arguments = self._scanner.arguments or ("{}" if self._scanner.done else "")
        new = Call(self._new_id(), self._scanner.name) if self._n_sent < 0 else None
        delta, self._n_sent = arguments[max(0, self._n_sent) :], len(arguments)
        self._call(delta, new=new, is_last=self._scanner.done)

    def _new_id(self) -> str:
        """Returns the id that the model wrote. Makes a new id when there is none or another call has the same."""
        assert self.family is not None
        written = self._scanner.id
        return written if written and all(call.id != written for call in self.calls) else self.family.new_id()

    def _read_after(self, final: bool) -> bool:
        """Reads on after a call: a closing mark, then perhaps another call."""
        assert self.family is not None
        if not self.several:
            self._held = ""
            return False
        self._held = self._held.lstrip()
        closing = self.family.closing.strip()
        if self._in_list and self._held[:1] in (",", ";"):
            self._held, self._read = self._held[1:], self._read_call
            return True
        for ending in (closing, *("]" for _ in range(self._in_list and self.family.is_list))):
            if ending and self._held.startswith(ending):
                self._held, self._in_list = self._held[len(ending) :], False
                return True
        if self._in_list and self.family.is_lines and not closing.startswith(self._held):
            self._read = self._read_call
            return True
        if not self.family.opening and self._held[:1] in (";", ","):
            self._held = self._held[1:]
            return True
        may_go_on = not final or self._is_cut
        if not self._held or (may_go_on and any(mark.startswith(self._held) for mark in (closing, *self._openings))):
            return False
        if self._begins_with_a_call(self._held):
            self._opening, self._read = "", self._read_call
        else:
            self._read = self._read_text
        return True
