"""persistent_layers: a persistent kernel for every layer of a decode step, a work-group for each compute unit."""

from __future__ import annotations

import numpy as np

from llmcl.kernels.common.cost import fused_cost, linear_cost
from llmcl.kernels.common.dtype import QUANTIZED, kernel_name
from llmcl.kernels.common.linear import GATES
from llmcl.kernels.common.persistent import BoundLayers, DecodeLayers, PersistentLayers
from llmcl.kernels.nvidia.attention import NvidiaAttentionDecode, decode_floats
from llmcl.kernels.nvidia.linear import (
    GROUP_WARPS,
    NvidiaLinearDecode,
    NvidiaLinearDecodeQuantized,
    local_floats,
    supports_ptx,
)
from llmcl.runtime.device import CostModel, Device, KernelArg

WARPS = GROUP_WARPS
# Local memory that a kernel may declare, by PTX architecture; OpenCL reports 48 KB, which goes for kernel arguments.
LOCAL_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448}
MIN_LOCAL_BYTES = 101376


class NvidiaPersistentLayers(PersistentLayers):
    name, file = "nvidia", "nvidia/persistent_layers.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def unsupported_reason(self, device: Device, step: DecodeLayers) -> str | None:
        layers, shape, wrong = step.layers, step.shape, device.cache.excluded
        weights = [weight for layer in layers for weight in layer.products]
        dtype = weights[0].dtype
        if shape.kv_dtype in QUANTIZED:
            return f"its attention reads a cache of 16-bit numbers, this one is {shape.kv_dtype}"
        if any(len(weight.parts) > 1 or weight.dtype != dtype for weight in weights):
            return "the layers' weights differ in dtype, or one is in several buffers"
        product = NvidiaLinearDecodeQuantized() if dtype in QUANTIZED else NvidiaLinearDecode()
        attention = NvidiaAttentionDecode()
        fits = product.supports(dtype, step.hidden) and attention.supports(shape.kv_dtype, shape.head_dim)
        if not fits or {product.key(dtype), attention.key(shape.kv_dtype)} & set(wrong):
            return "the device's kernels for this dtype are not NVIDIA's"
        if not all(layer.is_plain for layer in layers):
            return "the layers have biases or further norms"
        if any(layer.mods is not layers[0].mods or layer.gate != layers[0].gate for layer in layers):
            return "the layers differ in their attention rules or activations"
        if device.compute_units < shape.n_kv_heads:
            return "the device has fewer compute units than the model KV heads"
        needed, limit = _local_bytes(device, step), LOCAL_BYTES.get(device.entry.ptx_arch, MIN_LOCAL_BYTES)
        if needed > limit:
            return f"it needs {needed:,} bytes of local memory, the device has {limit:,}"
        return None

    def bind(self, device: Device, step: DecodeLayers) -> BoundLayers:
        """One work-group for each compute unit: all of them run at once, and so may wait for each other."""
        layers, shape, mods = step.layers, step.shape, step.layers[0].mods
        groups, n_splits = device.compute_units, _n_splits(device, step)
        table = device.alloc(64 * len(layers), "addresses of the layers")
        constants: dict[str, object] = {
            **shape.constants(step.step),
            "WEIGHT": kernel_name(layers[0].qkv.dtype),
            "EPS": float(step.eps),
            "GATE": GATES[layers[0].gate],
            "GROUP_SIZE": shape.group_size,
            "N_SPLITS": n_splits,
            "SCALE": shape.scale,
            "HIDDEN": step.hidden,
            "FFN": step.ffn,
            "N_LAYERS": len(layers),
            "N_GROUPS": groups,
            "WARPS": WARPS,
        }
        if layers[0].qkv.dtype in QUANTIZED:
            constants["DOT"] = int(not layers[0].qkv.exact_activations)
        for i, layer in enumerate(layers):
            assert layer.attention_norm is not None and layer.mlp_norm is not None  # it is plain
            buffers = [
                layer.attention_norm,
                layer.qkv.parts[0].buffer,
                layer.k,
                layer.v,
                layer.output.parts[0].buffer,
                layer.mlp_norm,
                layer.gate_up.parts[0].buffer,
                layer.down.parts[0].buffer,
            ]
            bound: list[KernelArg] = [table, np.int32(i), *buffers]
            device.launch(
                self.file, "store_addresses", constants, bound, groups=(1,), local=(1,), prelude=mods.prelude
            ).enqueue()
        part_values = shape.group_size * (shape.head_dim + 2)
        flagged = {
            name: device.zeros(4 * n, f"{name} with flags")
            for name, n in (
                ("qkv", layers[0].qkv.rows),
                ("attended", layers[0].output.k),
                ("mid", step.hidden),
                ("ffn", step.ffn),
                ("x", step.hidden),
            )
        }
        args: list[KernelArg] = [
            table,
            step.x,
            *flagged.values(),
            step.rope,
            step.step.state,
            device.zeros(8 * shape.n_kv_heads * n_splits * part_values, "states of the splits"),
            device.zeros(12, "groups that have left, layers that were run, claimed units"),
            *mods.buffers,
        ]
        launch = device.launch(
            self.file,
            "persistent_layers",
            constants,
            args,
            groups=(groups,),
            local=(32 * WARPS,),
            prelude=mods.prelude,
            cost=_cost(step),
        )
        return BoundLayers([launch], flagged)


def _local_bytes(device: Device, step: DecodeLayers) -> int:
    columns = max(step.ffn, step.hidden, step.shape.n_q_heads * step.shape.head_dim)
    attend_own, attend_shared = decode_floats(step.shape)
    product_own, product_shared = local_floats(step.layers[0].qkv, columns)
    own = -(-max(attend_own, product_own) // 4) * 4
    residual = 16 * -(-step.hidden // (16 * device.compute_units))
    return 4 * (WARPS * own + attend_shared + product_shared + residual) + 64 * len(step.layers)


def _n_splits(device: Device, step: DecodeLayers) -> int:
    return min(step.n_splits, device.compute_units // step.shape.n_kv_heads)


def _cost(step: DecodeLayers) -> CostModel:
    costs = [step.shape.cost() for _ in step.layers]
    for layer in step.layers:
        for weight, outputs in (
            (layer.qkv, layer.qkv.rows),
            (layer.output, 2 * layer.output.rows),
            (layer.gate_up, layer.gate_up.rows // 2),
            (layer.down, 2 * layer.down.rows),
        ):
            costs.append(linear_cost(weight.nbytes, weight.rows, weight.k, outputs))
    return fused_cost(*costs)
