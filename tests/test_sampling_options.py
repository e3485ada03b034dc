"""The table of sampling parameters, and the page that shows it."""

from __future__ import annotations

from pathlib import Path

from llmcl.sampling_options import PARAMETERS, Parameter

GUIDE = Path(__file__).resolve().parent.parent / "docs" / "guide" / "command_line.md"


def shown(parameter: Parameter) -> str:
    flags = ", ".join(f"`{flag}`" for flag in parameter.flags)
    fields = ", ".join(f"`{field}`" for field in parameter.http_fields or [parameter.name])
    return f"| {flags} | `{parameter.name}` | {fields} | {' '.join(parameter.help.split())} |"


def test_the_guide_has_every_parameter() -> None:
    rows = [line for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| `-")]
    assert [row for row in rows if row in map(shown, PARAMETERS.values())] == [*map(shown, PARAMETERS.values())]
