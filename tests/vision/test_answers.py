"""Answers to prompts with images, with a model's own tower, beside transformers: alone, in pages, in an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import relative_error
from image_models import MARKERS, save_model
from late_kernels import compile_when_used
from PIL import Image
from vision_models import random_model

import llmcl
from llmcl.engine.images import images_of
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.vision.vision import Pixels

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

IMAGE_TOKEN = 300
KINDS = [pytest.param(name, marks=[pytest.mark.slow] * (name != "smolvlm")) for name in MARKERS]
SMALL_STEPS = {"max_step_tokens": 40, "kv_pages": 14}
Opened = Callable[..., LLM]


@cache
def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def reference(kind: str, ids: Sequence[int], pixels: Sequence[Pixels]) -> np.ndarray:
    """transformers' logits of every position, float32 [n, vocab]. pixels: of all images."""
    import torch

    tokens, values = torch.tensor([[*ids]]), [torch.from_numpy(each.values) for each in pixels]
    more: dict[str, Any] = {"pixel_values": torch.cat(values)[None]}
    if kind == "gemma3":
        more = {"pixel_values": torch.cat(values), "token_type_ids": (tokens == IMAGE_TOKEN).int()}
    elif "qwen" in kind:  # both frames of a patch show the image
        frames = [each.reshape(-1, 3, 1, 36).expand(-1, 3, 2, 36).reshape(-1, 216) for each in values]
        sizes = [[1, 2 * rows, 2 * columns] for each in pixels for rows, columns in each.grids]
        more = {"pixel_values": torch.cat(frames), "image_grid_thw": torch.tensor(sizes)}
        more["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).int()
    elif kind == "mistral3":
        cells = [(len(each.grids), each.grids[0][1]) for each in pixels]
        laid_out = [
            each.reshape(rows, columns, 2, 2, 3, 6, 6).permute(4, 0, 2, 5, 1, 3, 6).reshape(3, 12 * rows, 12 * columns)
            for each, (rows, columns) in zip(values, cells, strict=True)
        ]
        more = {"pixel_values": torch.stack(laid_out), "image_sizes": torch.tensor(cells) * 12}
    with torch.no_grad():
        logits: np.ndarray = random_model(kind)(input_ids=tokens, **more).logits[0].numpy()
    return logits


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / kind, kind)


@pytest.fixture(scope="module")
def opened(folder: Path, default_device: Device) -> Iterator[Opened]:
    models = dict[str, LLM]()

    def opened(**options: Any) -> LLM:
        if str(options) not in models:
            options |= {"dtype": "float32", "max_context": 512}
            models[str(options)] = llmcl.load(str(folder), device=default_device.entry.index, **options)
        return models[str(options)]

    yield opened
    for llm in models.values():
        llm.close()


def check_answer(kind: str, llm: LLM, prompt: Sequence[int], answer: Sequence[int], seeds: Sequence[int]) -> None:
    """Asserts that transformers chooses each token of the answer after the tokens before, or one within rounding."""
    processor = llm.images.vision().processor
    logits = reference(kind, [*prompt, *answer], [processor.pixels(picture(seed)) for seed in seeds])
    rows = logits[len(prompt) - 1 : -1]
    chosen = rows[np.arange(len(answer)), [*answer]]
    assert (rows.max(axis=1) - chosen <= 1e-4 * np.abs(rows).max()).all()


def test_logits_are_those_of_transformers(kind: str, opened: Opened) -> None:
    llm = opened()
    prompt = llm.encode("What is it?", images=[picture(1), picture(2)])
    pixels = [llm.images.vision().processor.pixels(picture(seed)) for seed in (1, 2)]
    assert relative_error(llm.logits(prompt), reference(kind, prompt, pixels)) < 1e-4


@pytest.mark.parametrize("pages", [{}, {"kv_page_tokens": 64}], ids=["contiguous", "pages"])
def test_greedy_answers(kind: str, opened: Opened, pages: dict[str, int]) -> None:
    """Images with the same token ids are not taken for each other."""
    llm = opened(**pages)
    for seed in (1, 2):
        prompt = llm.encode("What is it?", images=[picture(seed)])
        answer = llm.generate(prompt, max_tokens=10, temperature=0, ignore_eos=True)
        check_answer(kind, llm, prompt, answer.token_ids, [seed])
        assert answer.prompt_token_ids == list(prompt) and min(prompt) >= 0


