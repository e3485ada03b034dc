"""How many tokens are drafted: on made-up costs, drafts come to the best length, and stop where they lose."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from llmcl.ops.sample import SamplingParams
from llmcl.speculation.draft_length import FIRST_LENGTH, LENGTHS, LONGEST_PAUSE, DraftLength
from llmcl.speculation.drafters import PromptLookup

Cost = Callable[[int], float]  # of a step with a draft of so many tokens, in steps without one


def flat(n: int) -> float:
    return 1.1


def steep(n: int) -> float:
    return 3.7 + n / 15


def drafting(n: int) -> float:
    """With a draft model that takes a fifth of a step."""
    return 1.1 + 0.2 * n


def speed(share: float, cost: Cost, *, watches: bool, n_tokens: int = 2000, found: float = 1.0) -> float:
    """Tokens in the time of a step without a draft. A draft can be made with probability `found`, and a token of it is
    right with probability `share` where all before it were.
    """
    rng = random.Random(1)
    length = DraftLength(LENGTHS[-1], watches=watches)
    tokens, time = 0, 0.0

    def right(n: int) -> int:
        return next((i for i in range(n) if rng.random() >= share), n)

    while tokens < n_tokens:
        n = length.choose()
        if n and rng.random() < found:
            seconds, n_right = cost(n), right(n)
            length.verified(n, n_right, seconds)
            tokens += 1 + n_right
        else:
            seconds = 1.0
            length.stepped(seconds)
            if n == 0 and watches and tokens % FIRST_LENGTH == 0 and rng.random() < found:
                length.watched(FIRST_LENGTH, right(FIRST_LENGTH))
            tokens += 1
        time += seconds
    return tokens / time


def best(share: float, cost: Cost) -> float:
    expected = {n: sum(share**i for i in range(n + 1)) / cost(n) for n in LENGTHS}
    return max(1.0, *expected.values())


@pytest.mark.parametrize("cost", [flat, steep, drafting])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("watches", [False, True])
def test_drafts_come_close_to_the_best_length_and_never_lose(share: float, cost: Cost, watches: bool) -> None:
    found = speed(share, cost, watches=watches)
    assert found >= 0.97
    assert found >= 0.85 * best(share, cost)


@pytest.mark.parametrize(("share", "least"), [(0.0, 0.95), (0.7, 1.2), (0.85, 1.55)])
def test_a_draft_model_is_tried_in_each_text(share: float, least: float) -> None:
    """Its drafts cost so much that half of the tokens right would not pay: a GPU's model of 1B for one of 8B."""
    rng = random.Random(2)
    length = DraftLength(LENGTHS[-1], watches=False)
    tokens, time = 0, 0.0
    for _ in range(10):
        length.begin()
        end = tokens + 200
        while tokens < end:
            n = length.choose()
            if n:
                n_right = next((i for i in range(n) if rng.random() >= share), n)
                length.verified(n, n_right, 1.3 + 0.2 * n)
                tokens, time = tokens + 1 + n_right, time + 1.3 + 0.2 * n
            else:
                length.stepped(1.0)
                tokens, time = tokens + 1, time + 1
    assert tokens / time >= least


@pytest.mark.parametrize("cost", [flat, steep])
def test_a_text_that_seldom_repeats_itself_loses_nothing(cost: Cost) -> None:
    assert speed(0.1, cost, watches=True, n_tokens=200, found=0.05) >= 0.97


def test_nothing_is_drafted_before_a_step_was_timed() -> None:
    length = DraftLength(15, watches=True)
    assert length.choose() == 0
    length.stepped(1.0)
    assert length.choose() == FIRST_LENGTH


def test_a_pause_ends_with_a_try_and_doubles() -> None:
    length, pauses = DraftLength(15, watches=False), []
    length.stepped(1.0)
    for _ in range(8):
        assert length.choose() == FIRST_LENGTH and not length.paused
        length.verified(FIRST_LENGTH, 0, 5.0)
        pauses.append(next(i for i in itertools.count() if not length.paused or length.stepped(1.0)))
    assert pauses == [16, 32, 64, 128, 256, 512, 512, 512]
    length.verified(FIRST_LENGTH, FIRST_LENGTH, 1.0)
    assert not length.paused and length.choose() > 0


def test_a_cost_that_was_measured_in_a_bad_moment_is_forgotten() -> None:
    length = DraftLength(15, watches=True)
    length.stepped(1.0)
    length.verified(FIRST_LENGTH, FIRST_LENGTH, 100.0)
    assert length.choose() == 0
    for _ in range(LONGEST_PAUSE):
        length.stepped(1.0)
    assert length.choose() == FIRST_LENGTH


def test_a_context_without_room_for_a_draft_has_none() -> None:
    length = DraftLength(0, watches=True)
    length.stepped(1.0)
    assert length.choose() == 0


def lookup(text: list[int]) -> PromptLookup:
    drafter = PromptLookup()
    drafter.begin(text, SamplingParams(seed=0))
    return drafter


def test_prompt_lookup_copies_what_followed_the_latest_and_longest_match() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 9, 3, 4, 5, 8, 8, 1, 2, 3, 4, 5]
    assert lookup(text).draft(0, 4) == [6, 7, 9, 3]  # five tokens, and not the latest three
    assert lookup(text[2:]).draft(0, 4) == [8, 8, 1, 2]
    assert lookup(text).draft(1, 2) == [7, 9]  # the token in between has not been read
    assert lookup(text[:8]).draft(0, 4) == []
    assert lookup([1, 2]).draft(0, 4) == []


def test_prompt_lookup_goes_on_with_what_repeats() -> None:
    assert lookup([5, 1, 2, 1, 2, 1, 2]).draft(0, 5) == [1, 2, 1, 2, 1]
    assert lookup([7, 7, 7, 7]).draft(1, 3) == [7, 7, 7]


def test_prompt_lookup_knows_the_answer_too() -> None:
    drafter = lookup([1, 2, 3])
    for token in (4, 5, 1, 2, 3):
        assert drafter.draft(0, 3) == []
        drafter.push(token)
    assert drafter.draft(0, 3) == [4, 5, 1]
