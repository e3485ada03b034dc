"""Chat: a conversation with a model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol
from weakref import ref

from llmcl.engine.conversation import Conversation, Messages, split_turns
from llmcl.engine.generation import Answer, Piece
from llmcl.engine.leases import Lease, Leases
from llmcl.engine.message_parts import Picture
from llmcl.engine.prompts import Part
from llmcl.errors import ContextLengthError, UsageError, shown
from llmcl.models.model import Model
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.channel_reader import has_channels
from llmcl.tokenizer.shown_text import said


class Speaker(Protocol):
    """The parts of an `LLM` that a conversation needs."""

    model_name: str
    leases: Leases
    max_context: int

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model(self) -> Model: ...
    @property
    def stream(self) -> Callable[..., Lease[Piece]]: ...
    @property
    def encode(self) -> Callable[..., list[int]]: ...
    def reset(self, *, wait: bool) -> None: ...


class Chat(Conversation):
    """A conversation. Each turn prefills only tokens that the KV cache does not hold yet.

    With a paged KV cache every conversation keeps its own sequence. Otherwise the last conversation to speak holds the
    whole cache.
    """

    def __init__(self, llm: Speaker, *, on_full: str = "error"):
        super().__init__(on_full)
        if not hasattr(llm, "leases"):
            raise UsageError(f"llm is {shown(llm)}; expected a loaded model, as llmcl.load returns it")
        if not llm.tokenizer.has_chat_template:
            raise UsageError(
                f"{llm.model_name} has no chat template, so it cannot hold a conversation; use generate, a model "
                "that was tuned for chat, or give it a template (--chat-template-file, chat_template)"
            )
        self._llm = llm
        self._in_channels = has_channels(llm.tokenizer.chat_template)
        self._sequence = llm.model.cache.sequence()
        self._answer: Callable[[], Lease[Piece] | None] = lambda: None  # weak

    def reset(self, *, wait: bool = False) -> None:
        """Forgets the conversation and ends its running answer. wait: see `LLM.stream`."""
        sequence = self._llm.model.cache.sequence()
        answer = self._answer()
        if answer is not None and not answer.over:
            self._llm.reset(wait=wait)
        self.messages, self._sequence = [], sequence

    def fork(self, *, wait: bool = False) -> Chat:
        """Returns a second conversation with the same history. Both continue independently.

        With a paged KV cache (load(..., kv_page_tokens=64)) both share pages for the common history. A running answer
        continues in the first conversation only. wait: see `LLM.stream`.
        """

        def work() -> Chat:
            other = Chat(self._llm, on_full=self.on_full)
            other.messages = [dict(message) for message in self.messages]
            other._sequence = self._llm.model.cache.fork(self._sequence)
            return other

        return self._llm.leases.call(work, wait=wait, beside=True)

    def send(
        self,
        text: str | Sequence[Part],
        *,
        images: Sequence[Picture] | None = None,
        max_tokens: int = 1024,
        system_prompt: str | None = None,
        **options: Any,
    ) -> Lease[Piece]:
        """Yields the answer's pieces. Closing the generator keeps the text so far. Options: see `LLM.stream`.

        text: a text, or content parts. images: paths, bytes or Pillow pictures in front of the text.

        Raises ContextLengthError, and leaves the conversation unchanged, if the messages no longer fit into the
        context. With on_full="drop" only a single message longer than the context raises; `dropped` counts the dropped
        turns.
        """
        expected = self._turn(text, system_prompt, images)
        fitted, ids = self._fitted(expected, max_tokens)

        def begin(answer: Answer) -> Generator[Piece, None, None]:
            # The history may have changed if the call ended another answer or waited for one.
            asked = self._turn(text, system_prompt, images)
            kept, again = (fitted, ids) if asked == expected else self._fitted(asked, max_tokens)
            pieces = answer(again, self._sequence)
            return self._record(kept, self.messages, pieces, said if self._in_channels else str)

        stream = self._llm.stream(ids, max_tokens=max_tokens, begin=begin, **options)
        self._answer = ref(stream)
        return stream

    def _fitted(self, messages: Messages, max_tokens: int) -> tuple[Messages, list[int]]:
        """Returns the messages that fit into the context, and their token ids.

        Turns are dropped once less than a quarter of the context (or less than max_tokens, if smaller) remains for the
        answer. Then half the context is freed, so the next turns can reuse the KV cache.
        """
        most = self._llm.max_context
        self.dropped = 0
        if self.on_full == "error":
            return messages, self._llm.encode(messages, most=most)
        ids = self._ids_up_to(messages, most - min(max_tokens, most // 4))
        if ids is not None:
            return messages, ids
        least, last = 1, len(split_turns(messages)[1]) - 1  # fewest turns to drop, by binary search
        while least < last:
            middle = (least + last) // 2
            if self._ids_up_to(self._without_oldest(messages, middle), most // 2) is None:
                least = middle + 1
            else:
                last = middle
        kept = self._without_oldest(messages, last)
        ids = self._llm.encode(kept, most=most)
        self.dropped = max(last, 0)
        return kept, ids

    def _ids_up_to(self, messages: Messages, most: int) -> list[int] | None:
        """Returns the token ids of the messages, or None if there are more than `most`."""
        try:
            ids = self._llm.encode(messages, most=most)
        except ContextLengthError:
            return None
        return ids if len(ids) <= most else None
