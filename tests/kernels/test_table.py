"""Which implementation a device gets, and LLMCL_VARIANT."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compilers.gpus import GPUS
from compilers.recording import RecordingDevice, ShapeCheckpoint
from family_configs import FAMILIES
from helpers import step_state_at, weight_on_device
from made_bert import bert_config

import llmcl
from llmcl.architectures.config import ModelConfig, config_from_hf
from llmcl.attention import flex_attention
from llmcl.engine.embedding import Embedder
from llmcl.errors import DeviceError, UsageError
from llmcl.kernels import portable, table
from llmcl.kernels.common.attention import AttentionDecode, AttentionPrefill, PackKeys, RopeAppend
from llmcl.kernels.common.linear import LinearDecode, LinearPrefill
from llmcl.kernels.common.persistent import PersistentLayers, PersistentStep
from llmcl.kernels.implementation import Implementation, OpKernel, Size
from llmcl.models.batch import Batch
from llmcl.models.kv_cache import KVCache
from llmcl.models.layer_mods import trace_layer_mods
from llmcl.models.model import Model
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.weights import WeightTypes, load_weights, random_weights, stored_formats
from llmcl.ops.linear import linear_decode, linear_prefill
from llmcl.ops.log_likelihood import kl_divergence, log_likelihood
from llmcl.ops.lora import LowRankWeight, lora
from llmcl.ops.mean_rows import mean_rows
from llmcl.ops.rope_axes import rope_axes
from llmcl.ops.sample import SamplingParams
from llmcl.runtime.device import Device
from llmcl.runtime.program import KernelSource
from llmcl.speculation.verification import Verification

KERNELS = Path(llmcl.__file__).parent / "kernels"
KINDS = (LinearDecode, LinearPrefill, AttentionDecode, AttentionPrefill, RopeAppend, PackKeys)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0", "q4_0"])
def test_portable_variants_alone(device: Device, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCL_VARIANT", "portable")
    assert {table.pick(kind, device, dtype, 64).name for kind in KINDS} == {"portable"}
    assert not table.implementations(PersistentStep) and not table.implementations(PersistentLayers)


@pytest.mark.parametrize("value", [None, ""])
def test_every_variant_without_it(value: str | None, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMCL_VARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("LLMCL_VARIANT", value)
    assert {row.name for row in table.implementations(LinearPrefill)} == {
        "hopper",
        "nvidia",
        "cpu",
        "intel",
        "portable",
    }
    if device.is_cpu:
        assert table.pick(LinearDecode, device, "float32", 64).name == "cpu"


def test_an_unknown_value(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCL_VARIANT", "fast")
    with pytest.raises(UsageError, match="LLMCL_VARIANT is 'fast'; expected portable"):
        table.pick(LinearDecode, device, "float32", 64)


@pytest.mark.parametrize("op", [linear_decode, linear_prefill])
def test_products_with_other_rows_share_a_program_on_a_cpu(device: Device, op: Any) -> None:
    """And differ in their last arguments: what is valid, the tiles, and in prefill how far rows of `out` are apart."""
    step, out = step_state_at(device, position=0, n_tokens=1), device.zeros(4 * 256, "out")
    weights = [weight_on_device(device, np.zeros((rows, 64), np.float32), "float32") for rows in (131, 48)]
    (of_131,), (of_48,) = (op(device, weight, out, out, step, variant="cpu") for weight in weights)
    assert of_131.source == of_48.source
    sizes = [[int(size) for size in launch.args[6 if op is linear_decode else 5 :]] for launch in (of_131, of_48)]
    assert sizes == ([[131, 9], [48, 3]] if op is linear_decode else [[131, 9, 131], [48, 3, 48]])


# ---- every op can be replaced -------------------------------------------------------------------------

PORTABLE = {path.stem for path in (KERNELS / "portable").glob("*.cl") if "__kernel" in path.read_text(encoding="utf-8")}
NO_OPS = {"device_probe", "dot4_probe", "sub_group_probe"}  # questions to a driver
NO_OPS |= {"arithmetic_peak", "read_bandwidth"}  # measure a device
NO_OPS |= {"round_rows"}  # a layout of `portable-int8`
GPU = GPUS[0].entry
EVERY_OP = (
    *("gemma4_text-experts", "qwen3_5_text", "glm4_moe_lite", "gemma4_text-given", "llama-biases", "lfm2"),
    *("cohere", "apertus", "nemotron_h"),
)
CPU = dataclasses.replace(GPU, kind="cpu", unified_memory=True)


class MadeUpKernel(OpKernel):
    name = folder = "made_up"

    def size(self, device: Device, portable: Size) -> Size:
        constants, groups, local = portable
        return {**constants, "MADE_UP": True}, groups, local


def made_up(row: Implementation) -> Implementation:
    """A portable row with a file of another class."""
    return type("MadeUp", (type(row),), {"name": "made_up", "file": row.file.replace("portable/", "made_up/")})()


def bound(device: RecordingDevice, config: ModelConfig, format: str) -> None:
    """Binds everything that a model launches: alone, in a batch, with drafts, for embeddings, to measure perplexity."""
    checkpoint = ShapeCheckpoint(config, lambda name: format)
    weights = load_weights(device, checkpoint, WeightTypes("native", stored_formats(checkpoint)))
    cache = PagedKVCache(device, config, 512, "float16", 64)
    mods = trace_layer_mods(config, 512).bind(device)
    Batch(Model(device, config, weights, cache, logit_rows=4, step_rows=64, mods=mods), 4, 64)
    model = Model(device, config, weights, cache, mods=mods)
    model.sampler.configure(SamplingParams(dry_multiplier=0.8))
    Embedder(model, cache.sequence(), (), "mean")
    if cache.states is None:
        Verification(model)
    logits = model.act.logits
    log_likelihood(device, config.vocab_size, logits, logits, logits)
    kl_divergence(device, config.vocab_size, logits, logits, logits)
    lora(device, LowRankWeight(*5 * (logits,), "float16", 64, 64, 4, 1), logits, logits, logits, model.step)


def encoder_bound(device: RecordingDevice) -> None:
    """Binds what an encoder launches, whose tokens all attend to each other."""
    config = config_from_hf({"model_type": "bert", **bert_config()})
    weights = random_weights(device, config, WeightTypes("float16"))
    cache = KVCache(device, config, config.max_position, "float16")
    model = Model(device, config, weights, cache, chunk=config.max_position, persistent=False, prepared=False)
    Embedder(model, cache.sequence(), (), "mean")


@pytest.fixture(scope="module")
def launched() -> list[KernelSource]:
    """What a CPU and a GPU launch for families that have all ops together, with a class that replaces every op."""
    rows = (
        *(made_up(row) for row in portable.IMPLEMENTATIONS if row.name == "portable"),
        *(MadeUpKernel(op) for op in PORTABLE),
        *table.ROWS,
    )
    sources = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "ROWS", rows)
        table._of_kind.cache_clear()
        for entry in (CPU, GPU):
            for name in EVERY_OP:
                bound(device := RecordingDevice(entry), FAMILIES[name], "F16")
                sources += device.take()
            bound(device := RecordingDevice(entry), FAMILIES["llama-biases"], "Q8_0")
            random_weights(device, FAMILIES["lfm2"], WeightTypes("float16"))
            encoder_bound(device)
            rope_axes(device, *(device.alloc(64, "axes") for _ in range(4)), n_axes=3)  # bound by the first image
            mean_rows(device, *(device.alloc(64, "rows") for _ in range(2)), n_rows=4, columns=16)  # a vision tower's
            array = np.zeros((1, 2, 40, 24), np.float16)
            flex_attention(array, array, array, device=device)
            sources += device.take()
    table._of_kind.cache_clear()
    return sources


@pytest.mark.parametrize("op", sorted(PORTABLE - NO_OPS))
def test_a_class_can_replace_an_op(op: str, launched: list[KernelSource]) -> None:
    files = {source.file for source in launched}
    assert f"made_up/{op}.cl" in files and f"portable/{op}.cl" not in files


def test_a_replacement_chooses_its_sizes(launched: list[KernelSource]) -> None:
    by_op = {source.constants.get("MADE_UP") for source in launched if source.file == "made_up/rms_norm.cl"}
    assert by_op == {True}


def test_a_wrong_replacement_is_passed_over(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_of_kind", lambda kind, of_portable: (MadeUpKernel("embed"), MadeUpKernel("rms_norm")))
    assert table.op_kernel(device, "rms_norm").file == "made_up/rms_norm.cl"
    assert table.op_kernel(device, "add_bias").file == "portable/add_bias.cl"
    monkeypatch.setattr(device.cache, "excluded", {"made_up/rms_norm.cl float32": "wrong"})
    assert table.op_kernel(device, "rms_norm").file == "portable/rms_norm.cl"
    table.check_only_kernels(device, "float32")
    both = ("made_up/rms_norm.cl float32", "portable/rms_norm.cl float32")
    monkeypatch.setattr(device.cache, "excluded", dict.fromkeys(both, "wrong"))
    with pytest.raises(DeviceError, match=r"portable/rms_norm.cl gives wrong results for float32"):
        table.check_only_kernels(device, "float32")


@pytest.mark.parametrize("room", ["ops", "attention", "models", "engine"])
def test_no_room_above_names_a_class(room: str) -> None:
    folders = "|".join(folder.__name__.rpartition(".")[2] for folder in table.CLASSES)
    named = re.compile(rf"[\"'](?:{folders})/|llmcl\.kernels(?:\.| import .*\b)(?:{folders})\b")
    texts = {path: path.read_text(encoding="utf-8") for path in (KERNELS.parent / room).rglob("*.py")}
    assert texts and not [str(path) for path, text in texts.items() if named.search(text)]
