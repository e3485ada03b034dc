"""Products of few rows in one launch against a launch for each: what is joined, and on a device the same results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compilers.recording import RecordingDevice
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.nvidia.few_rows_chain import MOST_ROWS, NvidiaFewRowsChain, chains
from llmcl.models.batch import Batch, make_batch
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.weights import random_types, random_weights
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.device import Device
from llmcl.runtime.program import KernelSource

SHAPE = {**TINY_SHAPE, "hidden_size": 256, "intermediate_size": 704, "head_dim": 64, "vocab_size": 1000}
CONTEXT, PAGE = 256, 64


def shape_file(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(SHAPE))
    return str(path)


def recorded(device: Device, folder: Path, dtype: str, ptx_arch: int, *, invariant: bool = False) -> Batch:
    """A batch of 20 sequences, bound for a GPU that is described."""
    entry = replace(device.entry, kind="gpu", ptx_arch=ptx_arch, compute_units=132, local_mem_bytes=48 << 10)
    gpu, config = RecordingDevice(entry), random_shape_config(shape_file(folder))
    weights = random_weights(gpu, config, random_types(config, dtype))
    cache = PagedKVCache(gpu, config, CONTEXT, "float16", PAGE, n_sequences=20)
    return Batch(Model(gpu, config, weights, cache, logit_rows=20, step_rows=100), 20, 100, invariant=invariant)


def test_what_lies_between_two_attentions_is_one_launch(default_device: Device, tmp_path: Path) -> None:
    """The first norm and product; then output, gate and up, down, and the next product."""
    batch = recorded(default_device, tmp_path, "bfloat16", 90)
    assert list(batch._decode) == [8, 16, 32]
    for rows, bound in batch._decode.items():
        if rows > MOST_ROWS:
            assert bound.launches is bound.separate
            continue
        names = [launch.name for launch in bound.launches]
        assert names == ["embed", *["few_rows_chain", "attention_decode"] * 2, "few_rows_chain"]
        for launch, n in zip(bound.launches[1::2], (2, 4, 4), strict=True):
            source = launch.source
            assert isinstance(source, KernelSource) and source.constants["N_LINKS"] == n
            (groups,) = launch.groups(1)
            assert launch.groups(rows) == (groups,) and f"< {groups}u)" in source.prelude
        joined = [launch for chain in chains(bound.separate) for launch in chain]
        assert joined == [*bound.separate]


def test_what_was_not_measured_is_separate_launches(default_device: Device, tmp_path: Path) -> None:
    """Quantised weights; and a batch whose rows have the same bits in steps of any number of rows."""
    batch = recorded(default_device, tmp_path, "q4_0", 90)
    assert all(bound.launches is bound.separate for bound in batch._decode.values())
    invariant = recorded(default_device, tmp_path, "bfloat16", 90, invariant=True)
    assert all(bound.launches is bound.separate for bound in invariant._decode.values())


def test_other_gpus_have_separate_launches(default_device: Device, tmp_path: Path) -> None:
    batch = recorded(default_device, tmp_path, "bfloat16", 80)
    assert all(bound.launches is bound.separate for bound in batch._decode.values())


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def llm(
    request: pytest.FixtureRequest, default_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    if not NvidiaFewRowsChain().supports_device(default_device):
        pytest.skip("a Hopper GPU is needed")
    shape = shape_file(tmp_path_factory.mktemp("shape"))
    with llmcl.load_random(shape, device=default_device.entry, dtype=request.param, max_context=CONTEXT) as llm:  # type: ignore[arg-type]
        yield llm


@pytest.mark.parametrize("n", [1, 8, 13])
def test_the_same_logits_as_separate_launches(n: int, llm: LLM) -> None:
    batch = make_batch(llm.model, n, CONTEXT, PAGE)
    rng = np.random.default_rng(n)
    sequences = [batch.cache.sequence() for _ in range(n)]
    for sequence in sequences:
        batch.start(sequence, SamplingParams(seed=0))
    batch.read([(sequence, rng.integers(0, 1000, 40).tolist()) for sequence in sequences])()
    for sequence in sequences:
        batch.cache.prepare(batch.step_state, sequence, 1, batch._places[sequence])
        batch._enter(sequence)
    batch._begin_step(sequences)
    bound = next(bound for rows, bound in batch._decode.items() if n <= rows)
    rows = next(rows for rows in batch._decode if n <= rows)
    listed = ListedStep(bound.separate, batch.step_state, CONTEXT, rows)
    parts = NvidiaFewRowsChain().bind(llm.device, listed).parts
    assert len(parts) < len(bound.separate)
    logits = []
    for launches in (bound.separate, parts, parts):  # twice: the counters are 0 again
        llm.device.fill(batch.model.act.logits, np.float32(np.nan))
        batch.model.run(launches, n)
        logits.append(llm.device.read(batch.model.act.logits, np.float32, (n, 1000)))
    worst = float(np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max())
    assert worst < 0.02  # other sums of 16-bit products
    np.testing.assert_array_equal(logits[2], logits[1])
