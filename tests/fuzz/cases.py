"""A case of the fuzzer: files and arguments, kept as a folder that can be looked at, loaded, and run again."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DESCRIPTION = "case.json"


@dataclass
class Case:
    """subject: what the child runs. notes: what was changed, for people. files: by name, bytes, or a path to link to.
    arguments: of the subject, as JSON has them."""

    subject: str
    notes: list[str]
    files: dict[str, bytes | Path] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replaces what is in the folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            if isinstance(content, Path):
                os.symlink(content, folder / name)
            else:
                (folder / name).write_bytes(content)
        described = {"subject": self.subject, "notes": self.notes, "arguments": self.arguments}
        (folder / DESCRIPTION).write_text(json.dumps(described, indent=1))


def read_description(folder: Path) -> Any:
    return json.loads((folder / DESCRIPTION).read_text())


def keep(folder: Path, target: Path) -> None:
    """Copies a case, with what it links to, to where it stays."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
