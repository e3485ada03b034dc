"""Reads which LoRA adapters a request chooses.

A request chooses an adapter by its name as the model, by "MODEL:NAME", or with llama-server's field `lora`.
"""

from __future__ import annotations

from typing import Any

from llmcl.errors import shown
from llmcl.serve.errors import RequestError
from llmcl.serve.fields import Fields, wrong
from llmcl.serve.served import Served

MOST_SCALE = 1e6


def read_lora(fields: Fields, served: Served) -> dict[str, Any]:
    """Returns the option `lora` of `LLM.stream` for a request, or {}. Raises RequestError for an unknown adapter."""
    names = lora_names(served)
    chosen = fields.items("lora")
    by_model = _named_by_model(fields.given("model"), served, names)
    if not chosen:
        return {} if by_model is None else {"lora": by_model}
    if by_model is not None:
        raise RequestError(400, f"lora: does not go with the adapter {by_model} as the model; give one", "lora")
    return {"lora": scales_of(fields, names)}


def lora_names(served: Served) -> list[str]:
    """Returns the names of the loaded adapters, in the order of their ids."""
    return [] if served.loras is None else [*served.loras.loras.loaded]


def _named_by_model(model: object, served: Served, names: list[str]) -> str | None:
    if not isinstance(model, str) or model == served.name:
        return None
    name = model.removeprefix(f"{served.name}:")
    if name in names:
        return name
    if name != model and names:
        message = f"model: there is no adapter {shown(name)}; loaded are {', '.join(names)}"
        raise RequestError(404, message, "model", "model_not_found")
    return None  # there is one model, whatever name a client sends


def scales_of(fields: Fields, names: list[str]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for entry in fields.objects("lora"):
        number = entry.given("id")
        name = names[number] if type(number) is int and 0 <= number < len(names) else number
        if name not in names:
            known = ", ".join(f"{i} ({name})" for i, name in enumerate(names)) or "none"
            raise wrong(entry.name("id"), number, f"an adapter's number or name; loaded are {known}")
        scales[str(name)] = entry.number("scale", 1.0, -MOST_SCALE, MOST_SCALE)
    return scales
