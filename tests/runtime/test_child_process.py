"""Children are isolated from the folder that the user stands in: no Python file of it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ROOT, TINY_SHAPE

from llmcl.runtime import child_process, device_probe, probe
from llmcl.runtime.cache_files import cache_dir, make_folder
from llmcl.runtime.platforms import DeviceEntry


def plant(folder: Path, marker: Path) -> None:
    """Gives the folder a module for each name of the standard library, and for each package that llmcl needs.

    Each appends its name to the marker when it is imported.
    """
    packages = "numpy pyopencl pytools tokenizers jinja2 markupsafe llguidance safetensors sitecustomize usercustomize"
    names = {name for name in sys.stdlib_module_names if name.isidentifier()} | set(packages.split())
    assert len(names) > 200
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name + ' '!r})\nraise ImportError\n")


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The marker of the planted folder, which is the current folder."""
    folder = tmp_path / "planted"
    folder.mkdir()
    plant(folder, tmp_path / "marker")
    monkeypatch.chdir(folder)
    return tmp_path / "marker"


def imported(marker: Path) -> set[str]:
    return set(marker.read_text().split()) if marker.exists() else set()


@pytest.mark.parametrize("path", ["", ".", "{here}"])
def test_a_child_imports_nothing_of_the_current_folder(
    marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Whatever form the current folder has on this process's own path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.path", [path.format(here=os.getcwd()), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.getcwd() if path == "." else "")
    (tmp_path / "child.py").write_text(
        "import json, os, sys, random, tempfile, hashlib, numpy, pyopencl, llmcl\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), os.listdir(), tempfile.gettempdir(), llmcl.__file__]))\n"
    )
    code, said = child_process.run(child_process.command("child", "a", "b c"), 60.0, streams=["stdout", "stderr"])
    assert code == 0, said
    arguments, here, files, temporary, llmcl_file = json.loads(said)
    assert arguments == ["a", "b c"] and Path(llmcl_file).is_relative_to(ROOT)
    assert here == temporary != os.getcwd() and files == [] and not Path(here).exists()
    assert imported(marker) == set()


def test_a_planted_standard_library_is_not_imported_even_where_the_folder_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the folder of a user's own script: their packages may lie there."""
    (tmp_path / "random.py").write_text("raise SystemExit('planted')")
    (tmp_path / "child.py").write_text("import random; print(random.__file__)")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = child_process.run(child_process.command("child"), 60.0)
    assert code == 0 and said != str(tmp_path / "random.py")


def test_paths_of_drivers_still_name_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vendors").mkdir()
    monkeypatch.setenv("OCL_ICD_VENDORS", "vendors")
    monkeypatch.setenv("OCL_ICD_FILENAMES", os.pathsep.join(["libpocl.so.2", "./libx.so", "/lib/liby.so"]))
    monkeypatch.setenv("LLMCL_CACHE_DIR", "~/cache")
    with child_process.empty_folder() as place:
        variables = place["env"]
    assert variables["OCL_ICD_VENDORS"] == str(tmp_path / "vendors")
    assert variables["OCL_ICD_FILENAMES"].split(os.pathsep) == ["libpocl.so.2", f"{tmp_path}/libx.so", "/lib/liby.so"]
    assert variables["LLMCL_CACHE_DIR"] == "~/cache"


COMMANDS = [
    "devices",
    *(
        pytest.param(words, marks=pytest.mark.slow)
        for words in (
            "generate -m smollm2 -p Hi -n 2 --regex [ab]+",
            "models",
            "devices --format json",
            "serve -m smollm2 --port 0",
            "convert smollm2 {folder}/out.gguf",
            "profile --random {shape} -p 4 -n 2 -o {folder}/profile",
            "tune --random {shape}",
            "doctor --report {folder}/report.md",
        )
    ),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_no_command_imports_a_file_of_the_current_folder(marker: Path, tmp_path: Path, words: str) -> None:
    script = tmp_path / "bin" / "llmcl"
    script.parent.mkdir()
    script.write_text("from llmcl.__main__ import main\nmain()\n")  # as pip writes it
    (tmp_path / "shape.json").write_text(json.dumps(TINY_SHAPE))
    names = {"shape": tmp_path / "shape.json", "folder": tmp_path}
    cache, programs = tmp_path / "cache", cache_dir() / "programs"
    cache.mkdir(mode=0o700)  # without answers of children, so that each is started
    make_folder(programs)
    (cache / "programs").symlink_to(programs)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LLMCL_CACHE_DIR": str(cache)}
    environment.pop("RUSTICL_ENABLE", None)  # to ask Mesa's software renderer what it is takes 4 s
    with subprocess.Popen(
        [sys.executable, str(script), *words.format(**names).split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("Hi\n")
        process.stdin.close()
        said = []
        for line in process.stdout:
            said.append(line)
            if words.startswith("serve") and line.startswith("device:"):  # it is ready
                process.terminate()
    assert process.returncode == 0, "".join(said)
    assert imported(marker) == set()
    assert (cache / "device_probe").exists() or words.split()[0] in ("models", "convert")


def test_a_module_of_the_current_folder_does_not_disturb_python_m(tmp_path: Path) -> None:
    """Python itself puts the folder first there, and imports a few modules of its own before llmcl begins."""
    for name in ("random", "tempfile", "hashlib", "numpy", "click"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')")
    done = subprocess.run(
        [sys.executable, "-m", "llmcl", "devices"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and "planted" not in done.stdout + done.stderr


def test_what_a_trial_that_cannot_begin_costs(
    default_entry: DeviceEntry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried once, and each start says that the driver was not tried."""
    monkeypatch.setattr(device_probe, "__name__", "llmcl.no_such_module")
    assert device_probe.fault(default_entry) is None
    (file,) = (empty_cache / "device_probe").iterdir()
    assert json.loads(file.read_text())["until"] > 0
    monkeypatch.setattr(device_probe, "ask", None)
    assert device_probe.fault(default_entry) is None
    assert len(caplog.messages) == 2
    for message in caplog.messages:
        assert message.startswith(f"{default_entry.label} is used untried") and "no_such_module" in message
    monkeypatch.setattr(device_probe, "ask", lambda *_: probe.Ending(probe.YES))
    assert device_probe.fault(default_entry, again=True) is None
    assert len(caplog.messages) == 2
