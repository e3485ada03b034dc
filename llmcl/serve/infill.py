"""Infilling: prompts for the text between a prefix and a suffix, and POST /infill as llama-server has it.

Source: llama.cpp, tools/server/README.md, "POST /infill".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from llmcl.serve.access_log import record_of
from llmcl.serve.body import read_fields
from llmcl.serve.errors import RequestError
from llmcl.serve.events import event
from llmcl.serve.generation import GenerationResponse
from llmcl.serve.sampling import MAX_STOPS, max_tokens, read_sampling
from llmcl.serve.served import Answer, Ask, Served
from llmcl.serve.service import Service
from llmcl.serve.structure import read_structure
from llmcl.tokenizer.infill_tokens import InfillTokens, infill_tokens

if TYPE_CHECKING:
    from llmcl.tokenizer import Tokenizer

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # llama-server's
_SNIPPET = "\n\n--- snippet ---\n\n"  # llama-server's separator where a model has no token for files


async def infill(request: Request, service: Service) -> GenerationResponse:
    """Writes the text between `input_prefix` and `input_suffix`. docs/guide/server.md lists the fields."""
    served = service.served()
    tokens = infill_tokens(served.tokenizer)
    if tokens.missing:
        raise RequestError(501, f"Infill is not supported by this model: {tokens.missing}", code="not_implemented")
    fields = await read_fields(request, service.settings)
    fields.text("model")
    for name in "input_prefix", "input_suffix":
        fields.required(name, "a text")
    prefix = (fields.text("input_prefix") or "") + (fields.text("prompt") or "")
    suffix = fields.text("input_suffix") or ""
    extra = [(one.text("filename") or "tmp", one.text("text") or "") for one in fields.objects("input_extra")]
    options = read_sampling(fields.with_defaults(_DEFAULTS), served)
    options |= await read_structure(fields, served, fields.object("response_format"))
    most = max_tokens(fields, "n_predict", "max_tokens", least=0)
    most_ms = fields.whole("t_max_predict_ms", 0, 0) or 0
    stop, stream = fields.strings("stop", MAX_STOPS), fields.flag("stream")
    served.check_text("".join((prefix, suffix, *(text for _, text in extra))), counted=False)
    reserved = served.max_context // 4 if most is None else min(most, served.max_context // 2)

    def work() -> list[int]:
        return _fitting(served.tokenizer, tokens, prefix, suffix, extra, served.max_context - reserved)

    prompt = await asyncio.to_thread(work)
    limit = served.max_context if most is None else max(1, min(most, served.max_context))
    ask = Ask(prompt, limit, *with_ends(served, options, stop), line_s=most_ms / 1e3 if most_ms else None)
    form = InfillForm(served, record_of(request.scope).start, is_empty=most == 0)
    return GenerationResponse(service, served, [ask], form, stream=stream)


async def suffix_prompt(served: Served, prefix: str, suffix: str) -> list[int]:
    """Returns the prompt for the text between two texts. Raises RequestError for a model that cannot infill."""
    tokenizer, tokens = served.tokenizer, infill_tokens(served.tokenizer)
    if tokens.missing:
        message = f"suffix: Infill is not supported by this model: {tokens.missing}"
        raise RequestError(400, message, "suffix", "unsupported_parameter")
    served.check_text(prefix + suffix, counted=False)

    def work() -> list[int]:
        before, behind = (_plain_ids(tokenizer, tokens, text) for text in (prefix, suffix))
        return tokens.arranged(before, behind, bos=tokenizer.encode(""))

    return await asyncio.to_thread(work)


def with_ends(served: Served, options: dict[str, Any], stop: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Adds what ends the text in the middle to the options and stop strings of a request. Some of the model's own end
    tokens are ordinary tokens, with a text, so they are stop strings as well.
    """
    ends = infill_tokens(served.tokenizer).ends
    texts = (served.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ends)
    ids = tuple(dict.fromkeys((*options.get("stop_token_ids", ()), *ends)))
    return options | ({"stop_token_ids": ids} if ids else {}), (*stop, *filter(None, texts))


