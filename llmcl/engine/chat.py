"""Chat: a conversation with a model."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from llmcl.engine.generation import Piece
from llmcl.errors import UsageError

if TYPE_CHECKING:
    from llmcl.engine.llm import LLM


class Chat:
    """A conversation. Each turn prefills only what the KV cache does not hold yet.

    With a KV cache in pages every conversation keeps its own place in it; otherwise the last one to speak has it all.

    messages: what was said so far, [{"role": ..., "content": ...}].
    """

    def __init__(self, llm: LLM):
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise UsageError(
                f"{llm.model_name} has no chat template, so it cannot hold a conversation; use generate, a model "
                "that was tuned for chat, or give it a template (--chat-template-file, chat_template)"
            )
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._sequence = llm.model.cache.sequence()
        self.messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forgets the conversation."""
        self.messages.clear()
        self._sequence = self._llm.model.cache.sequence()

    def fork(self) -> Chat:
        """A second conversation that begins with all that was said in this one; each goes on by itself.

        With a KV cache in pages (load(..., kv_page_tokens=64)) both share the pages of what they have in common.
        """
        other = Chat(self._llm)
        other.messages = [dict(message) for message in self.messages]
        other._sequence = self._llm.model.cache.fork(self._sequence)
        return other

    def send(
        self,
        text: str,
        *,
        max_tokens: int = 1024,
        system_prompt: str | None = None,
        **options: Any,
    ) -> Generator[Piece, None, None]:
        """Yields the answer's pieces; closing the generator keeps what was said so far. Options as of `LLM.stream`.

        Raises ContextLengthError, and leaves the conversation as it was, if it no longer fits into the context.
        """
        turn = [*self.messages, {"role": "user", "content": text}]
        if system_prompt is not None and not self.messages:
            turn.insert(0, {"role": "system", "content": system_prompt})
        ids = self._tokenizer.encode_chat(turn)
        stream = self._llm.stream(ids, max_tokens=max_tokens, sequence=self._sequence, **options)
        return self._take_turn(turn, stream)

    def _take_turn(
        self, turn: list[dict[str, str]], stream: Generator[Piece, None, None]
    ) -> Generator[Piece, None, None]:
        said: list[str] = []
        try:
            for piece in stream:
                said.append(piece.text)
                yield piece
        finally:
            stream.close()
            if any(said):  # interrupted before the first token, the turn never happened
                self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]
