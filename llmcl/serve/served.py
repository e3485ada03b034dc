"""The model behind a server: what the server needs of an engine, and nothing else of llmcl."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from llmcl.errors import ContextLengthError, UsageError, shown
from llmcl.serve.conversation import Ending, system_merged
from llmcl.serve.errors import RequestError
from llmcl.serve.thoughts import ThoughtBudget
from llmcl.tokenizer.answer_parts import AnswerParts, Call, Part, Said

if TYPE_CHECKING:  # the server listens before the engine is imported
    from llmcl.engine.engine_metrics import EngineMetrics
    from llmcl.engine.generation import Piece
    from llmcl.grammar import Grammars
    from llmcl.ops.logprobs import LogProb
    from llmcl.tokenizer import Tokenizer


STRUCTURES = "schema", "regex", "grammar"
NO_TOKEN = -1  # of a text that is several
_COMPILING = ThreadPoolExecutor(1, "compiling a grammar")
_RENDERING = ThreadPoolExecutor(1, "rendering chat templates")
_COUNTING = ThreadPoolExecutor(1, "counting tokens")
_LONG = 1 << 14  # characters of a text whose tokens take milliseconds
_MAX_TEXT = 1 << 20  # bytes that become tokens at once: up to a second and 150 MB
_BYTES_A_TOKEN = 16  # more than a text that fits into the context has on average

T = TypeVar("T")


class Stream(Protocol):
    """An answer on its way."""

    async def pass_on(self, take: Callable[[Piece], None], after: Callable[[], None]) -> None:
        """Calls `take` with each piece as it comes, and `after` behind those that came together; returns at the end of
        the answer, or raises what ended it."""
        ...

    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that the prefix cache held, and those that were read so far."""
        ...

    async def aclose(self) -> None:
        """Ends the request."""
        ...


class Engine(Protocol):
    """What makes answers, several at a time."""

    @property
    def metrics(self) -> EngineMetrics: ...

    def stream(self, prompt: Sequence[int], **options: Any) -> Stream:
        """Begins an answer; options as of `LLM.stream`."""
        ...

    def expect(self) -> Callable[[], None]:
        """Says that a request is on its way. The function returned says that it has begun, or never will."""
        ...


