"""The model behind a server: everything the server needs from an engine, and nothing else from llmcl."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from llmcl.engine.message_parts import rendered_with_images
from llmcl.errors import ContextLengthError, UsageError, shown
from llmcl.serve.conversation import Ending, system_merged
from llmcl.serve.errors import RequestError
from llmcl.serve.image_parts import for_template
from llmcl.serve.image_prompt import ImagePrompt, ImageWriter
from llmcl.serve.model_facts import ModelFacts
from llmcl.serve.thoughts import ThoughtBudget
from llmcl.tokenizer.answer_parts import AnswerParts, Call, Part, Said

if TYPE_CHECKING:  # imported late: the server listens before the engine is loaded
    import numpy as np

    from llmcl.engine.engine_metrics import EngineMetrics
    from llmcl.engine.generation import Piece
    from llmcl.grammar import Grammars
    from llmcl.models.image_rows import PlacedImage
    from llmcl.ops.logprobs import LogProb
    from llmcl.serve.lora_engine import LoraEngine
    from llmcl.tokenizer import Tokenizer
    from llmcl.vision.image_reader import ImageReader
    from llmcl.vision.vision import Pixels


STRUCTURES = "schema", "regex", "grammar"
NO_TOKEN = -1  # for text made from several tokens
_COMPILING = ThreadPoolExecutor(1, "compiling a grammar")
_RENDERING = ThreadPoolExecutor(1, "rendering chat templates")
_COUNTING = ThreadPoolExecutor(1, "counting tokens")
_LONG = 1 << 14  # characters; tokenizing a longer text takes milliseconds
_MAX_TEXT = 1 << 20  # bytes tokenized at once: up to a second and 150 MB
_BYTES_A_TOKEN = 16  # more than the average in a text that fits the context

T = TypeVar("T")


class Stream(Protocol):
    """An answer being generated."""

    async def pass_on(self, take: Callable[[Piece], None], after: Callable[[], None]) -> None:
        """Calls `take` with each piece as it comes, and `after` once per batch of pieces. Returns when the answer ends
        and raises any error that ended it.
        """
        ...

    def progress(self) -> tuple[int, int]:
        """Returns how many prompt tokens were cached, and how many were read so far."""
        ...

    async def aclose(self) -> None:
        """Ends the request."""
        ...


class AnswerEngine(Protocol):
    """Generates answers, several at a time."""

    @property
    def metrics(self) -> EngineMetrics: ...

    def stream(self, prompt: Sequence[int], **options: Any) -> Stream:
        """Begins an answer. Options as for `LLM.stream`."""
        ...

    def expect(self) -> Callable[[], None]:
        """Announces a request. Call the returned function once the request has begun, or was dropped."""
        ...


class TextEmbedder(Protocol):
    """Makes embeddings, for one thread at a time. Arguments as for `LLM.embed`."""

    @property
    def name(self) -> str: ...

    def ids_to_embed(
        self, texts: Sequence[str] | Sequence[Sequence[int]], *, prompt_name: str | None, truncate: bool
    ) -> list[list[int]]: ...

    def embed(self, ids: list[list[int]], *, dimensions: int | None) -> np.ndarray: ...


class TextReranker(Protocol):
    """Scores documents, for one thread at a time."""

    @property
    def name(self) -> str: ...

    def rerank(self, query: str, documents: list[str], *, truncate: bool) -> tuple[list[float], int]:
        """Returns the documents' scores and the number of tokens read."""
        ...


