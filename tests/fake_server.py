"""A server on loopback in this process, in front of an engine that answers by rule."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import httpx
from echo_engine import stats
from pydantic import BaseModel, TypeAdapter

from llmcl.engine.engine_metrics import EngineMetrics
from llmcl.engine.generation import Piece
from llmcl.engine.stats import GenerationStats
from llmcl.errors import UsageError
from llmcl.grammar import Grammars
from llmcl.ops.logprobs import LogProb
from llmcl.serve.run import Server, listen
from llmcl.serve.served import Served
from llmcl.serve.service import Service
from llmcl.serve.settings import Settings
from llmcl.tokenizer import Tokenizer
from llmcl.tokenizer.text import StopMatcher
from llmcl.tokenizer.tokenizer import byte_level_alphabet

T = TypeVar("T")

END = 1  # the id of the end-of-text token
INFILL = "<fim_prefix>", "<fim_suffix>", "<fim_middle>"  # StarCoder's tokens
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }}{{ c.function.arguments | tojson }}>"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Shows images as models with a vision encoder do.
IMAGE_TEMPLATE = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<picture>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}",
)


def byte_tokenizer(template: str | None = TEMPLATE, added: Sequence[str] = ()) -> Tokenizer:
    """A token for each byte, after <s> and </s>: an emoji takes four. added: further tokens, not special ones."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    symbols = ["<s>", "</s>", *byte_level_alphabet()]
    backend = Backend(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(symbol, special=True) for symbol in symbols[:2]])
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    return Tokenizer(backend, vocab_size=len(symbols) + len(added), eos_token_ids=[END], chat_template=template)


class FakeStream:
    def __init__(self, pieces: AsyncGenerator[Piece, None], progress: Callable[[], tuple[int, int]]):
        self._pieces = pieces
        self.progress = progress

    async def pass_on(self, take: Callable[[Piece], None], after: Callable[[], None]) -> None:
        async for piece in self._pieces:
            take(piece)
            after()

    async def aclose(self) -> None:
        await self._pieces.aclose()


class FakeEngine:
    """Answers a prompt with `reply(text of the prompt)`, a byte a token, max_sequences at a time.

    hold_after: so many tokens, and then nothing more until the client goes away. delay_s: before each token. fail: what
    to raise in place of the second token. cached: tokens of a prompt that it says it held. read: what a stream says of
    its progress. asked: prompt and options of each request. open: requests under way. expected: those on their way.
    """

    def __init__(self, tokenizer: Tokenizer, max_sequences: int = 2):
        self.tokenizer = tokenizer
        self.max_sequences = max_sequences
        self.reply: Callable[[str], str] = last_said
        self.hold_after: int | None = None
        self.delay_s = 0.0
        self.fail: Exception | None = None
        self.cached = 0
        self.read = 0, 0
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.open = self.running = self.expected = 0
        self.metrics = EngineMetrics()

    def expect(self) -> Callable[[], None]:
        self.expected += 1
        return self._come

    def _come(self) -> None:
        self.expected -= 1

    def stream(self, prompt: Sequence[int], **options: Any) -> FakeStream:
        return FakeStream(self._answer(prompt, **options), lambda: self.read)

    async def _answer(self, prompt: Sequence[int], **options: Any) -> AsyncGenerator[Piece, None]:
        text = self.tokenizer.decode(prompt)
        self.asked.append((text, options))
        self.open += 1
        try:
            while self.running == self.max_sequences:
                await asyncio.sleep(0.005)
            self.running += 1
            try:
                async for piece in self._pieces(text, **options):
                    yield piece
            finally:
                self.running -= 1
        finally:
            self.open -= 1

    async def _pieces(
        self,
        text: str,
        *,
        max_tokens: int,
        stop: Sequence[str],
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **_: Any,
    ) -> AsyncIterator[Piece]:
        of_prompt = None
        if prompt_logprobs is not None:
            later = self.tokenizer.encode(text)[1:]
            of_prompt = (None, *(LogProb(token, -0.5, ((token ^ 1, -0.125),) * prompt_logprobs) for token in later))
        ids = [*self.tokenizer.encode(self.reply(text)), END]
        detokenizer, matcher = self.tokenizer.detokenizer(), StopMatcher(stop)
        for n, token in enumerate(ids):
            if n == self.hold_after:
                await asyncio.sleep(3600)
            await asyncio.sleep(self.delay_s)
            if n == 1 and self.fail is not None:
                raise self.fail
            shown, stopped = matcher.push(detokenizer.push(token))
            at_end, cut = token == END, n + 1 == max_tokens
            if not stopped and (at_end or cut):
                tail, stopped = matcher.push(detokenizer.flush())
                shown += tail + matcher.flush()
            reason = "stop" if stopped or at_end else "length" if cut else None
            top = tuple((token ^ i, -0.25 - i) for i in range(logprobs or 0))
            logprob = None if logprobs is None else LogProb(token, -0.25, top)
            stats = self._stats() if reason else None
            yield Piece(shown, token, 1.5 if n else None, reason, stats, logprob, None if n else of_prompt)
            if reason:
                return

    def _stats(self) -> GenerationStats:
        return stats(cached_tokens=self.cached)


