"""Cases whose subject is the current folder: Python files lie in it, none of which a child of llmcl may execute."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from fuzz.cases import Case
from fuzz.mutations import Draw
from fuzz.seeds import Folders
from hypothesis import strategies as st

from llmcl.runtime import child_process, device_probe

_PACKAGES = ["numpy", "pyopencl", "pytools", "llmcl", "typing_extensions", "sitecustomize", "usercustomize"]
_NAMES = sorted({name for name in sys.stdlib_module_names if name.isidentifier()} | {*_PACKAGES})
_FORMS = ["{name}.py", "{name}/__init__.py", "{name}.pth"]
# How the current folder may be named on this process's path, and what PYTHONPATH may hold that names no folder.
_HERE = ["", ".", "./", "./.", "../place", "{place}", "{place}/", "{place}/../place", "../link", "{link}"]
_PYTHONPATH = [None, "", ".", os.pathsep, "place", "none.zip"]


@st.composite
def planted_cases(draw: Draw, folders: Folders) -> Case:
    names = draw(st.lists(st.sampled_from(_NAMES), max_size=40, unique=True)) + draw(st.sampled_from([[], _PACKAGES]))
    arguments = {
        "files": [draw(st.sampled_from(_FORMS)).format(name=name) for name in dict.fromkeys(names)],
        "here": draw(st.sampled_from(_HERE)),
        "first": draw(st.booleans()),
        "PYTHONPATH": draw(st.sampled_from(_PYTHONPATH)),
    }
    return Case("planted", [f"{key}: {value}" for key, value in arguments.items()], {}, arguments)


def planted_case(folder: Path, described: Any) -> None:
    """Asks a child that imports drivers for a device that there is not. Raises AssertionError if it executed a file."""
    given = described["arguments"]
    with tempfile.TemporaryDirectory() as outer:
        place, link, marker = Path(outer) / "place", Path(outer) / "link", Path(outer) / "marker"
        place.mkdir()
        link.symlink_to(place)
        for name in given["files"]:
            file = place / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"import sys; open({str(marker)!r}, 'a').write({name + ' '!r})\n")
        here = given["here"].format(place=place, link=link)
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if given["PYTHONPATH"] is not None:
            variables["PYTHONPATH"] = given["PYTHONPATH"]
        before = os.getcwd()
        os.chdir(place)
        try:
            with (
                mock.patch.object(sys, "path", [here, *sys.path] if given["first"] else [*sys.path, here]),
                mock.patch.dict(os.environ, variables, clear=True),
            ):
                command = child_process.command(device_probe.__name__, "77", "none")
                code, said = child_process.run(command, 60.0, streams=["stdout", "stderr"])
        finally:
            os.chdir(before)
        assert not marker.exists(), f"a child executed {marker.read_text()[:300]}"
        assert code == 75 and said.endswith("the device was not found"), f"exit code {code}: {said[-1000:]}"
