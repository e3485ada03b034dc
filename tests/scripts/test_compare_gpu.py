"""The comparison on a GPU: a whole run on the CPU device with a tiny shape, its figures, and contestants that fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import compare_engines as engines
import compare_gpu as gpu
import compare_gpu_child as gpu_child
import pytest
from programs import TINY_SHAPE, Run, run_script

from llmcl.models.random_shapes import random_shape_config
from llmcl.runtime.device import Device

SHAPE = {**TINY_SHAPE, "head_dim": 16}  # random_file leaves a GGUF reader to divide: hidden_size / heads

# A llama-bench that takes 20 ms for a prefill and 40 ms for decoding; the second micro-batch takes longer.
LLAMA_BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
numbers = lambda name: [int(n) for n in given[name].split(",")]
rows = []
for slow in range(len(numbers("-ub"))):
    for depth in numbers("-d"):
        shapes = [(n, 0, 20) for n in numbers("-p")] + [(0, n, 40) for n in numbers("-n")]
        for n_prompt, n_gen, ms in shapes:
            row = dict(n_prompt=n_prompt, n_gen=n_gen, n_depth=depth, samples_ns=[(ms + slow) * 10**6])
            rows.append(dict(row, model_type="llama tiny F16", build_commit="abc"))
print(json.dumps(rows))
"""


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE), encoding="utf-8")
    return path


def llama_bench(path: Path, text: str = LLAMA_BENCH) -> Path:
    path.write_text(text.replace("{python}", sys.executable), encoding="utf-8")
    path.chmod(0o755)
    return path


def plan(**changes: Any) -> Any:
    tests = [gpu.Test(16), gpu.Test(4, 0), gpu.Test(4, 8)]
    return gpu.Plan(**{"tests": tests, "rounds": 1, "device": None, "on_cpu": True, "limit_s": 60.0} | changes)


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, shape: Path, default_device: Device) -> None:
    if not default_device.is_cpu:
        pytest.skip("its PyTorch runs on a CPU")
    gguf = engines.random_file(tmp_path / "tiny.gguf", str(shape))
    done = run_script(
        "compare_gpu.py",
        *("--random", str(shape), "-p", "16", "-n", "4", "-d", "0,8", "-r", "2", "--json", str(tmp_path / "out.json")),
        *("--contestants", "llmcl,eager,llama.cpp", "--device", str(default_device.entry.index)),
        *("--llama-bench", str(llama_bench(tmp_path / "llama-bench")), "--gguf", str(gguf)),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    rows = {(row["test"], row["contestant"]): row for row in result["rows"]}
    assert len(rows) == 9 and all(len(row["seconds"]) == 2 for row in rows.values())
    assert {test for test, _ in rows} == {"pp16", "tg4", "tg4 @ d8"}
    assert rows["tg4", "llama.cpp"]["ms_per_token"] == pytest.approx(10) and "ratio" not in rows["tg4", "llmcl"]
    ours = rows["pp16", "llmcl"]["seconds"]
    assert rows["pp16", "llama.cpp"]["ratio_max"] == pytest.approx(0.020 / min(ours))
    assert rows["tg4", "llmcl"]["of_bandwidth"] > 0 and result["ceilings"]["bandwidth"] > 1e8
    assert not any("failure" in about for about in result["contestants"].values())
    assert "| PyTorch eager" in done.stdout and "streaming read" in done.stdout


@pytest.mark.slow
def test_a_contestant_that_fails_ends_nothing_else(tmp_path: Path, shape: Path) -> None:
    failing = llama_bench(tmp_path / "llama-bench", "#!/bin/sh\necho no GPU here >&2; exit 3\n")
    one = gpu.make_shapes([str(shape)], [], plan(contestants=(gpu.OURS, gpu.EAGER, gpu.LLAMA), llama_bench=failing))[0]
    missing = one.contestants[gpu.LLAMA]
    assert "no --gguf PATH of the shape" in missing.failure
    missing.failure, one.gguf = None, tmp_path / "tiny.gguf"
    no_gpu = gpu.Shape(str(shape), plan(on_cpu=False), None, {gpu.EAGER: gpu.Contestant()})
    one.contestants = {gpu.LLAMA: missing}
    one.turn(1)
    with no_gpu.loaded():
        no_gpu.turn(1)
    text = gpu.markdown([one.to_dict(), no_gpu.to_dict()])
    assert "llama.cpp: left out: llama-bench ended with status 3. no GPU here" in text
    assert "PyTorch eager: left out: PyTorch eager failed at 'load'" in text


def test_a_contestant_that_hangs_is_stopped(tmp_path: Path) -> None:
    hanging = tmp_path / "hanging.py"
    hanging.write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    child = engines.Child("x", sys.executable, os.sched_getaffinity(0), hanging, limit_s=0.2)
    with pytest.raises(engines.ChildError, match="x gave no answer to 'load' within 0 s"):
        child.ask("load")
    assert child._process.returncode is not None


@pytest.mark.slow
def test_the_compiled_step_decodes_what_the_eager_one_does() -> None:
    torch = pytest.importorskip("torch")
    ids = {}
    with torch.enable_grad():  # restores at its end what the engines switch off
        for compiled in (False, True):
            torch.manual_seed(0)
            engine = gpu_child.PyTorch(compiled, backend="eager")
            engine.load({**SHAPE, "tie_word_embeddings": False}, "cpu", [16], [[4, 8]])
            taken: list[int] = []
            step = engine._compiled_step if compiled else engine._step

            def recorded(token: Any, cache: Any, step: Any = step, taken: list[int] = taken) -> Any:
                token = step(token, cache)
                taken.append(int(token))
                return token

            setattr(engine, "_compiled_step" if compiled else "_step", recorded)
            assert engine.prefill(16)["seconds"] > 0 and engine.decode(4, 8)["seconds"] > 0
            assert not any("forward" in vars(layer) for layer in engine.model.model.layers)
            ids[compiled] = taken
    assert list(engine.caches) == [12]
    assert len(set(ids[True])) > 1 and ids[True] == ids[False]


def test_what_the_shares_count() -> None:
    llama = random_shape_config("llama-3.1-8b")
    assert gpu.streamed_weights(llama) == 8_030_261_248 - 128256 * 4096
    layers = 8_030_261_248 - 2 * 128256 * 4096
    attention = 32 * 32 * 128 * 2 * (2048 * 2049)
    assert gpu.prefill_operations(llama, 2048) == 2 * layers * 2048 + attention + 2 * 128256 * 4096


def test_shapes_load_together_where_they_fit(shape: Path) -> None:
    shapes = gpu.make_shapes([str(shape)], [], plan()) * 2
    assert gpu.batches(shapes, 10**9) == [shapes] and len(gpu.batches(shapes, 10**5)) == 2


def test_what_cannot_be_compared_is_refused(tmp_path: Path, shape: Path, run_here: Run) -> None:
    done = run_here("compare_gpu.py", "--random", "llama-3.2-1b", "--device", "cpu")
    assert done.returncode == 2 and "1.2 billion weights and the device is a CPU" in done.stderr
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**SHAPE, "num_hidden_layers": 3}), encoding="utf-8")
    gguf = engines.random_file(tmp_path / "other.gguf", str(other))
    with pytest.raises(gpu.UsageError, match=r"has the sizes .*'n_layers': 3.*expected those of a --random shape"):
        gpu.make_shapes([str(shape)], [gguf], plan())
