"""Errors of requests, in the form of the API that was called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcl.errors import ContextLengthError, DeviceError, LlmclError, UsageError

ANTHROPIC_PATH = "/v1/messages"
TOO_LONG = "context_length_exceeded"

# What clients can do about a chat template, whose errors have another remedy for the command line.
_OTHER_PROMPTS = "Send other messages, or the whole text of the prompt to /v1/completions."
_PROMPTS = {"/v1/completions": "prompt", "/v1/responses": "input"}  # elsewhere: messages
# The word that each API has for a status.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass
class RequestError(Exception):
    """A request that is refused. param: the field to blame. retry_after_s: when to try again; None: never as it is.

    closes: the rest of the request is not read, so the connection ends. allow: the methods that the path has. size: of
    a prompt that is too long for the context, such as "9031 tokens".
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    closes: bool = False
    allow: str | None = None
    size: str = ""
    max_context: int | None = None  # tokens, where the size is too large for it

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def headers(self) -> dict[str, str]:
        """What the clients look at before they try again."""
        headers = {"x-should-retry": "true" if self.retry_after_s is not None else "false"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if self.closes:
            headers["connection"] = "close"
        if self.allow is not None:
            headers["allow"] = self.allow
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    def body(self, path: str) -> dict[str, Any]:
        """The JSON of the answer to a request of `path`."""
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        message = self.message if self.code != TOO_LONG else self._too_long(path)
        if path.startswith(ANTHROPIC_PATH):
            error = {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": message}
            return {"type": "error", "error": error}
        kind = _OPENAI_TYPES.get(self.status, kind)
        param = _PROMPTS.get(path, self.param) if self.code == TOO_LONG else self.param
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def _too_long(self, path: str) -> str:
        """The words by which agents know that they have to shorten a conversation; tests have the phrases of each."""
        if not self.size or self.max_context is None:
            return f"the prompt is too long: {self.message}"
        if path.startswith(ANTHROPIC_PATH):
            return f"prompt is too long: {self.size} > {self.max_context} maximum"
        return (
            f"This model's maximum context length is {self.max_context} tokens. However, your prompt has {self.size}. "
            "Please reduce the length of the messages or the prompt, or start the server with a larger context "
            "(--ctx-size)."
        )


def unsupported(param: str, what: str) -> RequestError:
    """A field whose meaning the server lacks, where to ignore it would change the answer."""
    return RequestError(400, f"{param}: {what}; leave it out", param, "unsupported_parameter")


def of_llmcl(error: LlmclError, max_context: int | None = None) -> RequestError:
    """An error of the engine, as one of the request that met it. max_context: tokens that a prompt may have."""
    message = f"{error.problem} {_OTHER_PROMPTS}" if error.problem else str(error)
    if isinstance(error, ContextLengthError):
        return RequestError(400, message, "messages", TOO_LONG, size=error.size, max_context=max_context)
    if isinstance(error, UsageError):
        return RequestError(400, message)
    status = 503 if isinstance(error, DeviceError) else 500
    return RequestError(status, message)
