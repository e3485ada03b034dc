"""A decode step as a persistent kernel on a CPU: the bits of separate launches, whoever computes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import compare_launches
import numpy as np
import pytest
from decode_steps import load_for_decode, step_logits
from family_configs import FAMILIES
from helpers import gemma2_config, random_weights, save_folder, small_config

import llmcl
from llmcl.architectures.config import ModelConfig
from llmcl.attention.masks import alibi
from llmcl.engine.llm import LLM
from llmcl.kernels.common.functions import as_function
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.cpu import persistent_step
from llmcl.models.batch import make_batch
from llmcl.models.model import Model
from llmcl.ops.sample import SamplingParams
from llmcl.progress import COMPILING
from llmcl.runtime.device import Device, Launch
from llmcl.tools import doctor, trials

GEMMA2 = gemma2_config(windows=(20, None))
QWEN2 = small_config(architecture="qwen2", n_q_heads=4, head_dim=64, hidden_size=256, intermediate_size=512)
UNITS, LEFT = 0, 16  # slots of the counters
LOST = 8  # one of those of a work-group, which only a test uses
MODELS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "float16 with mods": (GEMMA2, {"dtype": "float16", "score_mod": alibi(4)}),
    "q4_k in pages": (QWEN2, {"quantize": "q4_k", "kv_page_tokens": 64, "kv_dtype": "bfloat16"}),
    "latents": (FAMILIES["glm4_moe_lite"], {"dtype": "bfloat16"}),
}


@pytest.fixture(scope="module")
def cpu(device: Device) -> Device:
    if not persistent_step.CpuPersistentStep().supports_device(device):
        pytest.skip("only a processor runs a step in a persistent kernel of this kind")
    return device


@pytest.fixture(scope="module")
def loaded(cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    config = small_config()
    folder = save_folder(tmp_path_factory.mktemp("small"), config, random_weights(config, seed=1))
    with pytest.MonkeyPatch.context() as patch:
        load_for_decode(patch)
        return llmcl.load(str(folder), device=cpu, dtype="bfloat16", max_context=128)


@pytest.fixture
def small(cpu: Device, loaded: LLM) -> Iterator[LLM]:
    """A small model, whose persistent kernel a test may break."""
    model = loaded.model
    loaded.model = Model(cpu, loaded.config, model.weights, model.cache, step_rows=1)
    yield loaded
    loaded.model = model


def test_attention_alone(cpu: Device) -> None:
    """The kernels of one token's attention, whose parts wait for each other: quick on a driver that compiles slowly."""
    for check in doctor.checks():
        if isinstance(check.variant, persistent_step.CpuPersistentStep):
            assert check.run(cpu) < trials.tolerance(check.variant, check.dtype)


@pytest.mark.slow
def test_a_small_model_has_the_bits_of_separate_launches(small: LLM) -> None:
    compare(small, 20, 8)


@pytest.mark.slow
def test_the_script_times_both_and_leaves_the_model(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_launches, "ROUNDS", 2)
    monkeypatch.setattr(compare_launches, "STEPS", 3)
    monkeypatch.setattr(compare_launches, "Model", partial(Model, step_rows=1))
    model = small.model
    counts: list[float] = []
    bench = small.bench_decode

    def bench_decode(n_tokens: int, depth: int) -> list[float]:
        before = small.device.traffic.copy()
        times = bench(n_tokens, depth)
        counts.append(small.device.traffic.since(before).kernel_launches / n_tokens)
        return times

    monkeypatch.setattr(small, "bench_decode", bench_decode)
    one, separate = compare_launches.rounds(small, 0)
    assert len(one) == len(separate) == 2 and min(*one, *separate) > 0 and small.model is model
    assert counts[0] < 3 < min(counts[1::2]), counts


def separate(llm: LLM) -> Model:
    """The model with a launch for each kernel, on the same cache."""
    return another(llm, persistent=False)


