"""decode_layers: every layer of a decode step in one launch, where the device can run it; the launches are its twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmcl.kernels.common.dtype import QUANTIZED, kernel_name
from llmcl.kernels.common.work import linear_work, together
from llmcl.kernels.variant import pick
from llmcl.ops import attention as attention
from llmcl.ops import linear
from llmcl.runtime.device import KernelArg, Launch, WorkOf

if TYPE_CHECKING:
    from llmcl.models.model import Model

FILE = "nvidia/decode_layers.cl"
WARPS = linear.NVIDIA_GROUP_WARPS
# Local memory that a kernel may declare, by PTX architecture; OpenCL reports 48 KB, which goes for kernel arguments.
LOCAL_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448}
LEAST_LOCAL_BYTES = 101376


def why_not(model: Model) -> str | None:
    """What keeps this model on this device from having its layers in one launch; None: nothing."""
    device, config, layers = model.device, model.config, model.weights.layers
    shape = model.cache.shape
    weights = [w for layer in layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    dtype = weights[0].dtype
    if shape.kv_dtype in QUANTIZED:
        return f"its attention reads a cache of 16-bit numbers, this one is {shape.kv_dtype}"
    if any(len(weight.parts) > 1 or weight.dtype != dtype for weight in weights):
        return "the layers' weights differ in dtype, or one is in several buffers"
    chosen = (
        linear.decode_variant(device, dtype, config.hidden_size),
        pick(attention.DECODE_VARIANTS, device, shape.kv_dtype, shape.head_dim),
    )
    if any(variant.name != "nvidia" for variant in chosen):
        return "the device's kernels for this dtype are not NVIDIA's"
    if any(
        extra is not None
        for layer in layers
        for extra in (layer.qkv_bias, layer.head_norms, layer.attention_post_norm, layer.mlp_post_norm)
    ):
        return "the layers have biases or further norms"
    if any(mods is not model.mods[0] for mods in model.mods):
        return "the layers differ in their attention rules"
    if device.compute_units < shape.n_kv_heads:
        return "the device has fewer compute units than the model KV heads"
    needed, limit = _local_bytes(model), LOCAL_BYTES.get(device.entry.ptx_arch, LEAST_LOCAL_BYTES)
    if needed > limit:
        return f"it needs {needed:,} bytes of local memory, the device has {limit:,}"
    return None


def decode_layers(model: Model, gate_epilogue: str) -> list[Launch]:
    """One launch for all layers of a step, from `act.x` to `act.x`; `why_not` must have said None.

    gate_epilogue: "swiglu" or "geglu". Buffers as `model.stack` uses them. There is one work-group for each compute
    unit, so that all of them run at once and may wait for each other.
    """
    device, config, act, cache = model.device, model.config, model.act, model.cache
    layers, mods = model.weights.layers, model.mods[0]
    groups = device.compute_units
    table = device.alloc(64 * config.n_layers, "addresses of the layers")
    constants: dict[str, object] = {
        **cache.shape.constants(model.step),
        "WEIGHT": kernel_name(layers[0].qkv.dtype),
        "EPS": float(config.rms_norm_eps),
        "GATE": linear.GATES[gate_epilogue],
        "GROUP_SIZE": cache.shape.group_size,
        "N_SPLITS": _n_splits(model),
        "SCALE": cache.shape.scale,
        "HIDDEN": config.hidden_size,
        "FFN": config.intermediate_size,
        "N_LAYERS": config.n_layers,
        "N_GROUPS": groups,
        "WARPS": WARPS,
    }
    if layers[0].qkv.dtype in QUANTIZED:
        constants["DOT"] = int(not layers[0].qkv.exact_activations)
    for i, layer in enumerate(layers):
        buffers = [
            layer.attention_norm,
            layer.qkv.parts[0].buffer,
            cache.k[i],
            cache.v[i],
            layer.output.parts[0].buffer,
            layer.mlp_norm,
            layer.gate_up.parts[0].buffer,
            layer.down.parts[0].buffer,
        ]
        bound: list[KernelArg] = [table, np.int32(i), *buffers]
        device.launch(
            FILE, "store_addresses", constants, bound, groups=(1,), local=(1,), prelude=mods.prelude
        ).enqueue()
    part_values = cache.shape.group_size * (cache.shape.head_dim + 2)
    tagged = model.tagged = {
        name: device.zeros(4 * n, f"{name} with tags")
        for name, n in (
            ("qkv", layers[0].qkv.rows),
            ("attended", layers[0].output.k),
            ("mid", config.hidden_size),
            ("ffn", config.intermediate_size),
            ("x", config.hidden_size),
        )
    }
    args: list[KernelArg] = [
        table,
        act.x,
        *tagged.values(),
        act.rope,
        model.step.state,
        device.zeros(8 * config.n_kv_heads * _n_splits(model) * part_values, "states of the splits"),
        device.zeros(12, "groups that have left, layers that were run, claimed units"),
        *mods.buffers,
    ]
    return [
        device.launch(
            FILE,
            "decode_layers",
            constants,
            args,
            groups=(groups,),
            local=(32 * WARPS,),
            prelude=mods.prelude,
            work=_work(model),
        )
    ]


def _local_bytes(model: Model) -> int:
    shape, config = model.cache.shape, model.config
    columns = max(config.intermediate_size, config.hidden_size, config.n_q_heads * config.head_dim)
    attend_own, attend_shared = attention.nvidia_decode_floats(shape)
    product_own, product_shared = linear.nvidia_local_floats(model.weights.layers[0].qkv, columns)
    own = -(-max(attend_own, product_own) // 4) * 4
    residual = 16 * -(-config.hidden_size // (16 * model.device.compute_units))
    return 4 * (WARPS * own + attend_shared + product_shared + residual) + 64 * config.n_layers


def _n_splits(model: Model) -> int:
    return min(model.n_splits, model.device.compute_units // model.config.n_kv_heads)


def _work(model: Model) -> WorkOf:
    works = [model.cache.shape.work() for _ in model.weights.layers]
    for layer in model.weights.layers:
        for weight, outputs in (
            (layer.qkv, layer.qkv.rows),
            (layer.output, 2 * layer.output.rows),
            (layer.gate_up, layer.gate_up.rows // 2),
            (layer.down, 2 * layer.down.rows),
        ):
            works.append(linear_work(weight.nbytes, weight.rows, weight.k, outputs))
    return together(*works)
