"""Models whose tensors are quantised, and differ in how: on the device they are what the same file is in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    random_weights,
    relative_error,
    rounded,
    save_folder,
    small_config,
    transformers_logits,
    transformers_model,
)
from late_kernels import compile_when_used

import llmcl
from llmcl.architectures.families.blocks import MatrixPlan
from llmcl.checkpoint import open_checkpoint
from llmcl.engine.llm import LLM
from llmcl.errors import UsageError
from llmcl.models.kv_cache import KVCache
from llmcl.models.model import Model
from llmcl.models.weights import WeightTypes, load_weights, stored_formats
from llmcl.progress import COMPILING, OPENING
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

SAME = 2e-5  # two orders of summation, both in float32
FLOAT16 = 5e-3  # NVIDIA's prefill multiplies in float16
N_HEADS = {"q_proj": 4, "k_proj": 2}

# How the log-likelihoods of the tokens of a text differ from those with the same weights in float32: root mean square,
# measured 0.001 and 0.07 to 0.08; and mean, which is what perplexity sees. The mean of rounded activations has a
# standard error of 0.007 with 118 tokens (0.002 to 0.011 measured, by the order of sums in attention), so that it says
# less than the spread does; over 4335 tokens it is 0.003 to 0.005 (notes/quantization.md).
SPREAD_EXACT, SPREAD_ROUNDED = 0.003, 0.12
SPREAD_FLOAT16 = 0.03
MEAN_EXACT, MEAN_ROUNDED = 0.003, 0.01

TEXT = """\
The harbour had been quiet since the storm. Two boats lay on the sand with their sides broken open, and a third, which
belonged to the old pilot, was still tied to the pier by a single rope. "You can't repair that," said the boy. The pilot
counted on his fingers: three planks, a new mast, two hundred nails, and paint. "By the end of June," he answered, "she
will be sailing again." The boy laughed, but he came back the next morning with a hammer and a bag of bread.
"""


def logits_of(device: Device, path: Path, types: WeightTypes, ids: list[int]) -> np.ndarray:
    with open_checkpoint(str(path)) as checkpoint:
        weights = load_weights(device, checkpoint, types)
        model = Model(device, checkpoint.config, weights, KVCache(device, checkpoint.config, 64, "float32"))
    return model.logits(model.cache.sequence(), ids)


# q and k, v in one matrix of several types; gate and up of two types cannot alternate and are held in float32.
MIXED = {"attn_q": "Q4_0", "attn_k": "Q4_0", "attn_v": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q5_0", "ffn_down": "Q5_1"}


@pytest.mark.slow
def test_a_file_of_mixed_formats(hf_files: Any, gguf_files: Any, tmp_path: Path, default_device: Device) -> None:
    tensors = hf_files.tensors(head_dim=32, vocab_size=131)  # the sizes of small_config, whose kernels are compiled
    tensors = {n: v if v.ndim == 1 else v / np.sqrt(np.float32(v.shape[1])) for n, v in tensors.items()}
    gguf_tensors = gguf_files.tensors(tensors, N_HEADS)
    formats = {f"blk.{i}.{name}.weight": format for i in range(2) for name, format in MIXED.items()}
    formats["token_embd.weight"] = "Q8_0"
    sizes = {"llama.attention.key_length": 32, "llama.vocab_size": 131}
    path = gguf_files.write(tmp_path / "m.gguf", gguf_tensors, formats, sizes)
    with open_checkpoint(str(path)) as checkpoint:
        native = WeightTypes("native", stored_formats(checkpoint), exact_activations=True)
    qkv = MatrixPlan("qkv", 64, tuple(f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"), (128, 64, 64))
    assert native.runs(qkv) == [(192, "q4_0"), (64, "q8_0")]
    gate_up = tuple(f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up"))
    assert native.runs(MatrixPlan("gate and up", 64, gate_up, (96, 96), True)) == [(192, "float32")]

    ids = [int(i) for i in np.random.default_rng(0).integers(0, 50, 40)]
    expected = logits_of(default_device, path, WeightTypes("float32"), ids)
    allowed = FLOAT16 if default_device.entry.fact("ptx_arch") >= 80 else SAME
    assert relative_error(logits_of(default_device, path, native, ids), expected) < allowed
    inexact = dataclasses.replace(native, exact_activations=False)
    assert relative_error(logits_of(default_device, path, inexact, ids), expected) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "q4_k"])
def test_quantising_while_loading(tmp_path: Path, default_device: Device, quantize: str) -> None:
    # Few columns lose too much with 4 bits, and are no whole super-blocks.
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if quantize != "q8_0" else {}
    config = small_config(tie_embeddings=True, **wide)
    weights = random_weights(config, seed=1)
    folder = save_folder(tmp_path / "m", config, weights, "bfloat16")
    seen: set[str] = set()

    def progress(what: str, done: int, total: int) -> None:
        seen.add(what)
        assert done <= total

    ids = [int(i) for i in np.random.default_rng(1).integers(0, 131, 50)]
    expected = transformers_logits(transformers_model(config, rounded(weights, "bfloat16")), ids)
    with llmcl.load(str(folder), device=default_device.entry.index, quantize=quantize, progress=progress) as llm:
        assert llm.dtype == quantize and llm.model.weights.embedding.dtype == "q8_0"
        error = relative_error(llm.logits(ids), expected)
    assert 1e-4 < error < (0.1 if quantize == "q8_0" else 0.6)
    assert seen - {OPENING, COMPILING} == {"quantising weights"}


def log_likelihoods(llm: LLM, ids: list[int]) -> np.ndarray:
    """Of each token but the first: float64 [len(ids) - 1]."""
    rows = llm.logits(ids).astype(np.float64)[:-1]
    top = rows.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(rows - top).sum(axis=-1)) + top[:, 0]
    chosen: np.ndarray = rows[np.arange(len(rows)), ids[1:]] - log_sum
    return chosen


@pytest.mark.slow
def test_the_demo_model_loses_nothing(smollm2: LLM, default_device: Device) -> None:
    """Its matrices are Q4_1, its embedding Q8_0; `smollm2` holds them in float32."""
    ids = smollm2.encode(TEXT, raw=True)
    expected = log_likelihoods(smollm2, ids)
    exact = SPREAD_FLOAT16 if default_device.entry.fact("ptx_arch") >= 80 else SPREAD_EXACT
    for activation_dtype, spread, mean in (
        ("float32", exact, MEAN_EXACT),
        ("auto", SPREAD_ROUNDED, MEAN_ROUNDED),
    ):
        with llmcl.load(
            "smollm2", device=default_device.entry.index, activation_dtype=activation_dtype, max_context=256
        ) as llm:
            assert llm.dtype == "q4_1" and llm.model.weights.head.dtype == "q8_0"
            difference = log_likelihoods(llm, ids) - expected
        assert np.sqrt(np.mean(difference**2)) < spread
        assert abs(difference.mean()) < mean + 2 * difference.std() / np.sqrt(len(difference))


def test_what_cannot_be_combined(default_device: Device) -> None:
    for options, message in (
        ({"quantize": "q4_0", "dtype": "float16"}, r"'float16' with quantize 'q4_0'"),
        ({"quantize": "q2_k"}, r"'q2_k'; expected one of q8_0, q4_0, q4_k"),
        ({"activation_dtype": "int4"}, r"'int4'; expected auto or float32"),
        ({"quantize": "q4_k"}, r"tensor model.layers.0.self_attn.q_proj.weight .* 576 .* q8_0 or q4_0"),
    ):
        with pytest.raises(UsageError, match=message):
            llmcl.load("smollm2", device=default_device.entry.index, **options)
