"""Runs mypy, the checks under Oclgrind and all tests, one process more at a time than there are cores.

LLMCL_TEST_FULL=1 adds the other devices, the cases marked `slow` (on one device each) and the vendors' compilers; the
summary says what was left.

`python tests/run.py [-j JOBS] [pytest arguments]` (with arguments: the tests alone; with paths: those). A process runs
some files and ends: the compilers of three OpenCL drivers hold on to gigabytes otherwise, and what goes wrong in one
takes little with it. Those of pytest are forked from one that has imported PyTorch and transformers (imported_once.py),
which takes seconds; the other checks run meanwhile. A process that hangs is ended and counts as failed. One that dies
(a compiler's crash) is run a second time, which the summary says; a kernel that crashes does so again.

One more than there are cores: tests wait for children, timers and drivers, and a core would be idle for a quarter of
the time.

The summary has the CPU seconds, too, but for those imports: unlike the time they hardly depend on what else the machine
does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import runpy
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from own_cache import use_own_cache
from tiers import FULL, is_full

ROOT = Path(__file__).resolve().parent.parent
FILES_A_PROCESS = 14  # half of them in the full run, where three compilers hold on to memory
# Those that took the most CPU seconds in both tiers together with no compiled kernels, the longest first.
LONGEST = [
    "tests/models/test_families.py",
    "tests/kernels/test_linear_few_rows_cpu.py",
    "tests/kernels/test_experts.py",
    "tests/kernels/test_linear_few_rows.py",
    "tests/test_first_minutes.py",
    "tests/speculation/test_speculation.py",
    "tests/kernels/test_linear_quantized.py",
    "tests/test_documentation.py",
    "tests/runtime/test_child_process.py",
    "tests/kernels/test_sample_filters.py",
    "tests/models/test_model.py",
    "tests/models/test_gguf_types.py",
    "tests/attention/test_functions.py",
    "tests/engine/test_llm.py",
    "tests/cli/test_cli.py",
    "tests/tools/test_doctor.py",
    "tests/engine/test_batch_invariant.py",
    "tests/cli/test_warm.py",
    "tests/kernels/test_attention_prefill.py",
    "tests/runtime/test_compilers.py",
    "tests/kernels/test_attention_decode.py",
    "tests/fuzz/test_fuzz.py",
    "tests/scripts/test_bench_attention.py",
    "tests/models/test_batch.py",
    "tests/engine/test_engine_on_a_device.py",
    "tests/engine/test_public_names.py",
    "tests/kernels/test_logprobs.py",
    "tests/tools/test_tune.py",
    "tests/kernels/test_persistent_step.py",
    "tests/test_check_compilers.py",
    "tests/models/test_quality.py",
    "tests/kernels/test_load_weight.py",
    "tests/attention/test_interface.py",
    "tests/kernels/test_delta_rule.py",
    "tests/kernels/test_sample.py",
    "tests/scripts/test_start_benchmark.py",
    "tests/cli/test_families.py",
    "tests/runtime/test_device_probe.py",
    "tests/attention/test_flex.py",
    "tests/models/test_paged_kv_cache.py",
    "tests/models/test_recurrent_states.py",
    "tests/attention/test_random_calls.py",
    "tests/serve/test_openapi.py",
    "tests/models/test_unprepared.py",
    "tests/scripts/test_compare_gpu.py",
    "tests/kernels/test_attention_q8_0.py",
    "tests/kernels/test_ragged_step.py",
    "tests/engine/test_scheduler.py",
    "tests/kernels/test_random_weight.py",
    "tests/serve/test_demo_model.py",
    "tests/kernels/test_pack_weight.py",
    "tests/kernels/test_attention_not_a_number.py",
    "tests/attention/test_block_test.py",
    "tests/kernels/test_linear_prefill.py",
    "tests/engine/test_leases.py",
    "tests/attention/test_trace.py",
    "tests/models/test_host_memory.py",
    "tests/kernels/test_linear_prefill_intel.py",
]
LIMIT_S = 1200  # of a process; pyproject.toml limits a test
GRACE_S = 10
TOO_LONG = f"did not end within {LIMIT_S} s"
SECTION = "OpenCL implementations"
UNUSABLE = "not usable:"
FORKED = multiprocessing.get_context("forkserver")
APART = multiprocessing.get_context("spawn")
IGNORED = (  # of what imported_once.py did with Hypothesis before pytest
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
    *("-W", "ignore:Slow code in plugin:hypothesis.errors.HypothesisSideeffectWarning"),
)
PASSED, NO_TESTS = 0, 5  # of pytest's exit codes


@dataclass
class Outcome:
    files: list[str]
    code: int
    output: str
    cpu_s: float = 0.0  # of the process and those that it started
    first_crash: str = ""  # how a first attempt ended that is forgiven

    @property
    def crashed(self) -> bool:
        return self.code < 0

    @property
    def failed(self) -> bool:
        return self.code not in (PASSED, NO_TESTS)

    @property
    def how(self) -> str:
        if self.crashed:
            return f"ended by {signal.Signals(-self.code).name}"
        lines = self.output.strip().splitlines()
        return lines[-1].strip("= ") if lines else f"exit code {self.code}"


def chunks() -> list[list[str]]:
    """Files in groups, the one that takes longest first, so that all cores have work to the end."""
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    files.sort(key=lambda file: LONGEST.index(file) if file in LONGEST else len(LONGEST))
    n = -(-len(files) // (FILES_A_PROCESS // 2 if is_full() else FILES_A_PROCESS))
    return [files[i::n] for i in range(n)]


def run(program: str, arguments: list[str], files: list[str]) -> Outcome:
    outcome = attempt(program, arguments, files)
    if outcome.crashed and not outcome.output.endswith(TOO_LONG):
        print(outcome.output, f"{outcome.how}; once more: {' '.join(files)}", sep="\n", flush=True)
        first, outcome = outcome, attempt(program, arguments, files)
        outcome.first_crash, outcome.cpu_s = first.how, first.cpu_s + outcome.cpu_s
    return outcome


def attempt(program: str, arguments: list[str], files: list[str]) -> Outcome:
    with tempfile.NamedTemporaryFile("r", errors="replace") as written:
        processes = FORKED if program == "pytest" else APART
        cpu_s = processes.Value("d", lock=False)
        args = (program, [*arguments, *files], written.name, cpu_s, os.environ.get("PYTHONPATH"))
        process = processes.Process(target=work, args=args)
        process.start()
        process.join(LIMIT_S)
        too_long = ""
        if process.exitcode is None:
            assert process.pid is not None
            end(process, process.pid)
            too_long = f"\n{TOO_LONG}"
        assert process.exitcode is not None
        return Outcome(files, process.exitcode, written.read() + too_long, cpu_s.value)


def end(process: Any, pid: int) -> None:
    """Ends a process that hangs; pytest's fault handler prints where it was.

    A driver's compiler may catch the first SIGABRT, wait for a lock of its own and never return.
    """
    for number in (signal.SIGABRT, signal.SIGABRT, signal.SIGKILL):
        os.kill(pid, number)
        process.join(GRACE_S)
        if process.exitcode is not None:
            return
    process.join()


def start_server() -> None:
    """Starts the process that the others are forked from, which imports what they share.

    Before Python 3.12.4 it does not get our sys.path, and passes over what it does not find: PYTHONPATH says where.
    """
    paths = os.environ.get("PYTHONPATH")
    set_python_path(os.pathsep.join(filter(None, [str(ROOT / "tests"), str(ROOT), paths])))
    FORKED.set_forkserver_preload(["imported_once"])
    forkserver.ensure_running()
    set_python_path(paths)


def set_python_path(paths: str | None) -> None:
    os.environ.pop("PYTHONPATH", None)
    if paths is not None:
        os.environ["PYTHONPATH"] = paths


def work(program: str, arguments: list[str], output: str, cpu_s: Any, python_path: str | None) -> None:
    """Runs a module or a file of Python as `python` would, with all that it and a driver print in the file.

    python_path: the variable, which is another in the process that this one was forked from.
    """
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    set_python_path(python_path)
    assert program != "pytest" or "imported_once" in sys.modules, "each process would take seconds to import PyTorch"
    sys.dont_write_bytecode = False
    sys.argv = [program, *arguments]
    run_program = runpy.run_path if program.endswith(".py") else runpy.run_module
    try:
        run_program(program, run_name="__main__")
    finally:
        cpu_s.value = cpu_seconds()


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def summary(outcomes: list[Outcome]) -> list[str]:
    """What pytest says at the end of a run, once for all processes."""
    text = "\n".join(outcome.output for outcome in outcomes)
    skipped: Counter[str] = Counter()
    for number, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", text, re.MULTILINE):
        skipped[reason] += int(number)
    left, not_chosen, elsewhere = (
        sum(int(number) for number in re.findall(rf"^{words}: (\d+) cases", text, re.MULTILINE))
        for words in (
            "left to the full run",
            "of variants that the device does not choose",
            "slow ones that another device runs",
        )
    )
    sections = re.findall(rf"^=+ {SECTION} =+\n(.*?)(?=^=|^\d+ |\Z)", text, re.MULTILINE | re.DOTALL)
    implementations: dict[str, str] = {}
    for line in (line for section in sections for line in section.splitlines() if line):
        implementations.setdefault(driver_of(line), line)
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b", outcome.how):
            totals[what.rstrip("s") if what == "errors" else what] += int(number)
    return [
        *(f"skipped {number}: {reason}" for reason, number in skipped.most_common()),
        *([f"{left:,} slow cases are left to {FULL}=1"] if left else []),
        *([f"{not_chosen:,} cases are of kernels that the device does not choose"] if not_chosen else []),
        *([f"{elsewhere:,} slow cases run on the first device that takes them alone"] if elsewhere else []),
        *implementations.values(),
        *(f"run twice, at first {done.first_crash}: {' '.join(done.files)}" for done in outcomes if done.first_crash),
        *(f"FAILED ({done.how}): {' '.join(done.files)}" for done in outcomes if done.failed),
        ", ".join(f"{number} {what}" for what, number in totals.items()),
    ]


def driver_of(line: str) -> str:
    """What a line on an implementation is about. The reason why one is not usable may name a temporary file."""
    return ":".join(line.split(":")[:2]) if line.startswith(UNUSABLE) else line


def paths_among(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Those arguments that name files or folders of tests, or tests in them; the others."""
    paths = [one for one in arguments if one.startswith("tests") and Path(one.split("::")[0]).exists()]
    return paths, [argument for argument in arguments if argument not in paths]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-j", "--jobs", type=int, default=(os.cpu_count() or 1) + 1, help="processes at a time")
    options, arguments = parser.parse_known_args()
    use_own_cache()
    # Threads of PyTorch and NumPy that wait keep a core busy, which another process could use.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    # Hundreds of processes import llmcl, which each would compile for 0.4 s where Python is told not to keep that.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.chdir(ROOT)
    paths, others = paths_among(arguments)
    sys.path.insert(0, str(ROOT))  # for all processes, as `python -m` does: the package need not be installed
    start_server()
    # Only Python's output is captured: what a driver prints as it crashes is to be seen.
    pytest = ["-q", "--capture=sys", "-p", "no:cacheprovider", *IGNORED, *others]
    groups = [[path] for path in paths] or chunks()
    todo = [("pytest", pytest, files) for files in groups]
    if not arguments:
        checks = ["tests/check_compilers.py"] * is_full() + ["tests/check_oclgrind.py"]
        todo[:0] = [*((check, [], []) for check in checks), ("mypy", ["--no-fast-exit"], ["llmcl", "scripts"])]
    start, outcomes = time.monotonic(), []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run, *work) for work in todo]):
            outcome = done.result()
            outcomes.append(outcome)
            if outcome.failed:
                print(outcome.output)
            took = f"{outcome.how}, {outcome.cpu_s:.0f} s of CPU"
            print(f"[{len(outcomes)}/{len(todo)}] {took}: {' '.join(outcome.files)}", flush=True)
    print("\n".join(summary(outcomes)))
    if not is_full() and not arguments:
        print(f"compiling for the GPUs of other vendors is left to {FULL}=1")
    failed = any(outcome.failed for outcome in outcomes)
    cpu_s = time.process_time() + sum(outcome.cpu_s for outcome in outcomes)
    print(f"tests {'FAILED' if failed else 'passed'} in {time.monotonic() - start:.0f} s, {cpu_s:.0f} s of CPU")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
