"""What a step that verifies drafts has beside the model: integers, equal to the twins'; nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import read_guarded, run, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.kernels.common.ragged_step import RaggedStep, Run
from llmcl.kernels.common.step_state import CONSTANTS, N_SLOTS, StepState
from llmcl.ops.sample import N_SLOTS as SAMPLING_SLOTS
from llmcl.ops.verify_draft import accept_draft, draft_counts, draft_last_seen, draft_rows
from llmcl.runtime.device import Device

MAX_ROWS = 16
PLACE = CONSTANTS["STATE_PLACE"]  # of a sequence, which these kernels do not write
STEP, PAGES, PLACES = 300, [5, 9], 4


@dataclass
class Rows:
    """A step on the device, and what its texts are: of each its place, position, number of tokens, and its rows."""

    step: StepState
    texts: StepState
    places: list[int]
    positions: list[int]
    numbers: list[int]
    tokens: list[list[int]]

    @property
    def n(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def n_texts(self) -> int:
        return max(1, self.texts.n_sequences)

    def record(self, place: int) -> tuple[int, int]:
        """Where the text's record begins, in bytes, and the page table behind it."""
        first, slots = self.texts.layout[:2].tolist() if self.texts.n_sequences else (0, 0)
        return 4 * (first + place * slots), 4 * (first + place * slots + N_SLOTS)


def one_text(device: Device, tokens: list[int]) -> Rows:
    """A step of one text, whose state has it."""
    step = StepState(device, MAX_ROWS, len(PAGES))
    step.write_pages(PAGES)
    device.write(step.tokens, np.array(tokens, np.int32))
    device.write(step.state, np.array([37, len(tokens), STEP], np.int32))
    return Rows(step, step, [0], [37], [STEP], [tokens])


def several_texts(device: Device, tokens: list[int]) -> Rows:
    """Beside that text, one that decodes, and one with other drafts."""
    texts = StepState(device, PLACES, len(PAGES), PLACES)
    ragged = RaggedStep(device, MAX_ROWS, texts)
    places, positions, numbers = [3, 0, 2], [70, 37, 5], [9, STEP, 2]
    of_rows = [[6], tokens, [tokens[-1], 3, tokens[0], 3][: MAX_ROWS - 1 - len(tokens)]]
    for place, position, number, of_text in zip(places, positions, numbers, of_rows, strict=True):
        texts.write_sequence(place, position, number)
        texts.write_pages(PAGES, place)
        device.write(texts.tokens, np.array(of_text[:1], np.int32), 4 * place)
    runs = [
        Run(place, position, [-1, *of_text[1:]] if len(of_text) > 1 else None)
        for place, position, of_text in zip(places, positions, of_rows, strict=True)
    ]
    ragged.write(runs, [])
    return Rows(ragged, texts, places, positions, numbers, of_rows)


MADE = pytest.mark.parametrize("made", [one_text, several_texts])
Make = Callable[[Device, list[int]], Rows]


@MADE
@pytest.mark.oclgrind
@pytest.mark.parametrize("n_draft", [1, 7, MAX_ROWS - 5])
def test_draft_rows(device: Device, n_draft: int, made: Make) -> None:
    draft = [int(i) for i in np.random.default_rng(n_draft).integers(0, 1000, n_draft)]
    of = made(device, [11, *draft])
    if made is one_text:  # the step before had one row
        device.write(of.step.tokens, np.array([11, *[0] * n_draft], np.int32))
        device.write(of.step.state, np.array([37, 1, STEP], np.int32))
    rows = StepState(device, MAX_ROWS, n_sequences=MAX_ROWS)
    words = np.zeros(MAX_ROWS, np.int32)
    words[: 1 + n_draft] = [n_draft, *draft]
    sampling = np.arange(of.n_texts * SAMPLING_SLOTS, dtype=np.int32).reshape(-1, SAMPLING_SLOTS)
    given, own = device.upload(sampling, "parameters"), device.zeros(4 * MAX_ROWS * SAMPLING_SLOTS, "of rows")
    run(draft_rows(device, with_poison(device, words), of.step, of.texts, given, rows, own))
    expected = []
    for place, position, number, tokens in zip(of.places, of.positions, of.numbers, of.tokens, strict=True):
        of_text, records = reference.draft_rows(tokens[1:], tokens[0], position, number)
        assert of_text == tokens
        expected += [(position, 1, number, place) for position, number in records]
        assert device.read(of.texts.state, np.int32, (2,), of.record(place)[1]).tolist() == PAGES
    if made is one_text:
        assert device.read(of.step.tokens, np.int32, (of.n,)).tolist() == [11, *draft]
        assert device.read(of.step.state, np.int32, (3,)).tolist() == [37, of.n, STEP]
    found = device.read(rows.state, np.int32, (MAX_ROWS, N_SLOTS), 4 * int(rows.layout[0]))
    assert found[: of.n, :3].tolist() == [[*record[:3]] for record in expected]
    untouched = found[:, :PLACE]
    assert not untouched[of.n :].any() and not untouched[:, 3:].any()
    of_rows = device.read(own, np.int32, (MAX_ROWS, SAMPLING_SLOTS))
    assert of_rows[: of.n].tolist() == [sampling[place].tolist() for *_, place in expected]
    assert not of_rows[of.n :].any()


