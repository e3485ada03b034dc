"""A chat through a server with OpenAI's API, using the standard library alone: `llmcl chat --server`."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from llmcl.engine.conversation import Conversation, Messages, split_turns
from llmcl.engine.message_parts import Content, for_server
from llmcl.errors import ContextLengthError, LlmclError, ServerError, UsageError, one_line, shown

if TYPE_CHECKING:
    from llmcl.engine.generation import Piece
    from llmcl.progress import Progress

TIMEOUT_S = 600  # limit on silence; a server sends a sign of life every few seconds
_MAX_ERROR_BYTES = 1 << 16
_NO_TOKEN = -1  # the server sends text without token ids


class ServerChat(Conversation):
    """Like Chat in engine/chat.py, with the model behind a server. Each request sends all messages so far.

    url: such as http://127.0.0.1:8080, optionally with /v1 at the end. Raises UsageError for an invalid URL.
    """

    def __init__(self, url: str, api_key: str | None = None, *, model: str | None = None, on_full: str = "error"):
        super().__init__(on_full)
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise UsageError(f"--server {shown(url)}: expected an address such as http://127.0.0.1:8080")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("--api-key has characters other than visible ASCII ones; give the server's key")
        self.model_name = model or "any"  # a server of one model ignores the name
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def reset(self) -> None:
        """Forgets the conversation."""
        self.messages = []

    def send(
        self,
        text: Content,
        *,
        max_tokens: int = 1024,
        system_prompt: str | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        progress: Progress | None = None,
        **sampling: Any,
    ) -> Generator[Piece, None, None]:
        """Yields pieces of the answer as they arrive. Closing the generator ends the request and keeps the text so far.

        Thoughts (reasoning_content) are shown between <think> and </think> and are not kept in the conversation. Times
        between tokens are times between events here. Raises ServerError, ContextLengthError.
        """
        asked = self._turn(text, system_prompt)
        body = {"model": self.model_name, "max_tokens": max_tokens, **sampling}
        body |= {"stream": True, "stream_options": {"include_usage": True}} | ({"stop": [*stop]} if stop else {})
        body |= {"ignore_eos": True} if ignore_eos else {}
        return self._answer(asked, body)

    def _answer(self, asked: Messages, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """Asks with fewer turns each time the server reports a full context, if turns may be dropped."""
        from llmcl.tokenizer.shown_text import said

        n_turns, self.dropped = len(split_turns(asked)[1]), 0
        while True:
            kept = self._without_oldest(asked, self.dropped)
            try:
                yield from self._record(kept, self.messages, self._pieces(body | {"messages": for_server(kept)}), said)
                return
            except ContextLengthError:
                left = n_turns - self.dropped
                if self.on_full == "error" or left <= 1:
                    self.dropped = 0
                    raise
                self.dropped += left // 2

    def _pieces(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        from llmcl.engine.generation import Piece
        from llmcl.engine.stats import Recorder
        from llmcl.tokenizer.answer_parts import Said, Thought
        from llmcl.tokenizer.shown_text import ThinkTags

        recorder, reason, tags = Recorder(0), None, ThinkTags()
        usage: dict[str, Any] = {}
        with closing(self._connection()) as connection:
            for data in self._events(connection, body):
                usage = data.get("usage") or usage
                for choice in data.get("choices") or ():
                    reason = choice.get("finish_reason") or reason
                    delta = choice.get("delta") or {}
                    for kind, text in ((Thought, delta.get("reasoning_content")), (Said, delta.get("content"))):
                        if text:
                            yield Piece(tags.shown(kind(text)), _NO_TOKEN, recorder.token())
        if reason is None:
            raise ServerError(f"{self.url} ended the answer before its end; ask again")
        tbt_ms = None if recorder.n_tokens else recorder.token()  # an answer without any text
        recorder.prompt_tokens = usage.get("prompt_tokens", 0)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        recorder.prefilled_tokens = recorder.prompt_tokens - cached
        stats = recorder.finish()
        stats = replace(stats, generated_tokens=usage.get("completion_tokens", stats.generated_tokens))
        yield Piece("", _NO_TOKEN, tbt_ms, reason, stats)

    def _connection(self) -> HTTPConnection:
        if self._https:
            return HTTPSConnection(self._host, self._port, timeout=TIMEOUT_S, context=ssl.create_default_context())
        return HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)

    def _events(self, connection: HTTPConnection, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects in the stream, up to the [DONE] line."""
        try:
            connection.request("POST", self._path, json.dumps(body).encode("ascii"), self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise self._refusal(answer)
            while line := answer.readline():
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    data = json.loads(line[6:])
                    if "error" in data:
                        raise ServerError(f"{self.url}: {_message_of(data)}")
                    yield data
        except LlmclError:  # first, since some are ValueErrors
            raise
        except TimeoutError as error:
            raise ServerError(f"{self.url} was silent for {TIMEOUT_S} s; ask again") from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ServerError(f"{self.url} cannot be used ({one_line(reason)}); does a server run there?") from error

    def _refusal(self, answer: HTTPResponse) -> ServerError | ContextLengthError:
        text, data = answer.read(_MAX_ERROR_BYTES), None
        with suppress(ValueError, RecursionError):
            data = json.loads(text)
        message = _message_of(data) if isinstance(data, dict) else ""
        error = data.get("error") if isinstance(data, dict) else None
        if isinstance(error, dict) and error.get("code") == "context_length_exceeded":
            return ContextLengthError(message)
        hint = " (--api-key)" if answer.status == 401 else "; try again later" if answer.status in (429, 503) else ""
        return ServerError(f"{self.url} refuses with status {answer.status}: {message or answer.reason}{hint}")


def _message_of(data: dict[str, Any]) -> str:
    error = data.get("error")
    return one_line(error.get("message") if isinstance(error, dict) else error or "no reason given", 500)
