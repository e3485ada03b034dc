"""The vendors' compilers as their packages bring them, and what they say of a kernel: registers, spills, occupancy."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from compilers.chosen import Program
from compilers.gpus import Gpu
from llmcl.runtime.probe import what_failed
from llmcl.runtime.program import BUILD_OPTIONS

LIMIT_S = 300  # of one compiler call
CLANG_VERSIONS = (19, *range(30, 19, -1), *range(18, 13, -1))  # the first found is taken


@dataclass(frozen=True)
class Figures:
    """What a compiler made of a kernel.

    registers: vector registers of a work-item (AMD), or of a thread (Intel). spilled: those that went to memory.
    scratch_bytes: private memory of a work-item: spilled registers, and arrays that are in none. local_bytes: of a
    work-group. occupancy: waves that a SIMD unit holds (AMD), or lanes of a thread (Intel).
    """

    registers: int
    spilled: int
    scratch_bytes: int
    local_bytes: int
    occupancy: int


class CompilerError(Exception):
    """A compiler refused, crashed or did not end."""


class Toolchain(ABC):
    """One vendor's. packages: of Debian and Ubuntu, that bring it."""

    packages: tuple[str, ...]
    version: str
    knows_targets = True
    """Whether the result depends on the device."""

    @abstractmethod
    def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
        """The kernels of a program, compiled in an empty folder. Raises CompilerError."""

    @classmethod
    @abstractmethod
    def find(cls) -> Toolchain | None:
        """None where a part of it is not installed."""


def options_of(program: Program) -> list[str]:
    return [*BUILD_OPTIONS, *program.options]


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a command says. Raises CompilerError with its last words where it does not end well."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompilerError(f"{Path(command[0]).name} did not end within {LIMIT_S} s") from error
    said = done.stdout + done.stderr
    if done.returncode != 0:
        raise CompilerError(what_failed(said) or f"{Path(command[0]).name} ended with exit status {done.returncode}")
    return said


def _first(names: Iterable[str]) -> Path | None:
    found = next((path for name in names if (path := shutil.which(name))), None)
    return Path(found) if found else None


# ---- Intel ------------------------------------------------------------------------------------------------


class Intel(Toolchain):
    """ocloc: the compiler of Intel's driver, without a device. What it made stands as YAML in the binary."""

    packages = ("intel-opencl-icd",)

    def __init__(self, ocloc: Path):
        self.ocloc = ocloc
        with_version = re.search(r"\d+\.\d+\.\d+", _ocloc_version(ocloc))
        self.version = f"ocloc {with_version[0] if with_version else 'of an unknown version'}"

    @classmethod
    def find(cls) -> Intel | None:
        ocloc = _first(["ocloc"])
        return cls(ocloc) if ocloc else None

    def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
        (folder / "kernel.cl").write_text(program.text, encoding="utf-8")
        target = "skl" if gpu.target == "gen9" else gpu.target  # gen9 is ten chips of one kind
        command = [self.ocloc, "compile", "-file", "kernel.cl", "-device", target, "--format", "zebin"]
        output = ["-out_dir", ".", "-output", "kernel", "-output_no_suffix"]
        said = run([*command, "-options", " ".join(options_of(program)), *output], folder)
        binary = folder / "kernel"
        if not binary.exists():  # the exit status of some failures is 0
            raise CompilerError(what_failed(said))
        return figures_of_binary(binary.read_bytes(), said)


def _ocloc_version(ocloc: Path) -> str:
    """`ocloc query` writes the version into a file of the current folder, and nowhere else."""
    with tempfile.TemporaryDirectory() as folder:
        said = run([ocloc, "query", "OCL_DRIVER_VERSION"], Path(folder))
        files = sorted(Path(folder).iterdir())
        return said + "".join(file.read_text(errors="replace") for file in files)


SPILLED = re.compile(r"kernel (\w+) +compiled SIMD\d+ allocated \d+ regs and spilled around (\d+)")


