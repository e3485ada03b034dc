"""What tests/check_compilers.py collects, reads from compilers, and takes for worse."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path

import check_compilers
import pytest
from compilers.chosen import DECODE, Program, programs_of
from compilers.compiling import Compiled, Job
from compilers.gpus import GPUS, Gpu
from compilers.page import PAGE, with_tables
from compilers.table import Table, problems, spills_in_decode
from compilers.toolchains import TOOLCHAINS, CompilerError, Figures, Toolchain, figures_of_binary, figures_of_remarks

from llmcl.kernels import portable
from llmcl.runtime.program import read_source

PORTABLE = Path(portable.__file__).parent
FIGURES = Figures(registers=53, spilled=0, scratch_bytes=0, local_bytes=9216, occupancy=12)
REMARKS = """\
k.cl:9:1: remark: Function Name: one [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     SGPRs: 34 [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     VGPRs: 256 [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     ScratchSize [bytes/lane]: 1136 [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     Dynamic Stack: False [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     Occupancy [waves/SIMD]: 5 [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     SGPRs Spill: 2 [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     VGPRs Spill: 285 [-Rpass-analysis=kernel-resource-usage]
k.cl:9:1: remark:     LDS Size [bytes/block]: 3328 [-Rpass-analysis=kernel-resource-usage]
"""
ZE_INFO = b"""\x00---
version:         '1.20'
kernels:
  - name:            one
    execution_env:
      grf_count:       128
      simd_size:       16
      slm_size:        3328
    payload_arguments:
      - arg_type:        global_id_offset
        offset:          0
        size:            12
    per_thread_memory_buffers:
      - type:            global
        usage:           private_space
        size:            1200
        is_simt_thread:  true
      - type:            scratch
        usage:           spill_fill_space
        size:            320
  - name:            two
    execution_env:
      grf_count:       128
      simd_size:       32
kernels_misc_info:
  - name:            one
    args_info:
      - index:           0
        size:            8
...
\x00"""
COUNTING = "__kernel void count(__global float* x) { x[get_global_id(0)] = sqrt(x[get_global_id(0)]) + N; }"


@cache
def listed(gpu: Gpu) -> list[Program]:
    return programs_of(gpu.entry)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)
def test_what_a_gpu_would_run(gpu: Gpu) -> None:
    programs = listed(gpu)
    own = {"intel"} if gpu.target == "dg2" else set()  # which has matrix units
    assert {program.file.split("/")[0] for program in programs} == {"portable", *own}
    for program in programs:
        assert set(program.kernels) <= set(re.findall(r"void (\w+)\(", program.text))
    in_decode = {program.file for program in programs if DECODE in program.kernels.values()}
    assert in_decode >= {"portable/embed.cl", "portable/sample.cl", "portable/attention_decode.cl"}
    keys = [(program.file, program.options, program.prelude) for program in programs]
    assert len(set(keys)) == len(keys)


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.target)
def test_the_table_has_what_a_gpu_would_run(gpu: Gpu) -> None:
    """A quick run of check_compilers.py asks one GPU of each vendor."""
    kinds = {program.kind(kernel) for program in listed(gpu) for kernel in program.kernels}
    assert kinds == set(Table.read().firsts[gpu.target]), "run `python tests/check_compilers.py --update`"


@pytest.mark.slow
def test_every_portable_kernel_is_compiled() -> None:
    files = {f"portable/{path.name}" for path in PORTABLE.glob("*.cl") if "__kernel" in path.read_text()}
    others = (
        *("biased_gate", "rope_axes", "rope_table", "short_conv", "zero_rows"),
        *("add_positions", "bias_gelu", "layer_norm", "pool"),  # for embeddings
        "mean_rows",  # for images
        *("gate_inputs", "last_row", "layer_inputs", "scale_rows", "scale_shares"),  # Gemma 4's
        *("center_rows", "mamba_inputs", "squared_relu", "xielu"),  # Cohere's, Mamba's, Nemotron's, Apertus'
        "lora",  # for adapters
        "sample_largest",  # a CPU's
        "delta_rule",  # a CPU's; a GPU takes delta_token and delta_chunks, but for heads that these do not have
    )
    of_other_families = {f"portable/{name}.cl" for name in others}
    assert files - {program.file for gpu in GPUS for program in listed(gpu)} == of_other_families


def test_kinds_leave_sizes_out() -> None:
    constants: dict[str, object] = {"WEIGHT": "bf16", "K": 64, "N": 32, "EPILOGUE": "EPILOGUE_ADD", "NORM": True}
    program = Program("portable/linear_decode.cl", constants, "")
    assert program.kind("linear_decode") == "linear_decode bf16 add norm"
    assert Program("portable/sample.cl", {"VOCAB": 9}, "").kind("sample_finish") == "sample_finish"


def test_a_quick_run_meets_each_pair_of_what_sets_kinds_apart() -> None:
    """Each by itself for every GPU, and pairs for one whose compiler gives figures. Intel's own kernels are others."""
    options = list(product(("f16", "q8_0"), ("64 3", "128 4", "256 2"), ("", " paged"), ("", " mask_mod")))
    kinds = [f"attention_decode {kv} {heads}{paged}{mod}" for kv, heads, paged, mod in options]
    kinds += ["linear_prefill bf16 norm", "sample_finish"]
    of = {"dg2": [*kinds, "intel linear_prefill bf16 add"], "gfx": kinds, "Adreno": kinds}

    def met(of: Iterable[str], n: int) -> set[tuple[str, ...]]:
        split = [kind.replace("intel ", "intel_").split() for kind in of]
        return {(kernel, *some) for kernel, *words in split for some in combinations(words, min(n, len(words)))}

    found = check_compilers.kinds_that_meet(of, ("dg2", "gfx"))
    for target, kinds_of_target in of.items():
        assert found[target] <= {*kinds_of_target} and met(found[target], 1) == met(kinds_of_target, 1)
    assert met([*found["dg2"], *found["gfx"]], 2) == met(of["dg2"], 2)
    assert len(found["Adreno"]) < len(kinds) / 2 and len(found["dg2"]) + len(found["gfx"]) < len(kinds)
    alone = check_compilers.kinds_that_meet({"gfx": kinds}, ("gfx",))["gfx"]
    assert met(alone, 2) == met(kinds, 2) and len(alone) < len(kinds) / 1.2


def test_a_kind_is_compared_where_its_first_program_was_compiled(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later program may have that kernel with other sizes, and other figures."""
    gpu = next(gpu for gpu in GPUS if gpu.vendor == "amd")
    programs = [
        Program("portable/embed.cl", {"K": k}, "", dict.fromkeys(kernels, "load"), ["a model"])
        for k, kernels in ((64, ["embed a b"]), (96, ["embed a b", "embed a b c"]))
    ]
    tables: list[Table] = []
    monkeypatch.setattr(Program, "kind", lambda program, kernel: kernel)
    monkeypatch.setattr(check_compilers, "programs_of", lambda entry: programs)
    monkeypatch.setattr(check_compilers, "GPUS", (gpu,))
    monkeypatch.setattr(check_compilers, "TOOLCHAINS", {gpu.vendor: Working})
    monkeypatch.setattr(check_compilers, "problems", lambda known, found, *_, **__: tables.append(found) or [])
    monkeypatch.delenv("LLMCL_TEST_REQUIRE", raising=False)
    assert check_compilers.main([]) == 0
    firsts = tables[0].firsts[gpu.target]
    assert {kind: row and row.registers for kind, row in firsts.items()} == {"embed a b c": 96}


def test_what_is_in_the_table_as_it_is_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program with an error is not in the table, and one that has changed is no longer."""
    gpu = next(gpu for gpu in GPUS if gpu.vendor == "amd")
    programs = [Program("portable/embed.cl", {"K": k}, "", {f"embed {k}": "load"}, ["a model"]) for k in (64, 96, 128)]

    class OneFault(Working):
        def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
            if program.constants["K"] == 128:
                raise CompilerError("too large")
            return super().compile(gpu, program, folder)

    def said(*arguments: str) -> str:
        check_compilers.main(arguments)
        return capsys.readouterr().out.splitlines()[-1]

    monkeypatch.setattr(Program, "kind", lambda program, kernel: kernel)
    monkeypatch.setattr(check_compilers, "programs_of", lambda entry: programs)
    monkeypatch.setattr(check_compilers, "GPUS", (gpu,))
    monkeypatch.setattr(check_compilers, "TOOLCHAINS", {gpu.vendor: OneFault})
    monkeypatch.setattr(check_compilers, "write_page", lambda table: None)
    monkeypatch.setattr(check_compilers, "TABLE", tmp_path / "table.json")
    monkeypatch.delenv("LLMCL_TEST_REQUIRE", raising=False)
    for number, (arguments, compiled) in enumerate((((), 3), (("--update",), 3), ((), 1), (("--all",), 3))):
        monkeypatch.setenv("LLMCL_CACHE_DIR", str(tmp_path / str(number)))
        assert f"{compiled} compiled, {3 - compiled} as in the table, FAILED" in said(*arguments)
    programs[0].constants["K"] = 65
    assert "2 compiled, 1 as in the table" in said()
    assert "2 compiled, 1 as in the table" in said("--refresh")
    table = Table.read(tmp_path / "table.json")
    assert {kind: row and row.registers for kind, row in table.firsts[gpu.target].items()} == {
        "embed 64": 65,
        "embed 96": 96,
        "embed 128": None,
    }
    assert len(table.digests[gpu.target]) == 2, "that of 64, which changed, is gone"
    assert "1 compiled, 2 as in the table" in said()


def test_what_clang_says_of_amd() -> None:
    assert figures_of_remarks(REMARKS) == {"one": Figures(256, 285, 1136, 3328, 5)}


def test_what_intels_binary_says() -> None:
    said = "warning: kernel one  compiled SIMD16 allocated 128 regs and spilled around 24\n\nBuild succeeded."
    found = figures_of_binary(ZE_INFO, said)
    assert found == {"one": Figures(128, 24, 1220, 3328, 16), "two": Figures(128, 0, 0, 0, 32)}


def table_of(figures: Figures | None, use: str = "prefill") -> Table:
    table = Table(versions={"amd": "clang 1"}, programs={"gfx1": 1})
    table.add("gfx1", "a kind", use, figures)
    return table


def found_problems(known: Table, found: Table, *, everything: bool = False) -> list[str]:
    return problems(known, found, {target: set(rows) for target, rows in found.firsts.items()}, everything=everything)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spilled": 3}, ["gfx1: a kind became worse: registers spilled 0 -> 3"]),
        ({"scratch_bytes": 8}, ["gfx1: a kind became worse: bytes of private memory 0 -> 8"]),
        ({"occupancy": 11}, ["gfx1: a kind became worse: occupancy 12 -> 11"]),
        ({"occupancy": 16, "registers": 60, "local_bytes": 0}, []),
    ],
)
@pytest.mark.parametrize("everything", [False, True])
def test_the_table_may_not_worsen(change: dict[str, int], said: list[str], everything: bool) -> None:
    assert found_problems(table_of(FIGURES), table_of(replace(FIGURES, **change)), everything=everything) == said


def test_decode_may_not_spill_whatever_the_table_says() -> None:
    spilling = table_of(replace(FIGURES, spilled=3), DECODE)
    assert found_problems(spilling, spilling) == [
        "gfx1: a kind spills 3 registers, and no kernel of the decode path may"
    ]


def test_new_and_gone_kinds_are_named() -> None:
    known, found = table_of(FIGURES), Table()
    found.add("gfx1", "another", "load", FIGURES)
    said = found_problems(known, found)
    assert said == ["gfx1: another is not in the table", "gfx1: a kind is in the table, and no device runs it"]


def test_figures_of_another_compiler_are_not_compared() -> None:
    known = table_of(FIGURES)
    known.forget({"gfx1"})
    assert found_problems(known, table_of(replace(FIGURES, occupancy=1))) == []


def test_a_quick_run_compares_first_programs_and_a_full_one_the_worst() -> None:
    known, found = table_of(FIGURES), table_of(FIGURES)
    found.add("gfx1", "a kind", "prefill", replace(FIGURES, occupancy=7))
    assert found_problems(known, found) == []
    assert found_problems(known, found, everything=True) == ["gfx1: a kind became worse: occupancy 12 -> 7"]


def test_the_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    table = table_of(FIGURES)
    table.add("gfx1", "a kind", "prefill", replace(FIGURES, occupancy=7))
    table.add("Mali", "a kind", "prefill", None)
    table.write(tmp_path / "table.json")
    assert Table.read(tmp_path / "table.json") == table
    again = table_of(FIGURES)
    again.keep_worst(table)
    assert again.worst["gfx1"]["a kind"] == replace(FIGURES, occupancy=7)


def test_the_page_has_the_tables_of_the_result() -> None:
    text, table = PAGE.read_text(encoding="utf-8"), Table.read()
    assert with_tables(text, table) == text, "run `python tests/check_compilers.py --update`"
    assert {gpu.target for gpu in GPUS} == set(table.firsts)
    for target, rows in table.worst.items():
        spilling = [kind for kind, row in rows.items() if row and spills_in_decode(table.uses[kind], row)]
        assert not spilling, target


def test_an_error_is_reported_with_its_program() -> None:
    gpu = GPUS[-1]
    job = Job(gpu, Faulty(), Program("portable/embed.cl", {"HIDDEN": 64}, "", {"embed": DECODE}, ["a model"]))
    table, errors = check_compilers.collect([job], [Compiled({}, "no such type")])
    assert errors == [f"{gpu.target}: portable/embed.cl of a model with -DHIDDEN=64 does not compile: no such type"]
    assert table.firsts == {gpu.target: {"embed": None}}


class Faulty(Toolchain):
    version = "faulty 1"

    @classmethod
    def find(cls) -> Toolchain | None:
        return None

    def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
        raise CompilerError("no such type")


class Working(Faulty):
    version = "working 1"

    @classmethod
    def find(cls) -> Toolchain:
        return cls()

    def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
        return {kernel: replace(FIGURES, registers=int(str(program.constants["K"]))) for kernel in program.kernels}


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_compilers, "TOOLCHAINS", dict.fromkeys(TOOLCHAINS, Faulty))
    monkeypatch.setattr(Faulty, "packages", ("a-compiler",), raising=False)
    monkeypatch.delenv("LLMCL_TEST_REQUIRE", raising=False)
    assert check_compilers.main([]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "nothing was compiled" in last and "Mali-G78, Adreno 740: install a-compiler" in last
    monkeypatch.setenv("LLMCL_TEST_REQUIRE", "pocl,compilers")
    assert check_compilers.main([]) == 1


@pytest.mark.parametrize("vendor", TOOLCHAINS)
def test_an_installed_compiler_takes_a_kernel_and_refuses_a_fault(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = TOOLCHAINS[vendor].find()
    if toolchain is None:
        pytest.skip(f"not installed: {' '.join(TOOLCHAINS[vendor].packages)}")
    gpu = next(gpu for gpu in GPUS if gpu.vendor == vendor)
    for source, fault in ((COUNTING, False), (COUNTING.replace("sqrt(", "square_root("), True)):
        monkeypatch.setattr(Program, "text", source)
        folder = tmp_path / str(fault)
        folder.mkdir()
        program = Program("count.cl", {"N": 3}, "", {"count": DECODE})
        if fault:
            with pytest.raises(CompilerError, match="square_root"):
                toolchain.compile(gpu, program, folder)
        else:
            figures = toolchain.compile(gpu, program, folder)
            assert set(figures) == ({"count"} if toolchain.knows_targets else set())


@pytest.mark.slow
def test_sources_are_those_that_are_run() -> None:
    program = next(program for program in listed(GPUS[0]) if program.file == "portable/embed.cl")
    assert program.text == read_source("portable/embed.cl") and "-DHEAD_DIM=128" in program.options
