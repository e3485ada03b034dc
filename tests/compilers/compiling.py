"""Compiles programs with as many processes at a time as there are cores, each once: what came of it is kept on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from compilers.chosen import Program
from compilers.gpus import Gpu
from compilers.toolchains import CompilerError, Figures, Toolchain, options_of
from llmcl.runtime.cache_files import cache_dir

COMMENT = re.compile(r"\s*(//.*)?\n\s*")  # with the blanks around it: what does not matter to a compiler
READ_AS = "3"  # changes with what toolchains.py reads from what a compiler says


@dataclass(frozen=True)
class Job:
    gpu: Gpu
    toolchain: Toolchain
    program: Program

    @property
    def digest(self) -> str:
        target = self.gpu.target if self.toolchain.knows_targets else ""
        kernels = ",".join(sorted(self.program.kernels))
        compiler = (READ_AS, self.gpu.vendor, target, self.toolchain.version)
        parts = (*compiler, *options_of(self.program), kernels, COMMENT.sub("\n", self.program.text))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    @property
    def short_digest(self) -> str:
        """What the table has of it."""
        return self.digest[:12]


@dataclass(frozen=True)
class Compiled:
    """figures: by kernel, none where the compiler gives none. error: the line of its log that says what failed."""

    figures: dict[str, Figures]
    error: str = ""


def compile_all(jobs: Sequence[Job], note: Callable[[int, int], None]) -> list[Compiled]:
    """What the compilers made of each job, in order. note: told how many are done, and of how many."""
    by_digest = {job.digest: job for job in jobs}
    done: dict[str, Compiled] = {}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for digest, compiled in zip(by_digest, pool.map(_compile_once, by_digest.values()), strict=True):
            done[digest] = compiled
            note(len(done), len(by_digest))
    return [done[job.digest] for job in jobs]


def _compile_once(job: Job) -> Compiled:
    path = cache_dir() / "compilers" / f"{job.digest}.json"
    try:
        stored = json.loads(path.read_text())
        return Compiled({name: Figures(**values) for name, values in stored["figures"].items()}, stored["error"])
    except (OSError, ValueError, KeyError, TypeError):
        compiled = _compile(job)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(compiled)))
    return compiled


def _compile(job: Job) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="llmcl-compilers-") as folder:
        try:
            figures = job.toolchain.compile(job.gpu, job.program, Path(folder))
        except CompilerError as error:
            return Compiled({}, str(error))
    if job.toolchain.knows_targets and (absent := set(job.program.kernels) - set(figures)):
        return Compiled({}, f"the compiler says nothing of {', '.join(sorted(absent))}")
    return Compiled({name: figures[name] for name in job.program.kernels if name in figures})
