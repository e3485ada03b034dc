"""POST /api/chat and /api/generate, as Ollama's clients call them. A stream is a line of JSON for each token.

Source: ollama/ollama, api.md and modelfile.mdx.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from llmcl.serve.access_log import record_of
from llmcl.serve.body import read_fields
from llmcl.serve.conversation import Ending, ollama_messages, thinking
from llmcl.serve.errors import RequestError, unsupported
from llmcl.serve.events import line
from llmcl.serve.fields import Fields, as_whole, wrong
from llmcl.serve.generation import AsciiJSONResponse, GenerationResponse
from llmcl.serve.image_parts import with_ollama_images
from llmcl.serve.images import load_images
from llmcl.serve.infill import suffix_prompt, with_ends
from llmcl.serve.logprobs import MAX_TOP, LogProbWriter
from llmcl.serve.ollama_models import listed_name, time_text
from llmcl.serve.ollama_schemas import LINES
from llmcl.serve.prepared import Prepared, prepare
from llmcl.serve.sampling import MAX_STOPS, read_sampling
from llmcl.serve.served import Answer, Ask, Served
from llmcl.serve.service import Service
from llmcl.serve.thoughts import thinks
from llmcl.serve.tools import NO_TOOLS, as_object, openai_tools
from llmcl.tokenizer.answer_parts import CallPart, Part, Said, Thought
from llmcl.tokenizer.channel_reader import has_channels

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's
_OFF = {"tfs_z": 1}  # options that would change the answer, with the value for off
_EFFORTS = "low", "medium", "high", "max"


async def chat(request: Request, service: Service) -> ASGIApp:
    """Answers a conversation. docs/guide/server.md lists the fields."""
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    fields.text("model")  # there is one model, whatever name a client sends
    messages = ollama_messages(fields)
    variables, use = _thinking(fields, served), openai_tools(fields)
    ask, structure = _ask(fields, served), await _structure(fields, served)
    if not messages:
        return _loaded(served, is_chat=True)
    last = messages[-1]
    goes_on = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    ending: Ending = "within" if goes_on else "answer"
    pixels = await load_images(request, service, served, messages)
    prepared = await prepare(
        served, messages, use, structure, variables, ending=ending, most=ask.max_tokens, pixels=pixels
    )
    return _answer(request, service, served, fields, _with(ask, prepared), is_chat=True)


async def generate(request: Request, service: Service) -> ASGIApp:
    """Answers a prompt as a user's message, or goes on from it (raw, or a model without a chat template)."""
    served = service.served()
    fields = await read_fields(request, service.settings, takes_images=served.takes_images)
    fields.text("model")
    fields.refuse("templates of requests are not supported", "template")
    prompt, system, suffix = map(fields.text, ("prompt", "system", "suffix"))
    raw = fields.flag("raw")
    earlier, variables = _context(fields, served), _thinking(fields, served)
    ask, structure = _ask(fields, served), await _structure(fields, served)
    if raw and (system or earlier):
        raise RequestError(400, "raw: does not go with system or context; leave one out", "raw", "invalid_value")
    if not prompt:
        return _loaded(served, is_chat=False)
    content = with_ollama_images(prompt, fields)
    if not isinstance(content, str) and (raw or suffix or not served.tokenizer.has_chat_template):
        raise RequestError(400, "images: do not go with raw or suffix; leave one out", "images", "invalid_value")
    if suffix:
        options, stop = with_ends(served, ask.options, ask.stop)
        ask = replace(ask, options=options, stop=stop)
        prepared = Prepared(await suffix_prompt(served, prompt, suffix), structure, None)
    elif raw or not served.tokenizer.has_chat_template:
        text = f"{system}\n{prompt}" if system else prompt
        prepared = Prepared(await served.encode(text), structure, None)
    else:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": content})
        pixels = await load_images(request, service, served, messages)
        prepared = await prepare(served, messages, NO_TOOLS, structure, variables, most=ask.max_tokens, pixels=pixels)
    if earlier:
        ids = prepared.prompt
        is_bos = ids[:1] == [served.tokenizer.bos_token_id]
        images = [replace(each, first=len(earlier) - is_bos + each.first) for each in prepared.images]
        prepared = replace(prepared, prompt=[*earlier, *ids[is_bos:]], images=images)
    with_context = not raw and isinstance(content, str)  # token ids do not tell images
    return _answer(request, service, served, fields, _with(ask, prepared), is_chat=False, with_context=with_context)


def _ask(fields: Fields, served: Served) -> Ask:
    """Reads the options of an answer, with Ollama's defaults; the prompt is still empty.

    Options for how a model is loaded (num_ctx, num_gpu and others) are left out: it is loaded already.
    """
    options = fields.object("options")
    for name, off in _OFF.items():
        if options.given(name) not in (None, off):
            raise unsupported(options.name(name), "this way of sampling is not supported")
    options = options.with_defaults(_DEFAULTS)
    most = options.whole("num_predict", -1, -2) or -1
    sampling = read_sampling(options, served)
    top = fields.whole("top_logprobs", 0, 0, MAX_TOP)
    if fields.flag("logprobs"):
        sampling["logprobs"] = top
    limit = served.max_context if most < 0 else min(most, served.max_context)
    return Ask([], limit, sampling, options.strings("stop", MAX_STOPS))


def _with(ask: Ask, prepared: Prepared) -> Ask:
    options = {**ask.options, **prepared.options}
    more: dict[str, Any] = {"reader": prepared.reader, "budget": prepared.budget, "images": prepared.images}
    return replace(ask, prompt=prepared.prompt, options=options, **more)


