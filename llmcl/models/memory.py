"""What a model takes of a device's memory, told before anything is loaded."""

from __future__ import annotations

import numpy as np

from llmcl.errors import OutOfDeviceMemoryError
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.dtype import is_rounded
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.kernels.common.weight import STAGING_BYTES
from llmcl.models.config import ModelConfig
from llmcl.models.kv_cache import kv_bytes_per_position
from llmcl.models.layer_ops import activation_shapes
from llmcl.models.weights import WeightTypes, all_plans, weights_bytes
from llmcl.ops.attention import decode_splits, prefill_implementation
from llmcl.ops.linear import linear_scratch_bytes
from llmcl.runtime.device import Device


def exact_queries(types: WeightTypes, kv_dtype: str) -> bool:
    """Whether attention is to be in float32 throughout: see AttentionShape."""
    return types.exact_activations or not is_rounded(kv_dtype, types.dtype)


def forecast(
    config: ModelConfig, types: WeightTypes, kv_dtype: str, max_context: int, device: Device, kv_tokens: int
) -> dict[str, int]:
    """Bytes of device memory that a model will take: weights, KV cache (kv_tokens of it), working buffers."""
    n_splits = decode_splits(device, config.n_kv_heads, config.head_dim, kv_dtype)
    chunk = min(prefill_chunk(device), max_context)
    shapes = activation_shapes(config, chunk, n_splits)
    working = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    matrices = {(dtype, plan.k) for plan in all_plans(config) for _, dtype in types.runs(plan)}
    working += linear_scratch_bytes(device, matrices, chunk, exact_activations=types.exact_activations)
    heads = config.n_q_heads, config.n_kv_heads, config.head_dim
    cache = AttentionShape(*heads, kv_tokens, kv_dtype, exact_queries=exact_queries(types, kv_dtype))
    working += prefill_implementation(device, cache).scratch_bytes(device, cache)
    # Given back before the working buffers are made: room for what is not counted (norms, sampling, step state).
    working += STAGING_BYTES
    return {
        "weights": weights_bytes(config, types),
        "KV cache": kv_bytes_per_position(config, kv_dtype) * kv_tokens,
        "working buffers": working,
    }


def check_memory(needed: dict[str, int], device: Device) -> None:
    """Raises OutOfDeviceMemoryError, with the sizes, if the forecast exceeds what the device has."""
    entry = device.entry
    limits = [entry.global_mem_bytes]
    if entry.host_available_bytes is not None:
        limits.append(entry.host_available_bytes)
    total, limit = sum(needed.values()), min(limits)
    if total <= limit:
        return
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in needed.items())
    raise OutOfDeviceMemoryError(
        f"the model needs {total / 2**30:.2f} GiB ({parts}), but {device.name} has {limit / 2**30:.2f} GiB; "
        "use a smaller --ctx-size, --dtype or --kv-dtype, a smaller model, or another --device"
    )
