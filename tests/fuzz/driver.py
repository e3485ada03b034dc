"""Runs cases in a child process with limits, sorts what came of them, and keeps those that failed."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.cases import Case, keep
from fuzz.command_cases import command_cases, parameters_of
from fuzz.convert_cases import convert_cases
from fuzz.http_cases import body_cases, http_cases
from fuzz.http_cases import sound as sound_request
from fuzz.model_cases import config_cases, gguf_cases, safetensors_cases
from fuzz.planted_cases import planted_cases
from fuzz.seeds import Folders, gguf_file, tokenizers_json, weights
from fuzz.template_cases import template_cases
from fuzz.tokenizer_cases import tokenizer_cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture import providers
from hypothesis.strategies import SearchStrategy

from llmcl.cli import _COMMANDS

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "fuzz"
LIMIT_S = 30.0  # of a case; one takes some hundredths of a second
COMPILING_LIMIT_S = 600.0  # of a sound one, the first to compile kernels
KEPT_A_CAUSE = 3

# Hypothesis also draws constants that it finds in the modules imported so far; with every change of llmcl a seed would
# stand for other cases.
providers.is_local_module_file = lambda path: False

STRATEGIES: dict[str, Callable[[Folders], SearchStrategy[Case]]] = {
    "gguf": gguf_cases,
    "safetensors": safetensors_cases,
    "config": config_cases,
    "tokenizer": tokenizer_cases,
    "template": template_cases,
    "command": command_cases,
    "convert": convert_cases,
    "body": body_cases,
    "http": http_cases,
    "planted": planted_cases,
}


class Child:
    """The process of child.py, started when it is needed and again after it ended."""

    def __init__(self, limit_s: float = LIMIT_S, *, compiles: bool = False):
        self.limit_s = limit_s
        self._mode = "compile" if compiles else "reuse"
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  for as long as the child runs
        self._hub_cache = tempfile.TemporaryDirectory()

    def run(self, folder: Path, limit_s: float | None = None) -> dict[str, str]:
        """What came of the case in the folder: see child.outcome_of. limit_s: in place of the usual one."""
        limit_s = limit_s or self.limit_s
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(f"{limit_s} {folder}\n".encode())
            process.stdin.flush()
            if select.select([process.stdout], [], [], 2 * limit_s + 60)[0]:
                line = process.stdout.readline()
                if line.endswith(b"\n"):
                    outcome: dict[str, str] = json.loads(line)
                    return outcome
        except BrokenPipeError:
            pass
        return self._death(process, limit_s)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
            hub = {"HF_HOME": self._hub_cache.name, "HF_HUB_CACHE": self._hub_cache.name, "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.child", self._mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | hub,
            )
        return self._process

    def _death(self, process: subprocess.Popen[bytes], limit_s: float) -> dict[str, str]:
        if hangs := process.poll() is None and not _ended(process):
            process.kill()
        code = process.wait()
        self._process = None
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._errors.truncate(0)
        self._errors.seek(0)
        frames = re.findall(r'File ".*?/(llmcl/[^"]+)", line (\d+)', text)
        where = ":".join(frames[0]) if frames else ""
        if hangs or "Timeout (" in text:
            what = f"it took more than {limit_s:g} s"
        else:
            what = f"the process ended by {signal.Signals(-code).name}" if code < 0 else f"the process ended ({code})"
        return {"outcome": "failed", "error": what, "message": "", "where": where, "details": text[-3000:]}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._hub_cache.cleanup()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        return False
    return True


@dataclass
class Failed:
    """A cause: its first cases."""

    subject: str
    outcome: dict[str, str]
    notes: list[str]
    folders: list[Path]
    count: int = 1

    def __str__(self) -> str:
        lines = [f"{self.subject}: {self.outcome['error']} at {self.outcome['where']} ({self.count} times)"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  {line}" for line in self.outcome["message"][:700].splitlines()]
        details = self.outcome.get("details", "").strip().splitlines()
        lines += [f"  | {line}" for line in details[-12:]]
        lines += [f"  again: python -m fuzz --case {folder}" for folder in self.folders[:1]]
        return "\n".join(lines)


@dataclass
class Session:
    """Cases that were run, what came of them, and the failures by cause."""

    child: Child
    work: Path
    kept: Path = KEPT
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    failures: dict[str, Failed] = field(default_factory=dict)
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folders = Folders(self.work / "seeds")
        self.check_seeds()

    def check_seeds(self) -> None:
        """The unchanged files work; otherwise every refusal would mean nothing."""
        folder = self.folders.folder()
        sound = [
            Case("config", [], folder),
            Case("gguf", [], {"model.gguf": self.folders.files["model.gguf"]}),
            Case("tokenizer", [], {"tokenizer.json": self.folders.files["tokenizer.json"]}, {"vocab_size": 576}),
            Case("convert", [], folder, {"source": ".", "target": "out.gguf", "options": {}}),
            sound_request(),
            Case("template", [], {"template.jinja": b"{{ messages[0].content }}"}),
        ]
        for case in sound:
            case.write(self.work / "case")
            outcome = self.child.run(self.work / "case", COMPILING_LIMIT_S)
            is_model = case.subject in ("config", "gguf")
            if outcome["outcome"] != "worked" or is_model != (outcome["message"] == "answered"):
                raise RuntimeError(f"the sound {case.subject} does not work: {outcome}")

    def run(self, case: Case) -> dict[str, str]:
        start = time.monotonic()
        folder = self.work / "case"
        case.write(folder)
        outcome = self.child.run(folder)
        self.seconds[case.subject] += time.monotonic() - start  # type: ignore[assignment]
        self.counts[case.subject, outcome["outcome"]] += 1
        if outcome["outcome"] == "refused":
            self.refusals[case.subject, outcome["where"]] += 1
        if outcome["outcome"] == "failed":
            self._note(case, outcome, folder)
        return outcome

    def _note(self, case: Case, outcome: dict[str, str], folder: Path) -> None:
        cause = f"{case.subject}: {outcome['error']} at {outcome['where']}"
        known = self.failures.get(cause)
        if known is None:
            known = self.failures[cause] = Failed(case.subject, outcome, case.notes, [], 0)
        known.count += 1
        if len(known.folders) < KEPT_A_CAUSE:
            name = re.sub(r"[^A-Za-z0-9]+", "-", cause)[:80].strip("-")
            known.folders.append(self.kept / f"{name}-{len(known.folders)}")
            keep(folder, known.folders[-1])

    @staticmethod
    def prepare() -> None:
        """Makes and imports what the strategies look at: what happens while they draw would change what they draw."""
        tokenizers_json()
        weights()
        for kind in ("gpt2", "llama"):
            gguf_file(kind)
        for command in _COMMANDS:
            parameters_of(command)

    def batch(self, subject: str, n: int, seed_number: int) -> None:
        """Draws and runs n cases; the same ones for the same seed in a process that drew nothing else."""
        self.prepare()

        @seed(seed_number)
        @settings(
            max_examples=n,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=[*HealthCheck],
        )
        @given(STRATEGIES[subject](self.folders))
        def draw_and_run(case: Case) -> None:
            self.run(case)

        draw_and_run()

    def table(self) -> str:
        """Outcomes by subject."""
        rows = [("subject", "cases", "worked", "refused", "failed", "seconds")]
        outcomes = ("worked", "refused", "failed")
        for subject in dict.fromkeys(subject for subject, _ in self.counts):
            numbers = [self.counts[subject, outcome] for outcome in outcomes]
            rows.append((subject, *map(str, (sum(numbers), *numbers)), f"{self.seconds[subject]:.1f}"))
        totals = [sum(self.counts[s, o] for s in STRATEGIES) for o in outcomes]
        rows.append(("all", *map(str, (sum(totals), *totals)), f"{sum(self.seconds.values()):.1f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(f"{c:<{w}}" if i == 0 else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        )

    def report(self) -> str:
        return "\n\n".join([*map(str, self.failures.values()), self.table()])
