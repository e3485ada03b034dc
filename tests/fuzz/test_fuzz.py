"""A thousand cases, the same each time (50 in `make test`); `make fuzz` draws others. What the fuzzer must notice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.cases import Case
from fuzz.driver import ROOT, Child
from tiers import is_full

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child's limits are Linux's")


# What Hypothesis draws depends on what the process drew before, so each has a process of its own.
def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900)


def test_odd_inputs_work_or_are_refused() -> None:
    done = run("-m", "fuzz", "--same", "1000" if is_full() else "50")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)


@pytest.mark.slow
def test_a_seed_stands_for_the_same_cases_whatever_was_imported() -> None:
    draw = (
        "from types import SimpleNamespace; from fuzz.driver import Session; cases = []\n"
        "Session.batch(SimpleNamespace(folders=None, run=cases.append, prepare=Session.prepare), 'gguf', 150, 1)\n"
        "print([case.notes for case in cases])"
    )
    alone, beside = (run("-c", imports + draw).stdout for imports in ("", "import llmcl; llmcl.load\n"))
    assert alone == beside and alone.count("dropped") > 0


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
def test_what_must_not_happen_is_noticed(how: str, what: str, tmp_path: Path, child: Child) -> None:
    Case("misbehave", [], {}, {"how": how}).write(tmp_path / "case")
    outcome = child.run(tmp_path / "case", 2 if how == "hang" else None)
    assert outcome["outcome"] == "failed"
    assert what in outcome["error"] + outcome["where"] + outcome["details"]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.close()