def _fitting(
    tokenizer: Tokenizer,
    tokens: InfillTokens,
    prefix: str,
    suffix: str,
    extra: Sequence[tuple[str, str]],
    room: int,
) -> list[int]:
    """Returns the prompt, with at most `room` tokens. Like llama-server, keeps the end of a long prefix (three quarters
    of the room), the beginning of a long suffix (one quarter), and the end of the other texts in what is left.
    """
    bos = tokenizer.encode("")
    room -= len(bos) + 3
    before, behind = (_plain_ids(tokenizer, tokens, text) for text in (prefix, suffix))
    n_behind = min(len(behind), max(room // 4, room - len(before)))
    before = before[max(0, len(before) - (room - n_behind)) :]
    others = _others(tokenizer, tokens, extra)
    others = others[max(0, len(others) - (room - n_behind - len(before))) :]
    return tokens.arranged(before, behind[:n_behind], bos=bos, extra=others)


def _others(tokenizer: Tokenizer, tokens: InfillTokens, extra: Sequence[tuple[str, str]]) -> list[int]:
    """Returns the tokens before the prefix: a repository with other files, with llama-server's names for both."""
    ids: list[int] = []

    def add(mark: int | None, text: str) -> None:
        ids.extend([*([] if mark is None else [mark]), *_plain_ids(tokenizer, tokens, text)])

    if tokens.repository is not None:
        add(tokens.repository, "myproject\n")
    for filename, text in extra:
        add(tokens.file, f"{filename}\n{text}" if tokens.file is not None else _SNIPPET + text)
    if tokens.file is not None:
        add(tokens.file, "filename\n")
    return ids


def _plain_ids(tokenizer: Tokenizer, tokens: InfillTokens, text: str) -> list[int]:
    """Returns the ids of a text in which the tokens for infilling are ordinary text: source code may quote them."""
    marks = [tokens.prefix, tokens.suffix, tokens.middle, *tokens.ends]
    texts = [tokenizer.token(mark) or "" for mark in marks if mark is not None]
    pieces = [text]
    for mark in filter(None, texts):
        cut = mark[:1], mark[1:]
        pieces = [part for piece in pieces for part in _split_within(piece, *cut)]
    return [token for piece in pieces if piece for token in tokenizer.encode(piece, False)]


def _split_within(text: str, head: str, tail: str) -> list[str]:
    """Splits a text within each occurrence of head + tail."""
    first, *others = text.split(head + tail)
    parts = [first]
    for other in others:
        parts[-1] += head
        parts.append(tail + other)
    return parts


class InfillForm:
    """Writes the objects of llama-server's /infill. is_empty: only the prompt was to be read, so there is no text."""

    def __init__(self, served: Served, start: float, *, is_empty: bool):
        self._served, self._start, self._is_empty = served, start, is_empty

    def begin(self) -> bytes:
        return b""

    def text(self, answer: Answer, text: str) -> bytes:
        return event({"index": 0, "content": "" if self._is_empty else text, "tokens": [], "stop": False})

    def finish(self, answer: Answer) -> bytes:
        return b""

    def end(self, answers: Sequence[Answer]) -> bytes:
        return event(self._last(answers[0]) | {"content": ""})

    def error(self, body: dict[str, Any]) -> bytes:
        return event(body)

    def alive(self, answer: Answer) -> bytes:
        return self.text(answer, "")

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._last(answers[0])

    def _last(self, answer: Answer) -> dict[str, Any]:
        n_prompt, n, cached = len(answer.ask.prompt), len(answer.token_ids), answer.cached_tokens
        total_ms = (time.perf_counter() - self._start) * 1e3
        decode_ms = min(sum(answer.tbt_ms), total_ms)
        word = answer.stop_string(self._served.tokenizer) or ""
        is_word = bool(word) and self._served.tokenizer.id_of(word) not in infill_tokens(self._served.tokenizer).ends
        return {
            "index": 0,
            "content": "" if self._is_empty else answer.text,
            "tokens": [],
            "model": self._served.name,
            "stop": True,
            "stop_type": "limit" if answer.finish_reason == "length" else "word" if is_word else "eos",
            "stopping_word": word if is_word else "",
            "tokens_predicted": n,
            "tokens_evaluated": n_prompt,
            "tokens_cached": n_prompt + n,
            "truncated": False,
            "generation_settings": {"n_ctx": self._served.max_context},
            "timings": {
                "cache_n": cached,
                **_timing("prompt", n_prompt - cached, total_ms - decode_ms),
                **_timing("predicted", n, decode_ms),
            },
        }


def _timing(name: str, n: int, ms: float) -> dict[str, float]:
    return {
        f"{name}_n": n,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / max(1, n),
        f"{name}_per_second": 1e3 * n / max(ms, 1e-3),
    }
