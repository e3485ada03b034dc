"""Which implementation a device gets, and LLMCL_VARIANT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import step_state_at, weight_on_device

from llmcl.errors import UsageError
from llmcl.kernels import table
from llmcl.kernels.common.attention import AttentionDecode, AttentionPrefill, PackKeys, RopeAppend
from llmcl.kernels.common.linear import LinearDecode, LinearPrefill
from llmcl.kernels.common.persistent import PersistentLayers, PersistentStep
from llmcl.ops.linear import linear_decode, linear_prefill
from llmcl.runtime.device import Device

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
