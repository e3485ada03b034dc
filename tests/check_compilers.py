"""Compiles the kernels of nine real models for GPUs that are not here, with Intel's, AMD's and a SPIR-V compiler.

`python tests/check_compilers.py` compiles for one GPU of each vendor so many programs that each kernel is met with all
that sets its kinds apart (types, sizes of heads, epilogues), and with each pair of that for one of the vendors whose
compilers give figures; with `--all` all programs of all models for all GPUs, in half an hour. It fails at a compile
error, at a kernel of the decode path that spills registers, and at one that spills more or has a lower occupancy than
docs/results/compilers.json says. That file has the digests of the programs that it is of (text, constants, target,
version of the compiler): without `--all` one that has not changed since is not compiled. `--update` compiles one
program of every kind for all GPUs and writes that file and the tables of docs/devices.md; with `--all` it also notes
where other models have worse figures than the first. `--refresh` compiles what a run without options does and writes
its figures and digests into the file, in a fraction of the time: rows of other kinds stay, and may be of an older text.
What was compiled before on this machine is not compiled again.
A compiler that is not installed is named, and its GPUs are left out; LLMCL_TEST_REQUIRE=compilers makes that an error.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from compilers.chosen import Program, programs_of
from compilers.compiling import Compiled, Job, compile_all
from compilers.gpus import GPUS
from compilers.page import write_page
from compilers.table import TABLE, Table, problems
from compilers.toolchains import TOOLCHAINS, Toolchain
from covering import covering
from own_cache import use_own_cache

OWN = "intel "  # in front of the kinds of kernels that Intel's GPUs have for themselves


def first_of_each_kind(programs: Sequence[Program]) -> dict[str, Program]:
    firsts: dict[str, Program] = {}
    for program in programs:
        for kernel in program.kernels:
            firsts.setdefault(program.kind(kernel), program)
    return firsts


def kinds_that_meet(kinds: Mapping[str, Collection[str]], with_figures: Collection[str]) -> dict[str, set[str]]:
    """Of the kinds of each target as many as have every word of each kernel there, and every pair of words somewhere.

    with_figures: the targets whose compilers give figures. Pairs are looked for there alone.
    """
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for target, of_target in kinds.items():
        for kind in of_target:
            own = kind.startswith(OWN)  # of Intel's GPUs alone
            kernel, *words = kind.removeprefix(OWN).split()
            kernel = OWN * own + kernel
            met = found[target, kind] = {(target, kernel, *of) for of in combinations(words, min(1, len(words)))}
            if target in with_figures:
                met |= {(kernel, *of) for of in combinations(words, min(2, len(words)))}
    chosen = covering(found)
    return {target: {kind for of, kind in chosen if of == target} for target in kinds}


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
    parser.add_argument("--refresh", action="store_true", help=f"write into {TABLE.name} what a run compiles anew")
    options = parser.parse_args(arguments)
    use_own_cache()
    start = time.monotonic()
    toolchains, left_out = found_toolchains()
    writes = options.update or options.refresh
    if left_out and (writes or "compilers" in os.environ.get("LLMCL_TEST_REQUIRE", "").split(",")):
        print(f"compilers: FAILED: all are needed, to write the table or by LLMCL_TEST_REQUIRE; {left_out}")
        return 1
    if not toolchains:
        print(f"compilers: nothing was compiled; {left_out}")
        return 0
    gpus = [*GPUS] if options.all or options.update else [*{gpu.vendor: gpu for gpu in GPUS}.values()]
    gpus = [gpu for gpu in gpus if gpu.vendor in toolchains]
    programs = {gpu.target: programs_of(gpu.entry) for gpu in gpus}
    firsts = {target: first_of_each_kind(of_target) for target, of_target in programs.items()}
    kinds: Mapping[str, Collection[str]] = firsts
    if not options.update:
        # Of equals that of the first target: AMD's compiler takes half the time of Intel's.
        quickest_first = {gpu.target: firsts[gpu.target] for gpu in sorted(gpus, key=lambda gpu: gpu.vendor != "amd")}
        kinds = kinds_that_meet(quickest_first, [gpu.target for gpu in gpus if toolchains[gpu.vendor].knows_targets])
    jobs = []
    for gpu in gpus:
        wanted = {id(program) for kind, program in firsts[gpu.target].items() if kind in kinds[gpu.target]}
        chosen = [program for program in programs[gpu.target] if options.all or id(program) in wanted]
        jobs += [Job(gpu, toolchains[gpu.vendor], program) for program in chosen]
    known = Table.read(TABLE) if TABLE.exists() else Table()
    n_jobs = len(jobs)
    if not (options.all or options.update):
        jobs = [job for job in jobs if job.short_digest not in known.digests.get(job.gpu.target, ())]
    results = compile_all(jobs, note)
    found, errors = collect(jobs, results)
    found.programs = {target: len(of_target) for target, of_target in programs.items()}
    compiled = {id(job.program) for job in jobs}
    for target, rows in found.firsts.items():  # of other kinds a later program may have been compiled, not the first
        found.firsts[target] = {kind: row for kind, row in rows.items() if id(firsts[target][kind]) in compiled}
    if writes:
        of_table = {id(program) for of_target in firsts.values() for program in of_target.values()}
        for job, result in zip(jobs, results, strict=True):
            if id(job.program) in of_table and not result.error:
                found.digests.setdefault(job.gpu.target, set()).add(job.short_digest)
        if not options.all:
            found.keep_worst(known)
        if options.refresh:
            if found.versions != {vendor: known.versions.get(vendor) for vendor in found.versions}:
                print(f"compilers: FAILED: the table is of {known.versions}: --update writes it for other compilers")
                return 1
            for gpu in gpus:  # what a program was before it changed, no run asks for
                now = {
                    Job(gpu, toolchains[gpu.vendor], program).short_digest for program in firsts[gpu.target].values()
                }
                known.digests[gpu.target] = known.digests.get(gpu.target, set()) & now
            known.take(found)
        else:
            known = found
        known.write(TABLE)
        write_page(known)
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
    n_kinds = sum(len(rows) for rows in kinds.values())
    done = f"{len(jobs)} compiled, {n_jobs - len(jobs)} as in the table"
    seconds = f"{verdict} in {time.monotonic() - start:.0f} s"
    what = f"compilers: {n_jobs} programs with {n_kinds} kinds of kernels, {done}, {seconds}"
    print("; ".join(filter(None, [what, left_out])))
    return int(bool(said))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
