"""A conversation's prompt, what its answer is to match, and what reads the answer: the same for every API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmcl.serve.answer_reader import AnswerReader
from llmcl.serve.errors import RequestError
from llmcl.serve.served import Served
from llmcl.serve.thoughts import thought_marks
from llmcl.serve.tool_families import family_of, knows_tools, with_tools
from llmcl.serve.tool_grammar import channel_grammar, grammar_of
from llmcl.serve.tools import ToolUse
from llmcl.tokenizer.answer_parts import AnswerParts
from llmcl.tokenizer.channel_reader import FINAL, MARKS, ChannelReader, has_channels
from llmcl.tokenizer.special_markers import special_markers

_TAIL = 8  # tokens at the end of a prompt, where a template opens a thought


@dataclass(frozen=True)
class Prepared:
    """options: `schema`, `regex` or `grammar` of `LLM.stream`, or none."""

    prompt: list[int]
    options: Mapping[str, Any]
    reader: Callable[[], AnswerParts] | None


async def encode_with_tools(
    served: Served, messages: list[dict[str, Any]], use: ToolUse, variables: Mapping[str, Any] | None = None
) -> list[int]:
    """The prompt of a conversation in which tools may be called. variables: what else the template is to see."""
    template = served.tokenizer.chat_template
    tools = [tool.for_template() for tool in use.tools] if knows_tools(template) else []
    return await served.encode_chat(with_tools(messages, template, use), tools or None, variables)


async def prepare(
    served: Served,
    messages: list[dict[str, Any]],
    use: ToolUse,
    structure: Mapping[str, Any],
    variables: Mapping[str, Any] | None = None,
) -> Prepared:
    """structure: the option of `LLM.stream` that says what the answer is to match, if it calls no tools. variables:
    what else the chat template is to see.

    Raises RequestError for tools whose calls cannot be constrained.
    """
    tokenizer = served.tokenizer
    prompt = await encode_with_tools(served, messages, use, variables)
    in_channels = has_channels(tokenizer.chat_template)
    marks = thought_marks(tokenizer.chat_template)
    special = special_markers(marks.markers, tokenizer)
    tail = "".join(special.get(token, "") or tokenizer.decode([token]) for token in prompt[-_TAIL:])
    thinks = tail.rstrip().endswith(marks.begin)
    schema = structure.get("schema")
    if structure and schema is None:
        if use.tools:
            raise RequestError(400, "tools: do not go with a regular expression or a grammar; leave one out", "tools")
        if in_channels:
            return Prepared([*prompt, *tokenizer.encode(FINAL, add_special_tokens=False)], structure, None)
        thinks = False  # the answer begins at once
    family = family_of(tokenizer.chat_template)
    if use.is_constrained or (schema is not None and (use.tools or thinks or in_channels)):
        if in_channels:
            grammar = channel_grammar(use, tokenizer, schema=schema)
        else:
            grammar = grammar_of(family, use, tokenizer, schema=schema, thought_end=marks.end if thinks else None)
        structure = {"grammar": grammar}
        await served.check_structure(dict(structure), "tools" if use.tools else "response_format")
    if in_channels:
        of_channels = special_markers(MARKS, tokenizer)
        return Prepared(prompt, structure, partial(ChannelReader, use.schemas, use.several, of_channels))
    if not use.tools and not thinks and marks.begin not in (tokenizer.chat_template or ""):
        return Prepared(prompt, structure, None)
    if use.tools:
        special = special_markers((*marks.markers, *family.markers), tokenizer)
    reader = partial(AnswerReader, family if use.tools else None, use.schemas, use.several, special, thinks, marks)
    return Prepared(prompt, structure, reader)
