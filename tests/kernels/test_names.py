"""A kernel file, its entries, its op, its twin and its test share a name; what differs is listed with a reason."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import llmcl
from llmcl import reference

PACKAGE, TESTS = Path(llmcl.__file__).parent, Path(__file__).parents[1]
KERNELS = PACKAGE / "kernels"
ENTRIES = {
    path.relative_to(KERNELS).as_posix(): set(re.findall(r"__kernel\b[^{]*?\bvoid (\w+)\(", text))
    for path in sorted(KERNELS.rglob("*.cl"))
    if "__kernel" in (text := re.sub(r"//.*", "", path.read_text(encoding="utf-8")))
}
NO_OPS = {
    "arithmetic_peak": "measures a device for llmcl/runtime/roofline.py",
    "read_bandwidth": "measures a device for llmcl/runtime/roofline.py",
    "device_probe": "tries a driver",
    "dot4_probe": "tries a driver",
    "sub_group_probe": "tries a driver",
    "round_rows": "packs rows for portable-int8, a variant of the products",
    "pack_keys": "copies arrays for flex_attention (llmcl/attention/flex_plan.py)",
    "pad_rows": "copies arrays for flex_attention (llmcl/attention/flex_plan.py)",
}
OPS = sorted({Path(file).stem for file in ENTRIES if file.startswith("portable/")} - {*NO_OPS})
PLACES = {
    "delta_terms": ("delta_chunks", "the first launch of delta_chunks"),
    "pack_weight": ("load_weight", "load_weight's launch for a format whose blocks are kept"),
}
TWINS = {
    "conv_state": ("causal_conv", "the state is half of the convolution's result"),
    "delta_token": ("delta_rule", "delta_inputs, delta_rule and gated_norm in one launch for a token"),
    "experts_prefill": ("experts_gate_up", "both products of the experts, for many tokens"),
    "experts_few_rows": ("experts_gate_up", "both products of the experts, for few tokens"),
    "experts_sum": ("experts_down", "the sum at the end of experts_down"),
    "load_weight": ("dequantize", "the format's definition, in llmcl/checkpoint"),
    "pack_weight": ("dequantize", "the format's definition, in llmcl/checkpoint"),
}
NO_TWINS = {
    "last_row": "moves rows",
    "last_token": "moves rows",
    "zero_rows": "writes zeros",
    "random_weight": "a hash, computed again in its test",
}


def begins(name: str, *shorter: str) -> bool:
    return any(name == first or name.startswith(first + "_") for first in shorter)


@pytest.mark.parametrize("file", ENTRIES)
def test_a_file_has_the_name_of_its_entries(file: str) -> None:
    """Stages in one file add a word to its name; a class's second file for an op adds a word to the op's name."""
    stem, entries = Path(file).stem, ENTRIES[file]
    assert entries, "no entry is found"
    assert all(begins(entry, stem) for entry in entries) or (len(entries) == 1 and begins(stem, *entries))


@cache
def modules_of_functions() -> dict[str, str]:
    """The functions of llmcl/ops, and its modules, each with the module."""
    places = {}
    for path in (PACKAGE / "ops").glob("*.py"):
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        places |= dict.fromkeys((node.name for node in nodes if isinstance(node, ast.FunctionDef)), path.stem)
        places[path.stem] = path.stem
    return places


@cache
def heads_of_tests() -> dict[str, str]:
    """The first paragraph of each test file, by the file's name."""
    return {
        path.stem.removeprefix("test_"): path.read_text(encoding="utf-8").partition("\n\n")[0]
        for path in (TESTS / "kernels").glob("test_*.py")
    }


@pytest.mark.parametrize("op", OPS)
def test_an_op_has_its_kernels_name(op: str) -> None:
    """As a function of llmcl/ops, or as the beginning of a module's name where a class binds several kernels."""
    place, _ = PLACES.get(op, (op, ""))
    assert place in modules_of_functions() or begins(place, *modules_of_functions().values())


def twins() -> list[str]:
    return [name for name in reference.__all__ if callable(getattr(reference, name))]


@pytest.mark.parametrize("op", sorted({*OPS} - {*NO_TWINS}))
def test_a_twin_has_its_kernels_name(op: str) -> None:
    """Ways to compute the same (decode, prefill, few rows) add words to the twin's name."""
    twin, _ = TWINS.get(op, (op, ""))
    assert begins(twin, *twins())


@pytest.mark.parametrize("op", [*OPS, "arithmetic_peak", "read_bandwidth"])
def test_an_op_has_a_test_of_its_name(op: str) -> None:
    """Of the op's or its module's name; or another's first paragraph names the op."""
    module = modules_of_functions().get(PLACES.get(op, (op, ""))[0], op)
    tests = heads_of_tests()
    assert begins(op, *tests) or module in tests or any(re.search(rf"\b{op}\b", head) for head in tests.values())


def test_a_test_has_its_subjects_name() -> None:
    """The subject is a kernel or an include, a module of ops or kernels, or a module of tests; an aspect follows."""
    subjects = [path.stem for folder in ("kernels", "ops") for path in (PACKAGE / folder).rglob("*.*")]
    subjects += ["names", *(path.stem for path in TESTS.glob("*.py"))]
    assert not [name for name in heads_of_tests() if not begins(name, *subjects)]


def test_what_is_listed_is_needed() -> None:
    assert {*NO_OPS, *PLACES, *TWINS, *NO_TWINS} <= {Path(file).stem for file in ENTRIES}
    assert not {*PLACES} & {*modules_of_functions()}
    assert not [op for op in (*TWINS, *NO_TWINS) if begins(op, *twins())]
