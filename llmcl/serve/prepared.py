"""Prepares a conversation for any API: the prompt, the answer's grammar, and the reader of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from llmcl.serve.answer_reader import AnswerReader
from llmcl.serve.conversation import Ending
from llmcl.serve.errors import RequestError
from llmcl.serve.image_prompt import ImagePrompt
from llmcl.serve.served import Served
from llmcl.serve.thoughts import ThoughtBudget, ThoughtMarks, thought_marks
from llmcl.serve.tool_families import ToolFamily, family_of, knows_tools, with_tools
from llmcl.serve.tool_grammar import channel_grammar, grammar_of
from llmcl.serve.tools import ToolUse
from llmcl.tokenizer.answer_parts import AnswerParts
from llmcl.tokenizer.channel_reader import END, FINAL, MARKS, START, ChannelReader, has_channels
from llmcl.tokenizer.special_markers import special_markers

if TYPE_CHECKING:
    from llmcl.models.image_rows import PlacedImage
    from llmcl.tokenizer import Tokenizer
    from llmcl.vision.vision import Pixels

# Share of the answer's tokens per effort, with OpenRouter's values.
_SHARES: dict[Any, float] = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95, "max": 0.95}
_TAIL = 8  # prompt tokens checked for an opened thought


@dataclass(frozen=True)
class Prepared:
    """A prepared conversation."""

    prompt: list[int]
    options: Mapping[str, Any]  # `schema`, `regex` or `grammar` of `LLM.stream`, or empty
    reader: Callable[[], AnswerParts] | None
    budget: ThoughtBudget | None = None  # limit on the thoughts that `reader` recognises
    images: Sequence[PlacedImage] = ()


@dataclass(frozen=True)
class _Habits:
    """How a model writes answers, judging by the chat template. special: token id -> text of special tokens."""

    in_channels: bool
    marks: ThoughtMarks
    special: Mapping[int, str]
    family: ToolFamily

    @staticmethod
    @lru_cache(4)  # searching a template is slow
    def of(tokenizer: Tokenizer, template: str | None) -> _Habits:
        marks = thought_marks(template)
        return _Habits(has_channels(template), marks, special_markers(marks.markers, tokenizer), family_of(template))


async def encode_with_tools(
    served: Served,
    messages: list[dict[str, Any]],
    use: ToolUse,
    variables: Mapping[str, Any] | None = None,
    *,
    ending: Ending = "answer",
    counted: bool = False,
    pixels: Sequence[Pixels] = (),
) -> ImagePrompt:
    """Returns a conversation's prompt, with tools. ending, counted, pixels: see `Served.encode_chat`."""
    template = served.tokenizer.chat_template
    tools = [tool.for_template() for tool in use.tools] if knows_tools(template) else []
    shown = with_tools(messages, template, use)
    return await served.encode_chat(shown, tools or None, variables, ending=ending, counted=counted, pixels=pixels)


async def prepare(
    served: Served,
    messages: list[dict[str, Any]],
    use: ToolUse,
    structure: Mapping[str, Any],
    variables: Mapping[str, Any] | None = None,
    *,
    ending: Ending = "answer",
    most: int | None = None,
    budget: int | None = None,
    pixels: Sequence[Pixels] = (),
) -> Prepared:
    """Prepares the prompt, grammar and reader of an answer.

    structure: the option of `LLM.stream` that constrains the answer unless it calls tools. variables: extra template
    variables. ending: how the prompt ends. most: the most tokens the answer may have. budget: the most tokens of
    thought; None: derived from the effort, unless the template reads the effort. pixels: the conversation's images.

    Raises RequestError for tools whose calls cannot be constrained.
    """
    tokenizer = served.tokenizer
    prompt, images, _ = await encode_with_tools(served, messages, use, variables, ending=ending, pixels=pixels)
    habits = _Habits.of(tokenizer, tokenizer.chat_template)
    marks, special, family = habits.marks, habits.special, habits.family
    in_channels = habits.in_channels and ending != "within"  # a continued message stays in its channel
    tail = "".join(special.get(token, "") or tokenizer.decode([token]) for token in prompt[-_TAIL:])
    thinks = tail.rstrip().endswith(marks.begin)
    schema = structure.get("schema")
    if budget is None and variables and "reasoning_effort" not in (tokenizer.chat_template or ""):
        room = min(most or served.max_context, served.max_context - len(prompt))
        share = _SHARES.get(variables.get("reasoning_effort"))
        budget = None if share is None else max(1, int(share * room))
    closing = marks.closing
    if in_channels:
        closing = f"{END}{START}assistant{'' if use.is_constrained or schema is not None else FINAL}"
    closing_ids = [] if budget is None else tokenizer.encode(closing, add_special_tokens=False)
    if budget == 0 and thinks:
        prompt, thinks = [*prompt, *closing_ids], False
    if structure and schema is None:
        if use.tools:
            raise RequestError(400, "tools: do not go with a regular expression or a grammar; leave one out", "tools")
        if in_channels:
            prompt = [*prompt, *tokenizer.encode(FINAL, add_special_tokens=False)]
            return Prepared(prompt, structure, None, images=images)
        thinks = False  # the answer begins at once
    after = structure  # constraint for the text after thoughts that the server ended
    if use.is_constrained or (schema is not None and (use.tools or thinks or in_channels)):
        param = "tools" if use.tools else "response_format"
        if in_channels:
            structure = after = {"grammar": channel_grammar(use, tokenizer, schema=schema)}
        else:
            end = marks.end if thinks else None
            structure = {"grammar": grammar_of(family, use, tokenizer, schema=schema, thought_end=end)}
            after = {"grammar": grammar_of(family, use, tokenizer, schema=schema)}
        await served.check_structure(dict(structure), param)
        if budget is not None and after != structure:
            await served.check_structure(dict(after), param)
    limit = None if budget is None else ThoughtBudget(budget, closing, closing_ids, after)
    if in_channels:
        of_channels = special_markers(MARKS, tokenizer)
        channel_reader = partial(ChannelReader, use.schemas, use.several, of_channels)
        return Prepared(prompt, structure, channel_reader, limit, images)
    if not use.tools and not thinks and marks.begin not in (tokenizer.chat_template or ""):
        return Prepared(prompt, structure, None, images=images)
    if use.tools:
        special = special_markers((*marks.markers, *family.markers), tokenizer)
    reader = partial(AnswerReader, family if use.tools else None, use.schemas, use.several, special, thinks, marks)
    return Prepared(prompt, structure, reader, limit, images)
