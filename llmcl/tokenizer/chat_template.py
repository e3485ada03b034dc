"""Chat templates: the Jinja program in a checkpoint that writes a conversation as the model learned it.

A template comes with the checkpoint and is not trusted: it runs in Jinja's sandbox, sees plain data only, and
has no loader, so it cannot read a file or include anything; its time and the length of its text are limited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from llmcl.checkpoint.files import is_unicode
from llmcl.errors import CheckpointError, UsageError, one_line, shown

if TYPE_CHECKING:
    from jinja2 import Template


_REMEDY = "Give the prompt as it is, without the template (raw, --raw), or another template (--chat-template-file)."


class _RefusedByTemplate(Exception):
    """The template called `raise_exception`: the conversation is not one that this model takes."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    special_tokens: Mapping[str, str],
) -> str:
    """The conversation as one text, special tokens included.

    Args:
        template: Jinja source. It sees what transformers shows it: `messages`, `add_generation_prompt`,
            `tools` and `documents` (None), the special tokens, `raise_exception`, `strftime_now`, the loop
            controls `break` and `continue`, and a `tojson` that leaves HTML characters alone.
        messages: dicts with at least `role` and `content`; `content` goes to the template as it is.
        add_generation_prompt: end with the opening of the assistant's next message.
        special_tokens: names such as `bos_token` and their texts.
    Raises:
        UsageError: the messages are malformed, or the template refuses them (its reason is in the message).
        CheckpointError: the template is malformed, fails, makes no text, or goes beyond the limits of
            template_sandbox.py.
    """
    # Jinja takes 50 ms to import, and a program that never meets a template need not wait for it.
    from llmcl.tokenizer import template_sandbox

    compiled = _compiled(template)
    plain = plain_messages(messages)
    generation: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
    try:
        text = template_sandbox.render(compiled, {"messages": plain, **generation, **special_tokens})
    except _RefusedByTemplate as refusal:
        raise UsageError(f"The chat template does not accept these messages: {refusal}") from None
    except Exception as error:  # whatever Python operation the template tried: it is a program, not ours
        raise CheckpointError(
            f"The chat template failed: {type(error).__name__}: {one_line(error)}. {_REMEDY}"
        ) from error
    if not is_unicode(text):
        raise CheckpointError(f"The chat template made a text with half a surrogate pair, expected Unicode. {_REMEDY}")
    if not text:
        raise CheckpointError(f"The chat template made an empty text of these messages. {_REMEDY}")
    return text


def check(template: str) -> None:
    """Raises CheckpointError, with the line, where the template is not valid Jinja."""
    _compiled(template)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of plain dicts, lists, strings and numbers, because a template could call an object's methods.

    Raises:
        UsageError: not a list of dicts with a `role` and a `content`, or a value that is no plain data.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not messages:
        raise UsageError(
            f'messages: got {shown(messages)}, expected a list like [{{"role": "user", "content": "Hello"}}].'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise UsageError(
                f'messages[{index}]: got {shown(message)}, expected a dict like {{"role": "user", "content": "Hello"}}.'
            )
    try:
        text = json.dumps([dict(message) for message in messages], ensure_ascii=False)
        plain: list[dict[str, Any]] = json.loads(text)
    except (TypeError, ValueError) as error:
        raise UsageError(f"messages: only strings, numbers, lists and dicts are allowed: {error}.") from None
    if not is_unicode(text):
        raise UsageError(
            "messages: a string holds half a surrogate pair. It comes from input that is not UTF-8: convert it first."
        )
    return plain


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    import jinja2

    from llmcl.tokenizer.template_sandbox import Sandbox

    environment = Sandbox()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.compiled(template)
    except Exception as error:  # a template nested too deeply is a RecursionError, not a TemplateError
        where = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reason = one_line(error).rstrip(".")
        raise CheckpointError(f"The chat template is not valid Jinja{where}: {reason}. {_REMEDY}") from error


def _raise_exception(message: object) -> None:
    raise _RefusedByTemplate(one_line(message, 400) if isinstance(message, str) else shown(message))


def _strftime_now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