def last_said(text: str) -> str:
    """What the last user of a conversation said; the prompt itself where it is none."""
    return text.rpartition("[user]")[2].partition("\n[assistant]")[0]


class Running:
    """A server that runs: it, its socket and url, service, engine, and a plain HTTP client."""

    def __init__(self, server: Server, listening: socket.socket, service: Service, engine: FakeEngine):
        self.server, self.listening, self.service, self.engine = server, listening, service, engine
        self.url = url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.http = httpx.Client(base_url=url, timeout=60, verify=False, trust_env=False)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, json=body, headers={name.replace("_", "-"): v for name, v in headers.items()})

    def chat(self, text: str = "Hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def metric(self, line: str) -> float:
        """The value of a line of /metrics that begins so; 0 where there is none."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(found.rpartition(" ")[2]) for found in lines if found.startswith(line))


@contextmanager
def running(engine: FakeEngine | None = None, *, loaded: bool = True, **settings: Any) -> Iterator[Running]:
    """A server with these settings. loaded: whether its model is ready."""
    engine = engine or FakeEngine(byte_tokenizer())
    settings = {"max_sequences": engine.max_sequences, "max_queue": 4, "quiet": True, "drain_s": 0.2} | settings
    service = Service(Settings(**settings))
    if loaded:
        service.ready(served(engine))
    listening = listen("127.0.0.1", 0)
    server = Server(service)
    thread = Thread(target=server.run, args=(listening,), daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    client = Running(server, listening[0], service, engine)
    try:
        yield client
    finally:
        client.http.close()
        service.stop()
        thread.join(60)
        assert not thread.is_alive()
        service.kept.close()
        assert engine.open == engine.expected == service.in_flight == 0


def served(engine: FakeEngine, **changes: Any) -> Served:
    vocab_size = engine.tokenizer.n_vocab
    given = {"name": "fake", "max_context": 2048, "vocab_size": vocab_size, "created": 1_700_000_000} | changes
    given.setdefault("grammars", Grammars(engine.tokenizer, given["vocab_size"]))
    return Served(engine, engine.tokenizer, **given)


def wait_for(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Until it holds; fails where it never does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.005)


def free_port() -> int:
    """A port for a server that is told its number: none that a system gives to whoever asks for any."""
    for port in range(10_000 + 10 * (os.getpid() % 2000), 32_000):
        try:
            for listening in listen("127.0.0.1", port):
                listening.close()
        except UsageError:
            continue
        return port
    raise AssertionError("no port is free")


def events(text: str) -> list[tuple[str | None, str]]:
    """Name and data of each event of a stream; comments left out."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if lines:
            found.append((lines.get("event"), lines["data"]))
    return found


# Fields of Open Responses that OpenAI's client does not have.
OPEN_RESPONSES = {
    "Response.presence_penalty",
    "Response.frequency_penalty",
    "Response.store",
    "ResponseFunctionCallArgumentsDoneEvent.name",
}


def strictly(kind: type[T] | Any, data: Any) -> T:
    """`data` as a client's own type: nothing missing, no wrong type, and no field that the type does not have."""
    value: T = _adapter(kind).validate_python(data, strict=True)
    assert not (extra := {*_unknown(value)} - OPEN_RESPONSES), extra
    return value


_adapter = cache(TypeAdapter)  # that of a client's events takes 0.1 s to make


def _unknown(value: Any) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{type(value).__name__}.{name}" for name in value.model_extra or {})
        for name in value.model_fields_set:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _unknown(item)
