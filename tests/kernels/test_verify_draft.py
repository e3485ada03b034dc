"""What a step that verifies drafts has beside the model: integers, equal to the twins'; nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import read_guarded, run, with_poison

from llmcl import reference
from llmcl.kernels.common.step_state import N_SLOTS, RING, StepState
from llmcl.ops.verify_draft import accept_draft, draft_counts, draft_last_seen, draft_rows
from llmcl.runtime.device import Device

MAX_ROWS = 16
POSITION, STEP, PAGES = 37, 300, [5, 9]


def text_step(device: Device, n: int, tokens: list[int]) -> StepState:
    """A step state of a text with pages, at POSITION and STEP."""
    step = StepState(device, MAX_ROWS, len(PAGES))
    step.write_pages(PAGES)
    device.write(step.tokens, np.array(tokens, np.int32))
    device.write(step.state, np.array([POSITION, n, STEP], np.int32))
    return step


@pytest.mark.oclgrind
@pytest.mark.parametrize("n_draft", [0, 1, 7, MAX_ROWS - 1])
def test_draft_rows(device: Device, n_draft: int) -> None:
    draft = [int(i) for i in np.random.default_rng(n_draft).integers(0, 1000, n_draft)]
    step, rows = text_step(device, 1, [11]), StepState(device, MAX_ROWS, n_sequences=MAX_ROWS)
    words = np.zeros(MAX_ROWS, np.int32)
    words[: 1 + n_draft] = [n_draft, *draft]
    buffer = with_poison(device, words)
    run(draft_rows(device, buffer, step, rows))
    tokens, places = reference.draft_rows(draft, 11, POSITION, STEP)
    n = 1 + n_draft
    assert device.read(step.tokens, np.int32, (n,)).tolist() == tokens
    assert device.read(step.state, np.int32, (3,)).tolist() == [POSITION, n, STEP]
    assert device.read(step.state, np.int32, (2,), 4 * N_SLOTS).tolist() == PAGES
    of_rows = device.read(rows.state, np.int32, (MAX_ROWS, N_SLOTS), 4 * N_SLOTS)
    assert of_rows[:n, :3].tolist() == [[position, 1, number] for position, number in places]
    assert not of_rows[n:].any() and not of_rows[:, 3:].any()


@pytest.mark.parametrize("vocab", [131, 5000])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_draft_last_seen(device: Device, n: int, vocab: int) -> None:
    rng = np.random.default_rng(n)
    tokens = [int(i) for i in rng.choice([0, 3, vocab // 2, vocab - 1], n)]  # few, so that some come again
    step = text_step(device, n, tokens)
    last_seen = np.where(rng.random(vocab) < 0.5, rng.integers(0, POSITION, vocab), -1).astype(np.int32)
    out = with_poison(device, np.zeros((n, vocab), np.int32))
    run(draft_last_seen(device, step, device.upload(last_seen, "latest positions"), out), n)
    expected = reference.draft_last_seen(last_seen, tokens, POSITION)
    np.testing.assert_array_equal(read_guarded(device, out, np.int32, (n, vocab)), expected)


@pytest.mark.oclgrind
@pytest.mark.parametrize("vocab", [131, 5000])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_draft_counts(device: Device, n: int, vocab: int) -> None:
    rng = np.random.default_rng(n)
    tokens = [int(i) for i in rng.choice([0, 3, vocab // 2, vocab - 1], n)]  # few, so that some come again
    step = text_step(device, n, tokens)
    counts = rng.integers(0, 3, vocab).astype(np.int32)
    out = with_poison(device, np.zeros((n, vocab), np.int32))
    run(draft_counts(device, step, device.upload(counts, "counts"), out), n)
    expected = reference.draft_counts(counts, tokens)
    np.testing.assert_array_equal(read_guarded(device, out, np.int32, (n, vocab)), expected)


@pytest.mark.oclgrind
@pytest.mark.parametrize("taken", [0, 1, 5, 6])
@pytest.mark.parametrize("step_number", [3, RING - 2])
def test_accept_draft(device: Device, taken: int, step_number: int) -> None:
    vocab, n = 131, 7
    tokens = [4, 9, 9, 120, 7, 0, 4]
    sampled = [*tokens[1:], 50]
    if taken < n - 1:
        sampled[taken] = 77  # what follows may be what the draft has, but not after the same text
    step = text_step(device, n, tokens)
    device.write(step.state, np.array([POSITION, n, step_number], np.int32))
    last_seen = np.random.default_rng(1).integers(-1, POSITION, vocab).astype(np.int32)
    seen, accepted = device.upload(last_seen, "latest positions"), with_poison(device, np.full(n + 1, -7, np.int32))
    before = np.random.default_rng(2).integers(0, 3, vocab).astype(np.int32)
    counts = device.upload(before, "counts")
    run(accept_draft(device, device.upload(np.array(sampled, np.int32), "sampled"), step, seen, counts, accepted))
    expected = reference.accept_draft(tokens, sampled)
    assert len(expected) == taken + 1
    found = read_guarded(device, accepted, np.int32, (n + 1,)).tolist()
    assert found == [len(expected), *expected, *[-7] * (n - len(expected))]
    after = [POSITION + len(expected), 1, step_number + len(expected)]
    assert device.read(step.state, np.int32, (3,)).tolist() == after
    assert device.read(step.state, np.int32, (2,), 4 * N_SLOTS).tolist() == PAGES
    assert device.read(step.tokens, np.int32, (n,)).tolist() == [expected[-1], *tokens[1:]]
    ring = device.read(step.sampled, np.int32, (RING,))
    places = [(step_number + i) % RING for i in range(len(expected))]
    assert ring[places].tolist() == expected and not np.delete(ring, places).any()
    rows = reference.draft_last_seen(last_seen, tokens, POSITION)
    assert device.read(seen, np.int32, (vocab,)).tolist() == rows[len(expected) - 1].tolist()
    after_counts = before + np.bincount(expected, minlength=vocab)
    np.testing.assert_array_equal(device.read(counts, np.int32, (vocab,)), after_counts)


def test_a_row_without_a_token_ends_what_is_accepted(device: Device) -> None:
    """A row whose logits are no numbers has sampled the size of the vocabulary; the next input is a token."""
    vocab = 131
    step = text_step(device, 3, [4, 9, 9])
    accepted = device.zeros(16, "accepted")
    last_seen = device.upload(np.full(vocab, -1, np.int32), "latest positions")
    counts, sampled = device.zeros(4 * vocab, "counts"), device.upload(np.array([9, vocab, 9], np.int32), "sampled")
    run(accept_draft(device, sampled, step, last_seen, counts, accepted))
    assert device.read(counts, np.int32, (vocab,)).tolist() == [int(token == 9) for token in range(vocab)]
    assert device.read(accepted, np.int32, (3,)).tolist() == [2, 9, vocab]
    assert device.read(step.tokens, np.int32, (1,)).tolist() == [vocab - 1]
