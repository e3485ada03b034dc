"""The tuner: what it refuses, what it stores, who uses that, and the command as a user runs it."""

from __future__ import annotations

import copy
import csv
import dataclasses
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from programs import TINY_SHAPE, Run

import llmcl
from llmcl import reference
from llmcl.architectures.config.hf import config_from_hf
from llmcl.attention import flex_attention
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.kernels.common.attention import AttentionDecode, AttentionShape, TileRequest
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import Product
from llmcl.kernels.common.weight import alloc_weight
from llmcl.kernels.portable.linear import PortableLinearDecode, PortableLinearPrefill
from llmcl.kernels.table import pick
from llmcl.ops.attention import decode_key, decode_splits, prefill_key, prefill_tiles
from llmcl.runtime import device_cache
from llmcl.runtime.device import Device
from llmcl.runtime.device_cache import DeviceCache
from llmcl.tools import tune as tuning
from llmcl.tools import tune_products
from llmcl.tools.trials import AttentionProblem, decode_trial, prefill_trial
from llmcl.tools.tune_products import ProductSize

SHAPE = AttentionShape(4, 2, 32, 64, "float16")


@pytest.fixture
def fresh(default_device: Device, no_findings: Path) -> Device:
    """The default device as if nothing had ever been found out about it."""
    device = copy.copy(default_device)
    device.cache = DeviceCache(device.entry)
    return device


def sizes(tiles: object) -> tuple[int, int, int]:
    return tiles.block_m, tiles.block_n, tiles.dv_tile  # type: ignore[attr-defined]


@pytest.mark.parametrize("variant", ["cpu", "portable"])
def test_trials_agree_with_the_twin_and_see_what_is_wrong(device: Device, variant: str) -> None:
    problem = AttentionProblem.random(4, 2, 32, "bfloat16", 19, position=37, exact=True)
    prefill = prefill_trial(device, problem)
    decode = decode_trial(device, AttentionProblem.random(4, 2, 32, "bfloat16", 1, position=50), copies=2)
    for trial, options in (prefill, {}), (decode, {"n_splits": 3}):
        launches = trial.bind(variant=variant, **options)
        assert trial.error(launches) < 1e-5
        assert trial.error([]) == float("inf"), "an output that nobody wrote passed"
        changed = dataclasses.replace(trial, expected=trial.expected * 1.01)
        assert 1e-3 < changed.error(launches) < 1e-1
        trial.release()


def test_the_trials_own_twin_is_that_of_the_kernels() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, heads, 16)) for n, heads in ((5, 4), (9, 2), (9, 2)))
    from llmcl.tools.trials import _causal_attention

    np.testing.assert_allclose(_causal_attention(q, k, v, 4), reference.attention(q, k, v, 4), rtol=1e-12)


def test_every_choice_is_timed_or_refused_by_the_constant_to_lower(fresh: Device) -> None:
    small = copy.copy(fresh)
    small.entry = dataclasses.replace(fresh.entry, local_mem_bytes=16384)
    result = tuning.tune_prefill(small, SHAPE, 33, variant="portable", search=False)
    rows = {row.label: row for row in result.rows}
    assert list(rows) == [*"ABCDEFGH", "default"]
    assert rows["G"].constants == {"BLOCK_M": 32, "BLOCK_N": 32, "DV_TILE": 32}, "DV_TILE is at most head_dim"
    assert rows["A"].ms is not None and rows["A"].memory is not None
    refused = rows["F"]
    assert refused.ms is None and "bytes of local memory" in str(refused.refused)
    assert str(refused.refused).endswith("lower BLOCK_M")
    assert result.winner is not None and result.winner.ms is not None and result.baseline_ms == rows["G"].ms


