"""pack_weight: quantised tiles hold what the file holds; values read back are bit for bit the format's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from parameters import slow_except
from stored_rows import StoredRows, load, quantized_weight, random_rows, values_of

from llmcl import reference
from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS
from llmcl.kernels.common.weight import Weight, alloc_weight, weight_bytes
from llmcl.ops.load_weight import load_weight
from llmcl.runtime.device import Device
from llmcl.tools.trials import HALVES

small = pytest.mark.oclgrind


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=small), 131])
def test_values_are_those_of_the_file(device: Device, dtype: str, rows: int) -> None:
    source = random_rows(QUANTIZED[dtype].format, rows, 512)
    weight = quantized_weight(device, rows, 512, dtype)
    np.testing.assert_array_equal(load(device, weight, source), [0, 0, 0])
    np.testing.assert_array_equal(values_of(device, weight), source.values())


@pytest.mark.parametrize("dtype", ["q4_1", "q6_k"])
def test_rotary_rows_find_their_place(device: Device, dtype: str) -> None:
    source = random_rows(QUANTIZED[dtype].format, 96, 512)
    weight = quantized_weight(device, 192, 512, dtype, tiles_per_part=4)
    load(device, weight, source, first_row=96, head_dim=32, rotary_dim=32, rope_interleaved=True)
    np.testing.assert_array_equal(values_of(device, weight)[96:], reference.unpermute_rope_rows(source.values(), 3))


def test_alternating_tiles(device: Device) -> None:
    gate, up = random_rows("Q4_0", 48, 512, seed=1), random_rows("Q4_0", 48, 512, seed=2)
    weight = quantized_weight(device, 96, 512, "q4_0", tiles_per_part=2)
    load(device, weight, gate, tile_step=2)
    load(device, weight, up, tile_step=2, tile_offset=1)
    tiles = values_of(device, weight).reshape(3, 2, TILE_ROWS, 512)
    np.testing.assert_array_equal(tiles[:, 0].reshape(48, 512), gate.values())
    np.testing.assert_array_equal(tiles[:, 1].reshape(48, 512), up.values())


def test_parts_of_several_types(device: Device) -> None:
    sources = [random_rows("Q4_K", 32, 512), random_rows("Q6_K", 16, 512), random_rows("BF16", 17, 512)]
    weight = alloc_weight(device, "mixed", 65, 512, [(32, "q4_k"), (16, "q6_k"), (17, "bfloat16")])
    first = 0
    for source in sources:
        assert not load_mixed(device, weight, source, first).any()
        first += source.shape[0]
    assert weight.dtype == "mixed"
    assert weight.nbytes == weight_bytes(32, 512, "q4_k") + weight_bytes(16, 512, "q6_k") + 2 * 32 * 512
    np.testing.assert_array_equal(values_of(device, weight), np.concatenate([s.values() for s in sources]))


def load_mixed(device: Device, weight: Weight, source: StoredRows, first_row: int) -> np.ndarray:
    flags = device.zeros(4 * 3, "flags")
    assert sum(load_weight(device, weight, source, flags, 1, first_row=first_row)) == source.data.nbytes
    return device.read(flags, np.int32, (3,))


def test_a_scale_of_mxfp4_that_makes_infinite_numbers_is_found(device: Device) -> None:
    source = random_rows("MXFP4", 20, 512)
    data = source.data.copy()
    data[19, 17] = 255
    source = dataclasses.replace(source, data=data)
    np.testing.assert_array_equal(load(device, quantized_weight(device, 20, 512, "mxfp4"), source), [0, 1, 0])


def test_a_scale_of_iq1_m_that_is_not_finite_is_found(device: Device) -> None:
    """It is in four parts, each in the upper half of a byte."""
    source = random_rows("IQ1_M", 20, 512)
    data = source.data.copy()
    data[19, 56 + 49 : 56 + 56 : 2] |= 0xF0
    source = dataclasses.replace(source, data=data)
    np.testing.assert_array_equal(load(device, quantized_weight(device, 20, 512, "iq1_m"), source), [0, 1, 0])


@pytest.mark.parametrize("dtype", slow_except(QUANTIZED, "q4_0", "q6_k", "mxfp4", "iq4_xs", "nvfp4"))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_found(device: Device, dtype: str, bad: float) -> None:
    format = QUANTIZED[dtype].format
    for at in HALVES[format]:
        source = random_rows(format, 20, 512)
        data = source.data.copy()
        size = reference.FORMATS[format].nbytes
        data[19, size + at : size + at + 2] = np.frombuffer(np.float16(bad).tobytes(), np.uint8)
        flags = load(device, quantized_weight(device, 20, 512, dtype), dataclasses.replace(source, data=data))
        np.testing.assert_array_equal(flags, [0, 1, 0])
