"""What a user of the package sees: names, help, and types that pass `mypy --strict`."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError

USER = Path(__file__).parent.parent / "user_script.py"


def test_every_public_name_is_offered_and_is_there() -> None:
    """Tab completion asks `dir`, in a program that has used nothing yet."""
    code = "import sys, llmcl; print(*dir(llmcl)); assert 'pyopencl' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*llmcl.__all__, "__version__"} <= {*run.stdout.split()}
    assert set(llmcl._HOMES) == {*llmcl.__all__} - {"LlmclError"}
    for name in llmcl.__all__:
        assert getattr(llmcl, name).__name__ == name


def test_help_begins_with_what_a_user_needs() -> None:
    start = pydoc.plain(pydoc.render_doc(llmcl)).partition("PACKAGE CONTENTS")[0]
    for name in ("load(", "llm.stream(", "llm.generate(", "llm.score(", "llm.chat()", "llm.engine()", "LlmclError"):
        assert name in start
    for line in (llmcl.__doc__ or "").splitlines():
        for word in line.split():
            if word.startswith("llm.") and word.rstrip(",")[4:].partition("(")[0].isidentifier():
                assert hasattr(LLM, word[4:].rstrip(",").partition("(")[0]), word


def test_a_model_says_what_it_is(small_llm: LLM) -> None:
    shown = repr(small_llm)
    for part in (small_llm.model_name, small_llm.device.name, "weights float32", "KV cache float32", "64 tokens"):
        assert part in shown
    assert len(shown.splitlines()) == 1


def test_a_model_without_a_tokenizer_says_so(small_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_llm.has_tokenizer
    monkeypatch.setattr(small_llm, "_tokenizer", None)
    assert not small_llm.has_tokenizer
    for use in lambda: small_llm.tokenizer, lambda: small_llm.encode("text"), small_llm.chat:
        with pytest.raises(UsageError, match="has no tokenizer; expected token ids"):
            use()


@pytest.mark.slow
def test_a_user_script_passes_mypy_strict(tmp_path: Path) -> None:
    """Outside the repository, so that its settings do not count. The wrong script shows that types are seen."""
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text('import llmcl\nllm = llmcl.load("smollm2")\nllm.generate("", max_token=8)\nllm.generate("").txt\n')
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}"]
    run = subprocess.run([*command, str(USER), str(wrong)], capture_output=True, text=True, cwd=tmp_path)
    errors = [line for line in run.stdout.splitlines() if ": error:" in line]
    assert [line for line in errors if USER.name in line] == []
    first, *_, last = errors
    assert 'Unexpected keyword argument "max_token"' in first and '"Generation" has no attribute "txt"' in last
