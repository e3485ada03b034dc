"""A thousand cases, the same each time; `make fuzz` draws others for an hour. And what the fuzzer must notice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.cases import Case
from fuzz.driver import STRATEGIES, Child, Session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child's limits are Linux's")

N_CASES = {"gguf": 240, "safetensors": 130, "config": 180, "tokenizer": 170, "template": 130, "command": 150}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    child = Child()
    yield Session(child, tmp_path_factory.mktemp("fuzz"))
    child.close()


@pytest.mark.parametrize("subject", STRATEGIES)
def test_odd_input_works_or_is_refused(session: Session, subject: str) -> None:
    session.batch(subject, N_CASES[subject], seed_number=1)
    failures = [failed for failed in session.failures.values() if failed.subject == subject]
    assert not failures, "\n\n".join(map(str, failures))
    assert session.counts[subject, "worked"] > 0 and session.counts[subject, "refused"] > 0


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("hang", "more than 2 s"),
        ("crash", "SIGSEGV"),
        ("exit", "the process ended (0)"),
        ("memory", "MemoryError"),
        ("panic", "PanicException"),
        ("escape", "U+001B"),
        ("dead end", "does not say what to do"),
        ("too long; give less " * 100, "characters, expected at most"),
    ],
)
def test_what_must_not_happen_is_noticed(how: str, what: str, tmp_path: Path, strict: Child) -> None:
    Case("misbehave", [], {}, {"how": how}).write(tmp_path / "case")
    outcome = strict.run(tmp_path / "case")
    assert outcome["outcome"] == "failed"
    assert what in outcome["error"] + outcome["where"] + outcome["details"]


@pytest.fixture(scope="module")
def strict() -> Iterator[Child]:
    child = Child(limit_s=2)
    yield child
    child.close()
