"""batch_invariant=True: an answer has the same bits alone, beside others, after a preemption and with any chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used
from which_devices import taken

import llmcl
from llmcl.engine.engine import Engine
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.kernels.cpu.dot_product import bf16_dot_form
from llmcl.models.batch import make_batch
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

Bits = list[tuple[int, float, tuple[tuple[int, float], ...]]]
"""Of each token its id, its log-probability and those of the likeliest: a difference in one bit of a logit shows."""

TYPES = [("float32", "float32"), ("bfloat16", "float16"), ("q8_0", "q8_0"), ("q4_0", "float16")]  # weights, cache
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "repeat_penalty": 1.2, "seed": 5},
    {"temperature": 1.3, "seed": 6},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = small_config(n_layers=3)
    return str(save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=7)))


# As a GPU a quantised type alone: a processor compiles a GPU's kernels of each type for 10 to 15 s.
@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(("as it is", *types), marks=pytest.mark.slow) for types in TYPES[:-1]),
        *(pytest.param(("as a GPU", *types), marks=pytest.mark.slow) for types in TYPES[2:3]),
        ("as it is", *TYPES[-1]),
    ],
    ids=lambda settings: f"{settings[0]}-{settings[1]}",
)
def llm(request: pytest.FixtureRequest, default_entry: DeviceEntry, folder: str) -> Iterator[LLM]:
    how, dtype, kv_dtype = request.param
    weights: dict[str, Any] = {"quantize": dtype} if dtype.startswith("q") else {"dtype": dtype}
    device = taken(default_entry, how)
    with llmcl.load(folder, device=device, kv_dtype=kv_dtype, max_context=768, **weights) as llm:  # type: ignore[arg-type]
        yield llm


def requests() -> list[dict[str, Any]]:
    """Of lengths around those of cells and pages, some with the same beginning, greedy and sampled in turn."""
    rng = np.random.default_rng(0)
    first = rng.integers(3, 99, 300).tolist()
    lengths = [1, 64, 65, 130, 17, 320, 7, 260]
    return [
        {
            "prompt": [*first[: n // 2], *rng.integers(3, 99, n - n // 2).tolist()],
            "max_tokens": 40 + 10 * i,
            "ignore_eos": True,
            "logprobs": 3,
            **OPTIONS[i % 3],
        }
        for i, n in enumerate(lengths)
    ]


def bits(pieces: list[llmcl.Piece]) -> Bits:
    return [(piece.token_id, piece.logprob.logprob, tuple(piece.logprob.top)) for piece in pieces if piece.logprob]


def answers(engine: Engine, asked: list[dict[str, Any]], *, together: bool) -> list[Bits]:
    if not together:
        return [bits(list(engine.submit(**request))) for request in asked]
    return [bits(list(answer)) for answer in [engine.submit(**request) for request in asked]]


@pytest.mark.slow
def test_an_answer_has_the_same_bits_whoever_else_runs(llm: LLM) -> None:
    asked = requests()
    with llm.engine(max_sequences=8, batch_invariant=True) as engine:
        alone = answers(engine, asked[::-1], together=False)[::-1]
        assert [len(found) for found in alone] == [request["max_tokens"] for request in asked]
        assert answers(engine, asked, together=True) == alone
    # Few pages, and steps that hold one cell of a prompt, or all of it.
    with llm.engine(max_sequences=3, max_step_tokens=3 + 255, kv_pages=8, batch_invariant=True) as engine:
        assert answers(engine, asked[::-1], together=True)[::-1] == alone
        assert engine.n_preempted > 0
    # Larger pages where weights are not quantised: they are a build constant of what reads the cache.
    page = 64 if llm.dtype.startswith("q") else 192
    with llm.engine(max_sequences=12, max_step_tokens=1000, kv_page_tokens=page, batch_invariant=True) as engine:
        assert answers(engine, asked, together=True) == alone
        follow_up = {**asked[3], "prompt": [*asked[3]["prompt"], *(token for token, _, _ in alone[3])]}
        (after,) = answers(engine, [follow_up], together=False)
    with llm.engine(max_sequences=1, batch_invariant=True) as engine:  # which holds nothing of the answer before
        assert answers(engine, [follow_up], together=False) == [after]


def test_a_row_alone_has_the_products_for_one_token(llm: LLM) -> None:
    """On a CPU, where they give the same bits: the others take longer for one row."""
    device = llm.model.device
    batch = make_batch(llm.model, 2, 128, 64, invariant=True)
    if not device.is_cpu or (llm.dtype == "bfloat16" and bf16_dot_form(device)):
        assert [*batch.decoding.bound] == [8]
        return
    names = {launch.name for launch in batch.decoding.bound[1].separate}
    assert "linear_decode" in names and "linear_prefill" not in names


def test_a_step_must_have_room_for_a_cell(folder: str, default_device: Device) -> None:
    with (
        llmcl.load(folder, device=default_device, dtype="float32", max_context=256) as llm,
        pytest.raises(
            UsageError, match=r"max_step_tokens is 40 with 8 sequences.*more for a prompt \(batch_invariant\)"
        ),
    ):
        llm.engine(max_step_tokens=40, batch_invariant=True)
