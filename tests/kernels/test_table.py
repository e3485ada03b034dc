"""Which implementation a device gets, and LLMCL_VARIANT."""

from __future__ import annotations

import pytest

from llmcl.errors import UsageError
from llmcl.kernels import table
from llmcl.kernels.common.attention import AttentionDecode, AttentionPrefill, PackKeys, RopeAppend
from llmcl.kernels.common.linear import LinearDecode, LinearPrefill
from llmcl.kernels.common.persistent import PersistentLayers, PersistentStep
from llmcl.runtime.device import Device

KINDS = (LinearDecode, LinearPrefill, AttentionDecode, AttentionPrefill, RopeAppend, PackKeys)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "q8_0", "q4_0"])
def test_portable_variants_alone(device: Device, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCL_VARIANT", "portable")
    assert {table.pick(kind, device, dtype, 64).name for kind in KINDS} == {"portable"}
    assert [row.name for row in table.implementations(PersistentStep)] == ["portable"]
    assert not table.implementations(PersistentLayers)


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