@MADE
@each_value(("vocab", [131, 5000]), ("n", [2, 9]))
def test_draft_last_seen(device: Device, n: int, vocab: int, made: Make) -> None:
    rng = np.random.default_rng(n)
    of = made(device, [int(i) for i in rng.choice([0, 3, vocab // 2, vocab - 1], n)])  # few, so that some come again
    shape = of.n_texts, vocab
    last_seen = np.where(rng.random(shape) < 0.5, rng.integers(0, 5, shape), -1).astype(np.int32)
    out = with_poison(device, np.zeros((of.n, vocab), np.int32))
    run(draft_last_seen(device, of.step, of.texts, device.upload(last_seen, "latest positions"), out), of.n)
    expected = [
        reference.draft_last_seen(last_seen[place], tokens, position)
        for place, position, tokens in zip(of.places, of.positions, of.tokens, strict=True)
    ]
    np.testing.assert_array_equal(read_guarded(device, out, np.int32, (of.n, vocab)), np.concatenate(expected))


@MADE
@pytest.mark.oclgrind
@each_value(("vocab", [131, 5000]), ("n", [2, 9]))
def test_draft_counts(device: Device, n: int, vocab: int, made: Make) -> None:
    rng = np.random.default_rng(n)
    of = made(device, [int(i) for i in rng.choice([0, 3, vocab // 2, vocab - 1], n)])  # few, so that some come again
    counts = rng.integers(0, 3, (of.n_texts, vocab)).astype(np.int32)
    out = with_poison(device, np.zeros((of.n, vocab), np.int32))
    run(draft_counts(device, of.step, of.texts, device.upload(counts, "counts"), out), of.n)
    expected = [
        reference.draft_counts(counts[place], tokens) for place, tokens in zip(of.places, of.tokens, strict=True)
    ]
    np.testing.assert_array_equal(read_guarded(device, out, np.int32, (of.n, vocab)), np.concatenate(expected))


@MADE
@pytest.mark.oclgrind
@pytest.mark.parametrize("taken", [0, 1, 5, 6])
def test_accept_draft(device: Device, taken: int, made: Make) -> None:
    vocab = 131
    tokens = [4, 9, 9, 120, 7, 0, 4]
    of = made(device, tokens)
    sampled = [[*of_text[1:], 50] for of_text in of.tokens]
    at = of.tokens.index(tokens)
    if taken < len(tokens) - 1:
        sampled[at][taken] = 77  # what follows may be what the draft has, but not after the same text
    if made is several_texts:
        sampled[0], sampled[2][1] = [of.tokens[1][0]], 99  # the first row of the next text is nobody's draft
    rng = np.random.default_rng(1)
    last_seen = rng.integers(-1, 5, (of.n_texts, vocab)).astype(np.int32)
    before = rng.integers(0, 3, (of.n_texts, vocab)).astype(np.int32)
    size = of.n + len(of.places)
    seen, accepted = device.upload(last_seen, "latest positions"), with_poison(device, np.full(size, -7, np.int32))
    counts = device.upload(before, "counts")
    row_sampled = device.upload(np.array([token for of_text in sampled for token in of_text], np.int32), "sampled")
    run(accept_draft(device, row_sampled, of.step, of.texts, seen, counts, accepted, MAX_ROWS))
    found, first = read_guarded(device, accepted, np.int32, (size,)).tolist(), 0
    new_tokens, new_seen, new_counts = {}, last_seen.copy(), before.copy()
    for place, position, number, of_text, chosen in zip(
        of.places, of.positions, of.numbers, of.tokens, sampled, strict=True
    ):
        expected = reference.accept_draft(of_text, chosen)
        assert found[first : first + 1 + len(of_text)] == [
            len(expected),
            *expected,
            *[-7] * (len(of_text) - len(expected)),
        ]
        first += 1 + len(of_text)
        record, pages = of.record(place)
        after = [position + len(expected), 1, number + len(expected)]
        assert device.read(of.texts.state, np.int32, (3,), record).tolist() == after
        assert device.read(of.texts.state, np.int32, (2,), pages).tolist() == PAGES
        new_tokens[place] = expected[-1]
        new_seen[place] = reference.draft_last_seen(last_seen[place], of_text, position)[len(expected) - 1]
        new_counts[place] += np.bincount(expected, minlength=vocab)
        if of_text is tokens:
            assert len(expected) == taken + 1
    for place, token in new_tokens.items():
        assert device.read(of.step.tokens, np.int32, (1,), 4 * place).tolist() == [token]
    np.testing.assert_array_equal(device.read(seen, np.int32, new_seen.shape), new_seen)
    np.testing.assert_array_equal(device.read(counts, np.int32, new_counts.shape), new_counts)


def test_a_row_without_a_token_ends_what_is_accepted(device: Device) -> None:
    """A row whose logits are no numbers has sampled the size of the vocabulary; the next input is a token."""
    vocab = 131
    step = one_text(device, [4, 9, 9]).step
    accepted = device.zeros(16, "accepted")
    last_seen = device.upload(np.full(vocab, -1, np.int32), "latest positions")
    counts, sampled = device.zeros(4 * vocab, "counts"), device.upload(np.array([9, vocab, 9], np.int32), "sampled")
    run(accept_draft(device, sampled, step, step, last_seen, counts, accepted, MAX_ROWS))
    assert device.read(counts, np.int32, (vocab,)).tolist() == [int(token == 9) for token in range(vocab)]
    assert device.read(accepted, np.int32, (3,)).tolist() == [2, 9, vocab]
    assert device.read(step.tokens, np.int32, (1,)).tolist() == [vocab - 1]
