"""`llmcl models`: which models run here, in which formats, and how large they may be."""

from __future__ import annotations

from typing import Any

from llmcl.cli import options as opt
from llmcl.tools import json_text

EPILOG = (
    "A model that needs anything else is refused before its weights are downloaded, and the message names what it is."
)


def models(format: opt.Format = "text") -> None:
    """List the model families that llmcl runs, what each has beyond Llama, formats and limits."""
    from llmcl.tools.supported_models import supported_models

    found = supported_models()
    if format == "json":
        print(json_text.dumps(found))
        return
    from llmcl.cli.tables import console, new_table

    table = new_table()
    for name in ("model_type", "GGUF"):
        table.add_column(name, no_wrap=True)
    table.add_column("beyond Llama")
    for family in found["families"]:
        table.add_row(family["model_type"], family["gguf"] or "", ", ".join(family["features"]))
    out = console()
    out.print(table)
    for line in _lines(found):
        out.print(line, soft_wrap=False)


def _lines(found: dict[str, Any]) -> list[str]:
    formats, limits = found["formats"], found["limits"]
    parts = ", ".join(f"{name} ({family})" for name, family in found["text_parts"].items())
    methods = {name for family in found["families"] for name in family["safetensors"]} - {*formats["safetensors"]}
    experts = f"; experts also {', '.join(sorted(methods))}" if methods else ""
    sizes = ", ".join(f"{name} {n}" for name, n in limits.items() if name != "size_multiple")
    return [
        "",
        f"text part of models with images: {parts}",
        f"safetensors: {', '.join(formats['safetensors'])}{experts}",
        f"GGUF: {', '.join(formats['gguf'])}",
        f"--quantize: {', '.join(formats['quantize'])}",
        f"--kv-dtype: {', '.join(formats['kv_cache'])}",
        f"rotary scalings: {', '.join(found['rotary_scalings'])}",
        f"pre-tokenizers in GGUF files: {', '.join(found['gguf_pre_tokenizers'])}",
        f"sizes of rows and heads are multiples of {limits['size_multiple']}; at most {sizes}",
    ]
