"""decode_layers: every layer of a decode step in one launch, where the device can run it; the launches are its twin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmcl.attention import kernels as attention
from llmcl.ops import linear
from llmcl.ops.dtype import QUANTIZED, kernel_name
from llmcl.ops.variant import pick
from llmcl.ops.work import linear_work, together
from llmcl.runtime.device import KernelArg, Launch, WorkOf

if TYPE_CHECKING:
    from llmcl.model import Model

FILE = "nvidia/decode_layers.cl"
WARPS = linear.NVIDIA_GROUP_WARPS


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
    needed = 4 * max(_attend_floats(model), *map(linear.nvidia_product_floats, weights)) + 4
    if needed > device.entry.local_mem_bytes:
        return f"it needs {needed:,} bytes of local memory, the device has {device.entry.local_mem_bytes:,}"
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
        "N_SPLITS": min(model.n_splits, groups // config.n_kv_heads),
        "SCALE": cache.shape.scale,
        "HIDDEN": config.hidden_size,
        "FFN": config.intermediate_size,
        "N_LAYERS": config.n_layers,
        "N_GROUPS": groups,
        "WARPS": WARPS,
    }
    if is_quantized := layers[0].qkv.dtype in QUANTIZED:
        constants["DOT"] = int(not layers[0].qkv.exact_activations)
    else:
        constants["UNROLL"] = linear.NVIDIA_UNROLL
    warps_of = linear.nvidia_quantized_team if is_quantized else linear.nvidia_decode_warps
    for name, weight, tiles in (
        ("QKV", layers[0].qkv, 1),
        ("OUT", layers[0].output, 1),
        ("GATE", layers[0].gate_up, 2),
        ("DOWN", layers[0].down, 1),
    ):
        constants[f"{name}_TEAM"] = warps_of(device, weight.n_tiles // tiles, weight.k)
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
    args: list[KernelArg] = [
        table,
        act.x,
        act.qkv,
        act.attended,
        act.ffn,
        act.rope,
        model.step.state,
        act.part_ml,
        act.part_acc,
        device.zeros(4 * config.n_kv_heads, "arrivals"),
        device.zeros(4, "ticket of the grid's barriers"),
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


def _attend_floats(model: Model) -> int:
    shape = model.cache.shape
    return shape.group_size * (shape.head_dim + WARPS * (16 + 2 + shape.head_dim))


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