def test_what_is_wrong_is_never_timed_or_stored(fresh: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tolerance", lambda variant, dtype: 0.0)
    result = tuning.tune_decode(fresh, SHAPE, 40)
    assert result.winner is None
    assert all(row.ms is None and str(row.refused).startswith("wrong: error ") for row in result.rows)


@pytest.mark.slow
def test_decode_is_searched_from_its_default(fresh: Device) -> None:
    result = tuning.tune_decode(fresh, SHAPE, 64)
    assert result.rows[0].label == "default"
    chosen = pick(AttentionDecode, fresh, SHAPE.kv_dtype, SHAPE.head_dim)
    assert result.rows[0].constants["N_SPLITS"] == chosen.default_splits(fresh, SHAPE.n_kv_heads)
    tried = [tuple(row.constants.values()) for row in result.rows]
    assert len(set(tried)) == len(tried) and len(tried) >= 5
    assert result.winner is not None and result.winner.ms == min(row.ms for row in result.rows if row.ms is not None)


def test_a_stored_winner_is_used_and_overridden(fresh: Device) -> None:
    name = prefill_tiles(fresh, 32, "float16").implementation.name
    default = sizes(prefill_tiles(fresh, 32, "float16"))
    prefill = {prefill_key(name, 32, "float16"): {"BLOCK_M": 16, "BLOCK_N": 64, "DV_TILE": 16}}
    fresh.cache.store_tuned(prefill)
    fresh.cache.store_tuned({decode_key(name, 2, 32, "float16"): {"N_SPLITS": 5, "BLOCK_N": 16}})
    assert DeviceCache(fresh.entry).tuned.keys() > prefill.keys()
    later = copy.copy(fresh)
    later.cache = DeviceCache(fresh.entry)  # another run reads the file
    assert sizes(prefill_tiles(later, 32, "float16")) == (16, 64, 16)
    assert decode_splits(later, 2, 32, "float16") == 5
    for other in ({"head_dim": 64, "kv_dtype": "float16"}, {"head_dim": 32, "kv_dtype": "float32"}):
        assert sizes(prefill_tiles(later, **other)) != (16, 64, 16)  # type: ignore[arg-type]
    assert sizes(prefill_tiles(later, 32, "float16", tuned=False)) == default
    assert sizes(prefill_tiles(later, 32, "float16", request=TileRequest(8))) == (
        8,
        *sizes(prefill_tiles(fresh, 32, "float16", request=TileRequest(8)))[1:],
    )
    masked = prefill_tiles(later, 32, "float16", request=TileRequest(q_block=8))
    assert 8 % masked.block_m == 0, "a block mask of 8 queries cannot take 16"
    later.kernel_options = {"BLOCK_M": 32, "BLOCK_N": 16, "DV_TILE": 128}
    assert sizes(prefill_tiles(later, 32, "float16")) == (32, 16, 32)


def test_another_driver_is_judged_anew(fresh: Device) -> None:
    updated = dataclasses.replace(fresh.entry, driver_version=fresh.entry.driver_version + ".1")
    fresh.cache.store_tuned({"key": {"BLOCK_M": 8}})
    assert DeviceCache(updated).tuned == {} and DeviceCache(fresh.entry).tuned == {"key": {"BLOCK_M": 8}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"tuned": {"x": 1}, "excluded": {}}',
        '{"tuned": {"x": {"BLOCK_M": 8}}, "wrong": {}}',  # as it was called once
        '{"tuned": {"x": {"y": "z"}}}',
        *(
            f'{{"tuned": {{"x": {{"BLOCK_M": {n}}}}}, "excluded": {{}}}}'
            for n in ("-8", "2000", "Infinity", "8.5", "true")
        ),
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(fresh: Device, text: str) -> None:
    path = fresh.cache.path
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.warns(UserWarning, match=f"{path.name} is damaged"):
        assert DeviceCache(fresh.entry).tuned == {}


@pytest.mark.parametrize(
    ("constants", "named"),
    [({"N_SPLITS": 300}, "N_SPLITS 300"), ({"BLOCK_M": 200}, "BLOCK_M 200"), ({"BLOCK": 1}, "BLOCK 1")],
)
def test_what_the_tuner_could_not_have_stored_is_not_used(
    fresh: Device, constants: dict[str, int], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = prefill_tiles(fresh, 32, "float16").implementation.name
    decode, prefill = decode_key(name, 2, 32, "float16"), prefill_key(name, 32, "float16")
    default = decode_splits(fresh, 2, 32, "float16"), sizes(prefill_tiles(fresh, 32, "float16"))
    fresh.cache.tuned = {decode: constants, prefill: constants}
    for _ in range(2):
        assert (decode_splits(fresh, 2, 32, "float16"), sizes(prefill_tiles(fresh, 32, "float16"))) == default
    assert len(caplog.messages) == 2 and all(f"has {named} for attention_" in text for text in caplog.messages)


@pytest.mark.parametrize("variant", ["cpu", "portable"])
@pytest.mark.parametrize(
    ("tile", "message"),
    [
        ({"block_m": -8}, "BLOCK_M is -8"),
        ({"block_m": 1 << 30}, "BLOCK_M is 1073741824; expected 1 to 128"),
        ({"block_n": -16}, "BLOCK_N is -16; expected 16, 32 or 64"),
        ({"dv_tile": -16}, r"DV_TILE is -16; expected a divisor of head_dim 32: \[16, 32\]"),
    ],
)
def test_tiles_that_no_kernel_has_are_refused(
    default_device: Device, variant: str, tile: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prefill_tiles(default_device, 32, "float16", variant=variant, request=TileRequest(**tile))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"BLOCK_M": 1 << 30}, "BLOCK_M is 1073741824; expected 1 to 128"),
        ({"BLOCK": 8}, "kernel_options has BLOCK; expected BLOCK_M, BLOCK_N, DV_TILE"),
        ({"BLOCK_M": 0}, "kernel_options has BLOCK_M 0; expected a whole number, 1 or more"),
        ({"BLOCK_N": 24}, "BLOCK_N is 24; expected 16, 32 or 64"),
    ],
)
def test_kernel_options_are_checked(
    default_device: Device, options: dict[str, int], message: str, tmp_path: Path
) -> None:
    x = np.zeros((1, 1, 4, 16), np.float32)
    with pytest.raises(UsageError, match=message):
        flex_attention(x, x, x, kernel_options=options, device=default_device)
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(TINY_SHAPE))
    with pytest.raises(UsageError, match=message):
        llmcl.load_random(str(shape), device=copy.copy(default_device), max_context=16, kernel_options=options)


