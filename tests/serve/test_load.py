"""Many clients at once, some of whom leave early: an answer is whole and right or refused, and nothing is left over."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import httpx
from fake_server import FakeEngine, Running, byte_tokenizer, events, running, wait_for

N_CLIENTS, N_REQUESTS = 64, 5


async def one_client(server: Running, http: httpx.AsyncClient, draw: random.Random, seen: Counter[str]) -> None:
    for _ in range(N_REQUESTS):
        text = "".join(draw.choices("abc 🙂é", k=draw.randint(1, 25)))
        body = {"messages": [{"role": "user", "content": text}], "stream": draw.random() < 0.5}
        leaves_after = draw.uniform(0.0, 0.1) if draw.random() < 0.4 else 60.0
        try:
            answer = await asyncio.wait_for(http.post("/v1/chat/completions", json=body), leaves_after)
        except asyncio.TimeoutError:
            seen["left"] += 1
            continue
        if answer.status_code == 429:
            assert answer.headers["retry-after"] == "1"
            seen["refused"] += 1
            await asyncio.sleep(0.05)
            continue
        assert answer.status_code == 200, answer.text
        if body["stream"]:
            found = [json.loads(data) for _, data in events(answer.text)[:-1]]
            said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)
        else:
            said = answer.json()["choices"][0]["message"]["content"]
        assert said == text
        seen["answered"] += 1


async def all_clients(server: Running) -> Counter[str]:
    seen: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=N_CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, verify=False, trust_env=False) as http:
        await asyncio.gather(*(one_client(server, http, random.Random(n), seen) for n in range(N_CLIENTS)))
    return seen


def test_many_clients_at_once() -> None:
    engine = FakeEngine(byte_tokenizer(), max_sequences=4)
    engine.delay_s = 0.001
    with running(engine, max_queue=24) as server:
        seen = asyncio.run(all_clients(server))
        assert (
            seen.total() == N_CLIENTS * N_REQUESTS and min(seen[kind] for kind in ("answered", "left", "refused")) > 0
        )
        wait_for(lambda: not server.service.in_flight)
        assert engine.open == engine.running == 0
        assert server.chat("still there").json()["choices"][0]["message"]["content"] == "still there"
