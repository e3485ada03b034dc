"""`llmcl models`: lists supported models with memory and formats."""

from __future__ import annotations

from typing import Any

from llmcl.cli import options as opt
from llmcl.tools import json_text

EPILOG = (
    "Other models are refused before their weights are downloaded, with the reason. --format json has more: features "
    "of each family, formats, limits."
)


def models(format: opt.Format = "text") -> None:
    """List the model families that run, with examples and the memory that they need."""
    from llmcl.tools.supported_models import supported_models

    listed = supported_models()
    if format == "json":
        print(json_text.dumps(listed))
        return
    from llmcl.cli.tables import console, new_table

    table = new_table()
    table.add_column("family", no_wrap=True)
    table.add_column("models", overflow="fold")
    for name in ("parameters", "bf16", "Q4"):
        table.add_column(name, justify="right", no_wrap=True)
    for family in listed["families"]:
        table.add_row(family["model_type"], family["models"], "", "", "")
        for example in family["examples"]:
            table.add_row("", *_cells(example))
    out = console()
    out.print(table)
    for line in _lines(listed):
        out.print(line, soft_wrap=False)


def _cells(example: dict[str, Any]) -> tuple[str, ...]:
    sizes = (f"{example[name] / 1e9:.1f} GB" for name in ("bf16_bytes", "q4_bytes"))
    return (f"  {example['name']}", f"{example['parameters'] / 1e9:.1f} B", *sizes)


def _lines(listed: dict[str, Any]) -> list[str]:
    formats = listed["formats"]
    parts = ", ".join(f"{name} ({family})" for name, family in listed["text_parts"].items())
    published = [family["model_type"] for family in listed["families"] if family["tested_with"] == "a published model"]
    return [
        "",
        f"tested with a published model: {', '.join(published)}; the others with random weights, beside transformers",
        "bf16, Q4: memory of the weights, in GGUF's Q4_0 for Q4. Keys and values of the context come on top.",
        f"text part of models with images: {parts}",
        f"safetensors: {', '.join(formats['safetensors'])}",
        f"quantised safetensors: {', '.join(formats['quant_methods'])}",
        f"GGUF: {', '.join(formats['gguf'])}",
        f"--quantize: {', '.join(formats['quantize'])}",
        f"--kv-dtype: {', '.join(formats['kv_cache'])}",
    ]
