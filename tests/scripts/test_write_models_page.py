"""scripts/write_models_page.py: the page is current, and its figures are measured."""

from __future__ import annotations

from pathlib import Path

from family_configs import MOST
from write_models_page import PAGE, described, largest_difference

from llmcl.architectures.families import TEXT_PARTS
from llmcl.runtime.platforms import DeviceEntry
from llmcl.tools.markdown import row


def test_the_page_has_the_families_of_today() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert lines[-1].endswith(", ".join(f"`{name}`" for name in TEXT_PARTS) + ".")
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len({models for models, *_ in described()}) == len(rows) and all(models for models, *_ in described())
    assert [line.rsplit("|", 3)[0] for line in rows] == [row(cells).removesuffix("|") for cells in described()]


def test_a_difference_is_measured(default_entry: DeviceEntry, tmp_path: Path) -> None:
    assert 0 < largest_difference(MOST, tmp_path, default_entry.index, in_gguf=True) < 1e-4