@dataclass(frozen=True)
class Served:
    """A loaded model."""

    engine: AnswerEngine
    tokenizer: Tokenizer
    name: str
    max_context: int  # most tokens of prompt and answer together
    vocab_size: int
    created: int  # load time, Unix seconds
    grammars: Grammars
    device: str = ""
    facts: ModelFacts = field(default_factory=ModelFacts)
    close: Callable[[], None] = lambda: None
    embedder: TextEmbedder | None = None  # the model for embeddings, this one or another
    reranker: TextReranker | None = None  # the cross-encoder, this model or another
    loras: LoraEngine | None = None  # the engine, if it takes adapters
    images: ImageReader | None = None  # None: the model takes no images

    @property
    def takes_images(self) -> bool:
        return self.images is not None

    def check(self, prompt: Sequence[int]) -> None:
        """Raises ContextLengthError or UsageError for a prompt that cannot be answered."""
        if not prompt:
            raise UsageError("the prompt has no tokens; expected at least one")
        if len(prompt) > self.max_context:
            raise self._too_long(f"{len(prompt)} tokens")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise UsageError(f"token id {shown(unknown)} is not in the vocabulary; expected 0 to {self.vocab_size - 1}")

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
        counted: bool = False,
        pixels: Sequence[Pixels] = (),
    ) -> ImagePrompt:
        """Returns the token ids of a conversation, with its images.

        ending: how the prompt ends. pixels: the conversation's images, in order. counted: the ids are only counted, so
        any length is allowed. Otherwise a text that must exceed the context raises ContextLengthError.

        The template runs in a separate process, and a thread waits for the result. One thread serves all requests,
        since the process renders one prompt at a time: with several waiting threads each wait takes twice as long. Long
        texts are tokenized in separate threads.
        """

        most = None if counted else self.max_context
        if most is not None and len(messages) > most:  # the template would keep other requests waiting
            raise self._too_long(f"at least {len(messages)} tokens")  # each message has at least one token

        if pixels and self.images is not None:
            return await self._encode_images(messages, tools, variables, ending, self.images, pixels, counted=counted)

        def work() -> list[int] | str:
            text = self.render(messages, tools, variables, ending)
            return self.tokenizer.encode(text, False) if len(text) < _LONG else text

        rendered = await asyncio.get_running_loop().run_in_executor(_RENDERING, work)
        if not isinstance(rendered, str):
            return ImagePrompt(rendered, [])
        self.check_text(rendered, counted=counted)
        if counted:
            return ImagePrompt(await self.beside(lambda: self.tokenizer.encode(rendered, False)), [])
        return ImagePrompt(await asyncio.to_thread(self.tokenizer.encode, rendered, False, most=most), [])

    async def _encode_images(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any] | None,
        ending: Ending,
        reader: ImageReader,
        pixels: Sequence[Pixels],
        *,
        counted: bool,
    ) -> ImagePrompt:
        writer = ImageWriter.of(reader.vision.processor)
        hidden, hidden_tools = writer.hidden([for_template(message) for message in messages]), writer.hidden(tools)

        def render() -> str:
            marker = writer.processor.marker
            return rendered_with_images(hidden, marker, lambda said: self.render(said, hidden_tools, variables, ending))

        text = await asyncio.get_running_loop().run_in_executor(_RENDERING, render)
        self.check_text(text, counted=counted)
        prompt = await asyncio.to_thread(writer.prompt, text, pixels, self.tokenizer)
        if counted:
            return prompt
        self.check(prompt.ids)  # before the tower runs
        return await asyncio.to_thread(prompt.with_rows, reader)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
    ) -> str:
        """Renders a conversation. If the template refuses later system messages, moves them to the front."""
        said = system_merged(messages)
        mark = ""
        if ending == "within":  # drops the template's text after the last message
            mark = secrets.token_hex(8)
            said = [*said[:-1], {**said[-1], "content": (said[-1]["content"] or "") + mark}]
        try:
            text = self.tokenizer.render_chat(said, ending == "answer", tools, variables)
        except UsageError as error:
            moved = system_merged(said, all_of_them=True)
            if moved is said:
                raise
            try:
                text = self.tokenizer.render_chat(moved, ending == "answer", tools, variables)
            except UsageError:
                raise error from None
        if mark:
            text, is_shown, _ = text.rpartition(mark)
            if not is_shown:
                raise UsageError("the chat template does not show the last message, so no answer can go on from it")
        return text

    async def beside(self, work: Callable[[], T]) -> T:
        """Runs work on tokens that no answer waits for, in one shared thread."""
        return await asyncio.get_running_loop().run_in_executor(_COUNTING, work)

    @property
    def max_text(self) -> int:
        """The most bytes of text to tokenize at once."""
        return max(_MAX_TEXT, _BYTES_A_TOKEN * self.max_context)

    def check_text(self, text: str, *, counted: bool) -> None:
        """Raises an error for a text above max_text bytes. counted: the tokens are only counted."""
        if (n_bytes := len(text.encode("utf-8", "surrogatepass"))) <= self.max_text:
            return
        if counted:
            message = f"the text has {n_bytes} bytes, expected at most {self.max_text}; send it in parts"
            raise RequestError(413, message, code="request_too_large")
        raise self._too_long(f"{n_bytes} bytes of text")

    def _too_long(self, size: str) -> ContextLengthError:
        return ContextLengthError.with_size(size, f"the prompt has {size}, the context {self.max_context} tokens")

    async def check_structure(self, option: dict[str, Any], param: str) -> None:
        """Compiles a schema or a grammar in advance for the engine. Compiles one at a time: each may take seconds.

        Raises RequestError, blaming the field `param`, if the schema or grammar is refused.
        """
        from llmcl.grammar import Grammar

        try:
            if (grammar := Grammar.of(**option)) is not None:
                await asyncio.get_running_loop().run_in_executor(_COMPILING, self.grammars.compile, grammar)
        except UsageError as error:
            raise RequestError(400, f"{param}: {error}", param, "invalid_value") from None

    async def encode(self, text: str) -> list[int]:
        self.check_text(text, counted=False)
        return await asyncio.to_thread(self.tokenizer.encode, text, most=self.max_context)


