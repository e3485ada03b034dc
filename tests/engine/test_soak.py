"""A soak of the engine: clients that come, read, leave and cancel at random over a small pool of pages.

Afterwards every page and all memory is back, and answers of that time are repeated alone: they have the same ids.

    LLMCL_SOAK_SECONDS=600 python -m pytest tests/engine/test_soak.py -s      half of it for each way to be the same
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import random_weights, save_folder, small_config

import llmcl
from llmcl.engine import llm as llm_module
from llmcl.engine.engine import Engine
from llmcl.engine.llm import LLM
from llmcl.models.batch import Batch
from llmcl.runtime.device import Device

SECONDS = float(os.environ.get("LLMCL_SOAK_SECONDS", "10"))
CLIENTS = 10
REPEATED = 200
N_PAGES = 7  # of which the longest text needs 6
HOST_GROWTH_BYTES = 48 << 20  # of the process from an early part to the end: an answer that is kept has some 10 KB


@dataclass
class Asked:
    """A request and what came of it. how: how the client behaved."""

    request: dict[str, Any]
    how: str
    ids: list[int] = field(default_factory=list)
    complete: bool = False


@dataclass
class Soak:
    """Clients of an engine, each in a thread, until the time is over."""

    engine: Engine
    seconds: float
    asked: list[Asked] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        end = time.monotonic() + self.seconds
        threads = [threading.Thread(target=self._client, args=(n, end), daemon=True) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        while time.monotonic() < end and not self.errors:
            time.sleep(self.seconds / 20)
            self.host_bytes.append(resident_bytes())
        for thread in threads:
            thread.join(60)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), "a request does not end"

    def _client(self, number: int, end: float) -> None:
        rng = random.Random(number)
        try:
            while time.monotonic() < end:
                time.sleep(rng.expovariate(1 / 0.05))
                asked = draw(rng)
                self._ask(asked, rng)
                self.asked.append(asked)
        except BaseException as error:
            self.errors.append(error)

    def _ask(self, asked: Asked, rng: random.Random) -> None:
        request = self.engine.submit(**asked.request)
        if asked.how == "cancelled at once":
            request.cancel()
            return
        if asked.how == "cancelled by the clock":  # while it waits, is read, or answers
            time.sleep(rng.uniform(0, 0.3))
            request.cancel()
            return
        most = rng.randrange(1, 40) if asked.how in ("cancelled", "dropped") else None
        for piece in request:
            asked.ids.append(piece.token_id)
            asked.complete = piece.finish_reason is not None
            if len(asked.ids) == most and not asked.complete:
                if asked.how == "cancelled":
                    request.cancel()
                return  # or nothing refers to it any more


def draw(rng: random.Random) -> Asked:
    text = rng.randrange(4)  # few, so that prompts begin alike
    n_prompt = rng.choice([1, 5, 20, 64, 65, rng.randrange(1, 250)])
    prompt = [(7 * i + 13 * text + i * i % 11) % 96 + 3 for i in range(n_prompt)]
    prompt[-1] = rng.randrange(3, 99)
    request: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, 120), "ignore_eos": True}
    request["priority"] = rng.choice([0, 0, 0, 1])
    if rng.random() < 0.5:
        request |= {"temperature": rng.uniform(0.5, 1.5), "seed": rng.getrandbits(32), "top_p": rng.choice([0.9, 1.0])}
        request |= {"repeat_penalty": rng.choice([1.0, 1.2])}
    ways = ["read"] * 6 + ["cancelled", "dropped", "cancelled at once", "cancelled by the clock"]
    return Asked(request, rng.choice(ways))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see the memory of the process")
@pytest.mark.parametrize(
    ("dtype", "batch_invariant"), [("float32", False), ("q4_0", True)], ids=["float32", "batch_invariant"]
)
def test_soak(
    dtype: str,
    batch_invariant: bool,
    default_device: Device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config()
    folder = save_folder(tmp_path, config, random_weights(config, seed=7))
    batches: list[weakref.ref[Batch]] = []

    def make_batch(*arguments: Any, **options: Any) -> Batch:
        batch = real(*arguments, **options)
        batches.append(weakref.ref(batch))
        return batch

    real = llm_module.make_batch
    monkeypatch.setattr(llm_module, "make_batch", make_batch)
    weights: dict[str, Any] = {"dtype": dtype} if dtype == "float32" else {"quantize": dtype}
    with llmcl.load(str(folder), device=default_device.entry, max_context=384, **weights) as llm:
        llm.generate([5, 6], max_tokens=2)  # what the model makes when it is first used
        before = llm.device.allocated_bytes
        sizes: dict[str, Any] = {"max_sequences": 5, "max_step_tokens": 80, "batch_invariant": batch_invariant}
        with llm.engine(kv_pages=N_PAGES, **sizes) as engine:
            soak = Soak(engine, SECONDS / 2)
            soak.run()
            wait_until_idle(batches[0])
            cache, n_preempted = batches[0]().cache, engine.n_preempted  # type: ignore[union-attr]
            assert sorted(cache.free()) == [*range(N_PAGES)]
            del cache
        report(soak, n_preempted)
        assert n_preempted > 0 and sum(asked.how == "cancelled" and not asked.complete for asked in soak.asked) > 0
        early = soak.host_bytes[len(soak.host_bytes) // 4]
        assert soak.host_bytes[-1] - early < HOST_GROWTH_BYTES
        n_tokens = repeat_alone(llm, soak, sizes, batch_invariant)
        print(f"repeated {n_tokens} tokens alone, all the same")
        del engine
        soak.engine = None  # type: ignore[assignment]
        gc.collect()
        assert [batch() for batch in batches] == [None] * len(batches)
        assert llm.device.allocated_bytes == before


def wait_until_idle(batch: weakref.ref[Batch]) -> None:
    """Until the engine has taken note of the last cancellation."""
    for _ in range(600):
        made = batch()
        if made is not None and not made._slots.sequences:
            return
        time.sleep(0.05)
    raise AssertionError("a place is still taken though nobody asks")


def report(soak: Soak, n_preempted: int) -> None:
    ways = Counter(asked.how for asked in soak.asked)
    complete = sum(asked.complete for asked in soak.asked)
    tokens = sum(len(asked.ids) for asked in soak.asked)
    mebi = [n / 2**20 for n in (soak.host_bytes[0], soak.host_bytes[-1])]
    print(
        f"{len(soak.asked)} requests ({dict(ways)}), {complete} complete, {tokens} tokens, {n_preempted} preemptions, "
        f"host memory {mebi[0]:.0f} to {mebi[1]:.0f} MiB"
    )


def repeat_alone(llm: LLM, soak: Soak, sizes: dict[str, Any], batch_invariant: bool) -> int:
    """Compares answers, or what there is of them, with those to the same requests when nobody else asks."""
    answered = [asked for asked in soak.asked if asked.ids]
    chosen = random.Random(0).sample(answered, min(REPEATED, len(answered)))
    requests = [{**asked.request, "max_tokens": len(asked.ids)} for asked in chosen]
    if batch_invariant:
        with llm.engine(**sizes) as engine:
            alone = [engine.submit(**request).result().token_ids for request in requests]
    else:
        for request in requests:
            del request["priority"]
        alone = [llm.generate(**request).token_ids for request in requests]
    assert alone == [asked.ids for asked in chosen]
    return sum(map(len, alone))