@dataclass(frozen=True)
class Served:
    """A model that is ready. max_context: tokens of prompt and answer. created: when it was loaded, Unix time."""

    engine: Engine
    tokenizer: Tokenizer
    name: str
    max_context: int
    vocab_size: int
    created: int
    grammars: Grammars
    device: str = ""
    close: Callable[[], None] = lambda: None

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
    ) -> list[int]:
        """The token ids of a conversation. ending: of the prompt. counted: they are not to be answered, so that any
        number will do; else ContextLengthError for what has more than the context for certain.

        The template runs in a process of its own, and the wait in a thread. That is one thread for all, since the
        process renders one after the other: many that wait for it take twice as long. Long texts become tokens in
        threads of their own.
        """

        most = None if counted else self.max_context
        if most is not None and len(messages) > most:  # the template would keep others waiting
            raise self._too_long(f"at least {len(messages)} tokens")  # each message has one or more

        def work() -> list[int] | str:
            text = self.render(messages, tools, variables, ending)
            return self.tokenizer.encode(text, False) if len(text) < _LONG else text

        rendered = await asyncio.get_running_loop().run_in_executor(_RENDERING, work)
        if not isinstance(rendered, str):
            return rendered
        self.check_text(rendered, counted=counted)
        if counted:
            return await self.beside(lambda: self.tokenizer.encode(rendered, False))
        return await asyncio.to_thread(self.tokenizer.encode, rendered, False, most=most)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        ending: Ending = "answer",
    ) -> str:
        """A conversation as text. Where the template refuses later system messages, these go to the front."""
        said = system_merged(messages)
        mark = ""
        if ending == "within":  # what the template writes behind the last message is cut off
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
        """Runs work on tokens that no answer waits for, in one thread for all."""
        return await asyncio.get_running_loop().run_in_executor(_COUNTING, work)

    @property
    def max_text(self) -> int:
        """How many bytes of text become tokens at once."""
        return max(_MAX_TEXT, _BYTES_A_TOKEN * self.max_context)

    def check_text(self, text: str, *, counted: bool) -> None:
        """Raises an error for a text of more than max_text bytes. counted: its tokens are to be counted alone."""
        if (n_bytes := len(text.encode("utf-8", "surrogatepass"))) <= self.max_text:
            return
        if counted:
            message = f"the text has {n_bytes} bytes, expected at most {self.max_text}; send it in parts"
            raise RequestError(413, message, code="request_too_large")
        raise self._too_long(f"{n_bytes} bytes of text")

    def _too_long(self, size: str) -> ContextLengthError:
        return ContextLengthError.with_size(size, f"the prompt has {size}, the context {self.max_context} tokens")

    async def check_structure(self, option: dict[str, Any], param: str) -> None:
        """Compiles a schema or a grammar, so that the engine finds it compiled. One at a time: it may take seconds.

        Raises RequestError, which blames the field `param`, where it is refused.
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
    """A prompt and how it is to be answered. max_tokens: 0 for an answer without any. options: of sampling.

    head: what stands before the answer in its text (a prompt that is echoed). reader: makes what tells text from
    thoughts and calls of tools; None where all is text. prompt_logprobs: so many alternatives beside the
    log-probability of each token of the prompt; None: they are not wanted. budget: of thoughts; None: no limit.
    """

    prompt: list[int]
    max_tokens: int
    options: dict[str, Any]
    stop: tuple[str, ...] = ()
    head: str = ""
    reader: Callable[[], AnswerParts] | None = None
    prompt_logprobs: int | None = None
    budget: ThoughtBudget | None = None

    @property
    def needs_engine(self) -> bool:
        return self.max_tokens > 0 or self.prompt_logprobs is not None


Take = Callable[["Answer", "Piece"], None]
"""What is called with each piece of an answer."""


@dataclass
class Answer:
    """What there is of the answer to `ask`. text: without the head. tbt_ms: between tokens, on the engine's clock.

    reader: has read the text. prompt_logprobs: of each token of the prompt, once they are there.
    """

    ask: Ask
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tbt_ms: list[float] = field(default_factory=list)
    logprobs: list[LogProb] = field(default_factory=list)
    prompt_logprobs: tuple[LogProb | None, ...] = ()
    finish_reason: str | None = None
    cached_tokens: int = 0  # of the prompt, which the engine's pages held; known at the end
    thought_tokens: int = 0  # of the answer, before it speaks or calls
    has_ended_thoughts: bool = field(default=False, init=False)  # the server, for the model
    reader: AnswerParts | None = field(default=None, init=False)

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
        """Whether it is time to end the thoughts, and there is room for what follows."""
        budget, n = self.ask.budget, len(self.token_ids)
        if budget is None or self.has_ended_thoughts or self.finish_reason is not None or self.reader is None:
            return False
        if not self.reader.is_thinking or self.thought_tokens < budget.n_tokens:
            return False
        n += len(budget.ids)
        return n < self.ask.max_tokens and len(self.ask.prompt) + n < max_context

    def end_thoughts(self, cached_tokens: int) -> Ask:
        """Adds the end of thoughts, and returns what is to be asked for the rest. cached_tokens: of the prompt."""
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
        """What is new of the answer; text: of its last piece, which is all where nothing has to be told apart."""
        if self.reader is not None:
            return self.reader.take()
        return [Said(text)] if text else []

    @property
    def calls(self) -> list[Call]:
        """The calls of tools in the answer."""
        return [] if self.reader is None else self.reader.calls

    def stop_string(self, tokenizer: Tokenizer) -> str | None:
        """The stop string that ended the answer; None where something else did.

        The text ends before it, and of those that began there the shortest was complete first.
        """
        if self.finish_reason != "stop" or not self.ask.stop:
            return None
        if self.token_ids[-1] in tokenizer.eos_token_ids:
            rest = tokenizer.decode(self.token_ids[:-1])[len(self.text) :]
        else:
            rest = tokenizer.decode(self.token_ids)[len(self.text) :]
        return min((stop for stop in self.ask.stop if rest.startswith(stop)), key=len, default=None)


def cached_tokens(answers: Sequence[Answer]) -> int:
    """Tokens of all prompts that were not computed for them. Of several answers to a prompt the first computed it."""
    least: dict[int, int] = {}
    for answer in answers:
        prompt = id(answer.ask.prompt)
        least[prompt] = min(least.get(prompt, answer.cached_tokens), answer.cached_tokens)
    return sum(least.values())


class Streams:
    """Has the engine make all answers, from the beginning of this async context on; its end ends them."""

    def __init__(self, served: Served, answers: Sequence[Answer]):
        self._served, self._answers = served, answers
        self._begun: list[tuple[Answer, Stream]] = []

    async def __aenter__(self) -> Streams:
        try:
            for answer in self._answers:
                if answer.ask.needs_engine:
                    self._begun.append((answer, _stream_of(self._served, answer.ask)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, stream in self._begun:
            await stream.aclose()

    def progress(self) -> list[tuple[Answer, int, int]]:
        """For each answer how many tokens of its prompt were cached, and how many were read."""
        return [(answer, *stream.progress()) for answer, stream in self._begun]

    async def pass_on(self, take: Take, after: Callable[[], None]) -> None:
        """Calls `take` with the pieces of all answers as they come, each added to its answer, and `after` behind those
        that came together. Returns after the last of them.
        """
        if len(self._begun) == 1:  # as nearly always; no task is needed
            ((answer, stream),) = self._begun
            await self._pass_on(answer, stream, take, after)
            return
        passing = [asyncio.ensure_future(self._pass_on(*begun, take, after)) for begun in self._begun]
        try:
            await asyncio.gather(*passing)
        finally:
            for task in passing:
                task.cancel()
            await asyncio.gather(*passing, return_exceptions=True)

    async def _pass_on(self, answer: Answer, stream: Stream, take: Take, after: Callable[[], None]) -> None:
        """One answer. Where its budget of thoughts is spent, another request goes on behind the end of thoughts."""
        try:
            await stream.pass_on(_adding(answer, take, self._served.max_context), after)
            return
        except _BudgetSpentError:
            start = time.perf_counter()
        await stream.aclose()
        rest = _stream_of(self._served, answer.end_thoughts(stream.progress()[0]))
        self._begun.append((answer, rest))
        await rest.pass_on(_adding(answer, take, self._served.max_context, start), after)


class _BudgetSpentError(Exception):
    """The model has thought as much as it may."""


def _stream_of(served: Served, ask: Ask) -> Stream:
    options = ask.options | ({} if ask.prompt_logprobs is None else {"prompt_logprobs": ask.prompt_logprobs})
    # With no token to be made one is, which comes with what was found of the prompt.
    return served.engine.stream(ask.prompt, max_tokens=max(1, ask.max_tokens), stop=ask.stop, **options)


def _adding(answer: Answer, take: Take, max_context: int, start: float | None = None) -> Callable[[Piece], None]:
    """start: when the answer stopped to go on in another request, whose first token is not the answer's first."""

    def add(piece: Piece) -> None:
        if start is not None and piece.tbt_ms is None:
            piece = replace(piece, tbt_ms=(time.perf_counter() - start) * 1e3)
        if not answer.ask.max_tokens:
            piece = replace(piece, text="", logprob=None, finish_reason="length")
        answer.add(piece)
        take(answer, piece)
        if answer.is_over_budget(max_context):
            raise _BudgetSpentError

    return add