@pytest.mark.parametrize("pages", [{}, {"kv_page_tokens": 64, "kv_pages": 24}], ids=["contiguous", "pages"])
def test_a_conversation_keeps_its_image(kind: str, opened: Opened, pages: dict[str, int]) -> None:
    llm = opened(**pages)
    chat = llm.chat()
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    for text, images in (("What is it?", [picture(1)]), ("Why?", None)):
        pieces = [*chat.send(text, images=images, **settings)]
    prompt = llm.encode(chat.messages[:-1])
    check_answer(kind, llm, prompt, [piece.token_id for piece in pieces], [1])
    stats = pieces[-1].stats
    assert stats is not None and stats.cached_tokens >= images_of(prompt)[0].end
    twin = chat.fork()
    pieces = [*twin.send("And?", **settings)]
    check_answer(kind, llm, llm.encode(twin.messages[:-1]), [piece.token_id for piece in pieces], [1])
    other = llm.chat()
    pieces = [*other.send("What is it?", images=[picture(2)], **settings)]
    check_answer(kind, llm, llm.encode(other.messages[:-1]), [piece.token_id for piece in pieces], [2])


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="together", marks=pytest.mark.slow), pytest.param(SMALL_STEPS, id="in small steps")],
)
def test_requests_with_images_beside_others(kind: str, opened: Opened, options: dict[str, int]) -> None:
    llm = opened()
    seeds: list[list[int]] = [[1], [], [2], [1, 2], [1]]
    settings: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "ignore_eos": True}
    texts = [
        "What is it? " * 5,
        "No image here, a longer text of many characters.",
        "What is it? " * 5,
        "Both?",
        "And?",
    ]
    alone = llm.generate(texts[1], **settings).token_ids
    with llm.engine(max_sequences=3, **options) as engine:
        requests = [
            engine.submit(text, images=[picture(seed) for seed in each] or None, **settings)
            for text, each in zip(texts, seeds, strict=True)
        ]
        answers = [request.result() for request in requests]
        again = engine.submit(texts[0], images=[picture(1)], **settings).result()
    for each, answer in zip(seeds, answers, strict=True):
        if each:
            check_answer(kind, llm, answer.prompt_token_ids, answer.token_ids, each)
    assert answers[1].token_ids == alone and again.token_ids == answers[0].token_ids
    assert again.stats.cached_tokens >= 64


def test_what_an_engine_refuses(kind: str, opened: Opened) -> None:
    llm = opened()
    with llm.engine(max_sequences=1, batch_invariant=True) as engine:
        with pytest.raises(UsageError, match="prompt_logprobs is for prompts of text"):
            engine.submit("What?", images=[picture(1)], prompt_logprobs=0)
        if kind == "gemma3":
            with pytest.raises(UsageError, match="reads an image at once, which batch_invariant"):
                engine.submit("What?", images=[picture(1)])


def test_an_image_after_a_scored_prompt(kind: str, opened: Opened) -> None:
    """Scoring binds launches for short steps; the image's step is longer."""
    llm = opened()
    settings: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with llm.engine(max_sequences=2) as engine:
        engine.submit("No image here.", prompt_logprobs=0, **settings).result()
        answer = engine.submit("What is it? " * 12, images=[picture(1)], **settings).result()
    check_answer(kind, llm, answer.prompt_token_ids, answer.token_ids, [1])


def test_an_engine_over_two_devices(kind: str, folder: Path, opened: Opened, default_entry: DeviceEntry) -> None:
    """One driver twice, each with some of the layers."""
    devices = [Device.open(default_entry) for _ in range(2)]
    options: dict[str, Any] = {"dtype": "float32", "max_context": 512, "split": "layer"}
    try:
        with llmcl.load(str(folder), device=devices, **options) as llm, llm.engine(max_sequences=2) as engine:
            if kind == "qwen3_vl":
                with pytest.raises(UsageError, match="the model 1 layer on its first device"):
                    engine.submit("What is it?", images=[picture(1)])
                return
            requests = [
                engine.submit("What is it?", images=images, max_tokens=6, temperature=0, ignore_eos=True)
                for images in ([picture(1)], None)
            ]
            answer, _ = (request.result() for request in requests)
    finally:
        for device in devices:
            device.close()
    check_answer(kind, opened(), answer.prompt_token_ids, answer.token_ids, [1])
