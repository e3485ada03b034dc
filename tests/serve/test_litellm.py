"""LiteLLM in front of the server. It wants other versions than the other tests, so it has an environment of its own:

python -m venv build/litellm && build/litellm/bin/pip install litellm

LLMCL_TEST_LITELLM names another Python that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_server import Running, running

PYTHON = os.environ.get("LLMCL_TEST_LITELLM") or str(
    Path(__file__).resolve().parents[2] / "build" / "litellm" / "bin" / "python"
)
pytestmark = pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"no LiteLLM: there is no {PYTHON}")

HEAD = """
import json, os, litellm
litellm.suppress_debug_info = True
url, found = os.environ["URL"], {}
asked = {"messages": [{"role": "user", "content": "Hello"}], "api_key": os.environ.get("KEY", "none"), "num_retries": 0}
openai = {**asked, "model": "openai/any", "api_base": url + "/v1"}
claude = {**asked, "model": "anthropic/any", "api_base": url}
"""


def found(script: str, server: Running, **variables: str) -> dict[str, Any]:
    """What the script puts into the dictionary `found`."""
    done = subprocess.run(
        [PYTHON, "-c", HEAD + script + "\nprint(json.dumps(found))"],
        env={**os.environ, "PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "URL": server.url, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shown: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return shown


def test_both_apis(shared: Running) -> None:
    script = """
for name, options in (("openai", openai), ("claude", claude)):
    whole = litellm.completion(**options, max_tokens=50)
    stream = litellm.completion(**options, max_tokens=3, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    found[name] = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens, text]
"""
    expected = ["Hello", "stop", 29, "Hel"]
    assert found(script, shared) == {"openai": expected, "claude": expected}


def test_errors_are_its_own() -> None:
    script = """
def name_of(options):
    try:
        litellm.completion(**options)
    except Exception as error:
        return type(error).__name__
for name, options in (("openai", openai), ("claude", claude)):
    found[name] = [name_of({**options, "temperature": -1}), name_of({**options, "api_key": "other"})]
long = [{"role": "user", "content": "x" * 2100}]
found["long"] = name_of({**openai, "messages": long})
"""
    with running(api_keys=("key",)) as server:
        expected = ["BadRequestError", "AuthenticationError"]
        assert found(script, server, KEY="key") == {
            "openai": expected,
            "claude": expected,
            "long": "BadRequestError",
        }
