"""Which layers go to which device, by shares, memory speed and memory size. Nothing is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from helpers import small_config

from llmcl.cli.devices import _several as devices_to_divide
from llmcl.engine import split
from llmcl.engine.split import SplitRequest, Splitter, Stage, cut
from llmcl.errors import DeviceError, OutOfDeviceMemoryError
from llmcl.models.weights import WeightTypes
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.selection import choose_device

CONFIG = small_config(n_layers=10, tie_embeddings=True)
LAYER = 4 * (64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 96)  # bytes of a layer's matrices in float32


@pytest.fixture(scope="module")
def gpus(default_entry: DeviceEntry) -> Iterator[list[Device]]:
    """One driver twice, taken for two GPUs, whose memories are not the host's."""
    devices = [Device.open(dataclasses.replace(default_entry, kind="gpu", index=i)) for i in range(2)]
    yield devices
    for device in devices:
        device.close()


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch, gpus: list[Device]) -> dict[int, float]:
    """The memory speed of each device by index, in place of a measurement. Both have other drivers."""
    rates = {0: 1e9, 1: 1e9}
    monkeypatch.setattr(split, "read_bandwidth", lambda device: rates[device.entry.index])
    for device in gpus:
        entry = dataclasses.replace(device.entry, driver_version=str(device.entry.index))
        monkeypatch.setattr(device, "entry", entry)
    return rates


def limit_memory(monkeypatch: pytest.MonkeyPatch, *limits: int) -> None:
    monkeypatch.setattr(Device, "memory_bytes", property(lambda device: limits[device.entry.index]))


def divided(devices: list[Device], how: str | None = "layer", shares: Any = None) -> list[Stage]:
    splitter = Splitter(CONFIG, WeightTypes("float32"), "float32", 128, 128, None)
    return splitter.divide(devices, SplitRequest.of(devices, how, shares))


def counts(stages: list[Stage]) -> list[int]:
    return [len(stage.span.layers) for stage in stages]


@pytest.mark.parametrize(
    ("n_bytes", "shares", "expected"),
    [
        ([1] * 30, [3, 1], [22, 8]),
        ([1] * 4, [1, 1], [2, 2]),
        ([1] * 4, [1000, 1], [3, 1]),  # each device has a layer or more
        ([1] * 4, [1, 1000, 1], [1, 2, 1]),
        ([6, 1, 1, 1, 1, 1, 1], [1, 1], [1, 6]),  # by bytes, not by number
    ],
)
def test_layers_follow_shares(n_bytes: list[int], shares: list[float], expected: list[int]) -> None:
    assert cut(n_bytes, shares) == expected


def test_given_shares_and_their_forecast(gpus: list[Device]) -> None:
    first, last = divided(gpus, None, [4, 1])
    assert (str(first.span), str(last.span)) == ("layers 0 to 7", "layers 8 to 9")
    head = 4 * 64 * 144  # 131 rows in tiles of 16; tied, so the first device has it as the embedding
    assert (first.needed["weights"], last.needed["weights"]) == (8 * LAYER + head, 2 * LAYER + head)
    assert first.needed["KV cache"] == 4 * last.needed["KV cache"] == 8 * 2 * 2 * 32 * 4 * 128


def test_faster_memory_gets_more_layers(gpus: list[Device], rates: dict[int, float]) -> None:
    assert counts(divided(gpus)) == [5, 5]
    rates[0] = 4e9
    assert counts(divided(gpus)) == [8, 2]
    rates[0] = 0.25e9
    assert counts(divided(gpus)) == [2, 8]


def test_layers_move_off_a_full_device(
    gpus: list[Device], rates: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates[0] = 4e9
    eight, _ = divided(gpus)
    limit_memory(monkeypatch, sum(eight.needed.values()) - 2 * LAYER, 1 << 40)
    assert counts(divided(gpus)) in ([5, 5], [6, 4])
    limit_memory(monkeypatch, sum(eight.needed.values()) - 2 * LAYER, 1 << 20)
    with pytest.raises(OutOfDeviceMemoryError, match=r"the layers on device [01], .*use other shares"):
        divided(gpus)


def test_auto_takes_one_device_if_the_model_fits(
    gpus: list[Device], rates: dict[int, float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "llmcl.engine.split")
    (alone,) = divided(gpus[::-1], "auto")
    assert alone.device is gpus[0] and counts([alone]) == [10]
    assert "alone, because the model fits" in caplog.text
    caplog.clear()
    limit = sum(alone.needed.values()) - 1
    limit_memory(monkeypatch, limit, limit)
    assert counts(divided(gpus, "auto")) == counts(divided(gpus, None)) == [5, 5]
    assert "split auto: by layers, because" in caplog.text and "layers 5 to 9 on" in caplog.text


def test_devices_of_one_memory_are_counted_together(default_entry: DeviceEntry, gpus: list[Device]) -> None:
    cpu = Device.open(dataclasses.replace(default_entry, kind="cpu"))
    needed = dict.fromkeys(["weights"], cpu.memory_bytes * 2 // 3)
    stages = [dataclasses.replace(stage, needed=needed) for stage in divided(gpus, None, [1, 1])]
    assert split.too_large(stages) == []  # each in its own memory
    (full,) = split.too_large([dataclasses.replace(stage, device=cpu) for stage in stages])
    assert full[0] == "the host" and full[1] == 2 * needed["weights"]
    cpu.close()


def test_devices_says_what_a_split_would_give(gpus: list[Device], rates: dict[int, float]) -> None:
    rates[1] = 3e9
    selected, reason = devices_to_divide([device.entry for device in gpus], "0, 1")
    assert selected == [0, 1]
    assert reason.count("25% on device 0") == 1 and reason.count("75% on device 1") == 1


def test_a_command_for_one_device_says_which_commands_take_several(default_entry: DeviceEntry) -> None:
    with pytest.raises(DeviceError, match="only generate, chat, run, serve, bench, perplexity and warm take several"):
        choose_device([default_entry], "0,1")
