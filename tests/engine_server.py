"""A server in front of a real engine, whose batch needs no device (fake_batch.py): answers are hashes of the text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_batch import FakeBatch, FakeLLM
from fake_server import INFILL, FakeEngine, Running, byte_tokenizer, running, served

from llmcl.engine.engine import Engine


class EngineServer:
    """The server, its engine and its batch."""

    def __init__(self, server: Running, engine: Engine, batch: FakeBatch):
        self.server, self.engine, self.batch = server, engine, batch

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way and all places and pages are free."""
        cache = self.batch.cache
        return not self.server.service.in_flight and not self.batch.places and cache.n_free == len(cache.order)


@contextmanager
def engine_server(n_pages: int = 60, max_sequences: int = 4, **settings: Any) -> Iterator[EngineServer]:
    """settings: of the server. Tokens of answers are below 131: bytes as the byte tokenizer has them."""
    tokenizer = byte_tokenizer(added=INFILL)
    batch, llm = FakeBatch(n_pages, max_sequences), FakeLLM()
    llm.tokenizer = tokenizer  # type: ignore[assignment]
    stand_in = FakeEngine(tokenizer, max_sequences=max_sequences)
    with (
        Engine(llm, lambda: batch, 64, wait=False) as engine,  # type: ignore[arg-type]
        running(stand_in, loaded=False, **settings) as server,
    ):
        model = served(stand_in, max_context=engine.max_context)
        object.__setattr__(model, "engine", engine)
        server.service.ready(model)
        yield EngineServer(server, engine, batch)
