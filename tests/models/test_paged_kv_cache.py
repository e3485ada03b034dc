"""A KV cache in pages against a contiguous one: the same bits, whichever pages hold them and whoever shares them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import POISON
from late_kernels import compile_when_used
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import OutOfDeviceMemoryError, UsageError
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState, Step
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

SHAPE = {**TINY_SHAPE, "max_position_embeddings": 2048}
# Not two query heads a KV head: what Intel's compiler makes for a GPU of them in float16 is wrong.
GPU_SHAPE = {**SHAPE, "num_attention_heads": 6}
PAGE, PAGES = 64, 16


@pytest.fixture(
    scope="module",
    params=["as it is", *(pytest.param(how, marks=pytest.mark.slow) for how in ("as a GPU", "in 8 bits"))],
)
def pair(
    request: pytest.FixtureRequest, default_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """The same model with a contiguous cache and with one in pages, for 768 tokens in both variants of the kernels."""
    shape = tmp_path_factory.mktemp("shape") / "config.json"
    shape.write_text(json.dumps(GPU_SHAPE if request.param == "as a GPU" else SHAPE))
    entry = default_device.entry
    if request.param == "as a GPU":
        entry = dataclasses.replace(entry, kind="gpu")
    options = {"device": entry, "max_context": 768, "kv_dtype": "q8_0" if request.param == "in 8 bits" else "auto"}
    with (
        llmcl.load_random(str(shape), **options) as contiguous,  # type: ignore[arg-type]
        llmcl.load_random(str(shape), kv_page_tokens=PAGE, kv_pages=PAGES, **options) as paged,  # type: ignore[arg-type]
    ):
        yield contiguous, paged


@pytest.fixture
def cache(pair: tuple[LLM, LLM]) -> PagedKVCache:
    """The paged cache, all its pages free, in shuffled order and filled with NaN."""
    llm = pair[1]
    cache = llm.model.cache
    assert isinstance(cache, PagedKVCache)
    cache.truncate(llm.sequence, 0)
    assert len(cache.free()) == PAGES
    for page in np.random.default_rng(1).permutation(PAGES):
        cache.order.move_to_end(page)
    for buffer in cache.buffers():
        llm.device.fill(buffer, POISON)
    return cache


def random_ids(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, SHAPE["vocab_size"], n)]


def extend(llm: LLM, sequence: SequenceState, ids: list[int], *, decode: bool = False) -> np.ndarray:
    """Logits after `ids`, appended to the sequence by the prefill or by the decode kernels."""
    if decode:
        for token in ids:
            llm.model.decode_token(sequence, token)
    else:
        llm.model.prefill(sequence, ids)
    return llm.device.read(llm.model.act.logits, np.float32, (llm.config.vocab_size,))


def expected(llm: LLM, *parts: tuple[list[int], bool]) -> np.ndarray:
    """The same on the contiguous cache, from the beginning: (ids, by decode) each."""
    llm.model.cache.truncate(llm.sequence, 0)
    for ids, decode in parts:
        logits = extend(llm, llm.sequence, ids, decode=decode)
    return logits


def test_logits_are_those_of_a_contiguous_cache(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    ids = random_ids(700)
    np.testing.assert_array_equal(paged.logits(ids), contiguous.logits(ids))
    assert paged.sequence.pages != sorted(paged.sequence.pages)
    more = random_ids(68, seed=1)
    actual = extend(paged, paged.sequence, more, decode=True)
    assert np.all(np.isfinite(actual)) and paged.sequence.position == 768
    # `logits` takes chunks of its own, so the reference does as well.
    np.testing.assert_array_equal(actual, extend(contiguous, contiguous.sequence, more, decode=True))


def test_generation_is_that_of_a_contiguous_cache(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    answers = [
        llm.generate(random_ids(50), max_tokens=100, temperature=1.0, seed=4, ignore_eos=True).token_ids for llm in pair
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 100


def test_a_fork_shares_pages_and_diverges(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    prefix, a, b = random_ids(150), random_ids(90, seed=1), random_ids(70, seed=2)
    trunk = cache.sequence()
    extend(paged, trunk, prefix)
    fork = cache.fork(trunk)
    assert fork.pages == trunk.pages and len(cache.free()) == PAGES - 3
    np.testing.assert_array_equal(extend(paged, fork, b, decode=True), expected(contiguous, (prefix, False), (b, True)))
    assert fork.pages[:2] == trunk.pages[:2] and fork.pages[2] != trunk.pages[2]
    np.testing.assert_array_equal(extend(paged, trunk, a), expected(contiguous, (prefix, False), (a, False)))
    assert len(cache.free()) == PAGES - 2 - 2 - 2
    more = random_ids(20, seed=3)
    np.testing.assert_array_equal(
        extend(paged, fork, more), expected(contiguous, (prefix, False), (b, True), (more, False))
    )


def test_a_fork_at_the_end_of_a_page_copies_nothing(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    trunk = cache.sequence()
    extend(pair[1], trunk, random_ids(2 * PAGE))
    fork = cache.fork(trunk)
    extend(pair[1], fork, [5], decode=True)
    assert fork.pages[:2] == trunk.pages and len(cache.free()) == PAGES - 3


def test_going_back_into_a_shared_page_leaves_the_other_alone(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    ids, other = random_ids(120), random_ids(30, seed=1)
    trunk = cache.sequence()
    extend(paged, trunk, ids)
    fork = cache.fork(trunk)
    cache.truncate(fork, 40)
    extend(paged, fork, other)
    np.testing.assert_array_equal(
        extend(paged, trunk, other, decode=True), expected(contiguous, (ids, False), (other, True))
    )


def test_sequences_take_turns(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    texts = [random_ids(100 + 10 * i, seed=i) for i in range(3)]
    sequences = [cache.sequence() for _ in texts]
    for text, sequence in zip(texts, sequences, strict=True):
        extend(paged, sequence, text[:60])
    last = []
    for at in range(60, 100):
        last = [extend(paged, s, [t[at]], decode=True) for t, s in zip(texts, sequences, strict=True)]
    for text, logits in zip(texts, last, strict=True):
        np.testing.assert_array_equal(logits, expected(contiguous, (text[:60], False), (text[60:100], True)))


def test_free_pages_are_used_again_whatever_they_hold(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    kept, ids = random_ids(130), random_ids(500, seed=1)
    sequence, gone = cache.sequence(), cache.sequence()
    extend(paged, gone, random_ids(500, seed=2))
    extend(paged, sequence, kept[:100])
    free_before = len(cache.free())
    extend(paged, gone, random_ids(20, seed=3))
    used = gone.pages
    del gone
    assert len(cache.free()) > free_before
    page_bytes = PAGE * cache.shape.row_bytes
    poison = np.full(page_bytes // 2, np.float16(np.nan))
    for buffer in cache.buffers():
        for head in range(2):
            for page in used:
                paged.device.write(buffer, poison, (head * PAGES + page) * page_bytes)
    new = cache.sequence()
    np.testing.assert_array_equal(extend(paged, new, ids), expected(contiguous, (ids, False)))
    assert set(new.pages) & set(used)
    np.testing.assert_array_equal(
        extend(paged, sequence, kept[100:], decode=True), expected(contiguous, (kept[:100], False), (kept[100:], True))
    )


def test_an_exhausted_pool_is_an_error_that_changes_nothing(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    paged = pair[1]
    first, second = cache.sequence(), cache.sequence()
    extend(paged, first, random_ids(700))
    with pytest.raises(OutOfDeviceMemoryError, match=r"need 6 pages of 64 tokens, but 5 of .* 16 are free.*kv_pages"):
        extend(paged, second, random_ids(321))
    assert second.pages == [] and second.token_ids == [] and len(cache.free()) == 5
    extend(paged, second, random_ids(320))
    with pytest.raises(OutOfDeviceMemoryError, match="need 1 page of 64 tokens, but 0"):
        extend(paged, second, [5], decode=True)
    cache.truncate(first, 64)
    extend(paged, second, [5], decode=True)
    assert len(cache.free()) == PAGES - 1 - 6


def test_prompts_share_what_a_living_sequence_holds(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    paged = pair[1]
    ids = random_ids(200)
    held = cache.sequence()
    extend(paged, held, ids)
    new = cache.sequence()
    cache.share_prefix(new, [*ids[:130], 7, 8])
    assert new.token_ids == ids[:130] and new.pages == held.pages[:3]


def test_full_pages_that_a_text_left_are_found(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    ids, other = random_ids(200, seed=10), random_ids(60, seed=11)
    first = cache.sequence()
    extend(paged, first, ids)
    left = first.pages[:3]
    cache.truncate(first, 0)
    assert len(cache.free()) == PAGES
    for prompt, n_pages in ([*ids[:150], *other], 2), ([*ids, *other], 3), (ids[:192], 2), (ids[:10], 0), (other, 0):
        new = cache.sequence()
        cache.share_pages(new, prompt)
        assert new.pages == left[:n_pages] and new.token_ids == prompt[: n_pages * PAGE]
    prompt = [*ids, *other]
    cache.share_pages(new, prompt)
    assert cache.missing_pages(new, len(prompt) - 192) == 2
    np.testing.assert_array_equal(extend(paged, new, prompt[192:]), expected(contiguous, (prompt, False)))
    both = cache.sequence()
    cache.share_prefix(both, prompt)  # a living sequence holds more
    assert both.token_ids == prompt and both.pages == new.pages


def test_a_text_that_nothing_refers_to_any_more_is_found(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    paged = pair[1]
    ids = random_ids(140, seed=20)
    gone = cache.sequence()
    extend(paged, gone, ids)
    extend(paged, gone, [5], decode=True)
    left = gone.pages[:2]
    del gone
    new = cache.sequence()
    cache.share_prefix(new, ids)
    assert new.pages == left and new.token_ids == ids[:128]


def test_pages_are_given_out_in_order_of_last_use_the_end_of_a_text_first(
    pair: tuple[LLM, LLM], cache: PagedKVCache
) -> None:
    paged = pair[1]
    texts = [random_ids(4 * PAGE, seed=30 + i) for i in range(4)]
    for text in texts:  # they fill the pool
        sequence = cache.sequence()
        extend(paged, sequence, text)
        cache.truncate(sequence, 0)

    def held(text: list[int]) -> int:
        found = cache.sequence()
        cache.share_pages(found, [*text, 5])
        n = len(found.pages)
        cache.truncate(found, 0)
        return n

    assert [held(text) for text in texts] == [4, 4, 4, 4]
    held(texts[0])
    taking = cache.sequence()
    extend(paged, taking, random_ids(3 * PAGE, seed=40))
    assert [held(text) for text in texts] == [4, 1, 4, 4]
    held(texts[0])
    extend(paged, taking, random_ids(5 * PAGE, seed=41))
    assert [held(text) for text in texts] == [4, 0, 0, 4]


def test_a_page_that_is_written_again_is_not_found(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    contiguous, paged = pair
    ids, other = random_ids(150, seed=50), random_ids(30, seed=51)
    sequence, new = cache.sequence(), cache.sequence()
    extend(paged, sequence, ids)
    cache.truncate(sequence, 100)  # into its second page
    cache.share_pages(new, ids)
    assert len(new.pages) == 2
    extend(paged, sequence, other)  # so this has a copy of it
    assert sequence.pages[1] != new.pages[1]
    cache.truncate(sequence, 100)
    cache.truncate(new, 100)
    extend(paged, sequence, other)
    cache.truncate(sequence, 0)
    extend(paged, new, other, decode=True)  # nobody else has it now: it is written over
    cache.share_pages(sequence, ids)
    assert len(sequence.pages) == 1
    contiguous.model.cache.truncate(contiguous.sequence, 0)
    extend(contiguous, contiguous.sequence, ids)  # in one piece, as that page was: short ones have other products
    contiguous.model.cache.truncate(contiguous.sequence, 64)
    np.testing.assert_array_equal(extend(paged, sequence, ids[64:]), extend(contiguous, contiguous.sequence, ids[64:]))


def test_what_a_step_has_not_written_yet_is_not_found(pair: tuple[LLM, LLM], cache: PagedKVCache) -> None:
    paged = pair[1]
    ids = random_ids(2 * PAGE + 1, seed=60)
    sequence, new = cache.sequence(), cache.sequence()
    extend(paged, sequence, ids[:PAGE])
    cache.prepare(paged.model.step, sequence, PAGE)
    cache.share_pages(new, ids)
    assert len(sequence.pages) == 2 and len(new.pages) == 1


def test_sizes_that_make_no_sense() -> None:
    for options in (
        {"kv_page_tokens": 48},
        {"kv_page_tokens": 0},
        {"kv_page_tokens": 64, "kv_pages": 0},
        {"kv_pages": 4},
    ):
        with pytest.raises(UsageError, match=r"kv_page"):
            llmcl.load_random("smollm2-135m", **options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_conversations_on_the_demo_model(smollm2: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversation keeps its place: a turn prefills only what is new and answers the same."""
    system = {"system_prompt": "You are a pirate. Answer in one short sentence."}
    options = {"activation_dtype": "float32", "kv_dtype": "float32", "max_context": 1024}
    with llmcl.load("smollm2", device=smollm2.device.entry.index, kv_page_tokens=64, **options) as paged:
        ids = smollm2.encode("Why is the sky blue?")
        np.testing.assert_array_equal(paged.logits(ids), smollm2.logits(ids))

        def said(llm: LLM) -> list[tuple[str, int]]:
            def turn(chat: llmcl.Chat, text: str) -> tuple[str, int]:
                prefilled = 0
                prefill = llm.model._prefill_steps

                def counted(sequence: SequenceState, ids: Sequence[int], *options: Any, **named: Any) -> Iterator[Step]:
                    nonlocal prefilled
                    prefilled += len(ids)
                    return prefill(sequence, ids, *options, **named)

                monkeypatch.setattr(llm.model, "_prefill_steps", counted)
                text = "".join(piece.text for piece in chat.send(text, max_tokens=12, **system))
                monkeypatch.undo()
                return text, prefilled

            first, second = llm.chat(), llm.chat()
            turns = [turn(first, "Name a sea."), turn(second, "Name a fish.")]
            fork = first.fork()
            turns += [turn(fork, "And an island?"), turn(first, "And a ship?"), turn(second, "Is it blue?")]
            return turns

        with_pages, without = said(paged), said(smollm2)
        assert [text for text, _ in with_pages] == [text for text, _ in without]
        assert max(n for _, n in with_pages[1:]) < 25 < max(n for _, n in without[1:]), (with_pages, without)
