"""Suspended threads of this process, counted by the step."""

from __future__ import annotations

import pytest

from llmcl.runtime import preemptions
from llmcl.runtime.preemptions import TURN_S, Preemptions

CORES = 4


class Machine:
    """What the system says: suspended threads and the time, as far as steps have come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count, self.now_s = 0, 0.0
        monkeypatch.setattr(preemptions, "_count", lambda: self.count)
        monkeypatch.setattr(preemptions.time, "perf_counter", lambda: self.now_s)
        self.of = Preemptions(CORES)

    def steps(self, n: int, suspended: int, step_s: float, at_once: int = 1) -> bool:
        """suspended: threads a step."""
        for _ in range(n):
            self.count += suspended * at_once
            self.now_s += step_s * at_once
            self.of.passed(at_once)
        return self.of.cost_turns


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_machine_at_rest_has_none(machine: Machine) -> None:
    assert not machine.of.cost_turns
    assert not machine.steps(50, 0, TURN_S)


def test_frequent_ones_are_noticed_within_some_steps_and_forgotten_again(machine: Machine) -> None:
    assert not machine.steps(1, CORES, TURN_S)
    assert machine.steps(10, CORES, TURN_S)
    assert machine.steps(5, 0, TURN_S)  # a quiet moment is none yet
    assert not machine.steps(50, 0, TURN_S)


def test_steps_of_one_launch_count_each(machine: Machine) -> None:
    assert machine.steps(4, CORES, TURN_S, at_once=4)
    assert not machine.steps(20, 0, TURN_S, at_once=4)


def test_few_for_the_cores_do_not_count(machine: Machine) -> None:
    assert not machine.steps(200, CORES // 5, TURN_S)
    for _ in range(200):
        assert not machine.steps(4, 0, TURN_S) and not machine.steps(1, 1, TURN_S)


def test_a_step_of_many_turns_does_not_notice_one(machine: Machine) -> None:
    assert not machine.steps(100, 10 * CORES, 10 * TURN_S)


def test_the_system_counts_them() -> None:
    before = preemptions._count()
    assert before >= 0 and preemptions._count() >= before