SMALL_SHAPE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SMALL_SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 80, "rms_norm_eps": 1e-5}
SMALL_SHAPE |= {"torch_dtype": "bfloat16", "tie_word_embeddings": True, "head_dim": 32}


def product_of(device: Device, size: ProductSize, dtype: str) -> Product:
    weight = alloc_weight(device, "weight", size.rows, size.k, dtype)
    return Product(weight, weight.parts[0], device.alloc(4 * size.rows, "out"), size.epilogue)


def test_which_products_a_model_has() -> None:
    found = tune_products.product_sizes(config_from_hf(SMALL_SHAPE))
    assert [(size.rows, size.k, size.has_gate) for size in found] == [
        (128, 64, False),
        (64, 64, False),
        (192, 64, True),
        (64, 96, False),
        (80, 64, False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "q4_0", "q4_1"])
def test_products_are_checked_timed_and_searched_from_their_default(
    fresh: Device, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_products, "COLD_BYTES", 1 << 14)
    if dtype in QUANTIZED:  # every other value, so that each is tried with one of these types
        first, choices = 1 + (dtype == "q4_1"), PortableLinearDecode.choices

        def some(row: PortableLinearDecode, device: Device, product: Product) -> dict[str, Sequence[int]]:
            return {name: [x[0], *x[first::2]] for name, x in choices(row, device, product).items()}

        monkeypatch.setattr(PortableLinearDecode, "choices", some)
    monkeypatch.setattr(tune_products, "product_sizes", lambda config: [ProductSize(40 * 16, 64, True)])
    decode, prefill = tune_products.tune_products(fresh, config_from_hf(SMALL_SHAPE), dtype, 5, variant="portable")
    assert [decode.kernel, prefill.kernel] == ["linear_decode", "linear_prefill"]
    expected = {"LOCAL_SIZE", "AT_ONCE", "AHEAD"} | ({"VECTORS"} if dtype != "bfloat16" else set())
    assert {*decode.rows[0].constants} == expected and decode.rows[0].label == "default"
    assert {*prefill.rows[0].constants} == {"ITEM_TOKENS", "ITEM_ROWS"}
    for tuning_ in decode, prefill:
        assert len(tuning_.rows) >= 3 and tuning_.winner is not None and "640 rows of 64 columns" in tuning_.title
        assert all(row.ms is not None and row.error is not None and row.error < 1e-5 for row in tuning_.rows)
    assert fresh.cache.tuned == {}, "what was tried is forgotten"
    monkeypatch.setattr(tune_products, "tolerance", lambda variant, dtype: 0.0)
    monkeypatch.setattr(tune_products, "ROUNDED_ACTIVATIONS", 0.0)
    wrong = next(tune_products.tune_products(fresh, config_from_hf(SMALL_SHAPE), dtype, 5, variant="portable"))
    assert wrong.winner is None and all(str(row.refused).startswith("wrong: error ") for row in wrong.rows)


