"""Tensors of the wrong shape, weights that are no numbers, and numbers that grow too large on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import llmcl
from llmcl.errors import CheckpointError, DeviceError
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")

LAYER_TENSOR = "model.layers.1.mlp.down_proj.weight"
NORM_TENSOR = "model.layers.0.input_layernorm.weight"

Failing = Callable[..., str]


def change_tensors(folder: Path, **changes: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """Rewrites the weights; a change that gives None leaves its tensor out. Names as keywords, dots as __."""
    from safetensors.numpy import load_file, save_file

    tensors: dict[str, np.ndarray] = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        name = name.replace("__", ".")
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = np.ascontiguousarray(changed)
    save_file(tensors, folder / "model.safetensors")


def with_value(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values.flat[values.size // 2] = value
        return values

    return change


def scaled(factor: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda values: (values * factor).astype(np.float32)


def test_a_tensor_of_the_wrong_shape_and_one_that_is_missing(copy: Path, fails: Failing) -> None:
    name = LAYER_TENSOR.replace(".", "__")
    change_tensors(copy, **{name: lambda values: values[:, :-16]})
    message = fails(CheckpointError, copy)
    assert LAYER_TENSOR in message and "[64, 80]" in message and "[64, 96]" in message
    change_tensors(copy, **{name: lambda values: None})
    message = fails(CheckpointError, copy)
    assert LAYER_TENSOR in message and "missing" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [LAYER_TENSOR, NORM_TENSOR, "model.embed_tokens.weight"])
def test_weights_that_are_no_numbers_are_named(name: str, value: float, copy: Path, fails: Failing) -> None:
    change_tensors(copy, **{name.replace(".", "__"): with_value(value)})
    message = fails(CheckpointError, copy)
    assert name in message and "NaN or infinite" in message
    others = {LAYER_TENSOR, NORM_TENSOR, "model.embed_tokens.weight"} - {name}
    assert not any(other in message for other in others)


def test_weights_too_large_for_float16_are_named(copy: Path, fails: Failing, default_device: Device) -> None:
    change_tensors(copy, **{LAYER_TENSOR.replace(".", "__"): with_value(-1e5)})
    message = fails(CheckpointError, copy, "--dtype", "float16")
    assert LAYER_TENSOR in message and "--dtype bfloat16 or float32" in message
    with llmcl.load(str(copy), device=default_device.entry.index, dtype="bfloat16") as llm:
        assert np.isfinite(llm.logits([5, 6, 7])).all()


def test_logits_that_are_no_numbers_end_the_answer(copy: Path, fails: Failing) -> None:
    change_tensors(copy, **{LAYER_TENSOR.replace(".", "__"): lambda values: np.full_like(values, 3e38)})
    for options in [], ["--temp", "1", "--top-p", "0.9"]:
        message = fails(DeviceError, copy, *options)
        assert "no token can be chosen: all 131 logits are NaN; " in message and "another --device" in message


@pytest.mark.parametrize("tensor", [LAYER_TENSOR, "model.norm.weight"])
def test_logits_that_are_no_numbers_are_an_error_for_all_who_ask(
    tensor: str, copy: Path, default_device: Device
) -> None:
    change_tensors(copy, **{tensor.replace(".", "__"): lambda values: np.full_like(values, 3e38)})
    with llmcl.load(str(copy), device=default_device.entry.index) as llm:
        ids = [5, 6, 7, 8]
        asks = [
            lambda: llm.logits(ids),
            lambda: llm.logprobs(ids),
            lambda: llm.logprobs(ids, top=3),
            lambda: llm.score(ids[:1], [ids[1:]]),
        ]
        for ask in asks:
            with pytest.raises(DeviceError, match=r"no probabilities after token 0 of the text: .*logits are"):
                ask()
        with pytest.raises(DeviceError, match="no token can be chosen"):
            llm.generate(ids, max_tokens=1)
        with pytest.raises(DeviceError, match="no token can be chosen"):
            llm.generate([ids, ids], max_tokens=1)


@pytest.mark.parametrize("paged", [(), ("--kv-page-size", "64")])
@pytest.mark.parametrize(("name", "what"), [("k", "keys"), ("v", "values")])
def test_a_cache_whose_numbers_are_too_small_is_named(
    copy: Path, fails: Failing, default_device: Device, paged: tuple[str, ...], name: str, what: str
) -> None:
    change_tensors(copy, **{f"model__layers__1__self_attn__{name}_proj__weight": scaled(1e8)})
    message = fails(DeviceError, copy, "--dtype", "bfloat16", *paged)
    assert f"{what} of layer 1 exceed 65504" in message and "--kv-dtype bfloat16" in message
    with llmcl.load(str(copy), device=default_device.entry.index, dtype="bfloat16", kv_dtype="bfloat16") as llm:
        assert llm.generate([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_squares_that_overflow_are_named(copy: Path, fails: Failing, kv_dtype: str) -> None:
    change_tensors(copy, model__embed_tokens__weight=scaled(1e25))
    message = fails(DeviceError, copy, "--kv-dtype", kv_dtype)
    assert "all 131 logits are NaN" in message and "keys of layer 0 are the first that are no finite" in message
    assert "exceed 1.8e+19" in message


def test_infinite_logits_are_named(copy: Path, fails: Failing) -> None:
    change_tensors(copy, lm_head__weight=scaled(3e38), model__norm__weight=scaled(1e5))
    for options in [], ["--temp", "1", "--top-k", "5"]:
        message = fails(DeviceError, copy, *options)
        assert "of 131 logits are infinite" in message or "logits are NaN" in message
        assert "all keys and values are finite" in message


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_weights_of_zeros_are_named(
    copy: Path, name: str, default_device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    change_tensors(copy, **{name.replace(".", "__"): np.zeros_like})
    with llmcl.load(str(copy), device=default_device.entry.index) as llm:
        assert llm.generate([5, 6, 7], max_tokens=2, ignore_eos=True).token_ids == [0, 0]
    (message,) = caplog.messages
    assert message.startswith(f"{name} holds nothing but zeros")
