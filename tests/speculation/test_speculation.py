"""Speculative decoding: the same tokens with drafts as without, whoever drafts, however wrong the drafts are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import FAMILIES
from helpers import gemma2_config, random_weights, save_folder, small_config
from late_kernels import compile_when_used
from parameters import each_value, slow_except
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.engine.speculation import NO_SPECULATION
from llmcl.errors import DeviceError, UsageError
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.speculation.draft_length import FixedLength
from llmcl.speculation.drafters import Drafter, DraftModel, PromptLookup
from llmcl.speculation.drafting import Drafting

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

VOCAB = 24  # few, so that texts repeat themselves
SHAPE = {**TINY_SHAPE, "vocab_size": VOCAB, "max_position_embeddings": 2048}
CONTEXT = 192
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.4, "seed": 5},
    "truncated": {"temperature": 0.8, "top_k": 5, "top_p": 0.95, "seed": 3},
    "penalty": {"repeat_penalty": 1.3},
    "sampled with a penalty": {"temperature": 0.5, "repeat_penalty": 1.2, "seed": 4},
    "counted": {"presence_penalty": 0.2, "frequency_penalty": 0.1},
}


class Repeated(Drafter):
    """Drafts the same tokens each time: now and then some are right."""

    is_free = True

    def __init__(self, tokens: Sequence[int]):
        self.tokens = tokens

    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        pass

    def push(self, token: int) -> None:
        pass

    def another(self) -> Repeated:
        return self

    def draft(self, unread: int, most: int) -> list[int]:
        return list(self.tokens[:most])


def prompt(n: int = 30, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, VOCAB, n)]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


@pytest.fixture(scope="module")
def llm(either_entry: DeviceEntry, shape: str) -> Iterator[LLM]:
    """In float32."""
    with llmcl.load_random(shape, device=either_entry, dtype="float32", max_context=CONTEXT) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.fixture(scope="module")
def draft_llm(llm: LLM, shape: str) -> LLM:
    """Another model with the same vocabulary, on the same device."""
    return llmcl.load_random(shape, device=llm.device, dtype="float32", max_context=CONTEXT, seed=1)


@pytest.fixture(autouse=True)
def plain_again(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").speculation = NO_SPECULATION


def answer(llm: LLM, drafting: Drafting | None, ids: list[int] | None = None, n: int = 100, **options: Any) -> Any:
    llm.speculation = drafting or NO_SPECULATION
    return llm.generate(ids or prompt(), max_tokens=n, ignore_eos=True, **options)


@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS, "greedy", "sampled with a penalty"))
def test_prompt_lookup_gives_the_same_tokens(sampling: str, llm: LLM) -> None:
    plain = answer(llm, None, **SAMPLINGS[sampling])
    drafted = answer(llm, Drafting(llm.model, PromptLookup(), FixedLength(7)), **SAMPLINGS[sampling])
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.rows_per_step is plain.stats.tokens_per_step is None
    assert drafted.stats.rows_per_step >= drafted.stats.tokens_per_step >= 1
    if sampling == "greedy":  # which repeats itself soon
        assert drafted.stats.tokens_per_step > 1.5
        assert drafted.stats.arrivals < drafted.stats.generated_tokens and drafted.stats.tbt_ms["min"] > 0


@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS, "greedy", "sampled with a penalty"))
def test_a_draft_model_gives_the_same_tokens(sampling: str, llm: LLM, draft_llm: LLM) -> None:
    plain = answer(llm, None, **SAMPLINGS[sampling])
    drafted = answer(
        llm, Drafting(llm.model, DraftModel(draft_llm.model, VOCAB), FixedLength(4)), **SAMPLINGS[sampling]
    )
    assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize("sampling", slow_except(SAMPLINGS, "truncated"))
def test_a_draft_model_with_the_same_weights_is_right_each_time(sampling: str, llm: LLM, shape: str) -> None:
    """It samples with the same noise."""
    twin = llmcl.load_random(shape, device=llm.device, dtype="float32", max_context=CONTEXT)
    drafting = Drafting(llm.model, DraftModel(twin.model, VOCAB), FixedLength(4))
    drafted = answer(llm, drafting, n=101, **SAMPLINGS[sampling])
    assert drafted.token_ids == answer(llm, None, n=101, **SAMPLINGS[sampling]).token_ids
    assert drafted.stats.rows_per_step == drafted.stats.tokens_per_step == 5


@each_value(("sampling", SAMPLINGS), ("length", [1, 2, 15]))
def test_wrong_drafts_change_nothing(length: int, sampling: str, llm: LLM) -> None:
    """Among them tokens that the penalty would know if they had been accepted."""
    plain = answer(llm, None, n=60, **SAMPLINGS[sampling])
    likely = [token for token, _ in Counter(plain.token_ids).most_common()]
    tokens = [likely[i % len(likely)] for i in range(length)]
    drafted = answer(llm, Drafting(llm.model, Repeated(tokens), FixedLength(length)), n=60, **SAMPLINGS[sampling])
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.tokens_per_step < drafted.stats.rows_per_step


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
def test_an_answer_has_no_token_too_many(n: int, llm: LLM) -> None:
    drafting = Drafting(llm.model, PromptLookup(), FixedLength(7))
    whole = answer(llm, None, n=20).token_ids
    assert answer(llm, drafting, n=n).token_ids == whole[:n]


@pytest.mark.parametrize("n_prompt", [CONTEXT - 40, CONTEXT - 1, CONTEXT])
def test_an_answer_fills_the_context(n_prompt: int, llm: LLM) -> None:
    ids = prompt(8) * (CONTEXT // 8)
    plain = answer(llm, None, ids[:n_prompt], n=1000)
    drafted = answer(llm, Drafting(llm.model, PromptLookup(), FixedLength(15)), ids[:n_prompt], n=1000)
    assert drafted.token_ids == plain.token_ids and len(plain.token_ids) == CONTEXT - n_prompt + 1


def test_a_draft_model_with_a_shorter_context_ends_to_draft(llm: LLM, shape: str) -> None:
    short = llmcl.load_random(shape, device=llm.device, dtype="float32", max_context=64)
    drafted = answer(llm, Drafting(llm.model, DraftModel(short.model, VOCAB), FixedLength(4)))
    assert drafted.token_ids == answer(llm, None).token_ids
    assert 1 < drafted.stats.tokens_per_step < 2


def test_an_answer_that_is_closed_leaves_what_the_next_can_use(llm: LLM, draft_llm: LLM) -> None:
    """At any of the eight tokens that a step may accept together."""
    whole = answer(llm, None).token_ids
    for drafter in (PromptLookup(), DraftModel(draft_llm.model, VOCAB)):
        llm.speculation = Drafting(llm.model, drafter, FixedLength(7))
        for n in range(20, 29):
            sequence = llm.model.cache.sequence()
            stream = llm.stream(prompt(), max_tokens=100, ignore_eos=True, sequence=sequence)
            assert [next(stream).token_id for _ in range(n)] == whole[:n]
            stream.close()
            held = sequence.token_ids
            assert held == (prompt() + whole)[: len(held)] and len(held) >= len(prompt()) + n - 1
        further = llm.stream(prompt() + whole[:15], max_tokens=85, ignore_eos=True, sequence=sequence)
        assert [piece.token_id for piece in further] == whole[15:]


def test_the_host_reads_four_bytes_a_row_and_four_more(llm: LLM) -> None:
    """And of a step without a draft (here only the last, after which no more is wanted) four, as ever."""
    drafting = Drafting(llm.model, Repeated([5] * 7), FixedLength(7))
    stats = answer(llm, drafting, n=50).stats
    verified = drafting.counted
    plain_steps = 49 - verified.tokens
    assert plain_steps <= 1 and verified.rows > 4 * verified.steps
    assert stats.device_to_host_bytes_per_token * 49 == 4 * (verified.rows + verified.steps + plain_steps)
    assert stats.host_to_device_bytes_per_token * 49 == 4 * 16 * verified.steps


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "q8_0"])
def test_pages(kv_dtype: str, default_device: Device, shape: str) -> None:
    """Rejected rows may be the first of a page, and a page that two conversations share is copied before."""
    options = {"device": default_device.entry, "dtype": "float32", "kv_dtype": kv_dtype, "max_context": CONTEXT}
    with llmcl.load_random(shape, kv_page_tokens=64, kv_pages=9, **options) as paged:  # type: ignore[arg-type]
        cache = paged.model.cache
        assert isinstance(cache, PagedKVCache)
        for page in [*cache.order][::-1]:
            cache.order.move_to_end(page)
        first, ids = cache.sequence(), prompt(60, 4)  # after which no choice is close: drafts add up in another order
        plain = [piece.token_id for piece in paged.stream(ids, max_tokens=100, ignore_eos=True, sequence=first)]
        paged.speculation = Drafting(paged.model, Repeated([plain[-1]] * 15), FixedLength(15))
        second = cache.fork(first)
        held = paged.model.device.read(cache.k[0], np.uint8, (cache.k[0].nbytes,))
        drafted = [piece.token_id for piece in paged.stream(ids, max_tokens=100, ignore_eos=True, sequence=second)]
        assert drafted == plain
        page_bytes = held.size // len(cache.order) // cache.shape.n_kv_heads
        pages = held.reshape(cache.shape.n_kv_heads, len(cache.order), page_bytes)
        now = paged.model.device.read(cache.k[0], np.uint8, (cache.k[0].nbytes,)).reshape(pages.shape)
        np.testing.assert_array_equal(now[:, first.pages], pages[:, first.pages])
        assert len(second.pages) <= cache.pages_for(second.position + 16)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["windows", "gemma2", "gemma4"])
def test_sliding_windows(name: str, tmp_path: Path, default_device: Device) -> None:
    if name == "gemma4":  # whose late layers read the keys of others
        config = FAMILIES["gemma4_text-given"]
    else:
        config = gemma2_config((16, None)) if name == "gemma2" else small_config("mistral", windows=(16, 16))
    folder = save_folder(tmp_path, config, random_weights(config, seed=2))
    with llmcl.load(str(folder), device=default_device, max_context=CONTEXT) as llm:
        plain = answer(llm, None)
        drafted = answer(llm, Drafting(llm.model, PromptLookup(), FixedLength(7)))
        assert drafted.token_ids == plain.token_ids
        wrong = answer(llm, Drafting(llm.model, Repeated(plain.token_ids[:15]), FixedLength(15)))
        assert wrong.token_ids == plain.token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "float32"), ("bfloat16", "float16"), ("q4_0", "q8_0")])
def test_on_every_device(device: Device, tmp_path: Path, dtype: str, kv_dtype: str) -> None:
    """With the shape and the types of test_batch.py, whose kernels serve here, too."""
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "activation_dtype": "float32", "max_context": CONTEXT}
    with llmcl.load_random(str(shape), device=device, **options) as llm:  # type: ignore[arg-type]
        plain = answer(llm, None, n=40, **SAMPLINGS["sampled with a penalty"])
        drafting = Drafting(llm.model, Repeated(plain.token_ids[:7]), FixedLength(7))
        drafted = answer(llm, drafting, n=40, **SAMPLINGS["sampled with a penalty"])
        same = [a == b for a, b in zip(drafted.token_ids, plain.token_ids, strict=True)]
        assert all(same) or (dtype != "float32" and all(same[:8]))  # other kernels round in another order


def test_sampled_tokens_have_the_models_probabilities(llm: LLM) -> None:
    """Chi-square over the vocabulary: of the first token, of the second, which is drafted, and of the one after that.

    With the seeds fixed it is no matter of chance. 60 is beyond the 0.99999 quantile of 23 degrees of freedom.
    """
    temperature, draws, text = 0.7, 600, prompt(20)
    likeliest: list[int] = []
    for _ in range(2):
        likeliest.append(int(np.argmax(llm.logits(text + likeliest)[-1])))
    llm.speculation = drafting = Drafting(llm.model, Repeated(likeliest[1:]), FixedLength(1))
    sequence = llm.model.cache.sequence()
    drawn = np.zeros((3, VOCAB))
    for seed in range(draws):
        options = {"temperature": temperature, "seed": seed, "ignore_eos": True, "sequence": sequence}
        for i, piece in enumerate(llm.stream(text, max_tokens=3, **options)):
            drawn[i, piece.token_id] += 1
            if i == 2 or piece.token_id != likeliest[i]:
                break
    assert drawn[2].sum() > 30 and drafting.counted.rows > drafting.counted.tokens
    llm.speculation = NO_SPECULATION
    for i, counts in enumerate(drawn):
        logits = llm.logits(text + likeliest[:i])[-1].astype(np.float64) / temperature
        expected = np.exp(logits - logits.max())
        expected *= counts.sum() / expected.sum()
        often = expected >= 5  # the others count together, as the test asks for
        found, wanted = (np.append(bins[often], bins[~often].sum()) for bins in (counts, expected))
        assert float(np.sum((found - wanted) ** 2 / np.maximum(wanted, 1e-9))) < 60


def test_a_row_that_has_no_token_ends_the_answer_with_the_cause(shape: str, default_device: Device) -> None:
    with llmcl.load_random(shape, device=default_device.entry, dtype="float32", max_context=CONTEXT) as llm:  # type: ignore[arg-type]
        llm.speculation = Drafting(llm.model, Repeated([5] * 3), FixedLength(3))
        stream = llm.stream(prompt(), max_tokens=20, ignore_eos=True)
        next(stream)
        llm.device.fill(llm.model.weights.final_norm, np.float32(np.nan))
        with pytest.raises(DeviceError, match="no token can be chosen: all 24 logits are NaN"):
            list(stream)


@pytest.mark.slow
@each_value(("drafter", ["lookup", "model", "wrong"]), ("sampling", ["greedy", "sampled with a penalty"]))
def test_an_engine_drafts_for_a_text_that_is_alone(drafter: str, sampling: str, llm: LLM, draft_llm: LLM) -> None:
    """And the ids stay the same when others come and go, and where the pool has no page for a draft."""
    options: dict[str, Any] = {"ignore_eos": True, **SAMPLINGS[sampling]}
    asked = [(prompt(), 130), (prompt(40, 1), 25), (prompt(70, 2), 25)]
    plain = [answer(llm, None, ids, n=n, **SAMPLINGS[sampling]).token_ids for ids, n in asked]
    drafters = {"lookup": PromptLookup(), "model": DraftModel(draft_llm.model, VOCAB), "wrong": Repeated([5] * 15)}
    llm.speculation = Drafting(llm.model, drafters[drafter], FixedLength(15 if drafter == "wrong" else 6))
    for n_pages in (3, 20):
        with llm.engine(max_sequences=3, max_step_tokens=40, kv_pages=n_pages) as engine:
            alone = engine.submit(asked[0][0], max_tokens=130, **options).result()
            assert alone.token_ids == plain[0]
            assert alone.stats.drafted_tokens > alone.stats.accepted_tokens >= 0
            assert alone.stats.device_to_host_bytes_per_token is None  # what steps move is no request's own
            first = engine.submit(asked[0][0], max_tokens=130, **options)
            found = [next(first).token_id for _ in range(20)]
            others = [engine.submit(ids, max_tokens=n, **options) for ids, n in asked[1:]]
            assert [other.result().token_ids for other in others] == plain[1:]
            gone = engine.submit(asked[2][0], max_tokens=100, **options)
            next(gone)
            gone.cancel()
            assert found + [piece.token_id for piece in first] == plain[0]
            left = engine.submit(asked[0][0], max_tokens=130, **options)
            assert [next(left).token_id for _ in range(45)] == plain[0][:45]
            left.cancel()
            assert engine.submit(asked[1][0], max_tokens=25, **options).result().token_ids == plain[1]
            assert engine.submit(asked[0][0], max_tokens=4, logprobs=1, **options).result().token_ids == plain[0][:4]


@each_value(("sampling", SAMPLINGS), ("drafter", ["lookup", "wrong"]))
def test_an_engine_drafts_for_several_texts(drafter: str, sampling: str, llm: LLM) -> None:
    """Each gets the ids that it has alone, with drafts of several lengths beside rows without, and with few pages."""
    options: dict[str, Any] = {"ignore_eos": True, **SAMPLINGS[sampling]}
    asked = [(prompt(30, i) + prompt(20, 9), n) for i, n in enumerate((60, 40, 50, 7))]
    plain = [answer(llm, None, ids, n=n, **SAMPLINGS[sampling]).token_ids for ids, n in asked]
    drafters = {"lookup": PromptLookup(), "wrong": Repeated(plain[0][:15])}
    llm.speculation = Drafting(llm.model, drafters[drafter], FixedLength(15 if drafter == "wrong" else 6))
    for n_pages in (5, 40):
        with llm.engine(max_sequences=4, max_step_tokens=40, kv_pages=n_pages) as engine:
            others = [engine.submit(ids, max_tokens=n, **options) for ids, n in asked[1:]]
            first = engine.submit(asked[0][0], max_tokens=60, **options)
            found = [next(first).token_id for _ in range(20)]
            gone = engine.submit(asked[2][0], max_tokens=100, **options)
            next(gone)
            gone.cancel()
            answers = [other.result() for other in others]
            assert [of.token_ids for of in answers] == plain[1:]
            assert found + [piece.token_id for piece in first] == plain[0]
    drafted = [of.stats for of in answers if of.stats.drafted_tokens]
    assert len(drafted) >= 2
    assert all(of.drafted_tokens >= of.accepted_tokens >= 0 for of in drafted)


def test_an_answer_with_more_wishes_ends_drafts_beside_it(llm: LLM) -> None:
    llm.speculation = Drafting(llm.model, Repeated([5] * 7), FixedLength(7))
    plain = [answer(llm, None, prompt(30, i), n=40).token_ids for i in range(2)]
    llm.speculation = Drafting(llm.model, Repeated([5] * 7), FixedLength(7))
    with llm.engine(max_sequences=2) as engine:
        asked = [engine.submit(prompt(30, i), max_tokens=40, ignore_eos=True, logprobs=i or None) for i in range(2)]
        found = [of.result() for of in asked]
    assert [of.token_ids for of in found] == plain
    assert found[1].stats.drafted_tokens is None


def test_an_engine_without_company_shows_what_drafts_bring(llm: LLM, shape: str) -> None:
    twin = llmcl.load_random(shape, device=llm.device, dtype="float32", max_context=CONTEXT)
    llm.speculation = Drafting(llm.model, DraftModel(twin.model, VOCAB), FixedLength(4))
    with llm.engine(max_sequences=2) as engine:
        stats, metrics = engine.submit(prompt(), max_tokens=101, ignore_eos=True).result().stats, engine.metrics
    assert (metrics.drafted_tokens, metrics.accepted.sum) == (stats.drafted_tokens, stats.accepted_tokens)
    # A device that runs ahead has the first step before the first token is read, so that step has no draft, and the
    # last draft is of 3 tokens, not 4.
    n_plain = int(llm.device.runs_ahead)
    assert (sum(metrics.accepted.counts), metrics.accepted.counts[4]) == (20, 20 - n_plain)
    assert stats.accepted_tokens == stats.drafted_tokens == 80 - n_plain
    assert stats.rows_per_step == stats.tokens_per_step == 100 / (20 + n_plain)


def test_a_batch_invariant_engine_does_not_draft(llm: LLM) -> None:
    llm.speculation = Drafting(llm.model, PromptLookup(), FixedLength(7))
    with llm.engine(max_sequences=2, batch_invariant=True) as engine:
        stats = engine.submit(prompt(), max_tokens=30, ignore_eos=True).result().stats
    assert stats.drafted_tokens is None


def test_both_ways_to_draft_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--prompt-lookup.*--draft-model.*'other'.*give one of the two"):
        llmcl.load("smollm2", prompt_lookup=True, draft_model="other")


def test_a_draft_model_with_another_vocabulary_is_refused(
    tmp_path_factory: pytest.TempPathFactory, default_device: Device
) -> None:
    config = small_config()
    folders = []
    for name in ("large", "small"):
        folder = save_folder(tmp_path_factory.mktemp(name), config, random_weights(config, seed=1))
        folders.append(folder)
    path = folders[1] / "tokenizer.json"
    path.write_text(path.read_text().replace('"Q":', '"Qu":').replace('"Q"', '"Qu"'))
    message = r"small\d+ \(99 tokens\).*large\d+ \(99\): token 53 is 'Qu', not 'Q'; give a smaller model"
    with pytest.raises(UsageError, match=message):
        llmcl.load(str(folders[0]), device=default_device, draft_model=str(folders[1]))
    with llmcl.load(str(folders[0]), device=default_device, draft_model=str(folders[0])) as llm:
        assert llm.generate("Hello", max_tokens=30, raw=True).stats.tokens_per_step is not None


@pytest.mark.slow
def test_the_demo_model_quotes_faster(smollm2: LLM) -> None:
    """It takes fewer steps; what these cost is another question (notes)."""
    text = "The lighthouse at Cape Varn was built in 1847 by a retired shipwright named Osvald Brekke."
    question = f"Repeat this sentence exactly:\n\n{text}"
    try:
        plain = answer(smollm2, None, smollm2.encode(question), n=28)
        drafted = answer(
            smollm2, Drafting(smollm2.model, PromptLookup(), FixedLength(7)), smollm2.encode(question), n=28
        )
    finally:
        smollm2.speculation = NO_SPECULATION
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.tokens_per_step > 2
    assert "tokens a step of" in drafted.stats.report() and "stalls" not in drafted.stats.report()
