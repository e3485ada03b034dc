"""A conversation's messages, independent of who answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from llmcl.engine.message_parts import Content, content_with
from llmcl.errors import UsageError, check_text, shown

if TYPE_CHECKING:  # a conversation with a server needs no engine
    from llmcl.engine.generation import Piece

Messages = list[dict[str, Any]]
ON_FULL = "error", "drop"


def split_turns(messages: Messages) -> tuple[Messages, list[Messages]]:
    """Splits messages into the ones before the first question (the system prompt) and the turns.

    A turn is a question and the messages up to the next question.
    """
    first: Messages = []
    turns: list[Messages] = []
    for message in messages:
        if message["role"] == "user":
            turns.append([message])
        else:
            (turns[-1] if turns else first).append(message)
    return first, turns


class Conversation:
    """A conversation's messages, and the policy for a full context."""

    def __init__(self, on_full: str = "error") -> None:
        if on_full not in ON_FULL:
            raise UsageError(f"on_full is {shown(on_full)}; expected one of {', '.join(ON_FULL)}")
        self.messages: Messages = []  # history: [{"role": ..., "content": ...}]; content: a text, or parts
        self.on_full = on_full  # "error" or "drop": raise ContextLengthError, or drop the oldest turns
        self.dropped = 0  # turns dropped by the last question

    def undo(self) -> Content | None:
        """Removes the last question and its answer. Returns the question, or None if there is none."""
        first, turns = split_turns(self.messages)
        if not turns:
            return None
        *kept, last = turns
        self.messages = [*first, *(message for turn in kept for message in turn)] if kept else []
        question: Content = last[0]["content"]
        return question

    def set_system_prompt(self, text: str | None) -> None:
        """Changes or removes the system prompt of a conversation that has begun."""
        if self.messages:
            rest = [message for turn in split_turns(self.messages)[1] for message in turn]
            self.messages = [*([{"role": "system", "content": text}] if text is not None else []), *rest]

    def _without_oldest(self, messages: Messages, n_turns: int) -> Messages:
        """Drops the oldest turns. Always keeps the system prompt and the last turn."""
        first, turns = split_turns(messages)
        return [*first, *(message for turn in turns[min(n_turns, len(turns) - 1) :] for message in turn)]

    def _turn(
        self, text: str | Sequence[Any], system_prompt: str | None, images: Sequence[Any] | None = None
    ) -> Messages:
        """Returns all messages plus the user's next message. A system prompt takes effect only at the beginning."""
        content = content_with(text, images)
        if system_prompt is not None:
            check_text("system_prompt", system_prompt)
        first = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        return [*(self.messages or first), {"role": "user", "content": content}]

    def _record(
        self,
        asked: Messages,
        before: Messages,
        stream: Generator[Piece, None, None],
        content: Callable[[str], str] = str,
    ) -> Generator[Piece, None, None]:
        """Yields the pieces of the answer to `asked`, and records both as messages at the end. before: the messages
        when the question was asked. content: extracts from the answer the text that later turns see.

        A finished answer is recorded even if empty. If interrupted before any text, or if the conversation was reset,
        the turn is not recorded.
        """
        said: list[str] = []
        ended = False
        try:
            for piece in stream:
                said.append(piece.text)
                ended = piece.finish_reason is not None
                yield piece
        finally:
            stream.close()
            if (ended or any(said)) and self.messages is before:
                self.messages = [*asked, {"role": "assistant", "content": content("".join(said))}]
