"""A context or weights for which there is no room: refused before anything is loaded, or cut into parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyopencl as cl
import pytest
from helpers import random_weights, relative_error, save_folder, small_config
from late_kernels import compile_when_used

import llmcl
from llmcl.engine.llm import LLM
from llmcl.errors import ContextLengthError, OutOfDeviceMemoryError
from llmcl.kernels.cpu.dot_product import bf16_dot_form, dot_form
from llmcl.models.weights import all_plans
from llmcl.ops.attention import prefill_implementation
from llmcl.ops.linear import linear_scratch_bytes
from llmcl.runtime import device as device_module
from llmcl.runtime.device import Device
from llmcl.runtime.driver_calls import named_errors

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

slow = pytest.mark.slow
Failing = Callable[..., str]


def test_a_prompt_longer_than_the_context(folder: Path, fails: Failing) -> None:
    message = fails(ContextLengthError, folder, "-c", "16", prompt="seventeen letters")
    assert "17 tokens" in message and "16" in message and "--ctx-size" in message


def test_a_context_beyond_the_memory_is_refused_before_loading(
    folder: Path, fails: Failing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*args: Any) -> Any:
        raise AssertionError("the forecast comes before loading")

    monkeypatch.setattr("llmcl.engine.loading.load_weights", load_weights)
    message = fails(OutOfDeviceMemoryError, folder, "--ctx-size", "2000000000")
    # 2 (K and V) * 2 layers * 2 heads * 32 values * 4 bytes for each token
    assert "KV cache 1907.35 GiB" in message and "weights 0.00 GiB" in message and "--ctx-size" in message


@pytest.fixture
def limited(default_device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the device say that it has less than it has."""

    def limit(**changes: Any) -> None:
        entry = dataclasses.replace(default_device.entry, **changes)
        monkeypatch.setattr(device_module, "select_device", lambda request: entry)

    return limit


