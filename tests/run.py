"""Runs all tests, some files to a process, as many processes at a time as there are cores.

`python tests/run.py [-j JOBS] [pytest arguments]`. A process ends after a few files: the compilers of three OpenCL
drivers hold on to gigabytes otherwise, and what goes wrong in one takes little with it. A process that hangs is ended
and counts as failed. One that dies (a compiler's crash) is run a second time, which the summary says; a kernel that
crashes does so again.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from own_cache import use_own_cache

ROOT = Path(__file__).resolve().parent.parent
FILES_A_PROCESS = 4
LIMIT_S = 1200
TOO_LONG = f"did not end within {LIMIT_S} s"
SECTION = "OpenCL implementations"
PASSED, NO_TESTS = 0, 5  # of pytest's exit codes


@dataclass
class Outcome:
    files: list[str]
    code: int
    output: str
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
    """Files in groups that take about as long as each other, those of kernels (most compilation) first in each."""
    files = sorted((ROOT / "tests").rglob("test_*.py"), key=lambda path: ("kernels" not in path.parts, path))
    n = -(-len(files) // FILES_A_PROCESS)
    return [[str(path.relative_to(ROOT)) for path in files[i::n]] for i in range(n)]


def run(files: list[str], arguments: list[str]) -> Outcome:
    outcome = attempt(files, arguments)
    if outcome.crashed and not outcome.output.endswith(TOO_LONG):
        print(outcome.output, f"{outcome.how}; once more: {' '.join(files)}", sep="\n", flush=True)
        first, outcome = outcome.how, attempt(files, arguments)
        outcome.first_crash = first
    return outcome


def attempt(files: list[str], arguments: list[str]) -> Outcome:
    # Only Python's output is captured: what a driver prints as it crashes is to be seen.
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", *arguments, *files]
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        process = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=subprocess.STDOUT)
        too_long = ""
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # pytest's fault handler prints where it was
            process.wait()
            too_long = f"\n{TOO_LONG}"
        written.seek(0)
        return Outcome(files, process.returncode, written.read() + too_long)


def summary(outcomes: list[Outcome]) -> list[str]:
    """What pytest says at the end of a run, once for all processes."""
    text = "\n".join(outcome.output for outcome in outcomes)
    skipped: Counter[str] = Counter()
    for number, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+: (.*)$", text, re.MULTILINE):
        skipped[reason] += int(number)
    sections = re.findall(rf"^=+ {SECTION} =+\n(.*?)(?=^=|^\d+ |\Z)", text, re.MULTILINE | re.DOTALL)
    implementations = dict.fromkeys(line for section in sections for line in section.splitlines() if line)
    totals: Counter[str] = Counter()
    for outcome in outcomes:
        for number, what in re.findall(r"(\d+) (passed|failed|errors?|skipped|xfailed)\b", outcome.how):
            totals[what.rstrip("s") if what == "errors" else what] += int(number)
    return [
        *(f"skipped {number}: {reason}" for reason, number in skipped.most_common()),
        *implementations,
        *(f"run twice, at first {done.first_crash}: {' '.join(done.files)}" for done in outcomes if done.first_crash),
        *(f"FAILED ({done.how}): {' '.join(done.files)}" for done in outcomes if done.failed),
        ", ".join(f"{number} {what}" for what, number in totals.items()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    options, arguments = parser.parse_known_args()
    use_own_cache()
    start, groups = time.monotonic(), chunks()
    outcomes = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run, files, arguments) for files in groups]):
            outcome = done.result()
            outcomes.append(outcome)
            if outcome.failed:
                print(outcome.output)
            print(f"[{len(outcomes)}/{len(groups)}] {outcome.how}: {' '.join(outcome.files)}", flush=True)
    print("\n".join(summary(outcomes)))
    failed = any(outcome.failed for outcome in outcomes)
    print(f"tests {'FAILED' if failed else 'passed'} in {time.monotonic() - start:.0f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
