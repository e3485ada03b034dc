"""scripts/schema_overhead.py with a small model and the vocabulary that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import schema_overhead
from made_vocabulary import END, made_tokenizer
from programs import TINY_SHAPE
from schema_overhead import Plan

import llmcl
from llmcl.runtime.device import Device
from llmcl.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")

VOCAB = 4000


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    return made_tokenizer(VOCAB)


@pytest.mark.slow
def test_the_vocabulary_is_whole(vocabulary: Tokenizer) -> None:
    assert vocabulary.n_vocab == VOCAB and not vocabulary.token_bytes(END)
    assert len({vocabulary.token_bytes(i) for i in range(1, VOCAB)}) == VOCAB - 1
    text = "def measure(engine): return 'über'"
    assert vocabulary.decode(vocabulary.encode(text)) == text and len(vocabulary.encode(text)) < 25


@pytest.mark.slow
def test_both_ways_are_measured(vocabulary: Tokenizer, default_device: Device, tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps({**TINY_SHAPE, "vocab_size": VOCAB}))
    notes: list[str] = []
    with llmcl.load_random(str(shape), device=default_device, max_context=128) as llm:
        llm.tokenizer = vocabulary
        with llm.engine(max_sequences=2) as engine:
            plan = Plan(2, n_gen=8, pairs=2)
            found = schema_overhead.measure(engine, VOCAB, plan, notes.append)
            answer = engine.generate([[1, 2, 3]], max_tokens=40, schema=schema_overhead.SCHEMA)[0]
    assert answer.finish_reason == "length" and answer.text.startswith("[")
    assert len(found) == 2 and len(notes) == 3 and all(a > 0 and b > 0 for a, b in found)


def test_the_row_has_medians_of_ratios() -> None:
    row = schema_overhead.row(Plan(16), [(10.0, 11.0), (20.0, 21.0), (10.0, 13.0)])
    assert row == "| 16 | 10.000 | 13.000 | 1.100 (1.075 to 1.200) |"
