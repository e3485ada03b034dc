"""scripts/start_benchmark.py: starts with an empty cache compile, later ones do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import TINY_SHAPE, run_script

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")


@pytest.mark.slow
def test_a_kept_cache_has_all_programs(tmp_path: Path) -> None:
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    done = run_script("start_benchmark.py", "--random", str(shape), "--jobs", "2", "-npp", "5", "--device", "intel")
    if "no OpenCL device" in done.stderr or "in its name" in done.stderr:
        pytest.skip("PoCL keeps its programs itself")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["start"], row["cache"]) for row in rows] == [
        (start, cache) for start in ("load", "engine") for cache in ("empty", "kept")
    ]
    assert [row["programs"] > 0 for row in rows] == [True, False, True, False]
    assert all(0 < row["load"] < row.get("first_token", row.get("ready")) for row in rows)
