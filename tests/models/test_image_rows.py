"""Rows in place of the embeddings of tokens, against transformers with `inputs_embeds`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_weights, relative_error, save_folder, small_config, transformers_model
from late_kernels import compile_when_used

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.models.image_rows import ImageRows, PlacedImage
from llmcl.runtime.device import Device

compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

BOUND = 1e-4
CONFIG = small_config("gemma2", tie_embeddings=True, norm_offset=1.0, embedding_scale=8.0, attention_scale=32.0**-0.5)
N = 90
PLACES = {  # (first, rows) of each image
    "first": [(0, 5)],
    "last": [(N - 7, 7)],
    "adjacent": [(20, 9), (29, 13)],
    "longer than a chunk": [(3, 70), (80, 1)],
}


@cache
def reference_model() -> Any:
    return transformers_model(CONFIG, random_weights(CONFIG, seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("gemma2"), CONFIG, random_weights(CONFIG, seed=3))


@pytest.fixture(scope="module")
def llm(folder: Path, default_device: Device) -> Iterator[LLM]:
    with llmcl.load(str(folder), device=default_device, dtype="float32", max_context=128) as llm:
        yield llm


def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(4).integers(0, CONFIG.vocab_size, N)]


def rows_for(places: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [3.0 * rng.standard_normal((n, CONFIG.hidden_size)).astype(np.float32) for _, n in places]


def placed(device: Device, places: Sequence[tuple[int, int]]) -> list[PlacedImage]:
    return [
        PlacedImage(first, ImageRows(device.upload(rows, "image"), n, bytes([i])))
        for i, ((first, n), rows) in enumerate(zip(places, rows_for(places), strict=True))
    ]


def expected_with(ids: Sequence[int], images: Sequence[tuple[int, np.ndarray]]) -> np.ndarray:
    """transformers' logits, with the rows put among what its embedding returns, as its models with images do."""
    import torch

    model = reference_model()
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor([list(ids)])).clone()
        for first, rows in images:
            embeds[0, first : first + len(rows)] = torch.from_numpy(rows)
        return np.asarray(model(inputs_embeds=embeds).logits[0].numpy())


def expected(ids: Sequence[int], places: Sequence[tuple[int, int]]) -> np.ndarray:
    return expected_with(ids, [(first, rows) for (first, _), rows in zip(places, rows_for(places), strict=True)])


def after_prefill(llm: LLM) -> np.ndarray:
    return llm.device.read(llm.model.act.logits, np.float32, (CONFIG.vocab_size,))


@pytest.mark.parametrize("name", PLACES)
def test_rows_replace_embeddings_in_every_chunk(name: str, llm: LLM) -> None:
    ids, places = prompt(), PLACES[name]
    images, reference = placed(llm.device, places), expected(prompt(), places)
    cache, sequence = llm.model.cache, llm.sequence
    for chunk in (7, 128):
        cache.truncate(sequence, 0)
        llm.model.prefill(sequence, ids, chunk=chunk, images=images)
        assert relative_error(after_prefill(llm), reference[-1]) <= BOUND
    cache.truncate(sequence, 0)
    assert relative_error(llm.model.logits(sequence, ids, images=images), reference) <= BOUND
    done: list[int] = []
    cache.truncate(sequence, 0)
    llm.model.prefill(sequence, ids, images=images, progress=lambda stage, n, of: done.append(n))
    assert relative_error(after_prefill(llm), reference[-1]) <= BOUND and done[-1] == N


def test_an_image_counts_its_place_from_the_tokens_it_comes_with(llm: LLM) -> None:
    ids, places = prompt(), [(20, 9), (40, 13)]
    first, second = placed(llm.device, places)
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.extend(llm.sequence, ids[:30], images=[first])
    llm.model.prefill(llm.sequence, ids[30:-1], images=[replace(second, first=10)])
    llm.model.decode_token(llm.sequence, ids[-1])
    assert relative_error(after_prefill(llm), expected(ids, places)[-1]) <= BOUND
    assert [image.first for image in llm.sequence.images] == [20, 40]


@pytest.mark.parametrize("kept", [0, 20, 24, 29, 60])
def test_truncation_forgets_the_images_behind_the_cut(kept: int, llm: LLM) -> None:
    ids, places = prompt(), [(20, 9), (40, 13)]
    llm.model.cache.truncate(llm.sequence, 0)
    llm.model.extend(llm.sequence, ids, images=placed(llm.device, places))
    llm.model.cache.truncate(llm.sequence, kept)
    held = [(image.first, image.image.n) for image in llm.sequence.images]
    assert held == [(first, min(n, kept - first)) for first, n in places if first < kept]
    llm.model.prefill(llm.sequence, ids[kept:])
    rows = rows_for(places)
    cut = expected_with(ids, [(first, rows[i][: kept - first]) for i, (first, _) in enumerate(places) if first < kept])
    assert relative_error(after_prefill(llm), cut[-1]) <= BOUND


def test_only_the_first_of_several_devices_takes_rows(folder: Path, default_device: Device) -> None:
    devices = [Device.open(default_device.entry) for _ in range(2)]
    options: dict[str, Any] = {"dtype": "float32", "max_context": 128, "split": "layer"}
    with llmcl.load(str(folder), device=devices, **options) as divided:
        images = placed(devices[0], PLACES["adjacent"])
        divided.model.prefill(divided.sequence, prompt(), chunk=25, images=images)
        logits = after_prefill(divided)
    for device in devices:
        device.close()
    assert relative_error(logits, expected(prompt(), PLACES["adjacent"])[-1]) <= BOUND


def test_a_text_without_images_runs_the_bound_launches(llm: LLM) -> None:
    llm.model.cache.truncate(llm.sequence, 0)
    launches = llm.model.launches_for(N)
    ids = prompt()
    for step in llm.model._prefill_steps(llm.sequence, ids, N):
        assert step.images == [] and llm.model.place_images(step, launches) is launches


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(86, 5)], "tokens 86 to 90 of 90"),
        ([(10, 5), (14, 3)], "tokens 14 to 16 of 90; expected tokens from 15 on"),
        ([(-1, 5)], "tokens -1 to 3 of 90"),
    ],
)
def test_images_outside_the_prompt_are_refused(places: list[tuple[int, int]], message: str, llm: LLM) -> None:
    llm.model.cache.truncate(llm.sequence, 0)
    images = placed(llm.device, places)
    with pytest.raises(UsageError, match=message):
        llm.model.prefill(llm.sequence, prompt(), images=images)
    with pytest.raises(UsageError, match=message):
        llm.generate(prompt(), images=images)
    with pytest.raises(UsageError, match=message):
        llm.logits(llm.encode(prompt(), images=images))
    assert llm.sequence.position == 0 and llm.sequence.images == []


def test_too_few_rows_and_rows_for_later_layers_are_refused(llm: LLM) -> None:
    llm.model.cache.truncate(llm.sequence, 0)
    (image,) = placed(llm.device, [(10, 5)])
    short = replace(image, image=replace(image.image, n=6))
    deep = replace(image, image=replace(image.image, deepstack=(image.image.rows,) * CONFIG.n_layers))
    for wrong, message in ((short, "6 rows fill 1280 bytes; expected 1536"), (deep, "deepstack")):
        with pytest.raises(UsageError, match=message):
            llm.model.prefill(llm.sequence, prompt(), images=[wrong])
