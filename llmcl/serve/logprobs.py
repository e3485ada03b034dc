"""Log-probabilities of tokens, in the forms of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmcl.serve.served import Answer

if TYPE_CHECKING:
    from llmcl.ops.logprobs import LogProb
    from llmcl.tokenizer import Tokenizer

MAX_TOP = 20  # alternatives, OpenAI's and ours
_LEAST = -9999.0  # OpenAI's word for a probability of 0, which JSON has no logarithm of


class LogProbWriter:
    """Writes the log-probabilities of an answer's tokens, each once, as they come."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._written: dict[int, int] = {}
        self._offsets: dict[int, int] = {}

    def chat(self, answer: Answer) -> dict[str, Any]:
        """Of the tokens that came since the last call, for /v1/chat/completions."""
        return {"content": [self._entry(logprob) for logprob in self._new(answer)], "refusal": None}

    def completion(self, answer: Answer) -> dict[str, Any]:
        """The same for /v1/completions; text_offset: where a token begins in the answer's text."""
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for logprob in self._new(answer):
            token, offset = self._text(logprob.token), self._offsets.get(answer.index, 0)
            self._offsets[answer.index] = offset + len(token)
            made["tokens"].append(token)
            made["token_logprobs"].append(max(logprob.logprob, _LEAST))
            made["top_logprobs"].append({self._text(i): max(value, _LEAST) for i, value in logprob.top})
            made["text_offset"].append(offset)
        return made

    def _new(self, answer: Answer) -> Sequence[LogProb]:
        first = self._written.get(answer.index, 0)
        self._written[answer.index] = len(answer.logprobs)
        return answer.logprobs[first:]

    def _entry(self, logprob: LogProb) -> dict[str, Any]:
        top = [self._value(token, value) for token, value in logprob.top]
        return {**self._value(logprob.token, logprob.logprob), "top_logprobs": top}

    def _value(self, token: int, value: float) -> dict[str, Any]:
        data = [*self._tokenizer.token_bytes(token)]  # of half a character, more than the text shows
        return {"token": self._text(token), "logprob": max(value, _LEAST), "bytes": data}

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
