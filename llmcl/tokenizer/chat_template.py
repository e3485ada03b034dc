"""Chat templates: the Jinja program in a checkpoint that writes a conversation as the model learned it.

A template comes with the checkpoint and is not trusted. It runs in a process of its own with limits of time and memory
(template_process.py), and there in Jinja's sandbox (template_sandbox.py). It sees plain data only and reads no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llmcl.checkpoint.files import is_unicode
from llmcl.errors import CheckpointError, ContextLengthError, UsageError, one_line, shown

MAX_CHARACTERS = 1_000_000  # published templates have up to some ten thousand
MAX_REASON = 200  # characters of a template's own words in a message
MAX_VARIABLES, MAX_VARIABLES_CHARACTERS = 64, 100_000  # that go to a template beside the conversation
# What a template gets from us or from Jinja; special tokens are reserved as well.
_CONVERSATION = "messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"
_JINJA = "namespace", "range", "dict", "lipsum", "cycler", "joiner", "loop", "self", "super", "caller"
_OWN_NAMES = frozenset((*_CONVERSATION, *_JINJA))

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
    """The conversation as one text, special tokens included. Any number of threads may call it.

    Args:
        template: Jinja source. It sees what transformers shows it: `messages`, `add_generation_prompt`,
            `tools`, `documents` (None), the special tokens, `raise_exception`, `strftime_now`, the loop
            controls `break` and `continue`, and a `tojson` that leaves HTML characters alone.
        messages: dicts with at least `role` and `content`; `content` goes to the template as it is.
        add_generation_prompt: end with the opening of the assistant's next message.
        special_tokens: names such as `bos_token` and their texts.
        tools: functions that the model may call, as OpenAI's API describes them; None for none.
        variables: what else the template is to see, such as `enable_thinking`: plain data by names of its own.
    Raises:
        UsageError: the messages are malformed, or the template refuses them (its reason is in the message); a variable
            has a reserved name, or the template does not work with the variables.
        CheckpointError: the template is malformed, fails, makes no text, or goes beyond a limit: MAX_CHARACTERS,
            or those of template_process.py.
        ContextLengthError: the conversation is so long that the template goes beyond a limit.
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
    """Raises UsageError where a template cannot get these beside a conversation."""
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
    # Half a pair in the messages themselves is what `encode` refuses.
    if not is_unicode(text) and is_unicode(json.dumps([plain, variables], ensure_ascii=False)):
        raise _failed("made a text with half a surrogate pair, expected Unicode")
    if not text:
        raise _failed("made an empty text of these messages")
    return text


def check(template: str) -> None:
    """Raises CheckpointError, with the line, where the template is not valid Jinja."""
    _ask(template, None)


def start() -> None:
    """Starts the process that renders, without waiting for it: to import Jinja takes longer than a short prompt."""
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
    from llmcl.tokenizer import template_process  # late, for programs that never meet a template

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
        reason = reason.partition(". ")[0]  # Jinja adds for which tags it was looking
    what = "is not valid Jinja" if kind == "S" else "failed: "
    raise _failed(f"{what}{reason.removesuffix('.')}")


def _failed(what: str) -> CheckpointError:
    return CheckpointError.with_remedy(f"The chat template {what}.", _REMEDY)
