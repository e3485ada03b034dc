"""linear_prefill on Intel's matrix units: largest difference over the largest expected magnitude.

No device that has them is at hand: they are emulated, on a driver with Intel's sub-groups. So this shows that the
kernels bring the right numbers to the right lanes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers import poisoned, read_guarded, relative_error, run, step_state_at, weight_on_device, with_poison
from parameters import each_value

from llmcl import reference
from llmcl.kernels.common.linear import GATES
from llmcl.kernels.intel import matrix_mad
from llmcl.kernels.intel.matrix_mad import EMULATED, NEEDED, NONE, XMX, matrix_form
from llmcl.ops.linear import linear_prefill
from llmcl.runtime import probe
from llmcl.runtime.device import Device
from llmcl.runtime.platforms import DeviceEntry
from llmcl.runtime.probe import CRASHED, NO, YES, Ending, ask

TOLERANCE = 3e-6  # of sums in float32: the operands are rounded in the twin, too

intel = pytest.mark.parametrize("variant", ["intel"])


def check(
    device: Device, dtype: str, n: int, rows: int, k: int, epilogue: str = "store", tiles_per_part: int = 0
) -> None:
    rng = np.random.default_rng(rows + k + n)
    values = (rng.standard_normal((rows, k)) / np.sqrt(k)).astype(np.float32)
    x = rng.standard_normal((n, k)).astype(np.float32)
    out_rows = rows // 2 if epilogue in GATES else rows
    before = rng.standard_normal((n, out_rows)).astype(np.float32)
    weight = weight_on_device(device, values, dtype, alternating=epilogue in GATES, tiles_per_part=tiles_per_part)
    out = with_poison(device, before) if epilogue == "add" else poisoned(device, (n, out_rows))
    step = step_state_at(device, position=3, n_tokens=n)
    run(linear_prefill(device, weight, with_poison(device, x), out, step, epilogue=epilogue, variant="intel"), n)
    expected = reference.linear(reference.round_to(x, dtype), reference.round_to(values, dtype))
    if epilogue in GATES:
        expected = getattr(reference, epilogue)(expected[:, :out_rows], expected[:, out_rows:])
    elif epilogue == "add":
        expected = before + expected
    assert relative_error(read_guarded(device, out, np.float32, (n, out_rows)), expected) < TOLERANCE


@intel
@each_value(("dtype", ["bfloat16", "float16"]), ("n", [1, 7, 8, 9, 33, 70]))
def test_tokens(target: Device, dtype: str, n: int) -> None:
    check(target, dtype, n, 131, 80)


@pytest.mark.slow
@intel
@pytest.mark.parametrize(("epilogue", "rows"), [("add", 37), ("swiglu", 160), ("geglu", 320)])
def test_epilogue(target: Device, epilogue: str, rows: int) -> None:
    check(target, "bfloat16", 27, rows, 576, epilogue)


@intel
def test_split_weight(target: Device) -> None:
    check(target, "float16", 13, 128, 80, "swiglu", tiles_per_part=4)


def xmx(entry: DeviceEntry) -> DeviceEntry:
    return dataclasses.replace(entry, kind="gpu", is_software=False, extensions=NEEDED)


@pytest.mark.parametrize(("verdict", "form"), [(YES, XMX), (NO, NONE), (CRASHED, NONE)])
def test_the_trial_decides(
    verdict: str, form: int, cl_entry: DeviceEntry, monkeypatch: pytest.MonkeyPatch, empty_cache: object
) -> None:
    monkeypatch.setattr(probe, "ask", lambda *_: Ending(verdict))
    assert matrix_form(dataclasses.replace(xmx(cl_entry), driver_version=f"xmx {verdict}")) == form


def test_who_is_not_asked(cl_entry: DeviceEntry) -> None:
    assert matrix_form(dataclasses.replace(xmx(cl_entry), kind="cpu")) == NONE
    assert matrix_form(dataclasses.replace(xmx(cl_entry), extensions=NEEDED[1:])) == NONE


@pytest.mark.slow
def test_the_trial_itself(device: Device) -> None:
    """On a driver without matrix units it says no, and of emulated ones yes."""
    if not {*device.entry.extensions}.issuperset(NEEDED[1:]):
        pytest.skip("this driver lacks Intel's sub-groups")
    assert ask(matrix_mad.__name__, device.entry, str(EMULATED)).verdict == YES
    assert ask(matrix_mad.__name__, device.entry, str(XMX)).verdict != YES
