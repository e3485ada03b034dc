"""Puts OpenCL C functions that change scores or hide keys (mods) into a kernel (common/attention_mods.cl)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcl.runtime.device import Buffer

INPUTS = "const int b, const int h, const int q_idx, const int kv_idx"
BLOCK_INPUTS = "const int b, const int h, const int q_first, const int q_last, const int kv_first, const int kv_last"


@dataclass(frozen=True)
class ModCode:
    """The statements of a function, ending in `return`."""

    body: str  # for one key
    wide: str  # for 16 keys
    arrays: tuple[tuple[str, str], ...] = ()  # type and name per array read by the function
    block: str = ""  # mask_mod only: the statements of mask_block
    helpers: str = ""  # functions called by the statements
    per_head: bool = False  # heads differ
    per_sequence: bool = False  # sequences differ
    fragment: str = ""  # score_mod only: macros for fragment kernels, to compute parts of the function once per row


@dataclass(frozen=True)
class Mods:
    """Functions in a kernel: OpenCL C text in front of the kernel, and arrays passed as arguments."""

    score: ModCode | None = None
    mask: ModCode | None = None
    buffers: tuple[Buffer, ...] = ()  # arrays of score, then arrays of mask
    tables: tuple[str, ...] = ()  # int arrays passed before `buffers`, supplied by the code that binds the kernel

    @property
    def arrays(self) -> tuple[tuple[str, str], ...]:
        """Returns the type and name of each array argument, in order."""
        mod_arrays = (array for mod in (self.score, self.mask) if mod is not None for array in mod.arrays)
        return *(("int", name) for name in self.tables), *mod_arrays

    @property
    def per_sequence(self) -> bool:
        """Tells whether a sequence's place in the batch affects the scores or the mask."""
        return any(mod is not None and mod.per_sequence for mod in (self.score, self.mask))

    @property
    def prelude(self) -> str:
        if self.score is None and self.mask is None and not self.tables:
            return ""
        scalar, wide, flags = "", "", _by_sequence([self])
        if self.score is not None:
            flags += "#define HAS_SCORE_MOD 1\n"
            wide += _function("score_mod16", f"const float16 score, {_wide(INPUTS)}", self.score.wide, "float16")
            flags += _macro("SCORE_MOD_BODY", f"{{ {self.score.body} }}") + self.score.fragment
        if self.mask is not None:
            flags += "#define HAS_MASK_MOD 1\n"
            wide += _function("mask_mod16", _wide(INPUTS), self.mask.wide, "int16")
            flags += f"#define MASK_PER_HEAD {int(self.mask.per_head)}\n"
            scalar = _function("mask_mod", INPUTS, self.mask.body) + self.mask.helpers
            scalar += _function("mask_block", BLOCK_INPUTS, self.mask.block)
        defined = {
            "MOD_PARAMS": "".join(map(_parameter, self.arrays)),
            "MOD_ARGS": "".join(f", {name}" for _, name in self.arrays),
            "SCALAR_MODS": scalar,
            "WIDE_MODS": wide,
        }
        return "".join(_macro(name, text) for name, text in defined.items()) + flags


NO_MODS = Mods()


def fragment_macros(
    body: str, unit: float, factor: float, slope: str, is_soft_cap: bool, has_arrays: bool = False
) -> str:
    """Returns the macros for a score_mod of the form factor f(unit score) (nvidia/fragment_scores.cl).

    body: the statements of f. slope: the statements of f's slope along the keys, or "". is_soft_cap: f is tanh
    (nvidia/capped_exponents.cl). has_arrays: f reads arrays.
    """
    macros = _macro("FRAGMENT_MOD_BODY", f"{{ {body} }}")
    macros += _macro("SCORE_UNIT", f"{unit:.9e}f") + _macro("SCORE_FACTOR", f"{factor:.9e}f")
    if slope:
        macros += "#define HAS_KEY_SLOPE 1\n" + _macro("KEY_SLOPE_BODY", f"{{ {slope} }}")
    if is_soft_cap:
        macros += "#define HAS_SOFT_CAP 1\n"
    if has_arrays:
        macros += "#define SCORE_MOD_ARRAYS 1\n"
    return macros


def one_of(choices: Sequence[Mods]) -> str:
    """Returns a prelude for a kernel that chooses between several Mods at run time.

    Wherever MOD_ARGS stands, an int `rules` selects the choice. MOD_BUFFERS declares the kernel's own parameters: the
    arrays of each choice in turn.
    """
    arrays = [[(kind, f"rules{i}_{name}") for kind, name in mods.arrays] for i, mods in enumerate(choices)]
    params = "".join(_parameter(array) for of_choice in arrays for array in of_choice)
    functions = "".join(sorted({mods.mask.helpers for mods in choices if mods.mask is not None}))
    calls: dict[str, list[str]] = {"score_mod": [], "mask_mod": [], "mask_block": []}
    for i, mods in enumerate(choices):
        parameters = "".join(map(_parameter, mods.arrays))
        arguments = "".join(f", {name}" for _, name in arrays[i])
        parts: list[tuple[str, str, str, str]] = []
        if mods.score is not None:
            parts.append(("score_mod", f"const float score, {INPUTS}", mods.score.body, "float"))
        if mods.mask is not None:
            parts.append(("mask_mod", INPUTS, mods.mask.body, "int"))
            parts.append(("mask_block", BLOCK_INPUTS, mods.mask.block, "int"))
        for name, inputs, body, kind in parts:
            functions += _function(f"{name}_rules{i}", inputs, body, kind, parameters)
            names = ", ".join(word.rpartition(" ")[2] for word in inputs.split(", "))
            calls[name].append(f"if (rules == {i}) return {name}_rules{i}({names}{arguments});")
    bodies = {name: " ".join(of_name) for name, of_name in calls.items()}
    flags = _by_sequence(choices)
    if calls["score_mod"]:
        flags += "#define HAS_SCORE_MOD 1\n" + _macro("SCORE_MOD_BODY", f"{{ {bodies['score_mod']} return score; }}")
    if calls["mask_mod"]:
        per_head = any(mods.mask is not None and mods.mask.per_head for mods in choices)
        flags += f"#define HAS_MASK_MOD 1\n#define MASK_PER_HEAD {int(per_head)}\n"
        functions += _function("mask_mod", INPUTS, f"{bodies['mask_mod']} return 1;")
        functions += _function("mask_block", BLOCK_INPUTS, f"{bodies['mask_block']} return 2;")
    defined = {
        "MOD_BUFFERS": params,
        "MOD_PARAMS": f"{params}, const int rules",
        "MOD_ARGS": "".join(f", {name}" for of_choice in arrays for _, name in of_choice) + ", rules",
        "SCALAR_MODS": functions,
    }
    return "".join(_macro(name, text) for name, text in defined.items()) + flags


def _by_sequence(choices: Sequence[Mods]) -> str:
    return "#define MODS_BY_SEQUENCE 1\n" if any(mods.per_sequence for mods in choices) else ""


def _parameter(array: tuple[str, str]) -> str:
    return f", __global const {array[0]}* {array[1]}"


def _macro(name: str, text: str) -> str:
    return f"#define {name} {text.replace(chr(10), ' ')}\n"


def _wide(inputs: str) -> str:
    return inputs.replace("const int kv_idx", "const int16 kv_idx")


def _function(name: str, inputs: str, body: str, kind: str = "int", params: str = " MOD_PARAMS") -> str:
    return f"inline {kind} {name}({inputs}{params}) {{\n{body}\n}}\n"
