"""The doctor: working devices, a kernel made wrong, a driver that crashes or hangs, and what follows from each."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from programs import TINY_SHAPE, Run, run_llmcl
from which_devices import not_chosen

import llmcl
from llmcl.cli import main
from llmcl.errors import DeviceError
from llmcl.kernels import table
from llmcl.kernels.common.linear import LinearDecode
from llmcl.kernels.implementation import OpKernel
from llmcl.kernels.nvidia import VARIANTS as PTX_VARIANTS
from llmcl.kernels.table import pick
from llmcl.models.random_shapes import random_shape_config
from llmcl.models.recurrent_blocks import checked_ops
from llmcl.runtime.device import Device
from llmcl.runtime.device_cache import DeviceCache
from llmcl.runtime.platforms import DeviceEntry, find_devices
from llmcl.tools import device_report, doctor

# A worker in which one kernel file is changed before it is compiled, or a check does something else.
WORKER = """
import sys, os, time
from llmcl.tools import doctor
from llmcl.cli import main
from llmcl.runtime import program
read = program.read_source
def changed(name):
    text = read(name)
    if {file!r} and name == {file!r}:
        assert {old!r} in text
        text = text.replace({old!r}, {new!r})
    return text
program.read_source = changed
{more}
doctor.work(int(sys.argv[1]), [int(i) for i in sys.argv[2].split(",")])
"""


def worker(file: str = "", old: str = "", new: str = "", more: str = "") -> list[str]:
    return [sys.executable, "-c", WORKER.format(file=file, old=old, new=new, more=more)]


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few checks, for tests whose subject is what becomes of them."""
    few = [c for c in doctor.checks() if c.dtype == "float32" and c.kernel in ("linear_decode", "rms_norm")]
    monkeypatch.setattr(doctor, "checks", lambda: few)


FEW = """
few = [c for c in doctor.checks() if c.dtype == "float32" and c.kernel in ("linear_decode", "rms_norm")]
doctor.checks = lambda: few
"""


def statuses(outcomes: Sequence[doctor.Outcome]) -> dict[str, str]:
    return {
        f"{o.check.kernel} {o.check.variant_name}": o.status
        for o in outcomes
        if o.check.variant_name not in PTX_VARIANTS
    }


ONE_DTYPE = "float16", "q4_k"  # and one whose products are other kernels


def run_alone(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[doctor.Check], bool]) -> None:
    """All other checks count as those of variants that the device never chooses."""
    supports = doctor.Check.supports_device
    monkeypatch.setattr(
        doctor.Check, "supports_device", lambda check, device: wanted(check) and supports(check, device)
    )


