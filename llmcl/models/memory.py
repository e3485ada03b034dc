"""Forecasts the device memory that a model needs, before anything is loaded."""

from __future__ import annotations

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.recurrent import DeltaNet, Mamba
from llmcl.errors import OutOfDeviceMemoryError, counted
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.dtype import is_rounded
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.models.activations import activation_shapes, splits_of
from llmcl.models.kv_cache import kv_bytes_per_position
from llmcl.models.layer_span import LayerSpan
from llmcl.models.recurrent_blocks import delta_shape, mamba_shape
from llmcl.models.recurrent_states import KEPT_STATES, state_slots
from llmcl.models.weights import WeightTypes, all_plans, weights_bytes
from llmcl.ops.attention import prefill_implementation
from llmcl.ops.delta_chunks import delta_scratch_bytes
from llmcl.ops.experts import experts_scratch_bytes
from llmcl.ops.linear import linear_scratch_bytes
from llmcl.ops.load_weight import STAGING_BYTES
from llmcl.runtime.device import Device

SAMPLING_BYTES = 20  # per sequence and vocabulary token: logits, latest positions, counts, candidates


def exact_queries(types: WeightTypes, kv_dtype: str) -> bool:
    """Returns whether attention uses float32 throughout (see AttentionShape)."""
    return types.exact_activations or not is_rounded(kv_dtype, types.dtype)


def forecast(
    config: ModelConfig,
    types: WeightTypes,
    kv_dtype: str,
    max_context: int,
    device: Device,
    kv_tokens: int,
    n_sequences: int | None = None,
    span: LayerSpan | None = None,
) -> dict[str, int]:
    """Returns the bytes of device memory for weights, KV cache (kv_tokens tokens), working buffers and recurrent
    states.

    n_sequences: sequences in a paged cache, or None for a contiguous cache. span: the layers on this device, if others
    are on other devices.
    """
    plans = all_plans(config, span)
    chunk = min(prefill_chunk(device), max_context)
    shapes = activation_shapes(config, chunk, splits_of(device, config, kv_dtype))
    working = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    matrices = {(dtype, plan.k) for plan in plans for _, dtype in types.runs(plan)}
    working += linear_scratch_bytes(device, matrices, chunk, exact_activations=types.exact_activations)
    experts = [
        (dtype, plan.k, plan.n_experts, plan.top_k)
        for plan in plans
        if plan.n_experts > 1
        for _, dtype in types.runs(plan)
    ]
    working += experts_scratch_bytes(device, experts, chunk, exact_activations=types.exact_activations)
    blocks = [block for layer in config.layers for block in layer]
    mixers = {delta_shape(block.settings) for block in blocks if isinstance(block, DeltaNet)}
    mixers |= {mamba_shape(block.settings).scan for block in blocks if isinstance(block, Mamba)}
    working += max([delta_scratch_bytes(device, mixer, chunk) for mixer in mixers], default=0)
    exact = exact_queries(types, kv_dtype)
    for heads in config.kinds_of_heads if config.latent is None else []:
        cache = AttentionShape(config.n_q_heads, heads.n_kv, heads.size, kv_tokens, kv_dtype, exact_queries=exact)
        working += prefill_implementation(device, cache).scratch_bytes(device, cache)
    slots = state_slots(1 if n_sequences is None else max(n_sequences, KEPT_STATES))
    # Staging memory is released before the working buffers exist, and leaves room for small buffers that are not
    # counted (norms, sampling, step state).
    working += STAGING_BYTES
    needed = {
        "weights": weights_bytes(config, types, span),
        "KV cache": kv_bytes_per_position(config, kv_dtype, span) * kv_tokens,
        "working buffers": working,
    }
    states = config.state_bytes if span is None else config.state_bytes_in(span.layers)
    return needed | ({"recurrent states": slots * states} if states else {})


def check_memory(needed: dict[str, int], device: Device) -> None:
    """Raises OutOfDeviceMemoryError, with all sizes, if the forecast exceeds device memory."""
    limit = device.memory_bytes
    if sum(needed.values()) > limit:
        raise OutOfDeviceMemoryError(
            f"the model needs {_gib(needed)}, but {device.name} has {limit / 2**30:.2f} GiB; "
            "use a smaller --ctx-size, --dtype or --kv-dtype, a smaller model, or another --device"
        )


def batch_bytes(
    config: ModelConfig, kv_dtype: str, kv_tokens: int, max_sequences: int, chunk: int, span: LayerSpan | None = None
) -> dict[str, int]:
    """Returns the bytes that a batch takes beside its model; parameters as for `check_batch_memory`."""
    shapes = activation_shapes(config, chunk, dict.fromkeys(config.kinds_of_heads, 1))
    needed = {
        "KV cache": kv_bytes_per_position(config, kv_dtype, span) * kv_tokens,
        "sampling": max_sequences * SAMPLING_BYTES * config.vocab_size,
        "working buffers": 4 * sum(int(np.prod(shape)) for shape in shapes.values()),
    }
    if states := config.state_bytes if span is None else config.state_bytes_in(span.layers):
        needed["recurrent states"] = state_slots(max(max_sequences, KEPT_STATES)) * states
    return needed


def check_batch_memory(
    device: Device,
    config: ModelConfig,
    kv_dtype: str,
    kv_tokens: int,
    max_sequences: int,
    chunk: int,
    span: LayerSpan | None = None,
) -> None:
    """Raises OutOfDeviceMemoryError if a batch does not fit beside the memory in use: a KV cache of kv_tokens tokens
    for all sequences, logits and sampling for max_sequences rows, activations for `chunk` tokens. span: as in
    `forecast`.
    """
    needed = batch_bytes(config, kv_dtype, kv_tokens, max_sequences, chunk, span)
    if sum(needed.values()) > device.memory_bytes - device.allocated_bytes:
        device.give_back_spares()
    left = device.memory_bytes - device.allocated_bytes
    if sum(needed.values()) > left:
        raise OutOfDeviceMemoryError(
            f"{counted(max_sequences, 'sequence')} at once would need {_gib(needed)}, but {device.name} has "
            f"{max(0, left) / 2**30:.2f} GiB left beside the model; use fewer sequences (max_sequences), a smaller "
            "max_context, fewer pages (kv_pages) or another --kv-dtype"
        )


def _gib(needed: dict[str, int]) -> str:
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in needed.items())
    return f"{sum(needed.values()) / 2**30:.2f} GiB ({parts})"
