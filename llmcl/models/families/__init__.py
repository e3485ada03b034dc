"""The supported model families: a file each, whose name is config.json's `model_type` and which declares `FAMILY`.

`blocks.py` has what a layer can be made of, `family.py` what a family declares.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from llmcl.models.families.family import Family

_NO_FAMILIES = ("blocks", "family")

FAMILIES: dict[str, Family] = {
    name: import_module(f"{__name__}.{name}").FAMILY
    for _, name, _ in iter_modules(__path__)
    if name not in _NO_FAMILIES
}

# By GGUF's general.architecture.
GGUF_FAMILIES: dict[str, str] = {
    family.gguf_name: name for name, family in FAMILIES.items() if family.gguf_name is not None
}