def test_every_form_that_a_device_gets_passes(
    cl_entry: DeviceEntry, default_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where other variants are chosen than on the first device in every type; where the same are, in one."""
    if cl_entry.index == default_device.entry.index:
        pytest.skip("test_json runs the checks on this device")
    unused = not_chosen(cl_entry)
    same = unused == not_chosen(default_device.entry)

    def wanted(check: doctor.Check) -> bool:
        return check.variant_name != unused and (not same or check.dtype == "float16")

    run_alone(monkeypatch, wanted)
    outcomes = doctor.diagnose(cl_entry)
    failed = [(o.check.kernel, o.check.variant_name, o.check.dtype, o.status, o.detail) for o in outcomes]
    assert {row[3] for row in failed} <= {"pass", "not used"}, failed
    assert all(o.status == "pass" for o in outcomes if o.in_use and wanted(o.check))
    one_form_of_each_is_in_use([(o.check.kernel, o.check.dtype, o.in_use) for o in outcomes])


def one_form_of_each_is_in_use(checks: Sequence[tuple[str, str, bool]]) -> None:
    for kernel in ("linear_decode", "linear_prefill", "attention_decode", "attention_prefill"):
        used = [dtype for name, dtype, in_use in checks if name == kernel and in_use]
        tested = {dtype for name, dtype, _ in checks if name == kernel}
        assert tested and sorted(used) == sorted(tested), "one variant of each is in use"


@pytest.mark.usefixtures("only", "no_findings")
def test_a_wrong_kernel_is_found(default_device: Device) -> None:
    wrong = worker("portable/rms_norm.cl", " / HIDDEN", " * 1.01f / HIDDEN", FEW)
    found = doctor.diagnose(default_device.entry, worker=wrong, everything=True)
    assert statuses(found)["rms_norm shared"] == "wrong"
    assert {s for name, s in statuses(found).items() if "linear" in name} == {"pass"}
    reasons = doctor.excluded(found)
    assert (
        list(reasons) == ["portable/rms_norm.cl float32"] and "allowed 2e-05" in reasons["portable/rms_norm.cl float32"]
    )


def test_each_kernel_of_a_simple_op_is_checked(default_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(OpKernel):
        name = folder = "other"

    checked: list[str] = []

    def note(device: Device) -> float:
        checked.append(table.op_kernel(device, "rms_norm").key("float32"))
        return 0.0

    monkeypatch.setattr(table, "op_kernels", lambda op: (Other(op), OpKernel(op)))
    monkeypatch.setattr(doctor, "_rms_norm", note)
    checks = [check for check in doctor.checks() if check.kernel == "rms_norm"]
    assert [check.in_use(default_device) for check in checks] == [True, False]
    for check in checks:
        check.run(default_device)
    assert checked == [check.key for check in checks] == ["other/rms_norm.cl float32", "portable/rms_norm.cl float32"]


@pytest.mark.usefixtures("only", "no_findings")
def test_a_compiler_that_refuses_is_reported_with_its_log(default_device: Device) -> None:
    broken = worker("portable/linear_decode.cl", "__kernel", "no_such_type __kernel", FEW)
    found = doctor.diagnose(default_device.entry, worker=broken, everything=True)
    (refused,) = (o for o in found if o.check.variant_name == "portable")
    assert refused.status == "refused" and "portable/linear_decode.cl does not compile" in refused.detail
    assert list(doctor.excluded(found)) == ["portable/linear_decode.cl float32"]


@pytest.mark.usefixtures("only", "no_findings")
@pytest.mark.parametrize(
    ("what", "limits_s", "said"),
    [
        (
            "print('driver: bad day', file=sys.stderr, flush=True); os._exit(11)",
            (60.0,),
            "(exit status 11): driver: bad day",
        ),
        ("time.sleep(300)", (5.0, 20.0, 80.0), "did not end within {limit_s:.0f} s"),
    ],
)
def test_a_crash_is_not_fatal(default_device: Device, what: str, limits_s: tuple[float, ...], said: str) -> None:
    more = FEW + (
        "import dataclasses\n"
        f"def bad(device):\n    {what}\n"
        "few = [dataclasses.replace(c, run=bad) if c.variant_name == 'portable' else c for c in few]\n"
    )
    for limit_s in limits_s:  # on a busy machine a process may take seconds to begin
        found = doctor.diagnose(default_device.entry, worker=worker(more=more), timeout_s=limit_s)
        if statuses(found)["rms_norm shared"] == "pass":
            break
    (crashed,) = (o for o in found if o.check.variant_name == "portable")
    assert crashed.status == "crashed" and said.format(limit_s=limit_s) in crashed.detail
    assert statuses(found)["rms_norm shared"] == "pass", "the rest is still checked"


@pytest.mark.usefixtures("no_findings")
def test_what_is_excluded_is_passed_over(default_device: Device) -> None:
    device = copy.copy(default_device)
    device.entry = dataclasses.replace(device.entry, kind="cpu", is_software=False, facts={})
    cache = DeviceCache(device.entry)
    cache.store_excluded({"cpu/linear_decode.cl float16": "wrong: error 1.0"})
    device.cache = DeviceCache(device.entry)  # as another run reads it
    assert pick(LinearDecode, device, "float16", 64).name == "portable"
    assert pick(LinearDecode, device, "float32", 64).name == "cpu"
    assert pick(LinearDecode, device, "float16", 64, "cpu").name == "cpu", "by name it can still be tested"
    cache.store_excluded(
        {"cpu/linear_decode.cl float16": "wrong: error 1.0", "portable/linear_decode.cl float16": "wrong: error 2.0"}
    )
    device.cache = DeviceCache(device.entry)
    with pytest.raises(DeviceError, match=r"portable/linear_decode.cl gives wrong .* error 2.0; use another --device"):
        pick(LinearDecode, device, "float16", 64)


@pytest.mark.usefixtures("no_findings")
def test_a_wrong_kernel_without_another_form_refuses_models(default_device: Device, tmp_path: Path) -> None:
    device = copy.copy(default_device)
    device.cache = DeviceCache(device.entry)
    device.cache.store_excluded(
        {"portable/rms_norm.cl float32": "wrong: error 0.3", "portable/embed.cl bfloat16": "wrong: error 0.1"}
    )
    with pytest.raises(DeviceError, match=r"kernel portable/rms_norm.cl gives wrong results for float32 .* error 0.3"):
        llmcl.load_random("smollm2-135m", device=device, dtype="float16", max_context=16)
    device.cache.store_excluded({"portable/delta_rule.cl float32": "wrong: error 0.4"})
    assert checked_ops(random_shape_config("smollm2-135m")) == [], "models without such layers run"
    hybrid = {**TINY_SHAPE, "architectures": None, "model_type": "qwen3_5_text"}
    shape = tmp_path / "config.json"
    shape.write_text(json.dumps(hybrid))
    with pytest.raises(DeviceError, match=r"kernel portable/delta_rule.cl gives wrong results .* error 0.4"):
        llmcl.load_random(str(shape), device=device, dtype="float16", max_context=16)


@pytest.mark.usefixtures("only", "no_findings")
def test_the_command(
    default_device: Device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "diagnose", partial(doctor.diagnose, worker=worker(more=FEW)))
    monkeypatch.setattr(sys, "argv", ["llmcl", "doctor", "--device", str(default_device.entry.index)])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 0
    shown = capsys.readouterr()
    assert "checks passed; nothing is excluded" in shown.out and "linear_decode" in shown.out
    assert default_device.name in shown.err
    assert DeviceCache(default_device.entry).excluded == {}


@pytest.mark.slow
@pytest.mark.usefixtures("only")
def test_the_report(default_device: Device, no_findings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What did not pass comes first, with its log, and nothing names the user or the machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(device_report.platform, "node", lambda: "machine-of-mine")
    more = FEW + (
        "import dataclasses\n"
        "from llmcl.errors import KernelBuildError\n"
        f"def bad(device):\n    raise KernelBuildError('{tmp_path}/.cache/x.cl on machine-of-mine: | no')\n"
        "few = [dataclasses.replace(c, run=bad) if c.kernel == 'rms_norm' else c for c in few]\n"
    )
    monkeypatch.setattr(doctor, "diagnose", partial(doctor.diagnose, worker=worker(more=more)))
    file, number = tmp_path / "report.md", str(default_device.entry.index)
    monkeypatch.setattr(sys, "argv", ["llmcl", "doctor", "-q", "--device", number, "--report", str(file)])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == DeviceError.exit_code
    text = file.read_text(encoding="utf-8")
    entry = default_device.entry
    for part in (entry.name, entry.driver_version, entry.platform_version, llmcl.__version__, "GB/s", "GFLOP/s"):
        assert part in text, part
    assert "1 did not" in text and "## rms_norm, shared, float32: refused" in text
    assert "~/.cache/x.cl on HOST: | no" in text
    assert str(tmp_path) not in text and "machine-of-mine" not in text
    tables = [line for line in text.splitlines() if line.startswith("| ") and line.endswith(" |")]
    assert {line.count("|") for line in tables} <= {3, 7}, "a | in a cell would begin another"


def test_rates_that_cannot_be_measured_are_no_obstacle(default_device: Device) -> None:
    missing = dataclasses.replace(default_device.entry, index=99)
    assert list(device_report.measured_rates(missing)) == ["rates"]
    slow = device_report.measured_rates(default_device.entry, timeout_s=0.01)
    assert slow == {"rates": "not measured: no end within 0 s"}


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    done = run_llmcl("doctor", "--report", str(tmp_path / "no folder" / "report.md"))
    assert done.returncode == 2 and "--report" in done.stderr and "cannot be written" in done.stderr
    both = run_llmcl("doctor", "--reset", "--report", str(tmp_path / "report.md"))
    assert both.returncode == 2 and "--reset checks nothing" in both.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("no_findings")
def test_what_was_found_is_shown_where_it_cannot_be_kept(
    default_device: Device, tmp_path: Path, run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.md"
    wrong = doctor.Outcome(doctor.checks()[0], doctor.WRONG, 1.0, "error 1.0", in_use=True)

    def diagnose(*args: object, **settings: object) -> list[doctor.Outcome]:
        file.unlink()
        file.mkdir()  # as if the disk were full
        return [wrong]

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    done = run_here("llmcl", "doctor", "-q", "--report", str(file), "--device", str(default_device.entry.index))
    assert done.returncode == 1 and f"--report {file}: cannot be written" in done.stderr
    assert "excluded from now on" in done.stdout
    assert DeviceCache(default_device.entry).excluded == {wrong.check.key: "wrong: error 1.0"}


@pytest.mark.usefixtures("no_findings")
def test_reset(default_device: Device, run_here: Run) -> None:
    cache = DeviceCache(default_device.entry)
    cache.store_excluded({"cpu/linear_decode.cl float16": "wrong: error 1.0"})
    cache.store_tuned({"key": {"BLOCK_M": 8}})
    reset = run_here("llmcl", "doctor", "--reset", "--device", str(default_device.entry.index))
    assert reset.returncode == 0 and "nothing is excluded any more" in reset.stdout
    after = DeviceCache(default_device.entry)
    assert after.excluded == {} and after.tuned == {"key": {"BLOCK_M": 8}}, "tuned tiles are no concern of the doctor"


def test_every_device_knows_which_forms_it_uses(default_device: Device) -> None:
    """Also where a check has no variant for it: GPUs have no persistent kernel for a step, but NVIDIA's."""
    for kind in ("cpu", "gpu"):
        taken_for = copy.copy(default_device)
        taken_for.entry = dataclasses.replace(default_device.entry, kind=kind)
        used = [(check.kernel, check.dtype, check.in_use(taken_for)) for check in doctor.checks()]
        one_form_of_each_is_in_use([row for row in used if row[0] != "persistent_step"])
        n_steps = sum(in_use for kernel, _, in_use in used if kernel == "persistent_step")
        assert n_steps == 1 if kind == "cpu" else n_steps <= (default_device.entry.fact("ptx_arch") > 0)


@pytest.mark.slow
def test_json(default_device: Device, run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with every check of the default device, but of the variant that it does not choose in one type.

    In the others that variant is checked on a device that chooses it, if there is one.
    """
    others = [entry for entry in find_devices() if entry.usable]
    unused = not_chosen(default_device.entry)
    if any(not_chosen(entry) != unused for entry in others):
        run_alone(
            monkeypatch,
            lambda check: check.variant_name != unused or check.dtype in ONE_DTYPE or check.in_use(default_device),
        )
    done = run_here("llmcl", "doctor", "--format", "json", "-q", "--device", str(default_device.entry.index))
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["device"] == default_device.name
    assert {row["status"] for row in report["checks"]} <= {"pass", "not used"}
    assert all(row["status"] == "pass" for row in report["checks"] if row["in_use"])
    assert {row["dtype"] for row in report["checks"] if row["in_use"]} == {*doctor.DTYPES, *doctor.QUANTIZED_DTYPES}
    one_form_of_each_is_in_use([(row["kernel"], row["dtype"], row["in_use"]) for row in report["checks"]])
    assert DeviceCache(default_device.entry).excluded == {}
