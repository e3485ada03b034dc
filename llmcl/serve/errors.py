"""Request errors, in the format of the API called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcl.errors import ContextLengthError, DeviceError, LlmclError, UsageError

ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
TOO_LONG = "context_length_exceeded"

# Advice for clients when a chat template fails; the command line gives different advice.
_OTHER_PROMPTS = "Send other messages, or the whole text of the prompt to /v1/completions."
# Field with the prompt by path; elsewhere: messages.
_PROMPTS = {"/v1/completions": "prompt", "/v1/rerank": "documents"} | dict.fromkeys(
    ("/v1/responses", "/v1/responses/compact", "/v1/embeddings"), "input"
)
# Each API's error type by HTTP status.
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
    """A refused request."""

    status: int
    message: str
    param: str | None = None  # the field to blame
    code: str | None = None
    retry_after_s: int | None = None  # when to retry; None: never unchanged
    closes: bool = False  # the rest of the request is not read, so the connection closes
    allow: str | None = None  # methods allowed on the path
    size: str = ""  # size of a prompt that exceeds the context, such as "9031 tokens"
    max_context: int | None = None  # in tokens, set along with `size`

    def __post_init__(self) -> None:
        super().__init__(self.message)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that clients consult before retrying."""
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
        """Returns the JSON body for a response to `path`."""
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        message = self.message if self.code != TOO_LONG else self._too_long(path)
        if path.startswith(ANTHROPIC_PATH):
            error = {"type": _ANTHROPIC_TYPES.get(self.status, kind), "message": message}
            return {"type": "error", "error": error}
        if path.startswith(OLLAMA_PATH):
            return {"error": message}
        kind = _OPENAI_TYPES.get(self.status, kind)
        param = _PROMPTS.get(path, self.param) if self.code == TOO_LONG else self.param
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def _too_long(self, path: str) -> str:
        """Returns the wording by which agents recognise a full context and shorten it; tests list each phrase."""
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
    """Refuses a field that the server does not implement when ignoring it would change the answer."""
    return RequestError(400, f"{param}: {what}; leave it out", param, "unsupported_parameter")


def of_llmcl(error: LlmclError, max_context: int | None = None) -> RequestError:
    """Converts an engine error to a request error. max_context: the most tokens a prompt may have."""
    message = f"{error.problem} {_OTHER_PROMPTS}" if error.problem else str(error)
    if isinstance(error, ContextLengthError):
        return RequestError(400, message, "messages", TOO_LONG, size=error.size, max_context=max_context)
    if isinstance(error, UsageError):
        return RequestError(400, message)
    status = 503 if isinstance(error, DeviceError) else 500
    return RequestError(status, message)
