"""An engine that answers at once, for tests of the command line in this process (the fixture `engine`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np

from llmcl.engine.conversation import Conversation
from llmcl.engine.generation import Piece
from llmcl.engine.message_parts import text_of
from llmcl.engine.stats import GenerationStats, summarize
from llmcl.progress import Progress


def stats(**changes: Any) -> GenerationStats:
    values: dict[str, Any] = {field.name: 1 for field in fields(GenerationStats)}
    values |= {"tbt_ms": summarize([20.0, 21.0]), "stage_shares": None} | changes
    return GenerationStats(**values)


class Engine:
    """Stands in for LLM: echoes the prompt word by word and remembers how it was called."""

    model_name = "echo"
    max_context = 64
    load_ms = 1.0
    dtype = "float32"
    device = SimpleNamespace(name="Echo Device", entry=SimpleNamespace(label="Echo Device (Echo OpenCL)"))
    devices = (device,)
    place = device.name

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.sampling_defaults: dict[str, float] = {}
        self.request: dict[str, Any] = {}
        self.before: Callable[[], None] = lambda: None  # called before the first token
        self.after: Callable[[int], None] = lambda n: None
        self.closed_streams = 0
        self.progress: Progress | None = None
        self.streams: list[Iterator[Piece]] = []  # held, so that only close() can end one before its time
        self.stats = stats()
        self.images = SimpleNamespace(vision=lambda progress: None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stream(self, prompt: str, *, progress: Progress | None = None, **request: Any) -> Iterator[Piece]:
        self.progress = progress
        self.request = request | {"prompt": prompt}
        self.streams.append(self.pieces(prompt))
        return self.streams[-1]

    def pieces(self, prompt: str) -> Iterator[Piece]:
        words = text_of(prompt).split()
        self.before()
        try:
            for n, word in enumerate(words, start=1):
                last = n == len(words)
                yield Piece(
                    f"{word} ",
                    n,
                    20.0 if n > 1 else None,
                    "stop" if last else None,
                    self.stats if last else None,
                )
                self.after(n)
        finally:
            self.closed_streams += 1

    def generate(self, prompt: str, **request: Any) -> SimpleNamespace:
        pieces = list(self.stream(prompt, **request))
        return SimpleNamespace(
            text="".join(piece.text for piece in pieces),
            token_ids=[piece.token_id for piece in pieces],
            prompt_token_ids=[1],
            finish_reason="stop",
            stats=self.stats,
        )

    def embed(self, texts: Sequence[str], **request: Any) -> np.ndarray:
        self.request = request
        return np.ones((len(texts), 2), np.float32)

    def chat(self, *, on_full: str = "error") -> EchoChat:
        self.conversation = EchoChat(self, on_full)
        return self.conversation

    def close(self) -> None:
        pass


class EchoChat(Conversation):
    """A conversation with `Engine`; requests are what each answer was asked with."""

    def __init__(self, engine: Engine, on_full: str):
        super().__init__(on_full)
        self._engine = engine
        self.requests: list[dict[str, Any]] = []

    def reset(self) -> None:
        self.messages = []

    def send(self, text: str, *, system_prompt: str | None = None, **request: Any) -> Iterator[Piece]:
        self.requests.append(request | {"system_prompt": system_prompt, "prompt": text})
        stream = self._engine.stream(text, system_prompt=system_prompt, **request)
        return self._record(self._turn(text, system_prompt), self.messages, stream)  # type: ignore[arg-type]
