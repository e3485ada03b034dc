"""Splits stored tensors that stack several model tensors: all experts, or gate and up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Experts
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import CheckpointError, shown


def parts_of(
    name: str, tensor: StoredTensor, parts: tuple[str, ...], config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields views of the stacked tensors with names: [rows, k] each, or [rows] for a bias.

    name: the stored tensor's, for errors. parts: names in row order. If names have {} for an expert number, the stored
    tensor is [n_experts, rows, k], and each expert has all parts.

    Raises CheckpointError for an unexpected shape.
    """
    of_experts = "{}" in parts[0]
    n_experts = n_experts_of(config) if of_experts else 1
    row_axis = -1 if name.endswith(".bias") else -2  # axis of a part's first size
    leading, n_parts = tensor.shape[:row_axis], n_experts * len(parts)
    is_stack = len(tensor.shape) >= -row_axis and leading == ((n_experts,) if of_experts else ()) and n_parts > 0
    # Values smaller than a byte may make a part end within a byte.
    if not is_stack or tensor.shape[row_axis] % len(parts) or not len(tensor.data) or len(tensor.data) % n_parts:
        halves = f" (a multiple of {len(parts)})" if len(parts) > 1 else ""
        expected = f"{n_experts} experts by rows{halves} by columns" if of_experts else f"rows{halves} by columns"
        raise CheckpointError(
            f"tensor {shown(name)} has the shape {shown(list(tensor.shape))}, expected {expected}. The configuration "
            "belongs to another model, or the file is damaged."
        )
    shape = tensor.shape[row_axis] // len(parts), *tensor.shape[row_axis:][1:]
    rows = tensor.data.reshape(n_parts, -1)
    for i, data in enumerate(rows):
        yield parts[i % len(parts)].format(i // len(parts)), replace(tensor, shape=shape, data=data)


def unstacked(
    stored: Mapping[str, StoredTensor], stacked: Mapping[str, tuple[str, ...]], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Returns a folder's tensors, with the tensors in `stacked` (`Family.stacked`) split into named parts."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        # Expert tensors belong to no module and therefore have no suffix.
        bare_name = name.removesuffix(".weight")
        module = next((module for module in stacked if bare_name.endswith(f".{module}")), None)
        if module is None:
            tensors[name] = tensor
            continue
        prefix = bare_name.removesuffix(module)
        names = tuple(f"{prefix}{part}.weight" for part in stacked[module])
        tensors.update(parts_of(name, tensor, names, config))
    return tensors


def n_experts_of(config: ModelConfig) -> int:
    """Returns the number of experts, or 0 for a model without experts."""
    blocks = (block for layer in config.layers for block in layer if isinstance(block, Experts))
    return next((block.settings.n_experts for block in blocks), 0)