def another(llm: LLM, *, persistent: bool) -> Model:
    model = llm.model
    options: dict[str, Any] = {"mods": model.mods, "step_rows": 0 if model._prefill else 1, "persistent": persistent}
    return Model(llm.device, llm.config, model.weights, model.cache, **options)


def in_one(model: Model, groups: int) -> persistent_step.PersistentKernel:
    then = model.sampler.largest_launches
    step = ListedStep(model._decode.separate, model.step, model.cache.max_context, then=then)
    return persistent_step.PersistentKernel(model.device, step, groups=groups)


def compare(llm: LLM, n_prompt: int, n_steps: int) -> None:
    assert len(llm.model.decode_launches) == 1
    found = step_logits(llm.model, n_prompt, n_steps)
    assert np.isfinite(found).all()
    twin = separate(llm)
    assert len(twin.decode_launches) > 5 * llm.config.n_layers
    assert np.array_equal(found.view(np.int32), step_logits(twin, n_prompt, n_steps).view(np.int32))


@pytest.mark.parametrize(
    "name",
    ["float16 with mods", *(pytest.param(name, marks=pytest.mark.slow) for name in ("latents", "q4_k in pages"))],
)
def test_has_the_bits_of_separate_launches(
    cpu: Device, default_device: Device, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_for_decode(monkeypatch)
    if cpu.entry.index != default_device.entry.index and name != "q4_k in pages":
        pytest.skip("on the other devices the quantised model does: each takes 10 s to compile")
    config, options = MODELS[name]
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=1))
    compare(llmcl.load(str(folder), device=cpu, max_context=192, **options), 60, 16)


@pytest.mark.slow
def test_has_the_bits_of_separate_launches_with_the_demo_model(cpu: Device, default_device: Device) -> None:
    if cpu.entry.index != default_device.entry.index:
        pytest.skip("small models of several types do on the other devices")
    compare(llmcl.load("smollm2", device=cpu, max_context=128), 70, 6)  # its matrices are of several types


@pytest.mark.slow
def test_several_rows_have_the_bits_of_separate_launches(small: LLM) -> None:
    """The work-groups of a launch depend on the rows of the step."""

    def logits(persistent: bool) -> list[np.ndarray]:
        batch = make_batch(small.model, 3, 128, 64)
        bound = batch.decoding.bound[8]
        assert len(bound.launches) == 1 < len(bound.separate)
        bound.persistent = bound.persistent if persistent else None
        sequences = [batch.cache.sequence() for _ in range(3)]
        for i, sequence in enumerate(sequences):
            batch.start(sequence, SamplingParams(temperature=0, seed=0))
            batch.read([(sequence, [*range(5 + 30 * i, 7 + 60 * i)])])()
        found = []
        for n in (3, 2, 3):
            batch.decode(sequences[:n])()
            found.append(batch.model.device.read(batch.model.act.logits, np.float32, (n, small.config.vocab_size)))
        return found

    for one, many in zip(logits(True), logits(False), strict=True):
        assert np.isfinite(one).all()
        assert np.array_equal(one.view(np.int32), many.view(np.int32))


def test_a_driver_that_cannot_compile_it_has_separate_launches(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_step, "_WORK_GROUP", "#error no\n")
    model = small.model
    with pytest.warns(UserWarning, match="a launch for each kernel.*persistent_step.cl does not compile"):
        other = Model(small.device, small.config, model.weights, model.cache, step_rows=1)
    assert len(other.decode_launches) > 1


