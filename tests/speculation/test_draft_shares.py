"""How the rows of a step are shared by several texts' drafts: to those that are right, where steps with drafts pay."""

from __future__ import annotations

import pytest

from llmcl.speculation.draft_length import LONGEST_PAUSE, Acceptance
from llmcl.speculation.draft_shares import DraftShares


def shares_of(plain_s: float, **draft_s: float) -> DraftShares:
    """Steps of two rows take plain_s, steps with drafts of up to 8, 16, .. rows draft_s: as rows8, rows16, ..."""
    shares = DraftShares(64)
    shares.stepped(2, plain_s)
    for name, seconds in draft_s.items():
        shares.verified(int(name.removeprefix("rows")), seconds)
    return shares


def test_nothing_is_drafted_before_a_plain_step_is_known() -> None:
    assert DraftShares(64).choose([0.9, 0.9], [15, 15]) == [0, 0]


def test_the_first_try_is_short() -> None:
    assert shares_of(1.0).choose([0.9, 0.5, 0.5], [15, 2, 0]) == [3, 2, 0]


@pytest.mark.parametrize(("cost", "drafts"), [(1.0, True), (2.9, True), (4.0, False)])
def test_drafts_are_verified_where_that_pays(cost: float, drafts: bool) -> None:
    shares = shares_of(1.0, rows8=cost, rows16=2 * cost, rows32=4 * cost, rows64=8 * cost)
    chosen = shares.choose([0.9, 0.9], [15, 15])
    assert (sum(chosen) > 0) == drafts and sum(chosen) + 2 <= 64


def test_rows_go_to_texts_whose_drafts_are_right() -> None:
    shares = shares_of(1.0, rows8=1.1, rows16=9.0, rows32=9.0, rows64=9.0)
    assert shares.choose([0.95, 0.1], [15, 15]) == [6, 0]
    assert shares.choose([0.95, 0.1], [4, 15]) == [4, 2]
    assert shares.choose([0.6, 0.6], [15, 15]) == [3, 3]
    assert sum(shares_of(1.0, rows8=1.01, rows16=9.0).choose([0.5] * 7, [15] * 7)) == 1


def test_more_rows_are_taken_where_they_cost_little() -> None:
    cheap = shares_of(1.0, rows8=1.1, rows16=1.2, rows32=1.3, rows64=1.4)
    assert sum(cheap.choose([0.95, 0.95], [15, 15])) == 30
    assert sum(cheap.choose([0.3, 0.3], [15, 15])) == 6


def test_times_of_drafts_are_forgotten_where_none_is_verified_for_long() -> None:
    shares = shares_of(1.0, rows8=9.0)
    assert shares.choose([0.9, 0.9], [15, 15]) == [0, 0]
    for _ in range(LONGEST_PAUSE):
        shares.stepped(2, 1.0)
    assert shares.choose([0.9, 0.9], [15, 15]) == [3, 3]


def test_no_more_rows_than_a_step_has() -> None:
    shares = DraftShares(10)
    shares.stepped(3, 1.0)
    for _ in range(2):
        chosen = shares.choose([0.9] * 3, [15] * 3)
        assert 0 < sum(chosen) <= 7
        shares.verified(3 + sum(chosen), 1.0)


def test_acceptance_follows_what_was_right_of_late() -> None:
    text = Acceptance()
    assert text.share == 0.5
    for _ in range(30):
        text.learn(3, 3)
    assert text.share > 0.9
    for _ in range(30):
        text.learn(3, 0)
    assert text.share < 0.2