def test_stored_sizes_of_a_product_are_used_where_they_fit(fresh: Device) -> None:
    size, row = ProductSize(128, 64, False), PortableLinearDecode()
    product = product_of(fresh, size, "bfloat16")
    default = row.chosen(fresh, product)
    assert default == {name: values[0] for name, values in row.choices(fresh, product).items()}
    other = {"LOCAL_SIZE": 32 if default["LOCAL_SIZE"] != 32 else 16, "AT_ONCE": 2, "AHEAD": 0}
    fresh.cache.store_tuned({row.tuned_key(product): other})
    later = copy.copy(fresh)
    later.cache = DeviceCache(fresh.entry)
    constants, groups, local = row.size(later, product)
    assert {**constants} == other and groups == (8,) and local == (other["LOCAL_SIZE"],)
    assert row.chosen(later, product_of(later, size, "float16")) == row.chosen(
        fresh, product_of(fresh, size, "float16")
    )
    for wrong in ({**other, "LOCAL_SIZE": 24}, {**other, "AT_ONCE": 3}, {"LOCAL_SIZE": 32}, {**other, "MORE": 1}):
        later.cache.tuned[row.tuned_key(product)] = wrong
        assert row.chosen(later, product) == default
    prefill = PortableLinearPrefill()
    later.cache.tuned[prefill.tuned_key(product)] = {"ITEM_TOKENS": 4, "ITEM_ROWS": 4}
    constants, groups, _ = prefill.size(later, product, None)
    assert constants == {"ITEM_TOKENS": 4, "ITEM_ROWS": 4} and callable(groups) and groups(65) == (2, 2)


def test_variants_without_a_choice_are_left_out(default_device: Device) -> None:
    if not default_device.is_cpu:
        pytest.skip("a CPU's products have no sizes to choose")
    for dtype in ("bfloat16", *QUANTIZED):  # q4_1, as the demo model's file has it, was a KeyError
        assert not [*tune_products.tune_products(default_device, config_from_hf(SMALL_SHAPE), dtype, 5)]


def test_rows_of_any_format_are_made(default_device: Device) -> None:
    for dtype, quantized in QUANTIZED.items():
        ((weight, met), *_) = tune_products._weights(default_device, ProductSize(64, 2 * quantized.block, False), dtype)
        assert weight.parts[0].dtype == dtype and np.isfinite(met).all() and met.std() > 0


@pytest.mark.slow
def test_the_command_stores_the_winner(tmp_path: Path, no_findings: Path, run_here: Run) -> None:
    files = [tmp_path / f"table.{kind}" for kind in ("md", "csv", "json")]
    written = [text for pair in zip(("--markdown", "--csv", "--json"), map(str, files), strict=True) for text in pair]
    done = run_here("llmcl", "tune", "-m", "smollm2", "--kernel", "decode", "-d", "64", *written)
    assert done.returncode == 0, done.stderr
    for part in ("attention_decode", "vs default", "fastest attention_decode (*): N_SPLITS", "stored in"):
        assert part in done.stdout
    assert "attention_decode default (N_SPLITS" in done.stderr
    (stored,) = (no_findings / "devices").iterdir()
    ((key, constants),) = json.loads(stored.read_text())["tuned"].items()
    assert key.startswith("attention_decode ") and key.endswith("kv_heads 3 head_dim 64 float16")
    rows = json.loads(files[2].read_text(encoding="utf-8"))
    (winner,) = (row for row in rows if row["winner"])
    assert {name: winner[name] for name in constants} == constants and winner["ms"] > 0
    assert [row["choice"] for row in csv.DictReader(files[1].read_text().splitlines())] == [r["choice"] for r in rows]
    assert files[0].read_text(encoding="utf-8").count("\n|") == len(rows) + 2
    again = run_here("llmcl", "generate", "-m", "smollm2", "-p", "Hi", "-n", "4", "-q")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("lost", ["cache", "--json"])