@pytest.mark.slow
def test_the_first_start_reports_what_it_compiles(
    cpu: Device, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.entry.fact("is_pocl"):
        pytest.skip("PoCL keeps its programs itself")
    load_for_decode(monkeypatch)
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
            assert not compiles or 2 < total <= len([*(empty_cache / "programs").iterdir()])


def test_any_number_of_work_groups_does(small: LLM) -> None:
    """None waits for one that has not begun: neither a single one nor more than there are threads stops for ever."""
    expected = step_logits(small.model, 20, 3)
    for groups in (1, 4 * small.device.compute_units + 1, 64):
        crowded = separate(small)
        crowded._decode.persistent = in_one(crowded, groups)
        assert len(crowded.decode_launches) == 1
        assert np.array_equal(step_logits(crowded, 20, 3), expected)


def test_whoever_waits_may_leave(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without patience each wait ends at once, and those that are left do the rest: in one part and in several."""
    expected = step_logits(small.model, 20, 40)
    monkeypatch.setattr(persistent_step, "LEAVE_SPINS", 0)
    monkeypatch.setattr(persistent_step, "BYTES_PER_SPIN", 1 << 40)
    parts = []
    for part_bytes in (persistent_step.PART_BYTES, 1000, 0):
        monkeypatch.setattr(persistent_step, "PART_BYTES", part_bytes)
        hasty = separate(small)
        hasty._decode.persistent = in_one(hasty, 3)
        parts.append(len(hasty.decode_launches))
        assert np.array_equal(step_logits(hasty, 20, 40), expected)
    assert 1 == parts[0] < parts[1] < parts[2], parts


def chosen(model: Model, n: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of 14 steps after a prompt, n a launch, and the last logits."""
    sequence = model.cache.sequence()
    model.cache.truncate(sequence, 0)
    model.start_sampling(sequence)
    for token in (5, 6, 7):
        model.decode_token(sequence, token)
    ids = [model.sample(sequence)()]
    assert n == 1 or n in model.steps_at_once(sequence)
    for _ in range(14 // n):
        launches = model.device.traffic.kernel_launches
        tokens = model.decode_and_sample(sequence, n)()
        assert n == 1 or model.device.traffic.kernel_launches == launches + 1
        sequence.token_ids += [ids[-1], *tokens[:-1]]
        ids += tokens
    return ids, model.device.read(model.act.logits, np.float32, (model.config.vocab_size,))


@pytest.mark.parametrize("take, leave", [(persistent_step.TAKE_SPINS, persistent_step.LEAVE_SPINS), (20, 1000), (9, 0)])
def test_steps_in_a_row_have_the_bits_of_separate_launches(
    small: LLM, take: int, leave: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes part, takes units over, or leaves."""
    ids, logits = chosen(separate(small), 1)
    monkeypatch.setattr(persistent_step, "TAKE_SPINS", take)
    monkeypatch.setattr(persistent_step, "LEAVE_SPINS", leave)
    monkeypatch.setattr(persistent_step, "BYTES_PER_SPIN", 8 if leave > 1000 else 1 << 40)
    for groups in (1, 2, 4 * small.device.compute_units + 1):
        several = separate(small)
        several._decode.persistent = in_one(several, groups)
        assert [*several._decode.whole_steps] == ([] if small.device.runs_ahead else [persistent_step.STEPS])
        for n in (1, *several._decode.whole_steps):
            found, last = chosen(several, n)
            assert found == ids and np.array_equal(last.view(np.int32), logits.view(np.int32))


def test_a_step_of_several_launches_is_never_one_of_several(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_step, "PART_BYTES", 1000)
    model = separate(small)
    kernel = in_one(model, 2)
    assert len(kernel.parts) > 1 and not kernel.whole_steps
    model._decode.persistent = kernel
    assert chosen(model, 1)[0] == chosen(small.model, 1)[0]
    assert model.steps_at_once(model.cache.sequence()) == []


# Now and then a thread stops for a millisecond before it stores, as if its core were taken away. It counts its losses.
LATE = """\
inline bool still_own_later(volatile __global uint* own, const uint word) {
    for (int i = 0; i < (word / 4096u % 3u == 0 ? 1000000 : 0); ++i) (void)own[LOST];
    if (atomic_cmpxchg(own, word, word | UNIT_CLOSED) == word) return true;
    own[LOST] += 1;
    return false;
}
"""


@pytest.fixture(params=["dense", pytest.param("experts", marks=pytest.mark.slow)])
def any_small(
    request: pytest.FixtureRequest, cpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LLM]:
    if request.param == "dense":
        yield request.getfixturevalue("small")
        return
    load_for_decode(monkeypatch)
    config = FAMILIES["gpt_oss"]
    folder = save_folder(tmp_path / "experts", config, random_weights(config, seed=1))
    with llmcl.load(str(folder), device=cpu, dtype="bfloat16", max_context=128) as llm:
        yield llm


def test_a_unit_whose_thread_is_late_is_taken_over(any_small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    small = any_small
    if small.device.compute_units == 1:
        pytest.skip("nobody waits where there is one core")
    expected = step_logits(small.model, 20, 3)
    monkeypatch.setattr(persistent_step, "TAKE_SPINS", 1000)
    functions = persistent_step._functions
    stored = "#define MAY_STORE (atomic_cmpxchg(own, word, word | UNIT_CLOSED) == word)"

    def late(launches: Sequence[Launch]) -> str:
        text = functions(launches)
        assert text.count(stored) == 1
        before, after = text.split(stored)
        return f"{before}#define LOST {LOST}\n{LATE}#define MAY_STORE still_own_later(own, word){after}"

    monkeypatch.setattr(persistent_step, "_functions", late)
    slow = another(small, persistent=True)
    kernel = slow._decode.persistent = in_one(slow, 3)
    end, lost = time.monotonic() + 30, 0
    while lost < 50 and time.monotonic() < end:  # a busy machine seldom runs two threads at once
        assert np.array_equal(step_logits(slow, 20, 3), expected)
        counters = small.device.read(kernel.sync, np.uint32, (kernel.sync.nbytes // 4,))
        lost = counters[persistent_step.SYNC_SLOTS :].reshape(3, -1)[:, LOST].sum()
    assert lost > 0


def test_who_waits_for_a_core_that_was_taken_away_leaves(small: LLM) -> None:
    kernel = in_one(separate(small), 2)
    (launch,), sync = kernel.parts, kernel.sync
    small.device.write(sync, np.ones(1, np.uint32), 4 * UNITS)  # unit 0, by a thread that does not come back
    launch.enqueue()
    assert small.device.read(sync, np.uint32, (LEFT + 1,))[[UNITS, LEFT]].tolist() == [1, 2]


def test_beside_processes_that_keep_the_cores_to_themselves(small: LLM) -> None:
    expected = step_logits(small.model, 20, 3)
    spin = "import time; end = time.monotonic() + 10\nwhile time.monotonic() < end: pass"
    others = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(small.device.compute_units)]
    try:
        end, rounds = time.monotonic() + 1, 0
        while time.monotonic() < end or rounds < 3:
            assert np.array_equal(step_logits(small.model, 20, 3), expected)
            rounds += 1
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_has_a_work_group_for_each_core_of_the_time(small: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step_logits(small.model, 20, 3)
    (launch,) = small.model.decode_launches
    for cores in (1, 2, 1000):
        monkeypatch.setattr(persistent_step, "cores_now", lambda cores=cores: cores)
        assert launch.global_size(1) == (min(cores, small.device.compute_units),)
        assert np.array_equal(step_logits(small.model, 20, 3), expected)


def test_a_kernel_becomes_a_function_with_names_of_its_own() -> None:
    from llmcl.runtime.program import KernelSource

    constants = {"K": 64, "WEIGHT": "q4_0", "EPS": 1e-5}
    source = KernelSource("cpu/linear_decode.cl", "linear_decode", constants)
    text = as_function(source, "_7", persistent_step.SHARED, "#define HEAD 1\n", "const uint3 work_group, ")
    assert "__kernel" not in text and "inline void linear_decode_7(const uint3 work_group, " in text
    assert "#define HEAD 1\n" in text and "#undef HEAD\n" in text
    assert "dot_quant_tile_7(" in text and "} activations_7;" in text
    assert text.startswith("#define EPS 1e-05f\n#define K 64\n")
    assert "#undef K\n" in text and "#undef TILE_SIZE\n" in text
