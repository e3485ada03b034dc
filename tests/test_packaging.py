"""The package is ready for an index: it builds, has every file, and its page there has no link that leads nowhere."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import llmcl

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/llmcl/llmcl/blob/main/"
PICTURES = "https://raw.githubusercontent.com/llmcl/llmcl/main/"
MAX_MEBIBYTES = 4  # of each; the index takes 100
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def metadata(built: tuple[Path, Path]) -> Message:
    with zipfile.ZipFile(built[1]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(wheel.read(name))


def files_of(folder: str) -> set[str]:
    paths = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in paths}


def test_the_wheel_has_the_package_alone(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files_of("llmcl")
    assert {Path(name).suffix for name in names} >= {".py", ".cl", ".js", ".json", ".typed"}


def test_the_sdist_has_what_builds_tests_and_explains_the_package(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml"}
    wanted = pages | files_of("llmcl") | files_of("docs") | files_of("tests") | files_of("scripts")
    assert wanted - names == set()


def test_both_are_small(built: tuple[Path, Path]) -> None:
    for path in built:
        assert path.stat().st_size < MAX_MEBIBYTES << 20, path.name


def test_twine_finds_nothing(built: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stdout + run.stderr


def test_links_and_pictures_of_the_page_lead_into_the_repository(metadata: Message) -> None:
    page = str(metadata.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page)
    assert len(links) > 10 and any(picture for picture, _ in links)
    for picture, link in links:
        base = PICTURES if picture else REPOSITORY
        assert link.startswith(base), link
        assert (ROOT / link.removeprefix(base).partition("#")[0]).exists(), link


def test_who_reads_the_page_installs_from_the_index(metadata: Message) -> None:
    page = str(metadata.get_payload())
    assert 'pip install "llmcl[cpu]"' in page
    assert not re.search(r'pip install "?\.', page)


def test_the_version_is_the_same_everywhere(metadata: Message) -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert metadata["Version"] == llmcl.__version__ == newest[1]
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], capture_output=True, text=True, cwd=ROOT)
    for tag in tags.stdout.split():  # none outside a clone
        assert tag == f"v{llmcl.__version__}"


def test_links_of_the_package_lead_into_the_repository(metadata: Message) -> None:
    urls = [value.partition(", ")[2] for value in metadata.get_all("Project-URL", [])]
    assert len(urls) >= 4
    for url in urls:
        if url.startswith(REPOSITORY):
            assert (ROOT / url.removeprefix(REPOSITORY)).exists(), url


def test_the_drivers_of_each_system(metadata: Message) -> None:
    """The extra `cpu` names Intel's driver for each system that the index has a wheel for."""
    from packaging.requirements import Requirement

    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]

    def installed(system: str, machine: str) -> set[str]:
        environment = {"sys_platform": system, "platform_machine": machine, "extra": "cpu"}
        return {r.name for r in requirements if r.marker is not None and r.marker.evaluate(environment)}

    assert installed("linux", "x86_64") == {"intel-opencl-rt", "intel-cmplr-lib-rt"}
    assert installed("win32", "AMD64") == {"intel-opencl-rt"}
    assert installed("darwin", "arm64") == installed("linux", "aarch64") == set()
