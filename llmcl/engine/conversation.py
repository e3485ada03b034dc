"""What was said in a conversation, whoever answers in it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

from llmcl.errors import check_text

if TYPE_CHECKING:  # a conversation with a server needs nothing of an engine
    from llmcl.engine.generation import Piece

Messages = list[dict[str, str]]


class Conversation:
    """messages: what was said so far, [{"role": ..., "content": ...}]."""

    def __init__(self) -> None:
        self.messages: Messages = []

    def _turn(self, text: str, system_prompt: str | None) -> Messages:
        """All messages with the next of the user; a system prompt begins a conversation, and changes none."""
        check_text("text", text)
        if system_prompt is not None:
            check_text("system_prompt", system_prompt)
        first = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        return [*(self.messages or first), {"role": "user", "content": text}]

    def _record(
        self,
        asked: Messages,
        before: Messages,
        stream: Generator[Piece, None, None],
        content: Callable[[str], str] = str,
    ) -> Generator[Piece, None, None]:
        """The pieces of the answer to `asked`, which become messages with it; before: the messages it was asked after.
        content: of the answer's text what the next turns are to know.

        An answer that ended counts, even without any text. Interrupted before the first text, the turn never happened;
        nor did it if the conversation was reset.
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
