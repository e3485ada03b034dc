#!/usr/bin/env python
"""Writes docs/models.md: each family's models and formats, and its largest difference from transformers.

The models are small random ones, in the configurations of the tests (tests/family_configs.py): a folder as
transformers writes it, and a GGUF file with the names and keys of llama.cpp's converter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from family_configs import FAMILIES as CONFIGS
from family_configs import IN_GGUF, MOST, ids_for
from family_files import save_gguf
from helpers import random_weights, relative_error, save_folder, transformers_logits, transformers_model

import llmcl
from llmcl.cli import options as opt
from llmcl.cli.command import run_script
from llmcl.runtime.selection import select_device
from llmcl.tools.markdown import table
from llmcl.tools.supported_models import supported_models

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
HEAD = """# Families and formats

`scripts/write_models_page.py` writes this page. [Models](guide/models.md) explains names, files and limits.

Differences are the largest between llmcl's logits and transformers' logits, over the largest logit, in float32, for
small models with random weights on {device}. Folders come from transformers; GGUF files have llama.cpp's keys.

- A dash under "folder" or "GGUF file": no such files exist, or the family's own tests compare them.
- A dash under "GGUF": files carry another family's name.
"""
END = """
A published model was opened, and its answers compared, for {published}.

Text parts of models with images: {parts}.
"""


def largest_difference(name: str, folder: Path, device: int, *, in_gguf: bool) -> float:
    """Returns the largest difference of the family's logits from transformers, over the largest logit."""
    config = CONFIGS[name]
    if in_gguf and config.architecture in ("gemma2", "gemma3_text"):  # the format has no key for another scale
        config = replace(config, attention_scale=config.head_dim**-0.5)
    weights, ids = random_weights(config, seed=1), ids_for(config)
    expected = transformers_logits(transformers_model(config, weights), ids)
    saved = save_gguf(folder / "model.gguf", config, weights) if in_gguf else save_folder(folder, config, weights)
    with llmcl.load(str(saved), device=device, dtype="float32", max_context=128) as llm:
        return float(relative_error(llm.logits(ids), expected))


def rows(device: int) -> Iterator[tuple[str, ...]]:
    """Yields a row of the table for each family."""
    first = {config.architecture: name for name, config in reversed(CONFIGS.items())}
    for cells in described():
        name, differences = first.get(cells[1].strip("`")), []
        for in_gguf in (False, True):
            if name is None or (in_gguf and name not in (*IN_GGUF, MOST)):
                differences.append("-")
                continue
            with tempfile.TemporaryDirectory() as folder:
                differences.append(f"{largest_difference(name, Path(folder), device, in_gguf=in_gguf):.1e}")
        print(*cells, *differences, flush=True)
        yield *cells, *differences


def described() -> list[tuple[str, str, str]]:
    """Returns the first cells of each family's row."""
    families = supported_models()["families"]
    return [
        (family["models"], f"`{family['model_type']}`", f"`{family['gguf']}`" if family["gguf"] else "-")
        for family in families
    ]


def write_models_page(
    output: Annotated[Path, opt.measurement("-o", "--output", metavar="FILE", help="The page.")] = PAGE,
    device: opt.Device = None,
) -> None:
    """Measures every family on a device and writes docs/models.md."""
    entry = select_device(device)
    listed: dict[str, Any] = supported_models()
    header = "models", "family (`model_type`)", "GGUF", "folder", "GGUF file"
    lines = table("lllrr", header, list(rows(entry.index)))
    families = listed["families"]
    published = [f"`{family['model_type']}`" for family in families if family["tested_with"] != "random weights"]
    parts = [f"`{name}`" for name in listed["text_parts"]]
    end = END.format(published=" and ".join(published), parts=", ".join(parts))
    output.write_text(HEAD.format(device=entry.name) + "\n" + "\n".join(lines) + "\n" + end, "utf-8")


if __name__ == "__main__":
    run_script(write_models_page)
