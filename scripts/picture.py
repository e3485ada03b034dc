#!/usr/bin/env python
"""Makes docs/images/streaming.svg, the README's picture, from a real run of `llmcl generate` on the demo model."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "streaming.svg"
WIDTH = 104
COMMAND = 'llmcl generate -m smollm2 -p "What is gravity?" --temp 0.5 --seed 2'


def main() -> None:
    arguments = shlex.split(COMMAND)[1:]
    run = subprocess.run(
        [sys.executable, "-m", "llmcl", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "COLUMNS": str(WIDTH)},
        cwd=ROOT,
    )
    if run.returncode:
        sys.exit(run.stderr)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(Text(f"$ {COMMAND}", style="bold"))
    console.print(run.stdout.rstrip())
    console.print(Text("\n" + run.stderr.strip(), style="dim"))
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(console.export_svg(title="llmcl", unique_id="llmcl"), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
