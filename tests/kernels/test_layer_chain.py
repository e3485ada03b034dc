"""Kernels of a layer in one launch against a launch for each: what is joined, and the same results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compilers.recording import RecordingDevice
from decode_steps import load_for_decode, step_logits
from programs import TINY_SHAPE

import llmcl
from llmcl.engine.llm import LLM
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.portable import layer_chain
from llmcl.kernels.portable.layer_chain import PortableLayerChain, chains
from llmcl.models.kv_cache import KVCache
from llmcl.models.model import Model
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.weights import random_types, random_weights
from llmcl.runtime.device import Device
from llmcl.runtime.program import KernelSource

LAYER = ["linear_decode", "attention_decode", "attention_merge", *["linear_decode"] * 3]
CONTEXT = 512


@pytest.fixture(autouse=True)
def portable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCL_VARIANT", "portable")


def shape_file(folder: Path, **others: int) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**TINY_SHAPE, **others}))
    return str(path)


def recorded(
    device: Device,
    folder: Path,
    *,
    persistent: bool = True,
    head_dim: int = 32,
    dtype: str = "bfloat16",
    **described: object,
) -> Model:
    """A model that is bound for a GPU of NVIDIA's, with what is `described`."""
    gpu = {
        "kind": "gpu",
        "ptx_arch": 90,
        "compute_units": 132,
        "local_mem_bytes": 48 << 10,
        "max_work_group_size": 1024,
    }
    recording = RecordingDevice(replace(device.entry, **{**gpu, **described}))
    config = random_shape_config(shape_file(folder, head_dim=head_dim))
    weights = random_weights(recording, config, random_types(config, dtype))
    return Model(recording, config, weights, KVCache(recording, config, CONTEXT, "float16"), persistent=persistent)


def test_a_layer_is_one_launch(default_device: Device, tmp_path: Path) -> None:
    separate = recorded(default_device, tmp_path, persistent=False)
    assert [launch.name for launch in separate.decode_launches] == ["embed", *LAYER * 2, "linear_decode"]
    joined = chains(separate.device, separate.decode_launches)
    assert [launch for chain in joined for launch in chain] == [*separate.decode_launches]
    assert [len(chain) for chain in joined] == [1, len(LAYER), len(LAYER), 1]
    model = recorded(default_device, tmp_path)
    assert [launch.name for launch in model.decode_launches] == ["embed", *["layer_chain"] * 2, "linear_decode"]
    first, second = (launch.source for launch in model.decode_launches[1:3])
    assert isinstance(first, KernelSource) and first == second  # one program for all layers
    of_layer = separate.decode_launches[1 : 1 + len(LAYER)]
    units = sum(int(np.prod(launch.groups(1))) for launch in of_layer)
    assert model.decode_launches[1].groups(1) == (units,) and f"< {units}u)" in first.prelude


@pytest.mark.parametrize(("head_dim", "items"), [(32, 512), (64, 512), (96, 256), (128, 256)])
def test_wide_heads_have_narrow_groups(head_dim: int, items: int, default_device: Device, tmp_path: Path) -> None:
    model = recorded(default_device, tmp_path, head_dim=head_dim)
    assert [launch.local for launch in model.decode_launches if launch.name == "layer_chain"] == [(items,)] * 2


@pytest.mark.parametrize("others", [{"dtype": "float32"}, {"dtype": "q8_0"}, {"head_dim": 256}])
def test_what_was_not_faster_is_separate(others: dict[str, Any], default_device: Device, tmp_path: Path) -> None:
    names = [launch.name for launch in recorded(default_device, tmp_path, **others).decode_launches]
    assert names == ["embed", *LAYER * 2, "linear_decode"]


@pytest.mark.parametrize("described", [{"kind": "cpu"}, {"ptx_arch": 0}, {"local_mem_bytes": 4 << 10}])
def test_other_devices_have_separate_launches(
    described: dict[str, object], default_device: Device, tmp_path: Path
) -> None:
    """A processor, a GPU of whose fences nothing is known, and one without the local memory."""
    model = recorded(default_device, tmp_path, **described)
    assert "layer_chain" not in [launch.name for launch in model.decode_launches]


@pytest.fixture(scope="module", params=[(32, "float32"), pytest.param((128, "float16"), marks=pytest.mark.full)])
def llm(
    request: pytest.FixtureRequest, default_device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    """On a GPU so large that compute units read what others have written again and again; on a processor chains of
    four links, since Intel's compiler has trouble with barriers in more branches.
    """
    if default_device.entry.is_software:
        pytest.skip("it ends loops that wait for long")
    head_dim, kv_dtype = request.param
    sizes = {"head_dim": head_dim}
    with pytest.MonkeyPatch.context() as patch:
        load_for_decode(patch)
        patch.setenv("LLMCL_VARIANT", "portable")
        device = default_device
        if device.entry.kind == "cpu":
            device = Device.open(replace(device.entry, kind="gpu"))
            patch.setattr(PortableLayerChain, "supports_device", lambda row, device: True)
            patch.setattr(layer_chain, "MOST_LINKS", 4)
        elif not PortableLayerChain().supports_device(device):
            pytest.skip("nothing is known of its fences")
        else:
            sizes |= {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
            sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4}
        shape = shape_file(tmp_path_factory.mktemp("shape"), **sizes)
        with llmcl.load_random(shape, device=device, kv_dtype=kv_dtype, max_context=CONTEXT) as found:
            yield found


@pytest.mark.full
@pytest.mark.parametrize("n", [3, 254])  # before and across the length from which keys are split
def test_the_same_logits_as_separate_launches(n: int, llm: LLM) -> None:
    model = llm.model
    separate = Model(llm.device, llm.config, model.weights, model.cache, step_rows=1, persistent=False)
    assert len(model.decode_launches) < len(separate.decode_launches)
    expected, found, again = (step_logits(of, n, 6) for of in (separate, model, model))
    assert np.isfinite((expected, found, again)).all()
    # Other sums; a key that float16 rounds the other way counts more.
    bound = 1e-5 if llm.kv_dtype == "float32" else 1e-3
    assert np.abs(found - expected).max() < bound * np.abs(expected).max()
    np.testing.assert_array_equal(again, found)  # the counters are 0 again


@pytest.mark.full
def test_what_is_timed_or_excluded_is_separate(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    row, model = PortableLayerChain(), llm.model
    separate = Model(llm.device, llm.config, model.weights, model.cache, step_rows=1, persistent=False)
    listed = ListedStep(separate.decode_launches, model.step, CONTEXT)
    assert row.unsupported_reason(llm.device, listed) is None
    assert row.unsupported_reason(llm.device, replace(listed, max_rows=8)) == "it is for one token of one sequence"
    no_products = replace(listed, launches=[launch for launch in listed.launches if launch.name != "linear_decode"])
    assert "no layer has" in str(row.unsupported_reason(llm.device, no_products))
    monkeypatch.setitem(llm.device.cache.excluded, row.key("bfloat16"), "wrong")
    assert row.unsupported_reason(llm.device, listed) == "llmcl doctor found it to be wrong"
    monkeypatch.setattr(llm.device, "queue_properties", 2)
    assert row.unsupported_reason(llm.device, listed) == "each kernel is timed"
