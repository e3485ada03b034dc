"""OpenAI's, Anthropic's and Ollama's own clients for Node.js, where they are installed (tests/node_clients.py)."""

from __future__ import annotations

import json
from typing import Any

import node_clients
import pytest
from fake_server import FakeEngine, Running, byte_tokenizer, running, wait_for

pytestmark = pytest.mark.skipif(node_clients.why_not() is not None, reason=str(node_clients.why_not()))

OPENAI = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.URL + "/v1", apiKey: process.env.KEY ?? "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const found = {};
const caught = async (what) => { try { await what(); return "nothing" } catch (error) { return error } };
"""
ANTHROPIC = """
import Anthropic from "@anthropic-ai/sdk";
const client = new Anthropic({ baseURL: process.env.URL, apiKey: process.env.KEY ?? "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const found = {};
const caught = async (what) => { try { await what(); return "nothing" } catch (error) { return error } };
"""
OLLAMA = """
import { Ollama } from "ollama";
const headers = process.env.KEY ? { Authorization: `Bearer ${process.env.KEY}` } : {};
const client = new Ollama({ host: process.env.URL, headers });
const messages = [{ role: "user", content: "Hello" }];
const found = {};
const caught = async (what) => { try { await what(); return "nothing" } catch (error) { return error } };
"""
SHOW = "console.log(JSON.stringify(found));"


def found(script: str, server: Running, **variables: str) -> dict[str, Any]:
    """What the script puts into the object `found`."""
    shown: dict[str, Any] = json.loads(node_clients.run_script(script + SHOW, URL=server.url, **variables))
    return shown


def test_openai(shared: Running) -> None:
    script = """
    const whole = await client.chat.completions.create({ model: "any", messages });
    found.whole = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens];
    const stream = client.chat.completions.stream(
        { model: "any", messages, max_tokens: 3, stream_options: { include_usage: true } });
    let text = "";
    stream.on("content", (delta) => { text += delta });
    const final = await stream.finalChatCompletion();
    const choice = final.choices[0];
    found.stream = [text, choice.message.content, choice.finish_reason, final.usage.completion_tokens];
    const completion = await client.completions.create({ model: "any", prompt: "abc", max_tokens: 2, logprobs: 1 });
    found.completion = [completion.choices[0].text, completion.choices[0].logprobs.tokens];
    const response = await client.responses.create({ model: "any", input: "Hello", instructions: "Be brief." });
    found.response = [response.output_text, response.status];
    const events = client.responses.stream({ model: "any", input: "Hello" });
    found.events = (await events.finalResponse()).output_text;
    found.models = (await client.models.list()).data.map((model) => model.id);
    """
    assert found(OPENAI + script, shared) == {
        "whole": ["Hello", "stop", 29],
        "stream": ["Hel", "Hel", "length", 3],
        "completion": ["ab", ["a", "b"]],
        "response": ["Hello", "completed"],
        "events": "Hello",
        "models": ["fake"],
    }


def test_anthropic(shared: Running) -> None:
    script = """
    const whole = await client.messages.create({ model: "any", messages, max_tokens: 100, system: "Be brief." });
    found.whole = [whole.content[0].text, whole.stop_reason, whole.usage.output_tokens];
    const stream = client.messages.stream({ model: "any", messages, max_tokens: 3 });
    let text = "";
    stream.on("text", (delta) => { text += delta });
    const final = await stream.finalMessage();
    const usage = final.usage;
    found.stream = [text, final.content[0].text, final.stop_reason, usage.input_tokens, usage.output_tokens];
    found.count = (await client.messages.countTokens({ model: "any", messages })).input_tokens;
    found.models = (await client.models.list()).data.map((model) => model.id);
    """
    assert found(ANTHROPIC + script, shared) == {
        "whole": ["Hello", "end_turn", 6],
        "stream": ["Hel", "Hel", "max_tokens", 23, 3],
        "count": 23,
        "models": ["fake"],
    }


def test_ollama(shared: Running) -> None:
    script = """
    const whole = await client.chat({ model: "fake", messages });
    found.whole = [whole.message.content, whole.done_reason, whole.prompt_eval_count, whole.eval_count];
    found.chunks = [];
    const asked = { model: "fake", stream: true, options: { num_predict: 3 } };
    for await (const chunk of await client.chat({ ...asked, messages }))
        found.chunks.push([chunk.message.content, chunk.done]);
    found.text = "";
    for await (const chunk of await client.generate({ ...asked, prompt: "Hello" })) found.text += chunk.response;
    found.models = (await client.list()).models.map((model) => model.name);
    found.running = (await client.ps()).models.map((model) => model.name);
    found.shown = (await client.show({ model: "fake" })).capabilities;
    found.pulled = (await client.pull({ model: "fake:latest" })).status;
    found.other = (await caught(() => client.pull({ model: "other" }))).message;
    found.embedded = (await caught(() => client.embed({ model: "fake", input: "x" }))).status_code;
    """
    answer = found(OLLAMA + script, shared)
    assert answer.pop("other").startswith("model 'other' not found; the model here is fake")
    assert answer == {
        "whole": ["Hello", "stop", 23, 6],
        "chunks": [["H", False], ["e", False], ["l", False], ["", True]],
        "text": "Hel",
        "models": ["fake:latest"],
        "running": ["fake:latest"],
        "shown": ["completion"],
        "pulled": "success",
        "embedded": 501,
    }


def test_errors_are_the_clients_own() -> None:
    engine = FakeEngine(byte_tokenizer())
    with running(engine, api_keys=("key",)) as server:
        openai = """
        const hot = { model: "any", messages, temperature: "hot" };
        const wrong = await caught(() => client.chat.completions.create(hot));
        found.wrong = [wrong instanceof OpenAI.BadRequestError, wrong.status, wrong.param];
        const stranger = new OpenAI({ baseURL: client.baseURL, apiKey: "other", maxRetries: 0 });
        found.stranger = (await caught(() => stranger.models.list())) instanceof OpenAI.AuthenticationError;
        const missing = await caught(() => client.embeddings.create({ model: "any", input: "x" }));
        found.missing = [missing instanceof OpenAI.InternalServerError, missing.status];
        """
        assert found(OPENAI + openai, server, KEY="key") == {
            "wrong": [True, 400, "temperature"],
            "stranger": True,
            "missing": [True, 501],
        }
        ollama = """
        const wrong = await caught(() => client.chat({ model: "fake", messages, options: { temperature: "hot" } }));
        found.wrong = [wrong.status_code, wrong.message.startsWith("options.temperature")];
        const stranger = new Ollama({ host: process.env.URL });
        found.stranger = (await caught(() => stranger.list())).status_code;
        """
        assert found(OLLAMA + ollama, server, KEY="key") == {"wrong": [400, True], "stranger": 401}
        engine.fail = KeyError("k")
        anthropic = """
        const wrong = await caught(() => client.messages.create({ model: "any", messages, max_tokens: 0 }));
        found.wrong = [wrong instanceof Anthropic.BadRequestError, wrong.error.error.type];
        const stranger = new Anthropic({ baseURL: client.baseURL, apiKey: "other", maxRetries: 0 });
        found.stranger = (await caught(() => stranger.models.list())) instanceof Anthropic.AuthenticationError;
        const failed = await caught(() => client.messages.create({ model: "any", messages, max_tokens: 9 }));
        found.failed = failed instanceof Anthropic.InternalServerError;
        const stream = client.messages.stream({ model: "any", messages, max_tokens: 9 });
        const broken = await caught(() => stream.finalMessage());
        found.broken = [broken instanceof Anthropic.APIError, String(broken).includes("KeyError")];
        """
        assert found(ANTHROPIC + anthropic, server, KEY="key") == {
            "wrong": [True, "invalid_request_error"],
            "stranger": True,
            "failed": True,
            "broken": [True, True],
        }


def test_timeouts_retries_and_leaving() -> None:
    engine = FakeEngine(byte_tokenizer())
    engine.hold_after = 2
    with running(engine, max_queue=0) as server:
        script = """
        const completions = client.chat.completions, asked = { model: "any", messages };
        const late = await caught(() => completions.create(asked, { timeout: 300 }));
        found.late = late instanceof OpenAI.APIConnectionTimeoutError;
        const streams = [];
        for (let i = 0; i < 2; ++i) {
            const stream = await completions.create({ ...asked, stream: true });
            for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
            streams.push(stream);
        }
        found.left = streams.length;
        const held = [];
        for (let i = 0; i < 2; ++i) held.push(await completions.create({ ...asked, stream: true }));
        const full = await caught(() => completions.create(asked));
        found.full = [full instanceof OpenAI.RateLimitError, full.code];
        const patient = client.withOptions({ maxRetries: 3 });
        const again = patient.chat.completions.create({ ...asked, max_tokens: 1 });
        for (const stream of held) stream.controller.abort();
        found.again = (await again).choices[0].message.content;
        """
        assert found(OPENAI + script, server) == {
            "late": True,
            "left": 2,
            "full": [True, "queue_full"],
            "again": "H",
        }
        wait_for(lambda: not engine.open)
