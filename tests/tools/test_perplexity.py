"""Perplexity: against transformers on the same windows, and everything it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import ascii_tokenizer, random_weights, save_folder, small_config, transformers_logits, transformers_model

import llmcl
from llmcl.cli import main
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.reference import kl_divergence, log_likelihood
from llmcl.runtime.device import Device
from llmcl.tools.perplexity import cut, perplexity

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")

TEXT = "The quick brown fox jumps over the lazy dog, and 1+1=2.\n" * 9
CONFIG = small_config()
WINDOW = 150  # its second half is more than one chunk of logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("model"), CONFIG, random_weights(CONFIG, seed=3))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("other"), CONFIG, random_weights(CONFIG, seed=4))


@pytest.fixture(scope="module")
def llm(default_device: Device, folder: Path) -> Iterator[LLM]:
    with llmcl.load(str(folder), device=default_device, max_context=200) as loaded:
        yield loaded


def scored_rows(seed: int, ids: list[int], window: int) -> tuple[np.ndarray, np.ndarray]:
    """transformers' logits before every scored token of the text, and those tokens."""
    model = transformers_model(CONFIG, random_weights(CONFIG, seed=seed))
    rows, targets = [], []
    for start in range(0, len(ids) - window + 1, window):
        part = ids[start : start + window]
        rows.append(transformers_logits(model, part)[window // 2 : -1])
        targets += part[window // 2 + 1 :]
    return np.concatenate(rows), np.array(targets)


@pytest.mark.parametrize("window", [4, 17, WINDOW])
def test_it_is_that_of_transformers(llm: LLM, window: int) -> None:
    ids = ascii_tokenizer().encode(TEXT).ids
    loss = -log_likelihood(*scored_rows(3, ids, window))
    result = perplexity(llm, TEXT, window=window)
    assert result.perplexity == pytest.approx(math.exp(loss.mean()), rel=1e-4)
    assert result.standard_error == pytest.approx(result.perplexity * loss.std() / math.sqrt(len(loss) - 1), rel=1e-3)
    assert result.n_scored == len(loss) == result.n_windows * (window - 1 - window // 2)
    assert result.n_windows == len(ids) // window and result.window == window
    assert result.tokens_per_s > 0 and result.divergence is None


def test_a_reference_is_compared_token_by_token(llm: LLM, default_device: Device, other_folder: Path) -> None:
    ids = ascii_tokenizer().encode(TEXT).ids
    rows, targets = scored_rows(3, ids, WINDOW)
    reference_rows, _ = scored_rows(4, ids, WINDOW)
    expected = kl_divergence(reference_rows, rows)
    with llmcl.load(str(other_folder), device=default_device, max_context=WINDOW) as reference:
        far = perplexity(llm, TEXT, window=WINDOW, reference=reference).divergence
    assert far is not None
    assert far.mean_kl == pytest.approx(expected[:, 0].mean(), rel=1e-3)
    assert far.max_kl == pytest.approx(expected[:, 0].max(), rel=1e-3)
    assert far.same_top_1 == pytest.approx(expected[:, 1].mean(), abs=1.5 / len(targets))
    assert far.perplexity == pytest.approx(math.exp(-log_likelihood(reference_rows, targets).mean()), rel=1e-4)


def test_the_same_model_has_no_divergence(llm: LLM, default_device: Device, folder: Path) -> None:
    with llmcl.load(str(folder), device=default_device, max_context=WINDOW) as same:
        far = perplexity(llm, TEXT, window=WINDOW, reference=same, max_windows=2).divergence
    assert far is not None and abs(far.mean_kl) < 1e-6 and far.same_top_1 == 1.0


def test_only_the_likelihoods_leave_the_device(llm: LLM) -> None:
    perplexity(llm, TEXT, window=WINDOW, max_windows=1)
    before = llm.device.traffic.copy()
    result = perplexity(llm, TEXT, window=WINDOW, max_windows=2)
    assert llm.device.traffic.since(before).device_to_host_bytes == 4 * result.n_scored


def test_windows_begin_with_bos_where_the_tokenizer_says_so() -> None:
    assert cut(range(10, 19), 4, None) == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert cut(range(10, 19), 4, 1) == [[1, 11, 12, 13], [1, 15, 16, 17]]
    assert cut(range(10, 19), 4, None, max_windows=1) == [[10, 11, 12, 13]]


def test_progress_ends_with_the_result(llm: LLM) -> None:
    calls: list[tuple[int, int, float]] = []
    result = perplexity(llm, TEXT, window=100, progress=lambda *call: calls.append(call))
    assert [done for done, _, _ in calls] == [100 * (i + 1) for i in range(result.n_windows)]
    assert calls[-1][1:] == (100 * result.n_windows, result.perplexity)


def test_what_cannot_be_scored_is_refused(llm: LLM, default_device: Device, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the text has 5 tokens, fewer than one window of 16"):
        perplexity(llm, "hello", window=16)
    for window in (3, 201):
        with pytest.raises(UsageError, match=f"the window is {window} tokens; expected 4 to 200"):
            perplexity(llm, TEXT, window=window)
    config = small_config(vocab_size=147)
    folder = save_folder(tmp_path, config, random_weights(config, seed=3))
    with (
        llmcl.load(str(folder), device=default_device, max_context=WINDOW) as reference,
        pytest.raises(UsageError, match=r"131 tokens, the reference .* one of 147"),
    ):
        perplexity(llm, TEXT, window=WINDOW, reference=reference)


# ---- the command ------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `llmcl perplexity`."""
    monkeypatch.setattr("sys.argv", ["llmcl", "perplexity", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


@pytest.mark.slow
def test_the_command_prints_json_and_text(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    llm: LLM,
    default_device: Device,
    folder: Path,
    tmp_path: Path,
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT + "\n", encoding="utf-8")  # one final newline is dropped
    device = str(default_device.entry.index)
    common = "-m", str(folder), "-f", str(file), "-c", "64", "--device", device
    code, out, err = run(capsys, monkeypatch, *common, "--reference-dtype", "float16", "--format", "json")
    assert code == 0, err
    values = json.loads(out)
    expected = perplexity(llm, TEXT, window=64)
    assert values["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    assert values["n_scored"] == expected.n_scored and values["reference_dtype"] == "float16"
    assert 0 < values["divergence"]["mean_kl"] < 1e-3 and values["divergence"]["same_top_1"] > 0.9
    code, out, err = run(
        capsys, monkeypatch, *common, "--quantize", "q8_0", "--reference-dtype", "float16", "--format", "json"
    )
    assert code == 0, err
    quantised = json.loads(out)
    assert (quantised["dtype"], quantised["reference_dtype"]) == ("q8_0", "float16")  # the reference is not quantised
    assert quantised["divergence"]["perplexity"] == pytest.approx(values["divergence"]["perplexity"], rel=1e-6)
    assert quantised["divergence"]["mean_kl"] > values["divergence"]["mean_kl"]
    code, out, err = run(capsys, monkeypatch, *common, "--chunks", "1", "-q")
    assert code == 0 and err == ""
    assert out.startswith("perplexity  ") and "31 tokens, 1 window of 64" in out


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, (), "cannot be read"),
        ("", (), "is empty"),
        ("short", (), "fewer than one window of 512"),
        ("short", ("-c", "3"), "expected a whole number of tokens, 4 or more"),
        ("short", ("--reference", "/nowhere"), "/nowhere"),
    ],
)
def test_the_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    tmp_path: Path,
    text: str | None,
    options: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "text.txt"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    code, out, err = run(capsys, monkeypatch, "-m", str(folder), "-f", str(file), *options)
    assert code in (2, 6) and out == "" and message in err.replace("\n", " ")