def test_weights_beyond_the_memory_are_refused_before_loading(
    fails: Failing, limited: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*args: Any) -> Any:
        raise AssertionError("the forecast comes before loading")

    monkeypatch.setattr("llmcl.engine.loading.load_weights", load_weights)
    for limit in ("global_mem_bytes", "host_available_bytes"):
        limited(**{limit: 500_000_000})
        message = fails(OutOfDeviceMemoryError, "smollm2", "--dtype", "float32", "-c", "512")
        assert "weights 0.50 GiB" in message and "has 0.47 GiB" in message and "--dtype" in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "kv_dtype": "float16", "max_context": 100},
        pytest.param({"max_context": 100, "kv_page_tokens": 128, "kv_pages": 3}, marks=slow),
        pytest.param({"max_context": 100, "kv_dtype": "q8_0"}, marks=slow),
        pytest.param({"max_context": 100, "quantize": "q8_0"}, marks=slow),
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "defaults",
)
def test_the_forecast_is_what_loading_takes(
    folder: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    forecasts: list[dict[str, int]] = []
    monkeypatch.setattr("llmcl.engine.loading.check_memory", lambda needed, device: forecasts.append(needed))
    with llmcl.load(str(folder), device=default_device.entry.index, **options) as llm:
        needed = forecasts.pop()
        weights, cache = llm.model.weights, llm.model.cache
        n_bytes = weights.decode_bytes() + weights.embedding.nbytes  # the embedding is not tied
        assert needed["weights"] == n_bytes
        assert needed["KV cache"] == sum(buffer.nbytes for buffer in cache.buffers())
        assert llm.device.peak_bytes <= sum(needed.values())
        matrices, chunk = {(llm.dtype, plan.k) for plan in all_plans(llm.config)}, llm.model.chunk
        rounded = linear_scratch_bytes(llm.device, matrices, chunk, exact_activations=False)
        paired = prefill_implementation(llm.device, cache.shape).scratch_bytes(llm.device, cache.shape)
        # Without dot products a CPU copies only the rows that a norm precedes; the forecast counts all rows.
        counted = rounded + paired
        form = {"float32": lambda device: 0, "bfloat16": bf16_dot_form}.get(llm.dtype, dot_form)
        if llm.device.is_cpu and not form(llm.device):
            assert 0 < llm.model.step.scratch_bytes <= counted
        else:
            assert llm.model.step.scratch_bytes == counted


def test_a_cache_beyond_the_largest_allocation_is_named(
    folder: Path, fails: Failing, limited: Callable[..., None]
) -> None:
    limited(max_alloc_bytes=1_000_000)
    message = fails(OutOfDeviceMemoryError, folder, "-c", "4096")
    assert "keys of layer 0" in message and "1,048,576 bytes" in message and "1,000,000 bytes" in message
    assert "--ctx-size" in message and "--kv-dtype" in message


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=slow), "bfloat16"])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=slow)])
def test_weights_beyond_the_largest_allocation_are_split(
    tied: bool, dtype: str, tmp_path: Path, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(vocab_size=1003, hidden_size=128, intermediate_size=288, max_position=64, tie_embeddings=tied)
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=11))
    ids = [5, 997, 6, 1002, 0, 500, 31]
    # Exact activations: room for rounded ones would be larger than these weights. NVIDIA's variants want 16 bits of
    # them, in buffers of 73,728 bytes.
    exact = {"activation_dtype": "float32"}
    options: dict[str, Any] = {"dtype": dtype, "kv_dtype": "float32", "max_context": 8, **exact}

    def use(llm: LLM) -> tuple[np.ndarray, list[int]]:
        return llm.logits(ids), llm.generate(ids[:3], max_tokens=6, ignore_eos=True).token_ids

    with llmcl.load(str(folder), device=default_device.entry.index, **options) as llm:
        expected, answer = use(llm)
        largest = max(llm.model.weights.head.nbytes, llm.model.weights.layers[0][1].gate_up.nbytes)
    limit = 80_000
    assert limit < largest
    # Staging stays far below what any real device allows.
    monkeypatch.setattr("llmcl.ops.load_weight.STAGING_BYTES", 10_000)
    entry = dataclasses.replace(default_device.entry, max_alloc_bytes=limit)
    with llmcl.load(str(folder), device=entry, **options) as llm:  # type: ignore[arg-type]
        weights = llm.model.weights
        for weight in (weights.head, weights.embedding, weights.layers[1][1].gate_up, weights.layers[1][0].qkv):
            assert len(weight.parts) > 1 or weight.nbytes <= limit
            assert all(part.buffer.nbytes <= limit for part in weight.parts)
        assert len(weights.head.parts) > 2 and len(weights.layers[1][1].gate_up.parts) > 1
        logits, split_answer = use(llm)
    assert relative_error(logits, expected) <= 1e-6
    assert split_answer == answer


def test_a_host_without_memory_is_no_lost_device() -> None:
    codes = cl.status_code
    for code in (codes.MEM_OBJECT_ALLOCATION_FAILURE, codes.OUT_OF_HOST_MEMORY):
        expected = pytest.raises(OutOfDeviceMemoryError, match="ran out of memory while making a buffer")
        with expected, named_errors("making a buffer"):
            raise cl.Error(cl._cl._ErrorRecord("failed", code, "clCreateBuffer"))


def test_a_driver_without_address_space_says_that_the_limit_was_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2 << 30, resource.RLIM_INFINITY))
    codes = cl.status_code
    for code in (codes.DEVICE_NOT_AVAILABLE, codes.OUT_OF_HOST_MEMORY):  # what Intel's driver says then
        expected = pytest.raises(OutOfDeviceMemoryError, match=r"opening it .*2048 MiB of address space.*ulimit -v")
        with expected, named_errors("opening it"):
            raise cl.Error(cl._cl._ErrorRecord("failed", code, "clCreateContext"))