@dataclass(frozen=True)
class Ask:
    """A prompt and how to answer it."""

    prompt: list[int]
    max_tokens: int  # 0: no tokens
    options: dict[str, Any]  # sampling options
    images: Sequence[PlacedImage] = field(default=(), kw_only=True)
    stop: tuple[str, ...] = ()
    head: str = ""  # text before the answer (an echoed prompt)
    reader: Callable[[], AnswerParts] | None = None  # makes the reader for thoughts and tool calls; None: all is text
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: no prompt log-probabilities
    budget: ThoughtBudget | None = None  # limit on thoughts; None: no limit
    line_s: float | None = (
        None  # seconds since the first token after which a line's end ends the answer; None: no limit
    )

    @property
    def needs_engine(self) -> bool:
        return self.max_tokens > 0 or self.prompt_logprobs is not None


@dataclass
class Answer:
    """The answer to `ask` so far."""

    ask: Ask
    index: int
    text: str = ""  # without the head
    token_ids: list[int] = field(default_factory=list)
    tbt_ms: list[float] = field(default_factory=list)  # time between tokens, by the engine's clock
    logprobs: list[LogProb] = field(default_factory=list)
    prompt_logprobs: tuple[LogProb | None, ...] = ()  # per prompt token, once available
    finish_reason: str | None = None
    cached_tokens: int = 0  # prompt tokens from cached pages; known at the end
    thought_tokens: int = 0  # answer tokens before it speaks or calls
    has_ended_thoughts: bool = field(default=False, init=False)  # whether the server ended the thoughts
    reader: AnswerParts | None = field(default=None, init=False)  # has read the text so far

    def __post_init__(self) -> None:
        if self.ask.reader is not None:
            self.reader = self.ask.reader()

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        if self.ask.max_tokens:
            self.token_ids.append(piece.token_id)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        self.finish_reason = piece.finish_reason
        if piece.tbt_ms is not None:
            self.tbt_ms.append(piece.tbt_ms)
        if piece.logprob is not None:
            self.logprobs.append(piece.logprob)
        if piece.stats is not None and not self.has_ended_thoughts:
            self.cached_tokens = piece.stats.cached_tokens
        if self.reader is not None:
            self.reader.push(piece.text, piece.token_id)
            self.thought_tokens += self.reader.is_thinking
            if piece.finish_reason is not None:
                self.reader.finish(is_cut=piece.finish_reason == "length")

    def is_over_budget(self, max_context: int) -> bool:
        """Returns whether to end the thoughts now. False if there is no room for the rest."""
        budget, n = self.ask.budget, len(self.token_ids)
        if budget is None or self.has_ended_thoughts or self.finish_reason is not None or self.reader is None:
            return False
        if not self.reader.is_thinking or self.thought_tokens < budget.n_tokens:
            return False
        n += len(budget.ids)
        return n < self.ask.max_tokens and len(self.ask.prompt) + n < max_context

    def end_thoughts(self, cached_tokens: int) -> Ask:
        """Appends the end of the thoughts. Returns the rest's request. cached_tokens: cached prompt tokens so far."""
        budget = self.ask.budget
        assert budget is not None and self.reader is not None
        self.has_ended_thoughts, self.cached_tokens = True, cached_tokens
        self.token_ids += budget.ids
        self.text += budget.text
        self.reader.push(budget.text, NO_TOKEN)
        matching = {name: self.ask.options[name] for name in self.ask.options if name not in STRUCTURES}
        return replace(
            self.ask,
            prompt=[*self.ask.prompt, *self.token_ids],
            max_tokens=self.ask.max_tokens - len(self.token_ids),
            options={**matching, **budget.options},
        )

    def parts(self, text: str) -> list[Part]:
        """Returns the new parts of the answer. text: the last piece, returned whole if there is no reader."""
        if self.reader is not None:
            return self.reader.take()
        return [Said(text)] if text else []

    @property
    def calls(self) -> list[Call]:
        """The tool calls in the answer."""
        return [] if self.reader is None else self.reader.calls

    def stop_string(self, tokenizer: Tokenizer) -> str | None:
        """Returns the stop string that ended the answer, or None.

        The text ends before the stop string. If several begin there, the shortest was complete first.
        """
        if self.finish_reason != "stop" or not self.ask.stop:
            return None
        if self.token_ids[-1] in tokenizer.eos_token_ids:
            rest = tokenizer.decode(self.token_ids[:-1])[len(self.text) :]
        else:
            rest = tokenizer.decode(self.token_ids)[len(self.text) :]
        return min((stop for stop in self.ask.stop if rest.startswith(stop)), key=len, default=None)


def cached_tokens(answers: Sequence[Answer]) -> int:
    """Returns how many prompt tokens were not computed for this request. With several answers to a prompt, the first
    answer computed it.
    """
    least: dict[int, int] = {}
    for answer in answers:
        prompt = id(answer.ask.prompt)
        least[prompt] = min(least.get(prompt, answer.cached_tokens), answer.cached_tokens)
    return sum(least.values())
