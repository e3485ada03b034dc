"""/openapi.json describes the server; a fuzzer that reads it finds no failure, no hang and no page that stays taken.

LLMCL_TEST_LONG=1 has it try some thousand requests, and at the limits of every field.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from engine_server import engine_server
from examples import examples
from fake_server import Running, running, wait_for

from llmcl.serve import app

LONG = os.environ.get("LLMCL_TEST_LONG") == "1"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
TIMEOUT_S = 3600 if LONG else 600


def test_every_path_is_described(shared: Running) -> None:
    described = shared.http.get("/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    paths = {path: {*methods} - {"parameters"} for path, methods in described["paths"].items()}
    served: dict[str, set[str]] = {}
    for method, endpoints in ("get", app.GET), ("post", app.POST), ("delete", app.DELETE):
        for path in endpoints:
            served.setdefault(path, set()).add(method)
    assert paths == served


def test_the_limits_are_those_of_the_model(shared: Running) -> None:
    schemas = shared.http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["TokenId"]["maximum"] == shared.service.served().vocab_size - 1
    assert schemas["Answers"]["maximum"] == shared.service.settings.max_in_flight


def test_before_the_model_is_ready_it_is_not_there() -> None:
    with running(loaded=False) as server:
        assert server.http.get("/openapi.json").status_code == 503


@pytest.mark.slow
@pytest.mark.skipif(find_spec("schemathesis") is None, reason="schemathesis is not installed")
def test_a_fuzzer_finds_nothing(tmp_path: Path) -> None:
    with engine_server(max_queue=8) as fuzzed:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{fuzzed.server.url}/openapi.json"]
        command += ["--checks", CHECKS, "--exclude-path-regex", "/embed|/rerank", "--request-timeout", "60"]
        command += ["--phases", "coverage,fuzzing" if LONG else "fuzzing", "--suppress-health-check", "all"]
        command += ["--max-examples", str(200 if LONG else examples(24)), "--seed", "1"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        wait_for(lambda: fuzzed.is_idle)
        answered = sum(fuzzed.server.metric(f'llmcl_requests_total{{api="{path}",status="200"}}') for path in app.POST)
        assert answered > 10 and not fuzzed.server.metric('llmcl_requests_total{api="other",status="500"}')
        print(f"{fuzzed.server.metric('llmcl_requests_total'):.0f} requests, {answered:.0f} of them answered")
