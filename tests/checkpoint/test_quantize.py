"""Quantising in NumPy: Q8_0 and Q4_0 as the gguf package (a port of llama.cpp's) bit for bit, Q4_K by its error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from llmcl.checkpoint import formats, open_checkpoint
from llmcl.checkpoint.quantize import quantize_rows, target_format, warn_of_rounding_again
from llmcl.errors import CheckpointError, UsageError

# Root mean square error over that of the values, on a normal distribution.
Q4_K_ERROR = 0.075


def values(rows: int = 64, k: int = 512) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    x[0], x[1, :40], x[2] = 0.0, -3.5, np.abs(x[2])  # all zero, all equal, no negative ones
    x[3] *= 1e-6
    return x


@pytest.mark.parametrize(("wanted", "warns"), [("q4_0", True), ("q8_0", False)])
def test_rounding_quantised_weights_again_is_said(wanted: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The demo model's file has Q4_1. In 8 bits nearly nothing is lost."""
    with open_checkpoint("smollm2") as checkpoint:
        tensors = list(checkpoint.tensors.values())
    warn_of_rounding_again(tensors, wanted)
    assert ("quantised already (Q4_1), and q4_0 rounds them again" in caplog.text) == warns == bool(caplog.messages)


def test_no_weight_of_16_bits_is_rounded_again(caplog: pytest.LogCaptureFixture) -> None:
    with open_checkpoint("smollm2") as checkpoint:
        tensors = [dataclasses.replace(tensor, format="BF16") for tensor in checkpoint.tensors.values()]
    warn_of_rounding_again(tensors, "q4_0")
    assert not caplog.messages


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
def test_as_llama_cpp_quantises(format: str) -> None:
    np.testing.assert_array_equal(quantize_rows(values(), format), quantize(values(), GGMLQuantizationType[format]))


def test_q4_k_is_close_and_decoded_alike_by_gguf() -> None:
    x = values()
    data = quantize_rows(x, "Q4_K")
    decoded = dequantize(data, GGMLQuantizationType.Q4_K)
    np.testing.assert_array_equal(decoded, formats.dequantize("Q4_K", data))
    assert np.all(decoded[0] == 0)
    error = np.sqrt(np.mean((decoded[4:] - x[4:]) ** 2) / np.mean(x[4:] ** 2))
    assert error < Q4_K_ERROR
    plain = np.clip(np.rint((x[4:] - x[4:].min()) / np.ptp(x[4:]) * 15), 0, 15) / 15 * np.ptp(x[4:]) + x[4:].min()
    assert error < np.sqrt(np.mean((plain - x[4:]) ** 2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_values_that_no_scale_holds(bad: float) -> None:
    x = values()
    x[5, 7] = bad
    with pytest.raises(CheckpointError, match="too large for Q8_0"):
        quantize_rows(x, "Q8_0")


def test_target_formats() -> None:
    assert target_format("model.norm.weight", (576,), "q4_0") is None
    assert target_format("model.embed_tokens.weight", (49152, 576), "q4_0") == "Q8_0"
    assert target_format("model.layers.0.mlp.down_proj.weight", (576, 1536), "q4_k") == "Q4_K"
    with pytest.raises(
        UsageError, match=r"tensor model.layers.0.mlp.up_proj.weight .* 576 .*use --quantize q8_0 or q4_0"
    ):
        target_format("model.layers.0.mlp.up_proj.weight", (1536, 576), "q4_k")
    with pytest.raises(UsageError, match="'q3_k'; expected one of q8_0, q4_0, q4_k"):
        target_format("x", (64, 64), "q3_k")
