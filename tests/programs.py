"""The command line and the scripts, run in processes of their own, and a small model's shape for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]  # of the fixture run_here, which needs no process
# The sizes of helpers.small_config, so that a kernel compiled for one serves the other.
TINY_SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run_llmcl(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`llmcl` with these arguments. variables: of the environment, besides the tests' own."""
    return run_python("-m", "llmcl", *arguments, **variables)


def run_script(name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/`name`; as run_llmcl."""
    return run_python(str(ROOT / "scripts" / name), *arguments, **variables)


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments; as run_llmcl."""
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search_path, "PYTHONIOENCODING": "utf-8", **variables},
        timeout=240,
    )
