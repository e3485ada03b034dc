"""Chat templates: the Jinja program in a checkpoint that formats a conversation for the model.

A template comes with the checkpoint and is not trusted. It runs in a separate process with limits on time and memory
(template_process.py), inside Jinja's sandbox (template_sandbox.py). It sees plain data only and cannot read files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llmcl.checkpoint.files import is_unicode
from llmcl.errors import CheckpointError, ContextLengthError, LlmclError, UsageError, one_line, shown

MAX_CHARACTERS = 1_000_000  # published templates have up to some ten thousand
MAX_REASON = 200  # characters quoted from a template in a message
MAX_VARIABLES, MAX_VARIABLES_CHARACTERS = 64, 100_000  # limits on extra template variables
# Names defined by llmcl or Jinja; special tokens are reserved as well.
_CONVERSATION = "messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"
_JINJA = "namespace", "range", "dict", "lipsum", "cycler", "joiner", "loop", "self", "super", "caller"
_OWN_NAMES = frozenset((*_CONVERSATION, *_JINJA))

_PART_TEXT = re.compile(r"\[\s*['\"]text['\"]\s*\]|\.text\b")

_REMEDY = "Give the prompt as it is, without the template (raw, --raw), or another template (--chat-template-file)."
_OTHERS = "Give other messages, or the prompt as it is (raw, --raw)."


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders the conversation as one text, special tokens included. Thread-safe.

    Args:
        template: Jinja source. It sees the same names as in transformers: `messages`, `add_generation_prompt`,
            `tools`, `documents` (None), the special tokens, `raise_exception`, `strftime_now`, the loop
            controls `break` and `continue`, and a `tojson` that leaves HTML characters alone.
        messages: dicts with at least `role` and `content`; `content` goes to the template unchanged.
        add_generation_prompt: end with the opening of the assistant's next message.
        special_tokens: texts by name, such as `bos_token`.
        tools: functions that the model may call, in OpenAI's format; None for none.
        variables: extra plain data by name, such as `enable_thinking`.

    Raises:
        UsageError: the messages are malformed, or the template refuses them (the message gives the reason); a
            variable has a reserved name, or the template fails with the variables.
        CheckpointError: the template is malformed, fails, returns no text, or exceeds a limit: MAX_CHARACTERS,
            or a limit in template_process.py.
        ContextLengthError: the conversation is so long that the template exceeds a limit.
        LlmclError: no process can be started here.
    """
    _check_messages(messages)
    check_variables(variables or {})
    try:
        return _render(template, messages, add_generation_prompt, special_tokens, tools, variables or {})
    except CheckpointError as error:
        if not variables:
            raise
        said = f"with the variables that were given for the chat template: {error.problem}"
        raise UsageError.with_remedy(said, _REMEDY) from None


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises UsageError if a template cannot take these variables."""
    if len(variables) > MAX_VARIABLES:
        raise UsageError(f"{len(variables)} variables for the chat template, expected at most {MAX_VARIABLES}")
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_REASON:
            raise UsageError(f"{shown(name)} is no name of a variable of a chat template; expected letters, digits, _")
        if name in _OWN_NAMES or name.endswith("_token"):
            raise UsageError(f"{name} is reserved: the chat template gets it with every conversation; leave it out")
    try:
        n_characters = len(json.dumps(variables))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a chat template takes strings, numbers, lists and dicts alone: {one_line(error)}") from None
    if n_characters > MAX_VARIABLES_CHARACTERS:
        raise UsageError(
            f"the variables for the chat template have {n_characters} characters as JSON, expected at most "
            f"{MAX_VARIABLES_CHARACTERS}"
        )


def _render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    generation: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools, "documents": None}
    plain = [dict(message) for message in messages]
    text = _ask(template, {**variables, "messages": plain, **generation, **special_tokens})
    # `encode` refuses half a surrogate pair from the messages themselves.
    if not is_unicode(text) and is_unicode(json.dumps([plain, variables], ensure_ascii=False)):
        raise _failed("made a text with half a surrogate pair, expected Unicode")
    if not text:
        raise _failed("made an empty text of these messages")
    return text


@lru_cache(16)
def needs_parts(template: str) -> bool:
    """Returns whether a template loses texts that are no parts, as SmolVLM's does."""
    if not _PART_TEXT.search(template):
        return False
    word = "a5e1c0d7"
    return not _shows(template, word) and _shows(template, [{"type": "text", "text": word}])


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the message with its text as a part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _shows(template: str, content: Any) -> bool:
    try:
        text = _ask(template, {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False})
    except LlmclError:
        return False
    return "a5e1c0d7" in text


def check(template: str) -> None:
    """Raises CheckpointError, with the line number, if the template is not valid Jinja."""
    _ask(template, None)


def start() -> None:
    """Starts the render process without waiting: importing Jinja takes longer than a short prompt."""
    from llmcl.tokenizer import template_process

    template_process.start()


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise UsageError(
            f'messages: got {shown(messages)}, expected a list like [{{"role": "user", "content": "Hello"}}].'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UsageError(
                f'messages[{index}]: got {shown(message)}, expected a dict like {{"role": "user", "content": "Hello"}}.'
            )
        if isinstance(content := message["content"], (int, float)):  # the template would be blamed
            raise UsageError(f"messages[{index}]: its content is {shown(content)}, expected a string.")


def _ask(template: str, variables: Mapping[str, Any] | None) -> str:
    from llmcl.tokenizer import template_process  # imported late, for programs that never use a template

    if len(template) > MAX_CHARACTERS:
        raise _failed(f"has {len(template)} characters, expected at most {MAX_CHARACTERS}")
    try:
        request = json.dumps({"template": template, "variables": variables}).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"messages: only strings, numbers, lists and dicts are allowed: {one_line(error)}.") from None
    try:
        kind, text = template_process.ask(request)
    except template_process.LimitError as error:
        if len(request) > template_process.TEXT_LIMIT // 4:
            raise ContextLengthError(
                f"the conversation has {len(request) >> 20} MiB, which its chat template cannot make a text of "
                f"({error}); shorten it, or give the prompt as it is (raw, --raw)"
            ) from None
        kind, text = "F", str(error)
    if kind == "T":
        return text
    reason = one_line(text, MAX_REASON)
    if kind == "R":
        reason = reason.removesuffix(".")
        raise UsageError.with_remedy(f"The chat template does not accept these messages: {reason}.", _OTHERS)
    if kind == "S":
        reason = reason.partition(". ")[0]  # drops Jinja's list of expected tags
    what = "is not valid Jinja" if kind == "S" else "failed: "
    raise _failed(f"{what}{reason.removesuffix('.')}")


def _failed(what: str) -> CheckpointError:
    return CheckpointError.with_remedy(f"The chat template {what}.", _REMEDY)
