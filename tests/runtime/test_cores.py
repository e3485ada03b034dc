"""How many cores a process may use: quotas of control groups, old and new, innermost and outer ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest

from llmcl.runtime import cores
from llmcl.runtime.cores import usable_cores
from llmcl.runtime.device import Device


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def group(root: Path, line: str, folder: str, **files: str) -> None:
    (root / "proc/self/cgroup").write_text(line)
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name.replace("__", ".")).write_text(text)


def test_affinity_counts_where_there_is_no_quota(root: Path) -> None:
    assert usable_cores(root) == 8
    group(root, "0::/a\n", "sys/fs/cgroup/a", cpu__max="max 100000\n")
    assert usable_cores(root) == 8


@pytest.mark.parametrize(("quota", "expected"), [("250000 100000", 2), ("50000 100000", 1), ("nonsense", 8)])
def test_a_quota_of_the_group_or_of_one_around_it(root: Path, quota: str, expected: int) -> None:
    group(root, "0::/a/b\n", "sys/fs/cgroup/a/b", cpu__max="max 100000\n")
    group(root, "0::/a/b\n", "sys/fs/cgroup/a", cpu__max=quota)
    assert usable_cores(root) == expected


def test_the_first_version_of_control_groups(root: Path) -> None:
    files = {"cpu__cfs_quota_us": "300000\n", "cpu__cfs_period_us": "100000\n"}
    group(root, "4:cpu,cpuacct:/a\n", "sys/fs/cgroup/cpu/a", **files)
    assert usable_cores(root) == 3
    (root / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us").write_text("-1\n")
    assert usable_cores(root) == 8


def test_this_process_has_a_core() -> None:
    assert 1 <= cores.usable_cores() <= (os.cpu_count() or 1)


def test_the_cores_of_now_are_asked_for_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 100.2, iter((4, 2))
    monkeypatch.setattr(cores, "usable_cores", lambda: next(asked))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    cores._cores_in.cache_clear()
    assert [cores.cores_now(), cores.cores_now()] == [4, 4]
    now = 101.1
    assert [cores.cores_now(), cores.cores_now()] == [2, 2]
    cores._cores_in.cache_clear()


def test_a_wait_with_fewer_cores_than_the_driver_has_threads(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []
    monkeypatch.setattr("llmcl.runtime.device.cores_now", lambda: 0)
    monkeypatch.setattr("llmcl.runtime.device.time.sleep", slept.append)
    given, found = np.arange(1 << 20, dtype=np.float32), np.zeros(1 << 20, np.float32)
    buffer = device.upload(given, "numbers")
    device.read_async(buffer, found)()
    np.testing.assert_array_equal(found, given)
    assert not (slept and device.runs_ahead)