def figures_of_binary(binary: bytes, said: str) -> dict[str, Figures]:
    """From the section .ze_info of Intel's binary format, a YAML document of which few lines are needed, and from the
    compiler's warnings: some devices have one space for spilled registers and private arrays.
    """
    spilled = {match[1]: int(match[2]) for match in SPILLED.finditer(said)}
    start = binary.find(b"version:         '")
    text = binary[start : binary.find(b"\0", start)].decode(errors="replace")
    text = text.partition("kernels:\n")[2].partition("\nkernels_misc_info:")[0]
    figures = {}
    for kernel in re.split(r"^  - name: +", text, flags=re.MULTILINE)[1:]:
        name = kernel.split("\n", 1)[0].strip()
        if not re.search(r"^    execution_env:$", kernel, re.MULTILINE):
            continue

        def number(key: str, of: str = kernel) -> int:
            match = re.search(rf"^ +{key}: +(\d+)$", of, re.MULTILINE)
            return int(match[1]) if match else 0

        lanes = number("simd_size")
        scratch = 0
        memory = kernel.partition("    per_thread_memory_buffers:\n")[2]
        for entry in re.split(r"^      - ", memory, flags=re.MULTILINE)[1:]:
            size = number("size", entry)
            scratch += size if "is_simt_thread:  true" in entry else -(-size // lanes)
        figures[name] = Figures(number("grf_count"), spilled.get(name, 0), scratch, number("slm_size"), lanes)
    return figures


# ---- AMD --------------------------------------------------------------------------------------------------

BITCODE = (
    "/usr/lib/x86_64-linux-gnu/amdgcn/bitcode",
    "/usr/lib/aarch64-linux-gnu/amdgcn/bitcode",
    "/usr/share/amdgcn/bitcode",
    "/usr/lib/amdgcn/bitcode",
    "/opt/rocm/amdgcn/bitcode",
)
REMARK = re.compile(
    r"remark: +([^:\n]+?)(?: \[[^\]]*\])?: (\S+) \[-Rpass-analysis=kernel-resource-usage\]$", re.MULTILINE
)


class Amd(Toolchain):
    """clang with AMD's device library, which is what AMD's driver compiles with, too."""

    packages = ("clang-19", "rocm-device-libs")

    def __init__(self, clang: Path, bitcode: Path):
        self.clang, self.bitcode = clang, bitcode
        self.version = _clang_version(clang)

    @classmethod
    def find(cls) -> Amd | None:
        clang = _first([*(f"clang-{n}" for n in CLANG_VERSIONS), "clang"])
        bitcode = next((Path(folder) for folder in BITCODE if Path(folder, "ocml.bc").exists()), None)
        return cls(clang, bitcode) if clang and bitcode else None

    def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
        (folder / "kernel.cl").write_text(program.text, encoding="utf-8")
        target = [*("-target", "amdgcn-amd-amdhsa"), f"-mcpu={gpu.target}", "-nogpulib", "-O3"]
        for library in self._libraries(int(gpu.target.removeprefix("gfx"))):
            target += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(library)]
        output = ["-Rpass-analysis=kernel-resource-usage", "-c", "-o", "/dev/null", "kernel.cl"]
        return figures_of_remarks(run([self.clang, "-x", "cl", *options_of(program), *target, *output], folder))

    def _libraries(self, arch: int) -> list[Path]:
        """Those that AMD's driver links for these options; of an architecture they do not know, the last before it."""
        known = sorted(
            int(path.stem.rpartition("_")[2])
            for path in self.bitcode.glob("oclc_isa_version_*.bc")
            if path.stem.rpartition("_")[2].isdigit()
        )
        isa = max((number for number in known if number <= arch), default=known[0])
        names = [
            *("opencl", "ocml", "ockl", "oclc_daz_opt_on", "oclc_unsafe_math_off", "oclc_finite_only_off"),
            *("oclc_correctly_rounded_sqrt_off", f"oclc_wavefrontsize64_{'on' if arch < 1000 else 'off'}"),
            *(f"oclc_isa_version_{isa}", "oclc_abi_version_500"),
        ]
        return [path for name in names if (path := self.bitcode / f"{name}.bc").exists()]


def figures_of_remarks(said: str) -> dict[str, Figures]:
    """From the remarks of clang's analysis kernel-resource-usage."""
    figures = {}
    for block in said.split("remark: Function Name: ")[1:]:
        name = block.split(" ", 1)[0]
        value = {match[1].strip(): match[2] for match in REMARK.finditer(block)}
        # Scalar registers are spilled to vector registers, and to memory only where there is scratch memory.
        spilled = int(value["VGPRs Spill"])
        scratch, local = int(value["ScratchSize"]), int(value["LDS Size"])
        figures[name] = Figures(int(value["VGPRs"]), spilled, scratch, local, int(value["Occupancy"]))
    return figures


def _clang_version(clang: Path) -> str:
    match = re.search(r"clang version (\S+)", run([clang, "--version"], Path("/")))
    return f"clang {match[1]}" if match else "clang of an unknown version"


# ---- Mali, Adreno -----------------------------------------------------------------------------------------


class Spirv(Toolchain):
    """clang's SPIR-V, validated: whether a kernel keeps to the language, where no vendor's compiler is at hand."""

    packages = ("clang-15", "llvm-spirv-15", "spirv-tools")
    knows_targets = False

    def __init__(self, clang: Path, translator: Path, validator: Path):
        self.clang, self.translator, self.validator = clang, translator, validator
        tools = re.search(r"v\d+\.\d+", run([validator, "--version"], Path("/")))
        self.version = f"{_clang_version(clang)}, spirv-val {tools[0] if tools else 'of an unknown version'}"

    @classmethod
    def find(cls) -> Spirv | None:
        validator = _first(["spirv-val"])
        for n in range(30, 13, -1):  # the translator reads what the clang of its own version makes
            clang, translator = _first([f"clang-{n}"]), _first([f"llvm-spirv-{n}"])
            if clang and translator and validator:
                return cls(clang, translator, validator)
        return None

    def compile(self, gpu: Gpu, program: Program, folder: Path) -> dict[str, Figures]:
        (folder / "kernel.cl").write_text(program.text, encoding="utf-8")
        # Not optimised: the translator does not know every instruction of LLVM's. With inline as OpenCL compilers
        # read it: the definition is the function's.
        front_end = ["-O1", "-Xclang", "-disable-llvm-passes", "-fgnu89-inline", "-emit-llvm", "-c", "kernel.cl"]
        target = ["-x", "cl", "-target", "spir64-unknown-unknown"]
        run([self.clang, *target, *options_of(program), *front_end, "-o", "kernel.bc"], folder)
        run([self.translator, "--spirv-max-version=1.2", "kernel.bc", "-o", "kernel.spv"], folder)
        run([self.validator, "--target-env", "opencl1.2", "kernel.spv"], folder)
        return {}


TOOLCHAINS: dict[str, type[Toolchain]] = {"intel": Intel, "amd": Amd, "spirv": Spirv}