async def _structure(fields: Fields, served: Served) -> Mapping[str, Any]:
    """Reads `format`: "json" for any object, or a JSON schema."""
    format = fields.given("format")
    if format in (None, ""):
        return {}
    if isinstance(format, str) and format != "json":
        raise wrong("format", format, "json, or a JSON schema")
    option = {"schema": {"type": "object"} if format == "json" else fields.object("format").values}
    await served.check_structure(option, "format")
    return option


def _thinking(fields: Fields, served: Served) -> dict[str, Any]:
    """Returns the template variables for `think`: true, false or an effort."""
    think, template = fields.given("think"), served.tokenizer.chat_template
    effort = fields.one_of("think", *_EFFORTS) if isinstance(think, str) else None
    does_think = fields.flag("think") if effort is None else True
    if does_think and not thinks(template):
        raise RequestError(400, f"think: {served.name} does not support thinking", "think", "invalid_value")
    if effort == "max" and has_channels(template):
        effort = "high"  # gpt-oss knows no higher effort
    return thinking(None if think is None else does_think, effort)


def _context(fields: Fields, served: Served) -> list[int]:
    """Reads `context`: the token ids of an earlier prompt and its answer."""
    values = fields.items("context")
    ids = [i for i in map(as_whole, values) if i is not None and 0 <= i < served.vocab_size]
    if len(ids) < len(values):
        raise wrong("context", values, f"a list of token ids from 0 to {served.vocab_size - 1}")
    return ids


def _answer(
    request: Request,
    service: Service,
    served: Served,
    fields: Fields,
    ask: Ask,
    *,
    is_chat: bool,
    with_context: bool = False,
) -> GenerationResponse:
    writer = LogProbWriter(served.tokenizer) if "logprobs" in ask.options else None
    start = record_of(request.scope).start
    form = OllamaForm(listed_name(served.name), start, writer, is_chat=is_chat, with_context=with_context)
    stream = fields.flag("stream", True)
    return GenerationResponse(service, served, [ask], form, stream=stream, media_type=LINES.encode())


def _loaded(served: Served, *, is_chat: bool) -> ASGIApp:
    """Answers a request without a prompt, which asks for the model to be loaded, or unloaded: it stays loaded."""
    form = OllamaForm(listed_name(served.name), 0.0, None, is_chat=is_chat)
    return AsciiJSONResponse(form.chunk([], done=True) | {"done_reason": "load"})


class OllamaForm:
    """Writes the objects of /api/chat and /api/generate. start: the request's begin, by `time.perf_counter`.

    with_context: the last object has the token ids of prompt and answer.
    """

    def __init__(
        self, model: str, start: float, logprobs: LogProbWriter | None, *, is_chat: bool, with_context: bool = False
    ):
        self._model, self._start, self._logprobs = model, start, logprobs
        self._is_chat, self._with_context = is_chat, with_context

    def begin(self) -> bytes:
        return b""

    def text(self, answer: Answer, text: str) -> bytes:
        parts, logprobs = answer.parts(text), self._logprobs_of(answer)
        shown = [part for part in parts if not isinstance(part, CallPart) or part.is_last]
        return line(self.chunk(shown) | logprobs) if shown or logprobs else b""

    def finish(self, answer: Answer) -> bytes:
        return b"" if answer.reader is None else self.text(answer, "")

    def end(self, answers: Sequence[Answer]) -> bytes:
        return line(self.chunk([], done=True) | self._ending(answers[0]))

    def error(self, body: dict[str, Any]) -> bytes:
        return line(body)

    def alive(self, answer: Answer) -> bytes:
        return line(self.chunk([]))

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        ending = self._ending(answer) | self._logprobs_of(answer)
        return self.chunk(answer.parts(answer.text), done=True) | ending

    def chunk(self, parts: Sequence[Part], *, done: bool = False) -> dict[str, Any]:
        """Returns an object with these parts of an answer. A call is complete or left out."""
        text = "".join(part.text for part in parts if isinstance(part, Said))
        thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
        calls = [_call(part) for part in parts if isinstance(part, CallPart) and part.is_last]
        said: dict[str, Any] = {"content" if self._is_chat else "response": text}
        said |= ({"thinking": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})
        if self._is_chat:
            said = {"message": {"role": "assistant", **said}}
        return {"model": self._model, "created_at": time_text(time.time()), **said, "done": done}

    def _ending(self, answer: Answer) -> dict[str, Any]:
        """Returns why the answer ended, counts of tokens, and times in nanoseconds."""
        total = max(2, round((time.perf_counter() - self._start) * 1e9))
        decode = min(max(1, round(sum(answer.tbt_ms) * 1e6)), total - 1)  # never 0: clients divide by it
        ending: dict[str, Any] = {
            "done_reason": answer.finish_reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": len(answer.ask.prompt),
            "prompt_eval_duration": total - decode,
            "eval_count": len(answer.token_ids),
            "eval_duration": decode,
        }
        return ending | ({"context": [*answer.ask.prompt, *answer.token_ids]} if self._with_context else {})

    def _logprobs_of(self, answer: Answer) -> dict[str, Any]:
        """Returns the log-probabilities of the new tokens; empty if there are none, or none were asked for."""
        new = [] if self._logprobs is None else self._logprobs.chat(answer)["content"]
        return {"logprobs": new} if new else {}


def _call(part: CallPart) -> dict[str, Any]:
    arguments = as_object(part.call.arguments)
    return {"id": part.call.id, "function": {"index": part.index, "name": part.call.name, "arguments": arguments}}
