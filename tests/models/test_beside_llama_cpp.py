"""Families beside llama.cpp on the same GGUF files of float32 weights, where LLMCL_TEST_LLAMA_CPP names a Python with
llama-cpp-python."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_configs import FAMILIES, IN_GGUF, MOST, ids_for
from family_files import save_gguf
from helpers import random_weights, relative_error
from llama_cpp_configs import as_llama_cpp_reads

import llmcl

PYTHON = os.environ.get("LLMCL_TEST_LLAMA_CPP")
SCRIPTS = Path(__file__).parents[2] / "scripts"
# Its own table of exponentials and approximated GELU (Gemma) round to float16.
BOUND, GEMMA_BOUND = 1e-4, 2e-3
NOT_READ = ("gpt_oss-tied",)  # it has none without biases
CHILD = f"""
import json, sys
import numpy as np
sys.path.insert(0, {str(SCRIPTS)!r})
from compare_child import LlamaCpp
engine = LlamaCpp()
options = {{"use_extra_bufts": False, "type_k": 0, "type_v": 0, "flash_attn_type": 0}}
engine.load(sys.argv[1], 256, 2, options)
np.save(sys.argv[2], np.concatenate(list(engine.logits(json.loads(sys.argv[3]), 0))))
"""


@pytest.mark.skipif(PYTHON is None, reason="LLMCL_TEST_LLAMA_CPP names no Python with llama-cpp-python")
@pytest.mark.parametrize("name", [name for name in (*IN_GGUF, MOST) if name in FAMILIES and name not in NOT_READ])
def test_the_logits_are_those_of_llama_cpp(name: str, default_device: Any, tmp_path: Path) -> None:
    assert PYTHON is not None
    config = as_llama_cpp_reads(FAMILIES[name])
    path, out = save_gguf(tmp_path / "model.gguf", config, random_weights(config, seed=3)), tmp_path / "logits.npy"
    ids = ids_for(config)
    command = [PYTHON, "-c", CHILD, str(path), str(out), json.dumps(ids)]
    subprocess.run(command, check=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    with llmcl.load(str(path), device=default_device.entry.index, dtype="float32", max_context=128) as llm:
        found = llm.logits(ids)
    expected = np.load(out)
    assert relative_error(found, expected) < (GEMMA_BOUND if config.architecture.startswith("gemma") else BOUND)
    assert np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
