"""A decode step in one launch on a CPU: the bits of separate launches, and what happens if its groups do not meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compare_launches
import numpy as np
import pytest
from helpers import gemma2_config, random_weights, save_folder, small_config

import llmcl
from llmcl.attention.masks import alibi
from llmcl.engine.llm import LLM
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import alloc_weight, fill_random
from llmcl.kernels.cpu import one_launch
from llmcl.models.config import ModelConfig
from llmcl.models.model import Model
from llmcl.ops.linear import linear_decode
from llmcl.progress import COMPILING
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("patient")

GEMMA2 = gemma2_config(windows=(20, None))
QWEN2 = small_config(
    architecture="qwen2", qkv_bias=True, n_q_heads=4, head_dim=64, hidden_size=256, intermediate_size=512
)
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "float16 with mods": (GEMMA2, {"dtype": "float16", "score_mod": alibi(4)}),
    "q4_k in pages": (QWEN2, {"quantize": "q4_k", "kv_page_tokens": 64, "kv_dtype": "bfloat16"}),
}


@pytest.fixture
def cpu(device: Device) -> Device:
    if not one_launch.CpuOneLaunch().suits(device):
        pytest.skip("only a processor runs a step in one launch of this kind")
    return device


@pytest.fixture(scope="module")
def loaded(device: Device, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = small_config()
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=1))
    return llmcl.load(str(folder), device=device, dtype="bfloat16", max_context=128)


@pytest.fixture
def small(cpu: Device, loaded: LLM) -> Iterator[LLM]:
    """A small model, whose one launch a test may break."""
    model = loaded.model
    loaded.model = Model(cpu, loaded.config, model.weights, model.cache)
    yield loaded
    loaded.model = model


def step_logits(model: Model, n_prompt: int, n_steps: int) -> np.ndarray:
    """Logits of n_steps decode steps after a prompt: float32 [n_steps, vocab]."""
    ids = np.random.default_rng(5).integers(0, model.config.vocab_size, n_prompt + n_steps).tolist()
    model.cache.truncate(0)
    model.prefill(ids[:n_prompt])
    rows = []
    for token in ids[n_prompt:]:
        model.decode_token(token)
        rows.append(model.device.read(model.act.logits, np.float32, (model.config.vocab_size,)))
    return np.stack(rows)


def test_the_script_times_both_and_leaves_the_model(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_launches, "TURNS", 2)
    monkeypatch.setattr(compare_launches, "STEPS", 3)
    model = small.model
    counts: list[float] = []
    bench = small.bench_decode

    def bench_decode(n_tokens: int, depth: int) -> list[float]:
        before = small.device.traffic.copy()
        times = bench(n_tokens, depth)
        counts.append(small.device.traffic.since(before).kernel_launches / n_tokens)
        return times

    monkeypatch.setattr(small, "bench_decode", bench_decode)
    one, apart = compare_launches.turns(small, 0)
    assert len(one) == len(apart) == 2 and min(*one, *apart) > 0 and small.model is model
    assert counts[0] < 3 < min(counts[1::2]), counts


def separate(llm: LLM) -> Model:
    """The model with a launch for each kernel, on the same cache."""
    model = llm.model
    return Model(llm.device, llm.config, model.weights, model.cache, mods=model.mods, one_launch=False)


def compare(llm: LLM, n_prompt: int, n_steps: int) -> None:
    assert len(llm.model.decode_launches) == 1
    found = step_logits(llm.model, n_prompt, n_steps)
    assert len(llm.model.decode_launches) == 1, "its work-groups did not meet"
    assert np.isfinite(found).all()
    llm.model._apart = n_steps
    assert len(llm.model.decode_launches) > 5 * llm.config.n_layers
    assert np.array_equal(found.view(np.int32), step_logits(llm.model, n_prompt, n_steps).view(np.int32))
    twin = separate(llm)
    assert len(twin.decode_launches) > 5 * llm.config.n_layers
    assert np.array_equal(found.view(np.int32), step_logits(twin, n_prompt, n_steps).view(np.int32))


@pytest.mark.parametrize("name", MODELS)
def test_has_the_bits_of_separate_launches(cpu: Device, name: str, tmp_path: Path) -> None:
    config, options = MODELS[name]
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    compare(llmcl.load(str(folder), device=cpu, max_context=192, **options), 60, 16)


def test_has_the_bits_of_separate_launches_with_the_demo_model(cpu: Device, default_device: Device) -> None:
    if cpu.entry.index != default_device.entry.index:
        pytest.skip("small models of several types do on the other devices")
    compare(llmcl.load("smollm2", device=cpu, max_context=128), 70, 6)  # its matrices are of several types


SAMPLING: dict[str, Any] = {
    **{"max_tokens": 20, "temperature": 0.9, "repeat_penalty": 1.2, "top_k": 30, "top_p": 0.95},
    **{"seed": 3, "ignore_eos": True},
}


def test_a_step_that_gave_up_is_repeated_with_separate_launches(small: LLM) -> None:
    prompt = list(range(3, 20))
    expected = small.generate(prompt, **SAMPLING).token_ids
    stream = small.stream(prompt, **SAMPLING)
    found = [next(stream).token_id for _ in range(5)]
    assert len(small.model.decode_launches) == 1
    together = small.model._one_launch
    assert together is not None
    small.device.write(together._sync, np.ones(1, np.uint32), 4 * one_launch.GAVE_UP)  # as a work-group does
    before, programs = small.device.traffic.copy(), small.device.n_programs
    found.append(next(stream).token_id)
    assert small.device.traffic.since(before).device_to_host_bytes == 4  # no more is asked for while all goes well
    found.append(next(stream).token_id)
    assert small.device.traffic.since(before).device_to_host_bytes == 16  # NaN's id, the flag, the token
    assert len(small.model.decode_launches) > 1
    assert small.device.n_programs == programs, "it waited for the compiler"
    found += [piece.token_id for piece in stream]
    assert found == expected
    while small.model._apart:
        assert small.generate(prompt, **SAMPLING).token_ids == expected
    assert len(small.model.decode_launches) == 1
    assert small.generate(prompt, **SAMPLING).token_ids == expected


def test_steps_apart_double_until_it_goes_well(small: LLM) -> None:
    model = small.model
    assert model._one_launch is not None
    model.prefill([1, 2, 3])

    def give_up() -> int:
        model._apart = 0
        small.device.write(model._one_launch._sync, np.ones(1, np.uint32), 4 * one_launch.GAVE_UP)
        assert model.repeat_decode(0)
        return model._apart

    assert [give_up() for _ in range(11)] == [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024]
    model._together = 2049
    assert give_up() == 2
    model._together = 16
    assert give_up() == 4


def test_a_driver_that_cannot_compile_it_has_separate_launches(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_launch, "_PLACE", "#error no\n")
    model = small.model
    with pytest.warns(UserWarning, match="a launch for each kernel.*one_launch.cl does not compile"):
        other = Model(small.device, small.config, model.weights, model.cache)
    assert len(other.decode_launches) > 1


def test_gives_up_where_patience_ends_and_leaves_nan(cpu: Device) -> None:
    rows = k = 64
    weight = alloc_weight(cpu, "weight", rows, k, "bfloat16")
    fill_random(cpu, weight, 0.1, 1)
    step, x, out = StepState(cpu, 1), cpu.upload(np.ones(k, np.float32), "x"), cpu.zeros(4 * rows, "out")
    step.write_tokens([0], 0)
    launches = [launch for _ in range(3) for launch in linear_decode(cpu, weight, x, out, step)]
    together = one_launch.OneLaunch(cpu, launches, out)
    together.launch.bind(len(together.launch.args) - 1, np.uint32(1000))
    claimed = np.ones(1, np.uint32)  # unit 0, by a work-group that never comes to its end
    cpu.write(together._sync, claimed, 4 * one_launch.CLAIMED)
    together.launch.enqueue()
    assert np.isnan(cpu.read(out, np.float32, (rows,))).all()
    assert together.gave_up() and not together.gave_up()
    together.launch.bind(len(together.launch.args) - 1, np.uint32(one_launch.MOST_TURNS))
    together.launch.enqueue()
    found = cpu.read(out, np.float32, (rows,))
    assert not together.gave_up()
    launches[0].enqueue()
    assert np.array_equal(found, cpu.read(out, np.float32, (rows,)))


def test_the_first_start_reports_what_it_compiles(cpu: Device, tmp_path: Path, empty_cache: Path) -> None:
    if cpu.entry.is_pocl:
        pytest.skip("PoCL keeps its programs itself")
    folder = save_folder(tmp_path / "small", small_config(), random_weights(small_config(), seed=1))
    for compiles, max_context in ((True, 128), (False, 200)):  # the kernels serve a context of any length
        reported: list[tuple[int, int]] = []

        def progress(what: str, done: int, total: int) -> None:
            if what == COMPILING:
                reported.append((done, total))  # noqa: B023

        settings: dict[str, Any] = {"dtype": "bfloat16", "max_context": max_context, "progress": progress}
        with llmcl.load(str(folder), device=cpu.entry.index, **settings) as llm:
            assert (llm.device.compile_s > 0) == compiles
            total = reported[0][1] if compiles else -1
            assert reported == [(done, total) for done in range(total + 1)]
            assert not compiles or total > 5


def test_any_number_of_work_groups_does(small: LLM) -> None:
    """None waits for one that has not begun: neither a single one nor more than there are threads stops for ever."""
    expected = step_logits(small.model, 20, 3)
    for groups in (1, 4 * small.device.compute_units + 1):
        crowded = separate(small)
        crowded._one_launch = one_launch.OneLaunch(
            small.device, crowded.decode_launches, crowded.act.logits, groups=groups
        )
        assert len(crowded.decode_launches) == 1
        assert np.array_equal(step_logits(crowded, 20, 3), expected)
        assert len(crowded.decode_launches) == 1, "a wait took too long"


def test_a_kernel_becomes_a_function_with_names_of_its_own() -> None:
    from llmcl.runtime.program import KernelSource

    constants = {"K": 64, "WEIGHT": "q4_0", "EPS": 1e-5}
    text = one_launch.as_function(KernelSource("cpu/linear_decode.cl", "linear_decode", constants), "_7")
    assert "__kernel" not in text and "inline void linear_decode_7(const int4 place, " in text
    assert "dot_quant_tile_7(" in text and "} activations_7;" in text
    assert text.startswith("#define EPS 1e-05f\n#define K 64\n")
    assert "#undef K\n" in text and "#undef TILE_SIZE\n" in text
