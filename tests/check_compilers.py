"""Compiles the kernels of nine real models for GPUs that are not here, with Intel's, AMD's and a SPIR-V compiler.

`python tests/check_compilers.py` compiles for one GPU of each vendor so many programs that each kernel is met with each
pair of what sets its kinds apart (types, sizes of heads, epilogues), and where a compiler gives no figures with each by
itself; with `--all` all programs of all models for all GPUs, in half an hour. It fails at a compile error, at a kernel
of the decode path that spills registers, and at one that spills more or has a lower occupancy than
docs/results/compilers.json says. `--update` compiles one program of every kind for all GPUs and writes that file and
the tables of docs/devices.md; with `--all` it also notes where other models have worse figures than the first. What was
compiled before is not compiled again. A compiler that is not installed is named, and its GPUs are left out;
LLMCL_TEST_REQUIRE=compilers makes that an error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Sequence
from itertools import combinations

from compilers.chosen import Program, programs_of
from compilers.compiling import Compiled, Job, compile_all
from compilers.gpus import GPUS
from compilers.page import write_page
from compilers.table import TABLE, Table, problems
from compilers.toolchains import TOOLCHAINS, Toolchain
from covering import covering
from own_cache import use_own_cache


def first_of_each_kind(programs: Sequence[Program]) -> dict[str, Program]:
    firsts: dict[str, Program] = {}
    for program in programs:
        for kernel in program.kernels:
            firsts.setdefault(program.kind(kernel), program)
    return firsts


def kinds_that_meet(kinds: Collection[str], n_words: int) -> set[str]:
    """As many of these kinds as have every combination of n_words words that a kernel's kinds have."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for kind in kinds:
        kernel, *words = kind.removeprefix("intel ").split()
        found[kind] = {(kernel, *of) for of in combinations(words, min(n_words, len(words)))}
    return covering(found)


def found_toolchains() -> tuple[dict[str, Toolchain], str]:
    """By vendor, and in words what is left out."""
    found: dict[str, Toolchain] = {}
    missing = []
    for vendor, kind in TOOLCHAINS.items():
        targets = ", ".join(gpu.label for gpu in GPUS if gpu.vendor == vendor)
        if toolchain := kind.find():
            found[vendor] = toolchain
            print(f"compilers: {toolchain.version} for {targets}", flush=True)
        else:
            missing.append(f"{targets}: install {' '.join(kind.packages)}")
    return found, f"left out: {'; '.join(missing)}" if missing else ""


def note(done: int, total: int) -> None:
    if done % 100 == 0:
        print(f"compilers: {done} of {total} programs", flush=True)


def collect(jobs: Sequence[Job], results: Sequence[Compiled]) -> tuple[Table, list[str]]:
    """The figures by kind, and the errors."""
    table, errors = Table(), []
    for job, result in zip(jobs, results, strict=True):
        target, program = job.gpu.target, job.program
        table.versions[job.gpu.vendor] = job.toolchain.version
        if result.error:
            what = f"{program.file} of {program.models[0]} with {' '.join(program.options)}"
            errors.append(f"{target}: {what} does not compile: {result.error}")
        for kernel, use in program.kernels.items():
            table.add(target, program.kind(kernel), use, result.figures.get(kernel))
    return table, errors


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every kernel of every model for every GPU")
    parser.add_argument("--update", action="store_true", help=f"every kind for every GPU; write {TABLE.name}, its page")
    options = parser.parse_args(arguments)
    use_own_cache()
    start = time.monotonic()
    toolchains, left_out = found_toolchains()
    if left_out and (options.update or "compilers" in os.environ.get("LLMCL_TEST_REQUIRE", "").split(",")):
        print(f"compilers: FAILED: all are needed, for --update or by LLMCL_TEST_REQUIRE; {left_out}")
        return 1
    if not toolchains:
        print(f"compilers: nothing was compiled; {left_out}")
        return 0
    gpus = GPUS if options.all or options.update else {gpu.vendor: gpu for gpu in GPUS}.values()
    jobs, firsts, n_programs = [], {}, {}
    for gpu in gpus:
        if gpu.vendor in toolchains:
            programs = programs_of(gpu.entry)
            n_programs[gpu.target] = len(programs)
            firsts[gpu.target] = of_kinds = first_of_each_kind(programs)
            kinds = {*of_kinds}
            if not options.update:
                kinds = kinds_that_meet(of_kinds, 2 if toolchains[gpu.vendor].knows_targets else 1)
            wanted = {id(program) for kind, program in of_kinds.items() if kind in kinds}
            chosen = [program for program in programs if options.all or id(program) in wanted]
            jobs += [Job(gpu, toolchains[gpu.vendor], program) for program in chosen]
    found, errors = collect(jobs, compile_all(jobs, note))
    found.programs = n_programs
    compiled = {id(job.program) for job in jobs}
    for target, rows in found.firsts.items():  # of other kinds a later program may have been compiled, not the first
        found.firsts[target] = {kind: row for kind, row in rows.items() if id(firsts[target][kind]) in compiled}
    known = Table.read() if TABLE.exists() else Table()
    if options.update:
        if not options.all:
            found.keep_worst(known)
        found.write()
        write_page(found)
        known = found
    for vendor, version in found.versions.items():
        if version != known.versions.get(vendor):
            print(
                f"compilers: the table is of {known.versions.get(vendor)}, not of {version}: figures are not compared"
            )
            known.forget({gpu.target for gpu in GPUS if gpu.vendor == vendor})
    kinds_of = {target: {*of_kinds} for target, of_kinds in firsts.items()}
    said = [*errors, *problems(known, found, kinds_of, everything=options.all)]
    for line in said:
        print(f"compilers: {line}")
    if said:
        print("compilers: where that is meant, `python tests/check_compilers.py --update` writes the table anew")
    verdict = "FAILED" if said else "passed"
    n_kinds = sum(len(rows) for rows in found.firsts.values())
    seconds = f"{verdict} in {time.monotonic() - start:.0f} s"
    print(
        "; ".join(filter(None, [f"compilers: {len(jobs)} programs, {n_kinds} kinds of kernels, {seconds}", left_out]))
    )
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
