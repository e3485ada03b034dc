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


class _Offsets:
    """Where tokens begin in a text that has characters before them. Parts of a character begin where it does."""

    def __init__(self, tokenizer: Tokenizer, n_before: int):
        self._detokenizer = tokenizer.detokenizer()
        self._n = n_before

    def next(self, token: int) -> int:
        begin = self._n
        self._n += len(self._detokenizer.push(token))
        return begin


class LogProbWriter:
    """Writes the log-probabilities of an answer's tokens, each once, as they come."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._written: dict[int, int] = {}
        self._offsets: dict[int, _Offsets] = {}

    def chat(self, answer: Answer) -> dict[str, Any]:
        """Of the tokens that came since the last call, for /v1/chat/completions."""
        return {"content": [self._entry(logprob) for logprob in self._new(answer)], "refusal": None}

    def completion(self, answer: Answer) -> dict[str, Any]:
        """The same for /v1/completions, with the tokens of a prompt that is echoed first.

        text_offset: where a token begins in the text of prompt and answer. Of the first token of a prompt nothing comes
        before, so its values are null.
        """
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(token: int, logprob: LogProb | None, offset: int) -> None:
            made["tokens"].append(self._text(token))
            made["token_logprobs"].append(None if logprob is None else max(logprob.logprob, _LEAST))
            made["top_logprobs"].append(None if logprob is None else self._top(logprob))
            made["text_offset"].append(offset)

        if (offsets := self._offsets.get(answer.index)) is None:
            of_prompt = _Offsets(self._tokenizer, 0)
            for token, logprob in zip(answer.ask.prompt, answer.prompt_logprobs, strict=False):
                add(token, logprob, min(of_prompt.next(token), len(answer.ask.head)))
            first = len(answer.ask.head) if answer.prompt_logprobs else 0
            offsets = self._offsets[answer.index] = _Offsets(self._tokenizer, first)
        for logprob in self._new(answer):
            add(logprob.token, logprob, offsets.next(logprob.token))
        return made

    def _top(self, logprob: LogProb) -> dict[str, float]:
        """The most likely tokens and, as OpenAI has it, the one that came, if any are wanted. Of several with one text
        (parts of characters) the likeliest.
        """
        found: dict[str, float] = {}
        for token, value in (*logprob.top, (logprob.token, logprob.logprob)) if logprob.top else ():
            found.setdefault(self._text(token), max(value, _LEAST))
        return found

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
