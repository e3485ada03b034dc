"""Steps of several sequences against each sequence by itself: the same logits, the same ids, whoever else is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import model_configs, random_weights, relative_error, save_folder, small_config
from late_kernels import compile_when_used
from parameters import slow_except
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import ContextLengthError, OutOfDeviceMemoryError, UsageError
from llmcl.models.batch import Batch, PromptChunk, make_batch
from llmcl.models.sequence import SequenceState
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

SAME = 2e-5  # two orders of summation, both in float32
PAGE = 64
SHAPE = {**TINY_SHAPE, "max_position_embeddings": 2048}
GREEDY = SamplingParams(seed=0)
WITHOUT_OPTION = "repeat_window", "logit_bias", "logprobs", "dry_breakers"


def random_ids(n: int, seed: int, vocab_size: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, vocab_size, n)]


def logits(batch: Batch, n: int) -> np.ndarray:
    """Of the rows of the last step."""
    model = batch.model
    return model.device.read(model.act.logits, np.float32, (n, model.config.vocab_size))


def begin(batch: Batch, prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[SequenceState, list[int]]:
    """A sequence after its prompt, and the ids sampled so far."""
    sequence = batch.cache.sequence()
    batch.start(sequence, params)
    return sequence, batch.read([(sequence, prompt)])()


def decode(batch: Batch, running: Sequence[tuple[SequenceState, list[int]]], steps: int = 1) -> None:
    for _ in range(steps):
        tokens = batch.decode([sequence for sequence, _ in running])()
        for (sequence, ids), token in zip(running, tokens, strict=True):
            sequence.token_ids.append(ids[-1])
            ids.append(token)


def alone(llm: LLM, prompt: Sequence[int], n: int, params: SamplingParams = GREEDY) -> list[int]:
    options = {name: value for name, value in vars(params).items() if name not in WITHOUT_OPTION}
    return llm.generate(list(prompt), max_tokens=n, ignore_eos=True, **options).token_ids


@pytest.fixture
def load_folder(tmp_path: Path, default_device: Device) -> Iterator[Callable[..., LLM]]:
    loaded: list[LLM] = []

    def load(config: Any, weights: Any) -> LLM:
        folder = save_folder(tmp_path / f"model{len(loaded)}", config, weights)
        loaded.append(llmcl.load(str(folder), device=default_device.entry.index))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.close()


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(scope="module")
def llm(default_device: Device, shape: str) -> Iterator[LLM]:
    options = {"device": default_device.entry, "dtype": "float32", "max_context": 256}
    with llmcl.load_random(shape, **options) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(scope="module")
def batch(llm: LLM) -> Batch:
    return make_batch(llm.model, 5, 256, PAGE)


@pytest.fixture(autouse=True)
def no_places_taken(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "batch" in request.fixturenames:
        batch: Batch = request.getfixturevalue("batch")
        for sequence in list(batch.cache.sequences):
            batch.end(sequence)
            batch.cache.truncate(sequence, 0)


@pytest.mark.parametrize("name", slow_except(model_configs(), "gqa3_dim64_untied"))
def test_rows_have_the_logits_of_each_sequence_alone(name: str, load_folder: Callable[..., LLM]) -> None:
    config = model_configs()[name]
    llm = load_folder(config, random_weights(config, seed=1))
    batch = make_batch(llm.model, 3, 192, PAGE)
    prompts = [random_ids(n, n, config.vocab_size) for n in (70, 3, 41)]
    running = [begin(batch, prompt) for prompt in prompts]
    decode(batch, running, 2)
    rows = logits(batch, 3)
    for (sequence, ids), prompt, row in zip(running, prompts, rows, strict=True):
        assert sequence.token_ids == prompt + ids[:2]
        assert relative_error(row, llm.logits(sequence.token_ids)[-1]) <= 5 * SAME


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "float32"),
        pytest.param("bfloat16", "float16", marks=pytest.mark.slow),
        pytest.param("q4_0", "q8_0", marks=pytest.mark.slow),
    ],
)
def test_on_every_device(device: Device, shape: str, dtype: str, kv_dtype: str) -> None:
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "activation_dtype": "float32", "max_context": 192}
    with llmcl.load_random(shape, device=device, **options) as llm:  # type: ignore[arg-type]
        batch = make_batch(llm.model, 9, 192, PAGE)
        prompts = [random_ids(n, n, 131) for n in (63, 1, 64, 130, 7, 8, 9, 10, 11)]
        running = [begin(batch, prompt) for prompt in prompts]
        decode(batch, running, 2)
        decode(batch, running[:4], 2)  # a step of another size
        bound = 1e-4 if dtype == "float32" else 2e-2  # matrix units round what a row of its own does not
        for (sequence, _), row in zip(running[:4], logits(batch, 4), strict=True):
            assert relative_error(row, llm.logits(sequence.token_ids)[-1]) <= bound


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=1 << 40),
    SamplingParams(repeat_penalty=1.3, seed=4),
    SamplingParams(temperature=0.9, min_p=0.05, repeat_penalty=1.1, presence_penalty=0.4, seed=5),
]
COUNTED = SamplingParams(temperature=0.7, top_k=30, presence_penalty=0.5, frequency_penalty=0.7, seed=6)
MIROSTAT = SamplingParams(temperature=1.5, mirostat=2, mirostat_tau=3.0, seed=8)

DRY = SamplingParams(dry_multiplier=3.0, dry_base=1.5, dry_allowed_length=1, seed=9)
DRY_SAMPLED = replace(DRY, temperature=0.6, repeat_penalty=1.2, dry_penalty_last_n=20, dry_allowed_length=0)


@pytest.mark.parametrize(
    "own", [PARAMS, [MIROSTAT, GREEDY], [DRY, GREEDY, DRY_SAMPLED]], ids=["usual", "mirostat", "dry"]
)
def test_each_row_is_sampled_as_its_own_parameters_say(own: list[SamplingParams], llm: LLM, batch: Batch) -> None:
    prompts = [random_ids(20 + n, n, 131) for n in range(len(own))]
    running = [begin(batch, prompt, params) for prompt, params in zip(prompts, own, strict=True)]
    decode(batch, running, 60)  # into a further page
    for (_, ids), prompt, params in zip(running, prompts, own, strict=True):
        assert ids == alone(llm, prompt, 61, params)


@pytest.mark.parametrize("last", [PARAMS[4], MIROSTAT, DRY], ids=["penalised", "mirostat", "dry"])
def test_sequences_come_and_go(last: SamplingParams, llm: LLM, batch: Batch) -> None:
    prompts = [random_ids(n, n, 131) for n in (9, 30, 62)]
    params = COUNTED, PARAMS[2], last
    first = begin(batch, prompts[0], params[0])
    decode(batch, [first], 5)  # alone, with the kernels for one token
    second = begin(batch, prompts[1], params[1])
    decode(batch, [first, second], 5)
    decode(batch, [second], 3)
    third = begin(batch, prompts[2], params[2])
    decode(batch, [third, first, second], 4)
    batch.end(second[0])
    decode(batch, [first, third], 5)
    decode(batch, [third], 1)
    decode(batch, [third, first], 1)
    for (_, ids), prompt, own in zip((first, second, third), prompts, params, strict=True):
        assert ids == alone(llm, prompt, len(ids), own)


@pytest.mark.parametrize("params", [PARAMS[2], COUNTED, MIROSTAT, DRY], ids=["truncated", "counted", "mirostat", "dry"])
def test_a_sequence_goes_on_in_another_place_after_it_was_recomputed(
    params: SamplingParams, llm: LLM, batch: Batch
) -> None:
    prompt = random_ids(12, 1, 131)
    sequence, ids = begin(batch, prompt, params)
    others = [begin(batch, random_ids(5, seed, 131)) for seed in range(2)]
    decode(batch, [(sequence, ids), *others], 6)
    n_sampled = sequence.n_sampled
    batch.end(sequence)
    batch.cache.truncate(sequence, 0)
    begin(batch, random_ids(5, 9, 131))  # has the place now
    again = batch.cache.sequence()
    again.mu = sequence.mu
    batch.start(again, params)
    again.n_sampled = n_sampled
    ids += batch.read([(again, prompt + ids)])()
    decode(batch, [*others, (again, ids)], 4)
    assert ids == alone(llm, prompt, len(ids), params)


def test_logprobs_and_allowed_tokens(llm: LLM, batch: Batch) -> None:
    """Of a sequence that is alone for a while, and of one that wants none of this."""
    prompt, even = random_ids(12, 1, 131), np.full(-(-llm.config.vocab_size // 32), 0x55555555, np.uint32)
    first = begin(batch, prompt, SamplingParams(logprobs=2, seed=1))
    second = begin(batch, random_ids(5, 2, 131))
    batch.allow({first[0]: even})
    for running in ([first, second], [first], [first], [second, first]):
        ids = [first[1][-1], *first[0].token_ids]
        wait = batch.decode([sequence for sequence, _ in running])
        found = dict(zip([sequence for sequence, _ in running], batch.logprobs([s for s, _ in running])(), strict=True))
        for (sequence, own), token in zip(running, wait(), strict=True):
            sequence.token_ids.append(own[-1])
            own.append(token)
        logprob = found[first[0]]
        assert logprob is not None and logprob.token == first[1][-1] and logprob.token % 2 == 0
        assert found.get(second[0]) is None and len(ids) == first[0].position
        row = llm.logits(first[0].token_ids)[-1].astype(np.float64)
        log_p = row - np.log(np.sum(np.exp(row)))
        assert logprob.logprob == pytest.approx(log_p[logprob.token], abs=1e-4)
        assert [token for token, _ in logprob.top] == [int(i) for i in np.argsort(-log_p)[:2]]
    batch.allow({first[0]: None})
    text = [*first[0].token_ids, first[1][-1]]
    decode(batch, [first, second], 6)
    assert first[1][-6:] == alone(llm, text, 6)


def test_prompts_in_chunks(llm: LLM, batch: Batch) -> None:
    prompt = random_ids(100, 3, 131)
    sequence = batch.cache.sequence()
    batch.start(sequence, GREEDY)
    other = begin(batch, random_ids(5, 1, 131))
    for first in (0, 40):
        assert batch.step(chunks=[PromptChunk(sequence, prompt[first : first + 40], is_last=False)])() == []
        decode(batch, [other])
    running = sequence, batch.read([(sequence, prompt[80:])])()
    decode(batch, [other, running], 3)
    assert running[1] == alone(llm, prompt, 4)


def mixed_step(batch: Batch, running: list[tuple[SequenceState, list[int]]], chunks: Sequence[PromptChunk]) -> None:
    """A step of rows that decode and of chunks; ids go to `running`, those of last chunks to new entries behind."""
    tokens = batch.step([sequence for sequence, _ in running], chunks)()
    for (sequence, ids), token in zip(running, tokens, strict=False):
        sequence.token_ids.append(ids[-1])
        ids.append(token)
    begun = [chunk.sequence for chunk in chunks if chunk.is_last]
    first = zip(begun, [[token] for token in tokens[len(running) :]], strict=True)
    running.extend(first)


def test_prompts_beside_rows_that_decode(llm: LLM, batch: Batch) -> None:
    """Lengths that differ by a hundred times, chunks that end within a page, a sequence that is alone at times."""
    prompts = [random_ids(n, n, 131) for n in (20, 1, 130, 2, 66)]
    params = [*PARAMS]
    sequences = [batch.cache.sequence() for _ in prompts]
    for sequence, own in zip(sequences, params, strict=True):
        batch.start(sequence, own)
    running: list[tuple[SequenceState, list[int]]] = []
    mixed_step(batch, running, [PromptChunk(sequences[0], prompts[0])])
    decode(batch, running, 3)
    mixed_step(batch, running, [PromptChunk(sequences[2], prompts[2][:50], is_last=False)])
    mixed_step(
        batch,
        running,
        [PromptChunk(sequences[1], prompts[1]), PromptChunk(sequences[2], prompts[2][50:71], is_last=False)],
    )
    decode(batch, running, 2)
    mixed_step(
        batch,
        running,
        [
            PromptChunk(sequences[2], prompts[2][71:]),
            PromptChunk(sequences[3], prompts[3]),
            PromptChunk(sequences[4], prompts[4][:65], is_last=False),
        ],
    )
    decode(batch, running, 1)
    mixed_step(batch, running, [PromptChunk(sequences[4], prompts[4][65:])])
    decode(batch, running, 5)
    decode(batch, running[:1], 3)
    order = 0, 1, 2, 3, 4
    for i, (sequence, ids) in zip(order, running, strict=True):
        assert sequence is sequences[i] and ids == alone(llm, prompts[i], len(ids), params[i])


def test_many_prompts_in_one_step(llm: LLM, batch: Batch) -> None:
    prompts = [random_ids(n, n, 131) for n in (64, 1, 150, 3, 65)]
    sequences = [batch.cache.sequence() for _ in prompts]
    for sequence in sequences:
        batch.start(sequence, GREEDY)
    launches = llm.device.traffic.kernel_launches
    first = batch.read(list(zip(sequences, prompts, strict=True)))()
    together = llm.device.traffic.kernel_launches - launches
    assert first == [alone(llm, prompt, 1)[0] for prompt in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids == prompt
        batch.cache.truncate(sequence, 0)
    launches = llm.device.traffic.kernel_launches
    assert batch.read([(sequences[0], prompts[0])])() == first[:1]
    assert together == llm.device.traffic.kernel_launches - launches


def test_prompts_longer_than_a_step(llm: LLM) -> None:
    batch = make_batch(llm.model, 3, 256, PAGE, max_rows=32)
    prompts = [random_ids(n, n, 131) for n in (70, 5, 27)]
    sequences = [batch.cache.sequence() for _ in prompts]
    for sequence in sequences:
        batch.start(sequence, GREEDY)
    assert batch.max_rows == 32
    assert batch.read(list(zip(sequences, prompts, strict=True)))() == [alone(llm, prompt, 1)[0] for prompt in prompts]
    with pytest.raises(UsageError, match="a step of 33 rows; expected at most 32"):
        batch.step(sequences[:1], [PromptChunk(sequences[1], [5] * 32)])


@pytest.mark.slow
def test_mods_of_the_user(default_device: Device, tmp_path: Path) -> None:
    config = model_configs()["gqa3_dim64_untied"]
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - (q_idx - kv_idx) * 0.1

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx - kv_idx < 9

    mods = {"score_mod": score_mod, "mask_mod": mask_mod}
    with llmcl.load(str(folder), device=default_device.entry.index, **mods) as llm:  # type: ignore[arg-type]
        batch = make_batch(llm.model, 2, 128, PAGE)
        running = [begin(batch, random_ids(n, n, config.vocab_size)) for n in (2, 30)]
        decode(batch, running, 12)
        for (sequence, _), row in zip(running, logits(batch, 2), strict=True):
            assert relative_error(row, llm.logits(sequence.token_ids)[-1]) <= 5 * SAME


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_mods_are_called_with_the_place(kind: str, default_device: Device, tmp_path: Path) -> None:
    """In a prompt, beside others, and alone: as a model whose functions have that number in place of b."""
    entry = replace(default_device.entry, kind=kind)
    config = small_config(n_layers=2)
    folder = str(save_folder(tmp_path / "model", config, random_weights(config, seed=1)))

    def mods(place: int | None) -> dict[str, Any]:
        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - (q_idx - kv_idx) * 0.1 * (b if place is None else place)

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return q_idx - kv_idx < 40 - 15 * (b if place is None else place)

        return {"score_mod": score_mod, "mask_mod": mask_mod, "max_context": 128, "dtype": "float32"}

    with llmcl.load(folder, device=entry, **mods(None)) as llm:  # type: ignore[arg-type]
        batch = make_batch(llm.model, 2, 128, PAGE)
        text = random_ids(70, 7, config.vocab_size)
        sequences = [batch.cache.sequence() for _ in range(2)]
        found = []
        for sequence in sequences:
            batch.start(sequence, GREEDY)
            batch.cache.share_pages(sequence, text)
            assert sequence.position == 0  # the first has left nothing that is the second's
            batch.read([(sequence, text)])()
            found.append((sequence, text, logits(batch, 1)[0]))
        for running in (sequences, sequences[1:]):
            inputs = [batch._slots._last[sequence]() for sequence in running]
            batch.decode(running)()
            for sequence, token in zip(running, inputs, strict=True):
                sequence.token_ids.append(token)
            rows = logits(batch, len(running))
            found += [(of, [*of.token_ids], row) for of, row in zip(running, rows, strict=True)]
    for place, sequence in enumerate(sequences):
        with llmcl.load(folder, device=entry, **mods(place)) as llm:  # type: ignore[arg-type]
            for of, ids, row in found:
                if of is sequence:
                    assert relative_error(row, llm.logits(ids)[-1]) <= 5 * SAME
    assert relative_error(found[0][2], found[1][2]) > 100 * SAME


def test_too_many_sequences(batch: Batch) -> None:
    for _ in range(5):
        batch.start(batch.cache.sequence(), GREEDY)
    with pytest.raises(UsageError, match="all 5 places are taken; end a sequence, or raise max_sequences"):
        batch.start(batch.cache.sequence(), GREEDY)


@pytest.mark.parametrize("n", [0, 65])
def test_sizes_out_of_range(llm: LLM, n: int) -> None:
    with pytest.raises(UsageError, match=f"max_sequences is {n}; expected 1 to 64"):
        make_batch(llm.model, n, 256, PAGE)


def test_a_sequence_that_is_full(llm: LLM) -> None:
    batch = make_batch(llm.model, 2, 64, PAGE)
    running = [begin(batch, random_ids(n, n, 131)) for n in (63, 5)]
    decode(batch, running)
    for full in (running, running[:1]):
        with pytest.raises(ContextLengthError, match="64 tokens, which is its context"):
            decode(batch, full)
    decode(batch, running[1:])


def test_no_room_for_a_batch(llm: LLM) -> None:
    with pytest.raises(OutOfDeviceMemoryError, match=r"64 sequences at once would need .*KV cache .* left beside the"):
        make_batch(llm.model, 64, 256, PAGE, 1 << 30)


def test_too_few_pages_are_an_error_that_loses_nothing(llm: LLM) -> None:
    batch = make_batch(llm.model, 2, 256, PAGE, 3)
    prompts = random_ids(100, 1, 131), random_ids(60, 2, 131)
    running = [begin(batch, prompt) for prompt in prompts]
    decode(batch, running, 4)
    with pytest.raises(OutOfDeviceMemoryError, match="0 of the KV cache's 3 are free"):
        decode(batch, running)
    batch.end(running[0][0])
    batch.cache.truncate(running[0][0], 0)
    decode(batch, running[1:], 3)
    assert running[1][1] == alone(llm, prompts[1], 8)
