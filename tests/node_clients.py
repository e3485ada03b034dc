"""Running scripts with the clients that OpenAI, Anthropic and Ollama publish for Node.js.

They are looked for in the folder LLMCL_TEST_NODE, by default build/node. What puts them there:
npm install --prefix build/node openai @anthropic-ai/sdk ollama
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

PACKAGES = "openai", "@anthropic-ai/sdk", "ollama"
FOLDER = Path(os.environ.get("LLMCL_TEST_NODE") or Path(__file__).resolve().parents[1] / "build" / "node")


def why_not() -> str | None:
    """Why no such script can run here; None: it can."""
    if shutil.which("node") is None:
        return "Node.js is not installed"
    missing = [name for name in PACKAGES if not (FOLDER / "node_modules" / name / "package.json").exists()]
    if missing:
        return f"not in {FOLDER}: {', '.join(missing)} (npm install --prefix build/node {' '.join(PACKAGES)})"
    return None


def run_script(script: str, **variables: str) -> str:
    """What a module prints, which finds the packages as if it lay in the folder."""
    done = subprocess.run(
        ["node", "--input-type=module", "-"],
        cwd=FOLDER,
        input=script,
        env={**os.environ, **variables, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
