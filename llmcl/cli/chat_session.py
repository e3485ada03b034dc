"""A chat in progress: conversation, settings, model, and how an answer is shown."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmcl.cli.answer import ShownAnswer, show, write_plain
from llmcl.cli.chat_screen import screen
from llmcl.cli.command import fit_for_terminal
from llmcl.cli.loading import reading_bar
from llmcl.cli.pictures import check_pictures, load_tower
from llmcl.engine.message_parts import Content, content_with
from llmcl.errors import ContextLengthError, OutOfDeviceMemoryError, ServerError, UsageError, counted

if TYPE_CHECKING:
    from llmcl.engine.chat import Chat
    from llmcl.engine.llm import LLM
    from llmcl.serve.client import ServerChat


class Session:
    """State for chat commands to read and change."""

    def __init__(
        self,
        conversation: Chat | ServerChat,
        request: dict[str, Any],
        given: set[str],
        *,
        quiet: bool,
        with_times: bool = False,
    ):
        self.conversation = conversation
        self.request = request  # options for `send`
        self.given = given  # options set by the user; override a model's defaults
        self.quiet = quiet
        self.with_times = with_times  # show a line with times after each answer
        self.last: ShownAnswer | None = None
        self.last_seed: int | None = None
        self.over = False
        self.pictures: list[str] = []  # go with the next message
        self._defaults = dict(request)
        self._llm: LLM | None = None  # None if a server has the model
        self._load: Callable[[str], LLM] | None = None

    @property
    def model_name(self) -> str:
        return self._llm.model_name if self._llm is not None else getattr(self.conversation, "model_name", "")

    @staticmethod
    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def take(self, llm: LLM, load: Callable[[str], LLM]) -> None:
        """Uses this model and its recommended sampling parameters. load: loads another model."""
        self._llm, self._load = llm, load
        for name, value in (self._defaults | llm.sampling_defaults).items():
            if name not in self.given and name != "system_prompt":
                self.request[name] = value

    def close(self) -> None:
        if self._llm is not None:
            self._llm.close()

    def use_model(self, name: str) -> None:
        """Continues with another model, loaded beside the old one if the device has room for both."""
        old, load, talk = self._llm, self._load, self.conversation
        if old is None or load is None:
            talk.model_name = name  # type: ignore[union-attr]  # a server's
            self.note(f"the server is asked for {fit_for_terminal(name)} from now on")
            return
        try:
            llm = load(name)
        except OutOfDeviceMemoryError:
            old.close()
            try:
                llm = load(name)
            except Exception:
                self._go_on(load(old.model_name), load)
                raise
        try:
            self._go_on(llm, load)
        except UsageError:  # no chat template
            llm.close()
            raise
        old.close()

    def _go_on(self, llm: LLM, load: Callable[[str], LLM]) -> None:
        talk = llm.chat(on_full=self.conversation.on_full)
        talk.messages = self.conversation.messages
        self.conversation = talk
        self.take(llm, load)

    def set_system_prompt(self, text: str | None) -> None:
        self.request["system_prompt"] = text
        self.conversation.set_system_prompt(text)

    def add_picture(self, file: str) -> None:
        """Sends a picture with the next message. Raises UsageError if it cannot be read, or the model takes none."""
        check_pictures([file])
        if self._llm is not None:
            load_tower(self._llm, quiet=self.quiet)
        self.pictures.append(file)

    def answer(self, message: Content, *, another: bool = False) -> ShownAnswer | None:
        """Shows one answer. Returns None if it was stopped before the first token or did not fit.

        another: draw a new seed, even if a seed was set.
        """
        message, self.pictures = content_with(message, self.pictures or None), []
        request = dict(self.request)
        if (request["seed"] is None or another) and request["temperature"] > 0:
            request["seed"] = secrets.randbelow(2**32)
        display = screen()
        try:
            with reading_bar(self.quiet) as progress:
                pieces = self.conversation.send(message, progress=progress, **request)
                answer = show(pieces, write_plain if display is None else display.write)
        except KeyboardInterrupt:
            self.note("stopped")
            return None
        except (ContextLengthError, ServerError, UsageError) as error:
            if isinstance(error, UsageError) and not isinstance(error, ContextLengthError) and not _is_typed():
                raise
            hint = " (/reset starts anew)" if isinstance(error, ContextLengthError) else ""
            self.note(f"error: {fit_for_terminal(error)}{hint}")
            return None
        if display is None:
            print(flush=True)
        else:
            display.end()
        self.last, self.last_seed = answer, request["seed"] if request["temperature"] > 0 else None
        self._say_what_happened(answer)
        return answer

    def _say_what_happened(self, answer: ShownAnswer) -> None:
        drops = self.conversation.on_full == "drop"
        if self.conversation.dropped and not self.quiet:
            turns = counted(self.conversation.dropped, "turn")
            self.note(f"the context was full: the oldest {turns} of the conversation left it (-c makes it larger)")
        max_tokens = self.request["max_tokens"]
        if answer.interrupted:
            self.note("stopped")
        elif (reason := answer.why_cut(max_tokens)) is not None:
            self.note(f"{reason}, /reset starts anew" if answer.fills_context(max_tokens) and not drops else reason)
        if self.with_times:
            self.note(answer.summary())


def _is_typed() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
