"""Lines by room: counted in a repository made here, before and after a change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from programs import ROOT

WHO = {f"GIT_{role}_{field}": "test@localhost" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, env={**os.environ, **WHO}, check=True, capture_output=True)


def lines(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(ROOT / "scripts" / "lines.py")
    return subprocess.run([sys.executable, script, *arguments], cwd=folder, capture_output=True, text=True)


def write(path: Path, n: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x\n\n" * (n // 2) + "x\n" * (n % 2))


def test_lines_by_room_and_their_change(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name, n in {"engine/a.py": 7, "engine/deep/b.py": 2, "kernels/cpu/c.cl": 5, "old/d.py": 3}.items():
        write(tmp_path / "llmcl" / name, n)
    write(tmp_path / "llmcl" / "cli.py", 4)
    write(tmp_path / "tests" / "deep" / "test_é.py", 6)
    write(tmp_path / "docs" / "page.md", 50)
    write(tmp_path / ".gitignore", 0)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    write(tmp_path / "llmcl" / "engine" / "a.py", 10)
    (tmp_path / "llmcl" / "old" / "d.py").unlink()
    write(tmp_path / "llmcl" / "kernels" / "new.cl", 1)  # not added yet
    (tmp_path / ".gitignore").write_text("build\n")
    write(tmp_path / "build" / "e.py", 1000)

    rows = [line.split("  ") for line in lines(tmp_path, "--since", "HEAD").stdout.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["Python", "OpenCL C"],
        ["llmcl", "4", "0"],
        ["llmcl/engine", "12 (+3)", "0"],
        ["llmcl/kernels", "0", "6 (+1)"],
        ["llmcl/old", "0 (-3)", "0"],
        ["tests", "6", "0"],
        ["llmcl in all", "16", "6 (+1)"],
    ]
    (tmp_path / "plain").mkdir()
    plain = lines(tmp_path / "plain").stdout  # from a folder below the top
    assert "llmcl/engine" in plain and "(" not in plain
    assert lines(tmp_path, "--since", "HEAD").stdout == lines(tmp_path / "plain", "--since", "HEAD").stdout


def test_an_unknown_commit_is_named(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    done = lines(tmp_path, "--since", "nothing")
    assert done.returncode == 1 and "nothing" in done.stderr and "Traceback" not in done.stderr