def test_a_disk_that_becomes_full_loses_nothing_else(
    lost: str, tmp_path: Path, no_findings: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = tuning.Measurement("attention_decode", "default", {"N_SPLITS": 2, "BLOCK_N": 16}, 1.0)
    file = tmp_path / "table.json"

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def tune_decode(*args: object, **settings: object) -> tuning.Tuning:
        if lost == "cache":
            monkeypatch.setattr(device_cache, "write_cached", full)
        else:
            file.unlink()
            file.mkdir()  # nor can a folder be written
        return tuning.Tuning("attention_decode", "portable", "key", [row], row)

    monkeypatch.setattr(tuning, "tune_decode", tune_decode)
    done = run_here("llmcl", "tune", "--random", "smollm2-135m", "--kernel", "decode", "--json", str(file))
    assert "fastest attention_decode (*): N_SPLITS 2 BLOCK_N 16" in done.stdout and "stored in" not in done.stdout
    (stored,) = (no_findings / "devices").iterdir()
    kept = json.loads(stored.read_text())["tuned"]
    if lost == "cache":
        assert (done.returncode, kept) == (2, {})
        assert f"winners cannot be stored in {stored} (No space left on device); make" in done.stderr
        assert json.loads(file.read_text())[0]["winner"]
    else:
        assert (done.returncode, kept) == (1, {"key": {"N_SPLITS": 2, "BLOCK_N": 16}})
        assert f"--json {file}: cannot be written (Is a directory); make room" in done.stderr


def test_a_folder_that_cannot_be_written_is_named_before_the_work(
    no_findings: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (no_findings / "devices").write_text("")
    monkeypatch.setattr(tuning, "tune_decode", lambda *args, **settings: pytest.fail("it began"))
    done = run_here("llmcl", "tune", "--random", "smollm2-135m", "--kernel", "decode")
    assert (done.returncode, done.stdout) == (2, "")
    assert "winners cannot be stored in" in done.stderr and "give --no-store" in done.stderr


@pytest.mark.slow
def test_one_combination_is_timed(no_findings: Path, run_here: Run) -> None:
    done = run_here("llmcl", "tune", "--kernel", "prefill", "-m", "smollm2", "--combo", "D", "-p", "32", "-q")
    assert done.returncode == 0, done.stderr
    labels = [line.split(" ")[0] for line in done.stdout.splitlines()[3:6]]
    assert labels == ["D", "G", "default"] and done.stderr == ""
    assert not (no_findings / "devices").exists(), "a single combination is no winner"


@pytest.mark.parametrize(
    ("command", "arguments", "code", "parts"),
    [
        ("tune", [], 2, ["--model", "--random"]),
        ("tune", ["-m", "smollm2", "--combo", "X"], 2, ["--combo", "'X'", "A, B"]),
        ("tune", ["-m", "smollm2", "--variant", "fast", "-q"], 2, ["'fast'", "cpu, portable"]),
        ("tune", ["-m", "smollm2", "--csv", "no/such/folder/x"], 2, ["--csv", "no/such/folder/x"]),
        ("generate", ["-m", "smollm2", "-p", "Hi", "--combo", "X"], 2, ["--combo", "'X'"]),
    ],
)
def test_bad_requests_are_refused(
    command: str, arguments: list[str], code: int, parts: list[str], run_here: Run
) -> None:
    done = run_here("llmcl", command, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_combination_gives_the_same_logits(smollm2: LLM) -> None:
    """Not the same text: a last bit of attention's sums may choose another of two tokens that are as likely."""
    tiles = tuning.combination("D")
    ids = smollm2.encode("Why is the sky blue?")
    with llmcl.load(
        "smollm2", device=smollm2.device.entry.index, dtype="float32", max_context=1024, kernel_options=tiles
    ) as other:
        used = [sizes(prefill_tiles(llm.device, llm.config.head_dim, llm.kv_dtype)) for llm in (other, smollm2)]
        assert used[0] == (tiles["BLOCK_M"], tiles["BLOCK_N"], tiles["DV_TILE"]) != used[1]
        expected, actual = smollm2.logits(ids), other.logits(ids)
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


def test_the_command_takes_a_combination(run_here: Run) -> None:
    done = run_here("llmcl", "generate", "-m", "smollm2", "-p", "Hi", "-n", "2", "--combo", "D")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
