"""Log-probabilities of tokens, in the formats of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcl.serve.served import Answer

if TYPE_CHECKING:
    from llmcl.ops.logprobs import LogProb
    from llmcl.tokenizer import Tokenizer

MAX_TOP = 20  # alternatives per token, the same limit as OpenAI
_LEAST = -9999.0  # OpenAI's value for probability 0; JSON has no infinity


class _Offsets:
    """Computes each token's offset in a text with `n_before` characters before it. Tokens inside one character share an
    offset.
    """

    def __init__(self, tokenizer: Tokenizer, n_before: int):
        self._detokenizer = tokenizer.detokenizer()
        self._n = n_before

    def next(self, token: int) -> int:
        begin = self._n
        self._n += len(self._detokenizer.push(token))
        return begin


class LogProbWriter:
    """Writes the log-probabilities of an answer's tokens as they come, each once."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._written: dict[int, int] = {}
        self._offsets: dict[int, _Offsets] = {}

    def chat(self, answer: Answer) -> dict[str, Any]:
        """Returns the tokens since the last call, for /v1/chat/completions."""
        return {"content": [self._entry(logprob) for logprob in self._new(answer)], "refusal": None}

    def completion(self, answer: Answer) -> dict[str, Any]:
        """Returns the tokens since the last call, for /v1/completions. With an echoed prompt, the prompt tokens come
        first.

        text_offset: where a token begins in the text of prompt and answer. The first prompt token has no predecessor,
        so the values are null.
        """
        token_lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(token: int, logprob: LogProb | None, offset: int) -> None:
            token_lists["tokens"].append(self._text(token))
            token_lists["token_logprobs"].append(None if logprob is None else max(logprob.logprob, _LEAST))
            token_lists["top_logprobs"].append(None if logprob is None else self._top(logprob))
            token_lists["text_offset"].append(offset)

        if (offsets := self._offsets.get(answer.index)) is None:
            of_prompt = _Offsets(self._tokenizer, 0)
            for token, logprob in zip(answer.ask.prompt, answer.prompt_logprobs, strict=False):
                add(token, logprob, min(of_prompt.next(token), len(answer.ask.head)))
            first = len(answer.ask.head) if answer.prompt_logprobs else 0
            offsets = self._offsets[answer.index] = _Offsets(self._tokenizer, first)
        for logprob in self._new(answer):
            add(logprob.token, logprob, offsets.next(logprob.token))
        return token_lists

    def _top(self, logprob: LogProb) -> dict[str, float]:
        """Returns the most likely tokens and, as in OpenAI's API, the sampled token; empty if no alternatives are
        wanted. When several tokens share a text (parts of a character), the likeliest counts.
        """
        likeliest: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token, logprob.logprob)) if logprob.top else ():
            likeliest.setdefault(self._text(token), max(value, _LEAST))
        return likeliest

    def _new(self, answer: Answer) -> Sequence[LogProb]:
        first = self._written.get(answer.index, 0)
        self._written[answer.index] = len(answer.logprobs)
        return answer.logprobs[first:]

    def _entry(self, logprob: LogProb) -> dict[str, Any]:
        top = [self._value(token, value) for token, value in logprob.top]
        return {**self._value(logprob.token, logprob.logprob), "top_logprobs": top}

    def _value(self, token: int, value: float) -> dict[str, Any]:
        data = [*self._tokenizer.token_bytes(token)]  # half a character has bytes that the text cannot show
        return {"token": self._text(token), "logprob": max(value, _LEAST), "bytes": data}

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
