"""persistent_layers: a persistent kernel for all layers in a decode step, with a work-group per compute unit."""

from __future__ import annotations

import numpy as np

from llmcl.kernels.common.cost import fused_cost, linear_cost, per_token
from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS, kernel_name
from llmcl.kernels.common.linear import EXPERT_GATES
from llmcl.kernels.common.mods import Mods, one_of
from llmcl.kernels.common.persistent import BoundLayers, DecodeLayer, DecodeLayers, PersistentLayers
from llmcl.kernels.common.step_state import RECURRENT
from llmcl.kernels.nvidia.attention import NvidiaAttentionDecode, decode_floats
from llmcl.kernels.nvidia.layer_types import LayerTypes, parts_of, type_constants, types_of, types_word
from llmcl.kernels.nvidia.linear import (
    GROUP_WARPS,
    NvidiaLinearDecode,
    NvidiaLinearDecodeQuantized,
    local_floats,
    stream_fours,
    supports_ptx,
)
from llmcl.runtime.device import Buffer, CostModel, Device, KernelArg

WARPS = GROUP_WARPS
# Local memory a kernel may declare, by PTX architecture. OpenCL reports 48 KB, the limit for kernel arguments.
LOCAL_BYTES = {80: 166912, 87: 166912, 90: 232448, 100: 232448}
MIN_LOCAL_BYTES = 101376


# Words per layer, in table order; AT_NAME in the kernel. VECTORS: optional float32 vectors.
WEIGHTS = ("qkv", "output", "gate_up", "down", "attention_gate", "router")
CACHE = ("k", "v")
VECTORS = (
    *("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"),
    *("bias", "head_norms", "q_norm", "k_norm", "output_bias", "gate_up_bias", "down_bias", "router_bias", "sinks"),
)
SPLIT_K = 2  # for 16-bit weights, see notes/h200.md
MAX_RULES = 4  # kinds of attention rules per launch
STATES = ("conv", "scalars", "gated_norm", "conv_states", "matrix_states")  # buffers in recurrent layers
OF_ATTENTION = {
    "bias",
    "output_bias",
    "head_norms",
    "q_norm",
    "k_norm",
    "sinks",
}  # vectors missing in recurrent layers
WORDS = (*WEIGHTS, *CACHE, *VECTORS, *STATES, "rope", "rules", "mixer")
OF_TYPES = ("types", "qkv_rest")  # present if a launch has two weight types: see nvidia/layer_types.cl
STATE_ROWS = 32  # matrix-state rows per work-item


class NvidiaPersistentLayers(PersistentLayers):
    name, file = "nvidia", "nvidia/persistent_layers.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def unsupported_reason(self, device: Device, step: DecodeLayers) -> str | None:
        layers, shape, wrong = step.layers, step.shape, device.cache.excluded
        types = types_of(step)
        if isinstance(types, str):
            return types
        dtype = types.main
        product = NvidiaLinearDecodeQuantized() if dtype in QUANTIZED else NvidiaLinearDecode()
        attention = NvidiaAttentionDecode()
        if not attention.supports(shape.kv_dtype, shape.head_dim):
            return f"its attention has no heads of {shape.head_dim}, or no cache in {shape.kv_dtype}"
        fits = product.supports(dtype, step.hidden)
        beside = () if types.other is None else (product.key(types.other),)
        if not fits or {product.key(dtype), attention.key(shape.kv_dtype), *beside} & set(wrong):
            return "the device's kernels for this dtype are not NVIDIA's"
        rows = (row for layer in layers for row in (layer.qkv.rows, layer.first_rows))
        if any(size % TILE_ROWS for size in (step.hidden, step.ffn, *rows)):
            return f"a size of the model is no multiple of {TILE_ROWS}"
        first = layers[0]
        if any(layer.gate != first.gate or _vectors(layer) != _vectors(first) for layer in layers):
            return "the layers differ in their norms, biases or activations"
        for alike in (step.attention_layers, step.recurrent_layers):
            if len({(frozenset(layer.vectors), layer.first_rows) for layer in alike}) > 1:
                return "the layers differ in their norms, biases or gates"
        if any(layer.mlp_sizes != first.mlp_sizes for layer in layers):
            return "the layers differ in their MLPs or experts"
        experts = [weight for layer in layers for weight in layer.products if weight.n_experts > 1]
        for weight in experts:
            if weight.dtype in QUANTIZED and weight.k % QUANTIZED[weight.dtype].block:
                return f"rows of experts are no whole blocks of {weight.dtype}"
        if ("attention_post_norm" in first.vectors) != ("mlp_post_norm" in first.vectors):
            return "of attention and MLP one alone has a norm after it"
        if len(_rules(step)) > MAX_RULES:
            return f"the layers have more than {MAX_RULES} kinds of attention rules"
        if device.compute_units < shape.n_kv_heads:
            return "the device has fewer compute units than the model KV heads"
        if step.recurrent_layers and (why := _why_not_mixed(device, step)) is not None:
            return why
        needed, limit = _local_bytes(device, step, 1), _local_limit(device)
        if needed > limit:
            return f"it needs {needed:,} bytes of local memory, the device has {limit:,}"
        return None

    def bind(self, device: Device, step: DecodeLayers) -> BoundLayers:
        """Launches one work-group per compute unit. All groups run at once, so groups may wait for each other."""
        layers, shape, rules, words, types = step.layers, step.shape, _rules(step), _words(step), _types(step)
        groups, n_splits, split_k = device.compute_units, _n_splits(device, step), _split_k(device, step)
        constants: dict[str, object] = {
            **shape.constants(step.step),
            **type_constants(step, types, words),
            "EPS": float(step.eps),
            "NORM_EPS": float(step.norm_eps),
            "GATE": EXPERT_GATES[layers[0].gate],
            "GROUP_SIZE": shape.group_size,
            "N_SPLITS": n_splits,
            "SCALE": shape.scale,
            "HIDDEN": step.hidden,
            "FFN": step.ffn,
            "N_LAYERS": len(layers),
            "N_GROUPS": groups,
            "N_RULES": len(rules),
            "SPLIT_K": split_k,
            "LAYER_WORDS": len(words),
            "WARPS": WARPS,
            **_expert_constants(layers[0], types),
            **_mixer_constants(step),
            **{f"AT_{name.upper()}": words.index(name) if name in words else -1 for name in WORDS},
        }
        if (types.experts or types.main) in QUANTIZED:
            constants["DOT"] = int(not layers[0].gate_up.exact_activations)
        attention, recurrent = step.attention_layers[0], step.recurrent_layers
        if "sinks" in attention.vectors:
            constants["HAS_SINKS"] = 1
        part_values = shape.group_size * (shape.head_dim + 2)
        flagged = {
            name: device.zeros(4 * n, f"{name} with flags")
            for name, n in (
                ("qkv", attention.first_rows),
                ("attended", attention.output.k),
                ("mid", split_k * step.hidden),
                ("expert_rows" if layers[0].n_experts else "ffn", step.ffn),
                ("x", split_k * step.hidden),
                ("router_logits", layers[0].n_experts),
                ("mixer_in", recurrent[0].qkv.rows if recurrent else 0),
            )
            if n
        }
        mixer_in = [flagged["mixer_in"]] if recurrent else []
        assert attention.rope is not None
        args: list[KernelArg] = [
            _address_table(device, step),
            step.x,
            *(buffer for name, buffer in flagged.items() if name != "mixer_in"),
            *([] if layers[0].n_experts else [step.x]),  # placeholder for logits
            attention.rope,
            step.step.state,
            device.zeros(8 * shape.n_kv_heads * n_splits * part_values, "states of the splits"),
            device.zeros(16, "groups that have left, layers that were run, claimed units, recurrent layers of those"),
            *mixer_in,
            *(buffer for mods in rules for buffer in mods.buffers),
        ]
        launch = device.launch(
            self.file,
            "persistent_layers",
            constants,
            args,
            groups=(groups,),
            local=(32 * WARPS,),
            prelude=rules[0].prelude if len(rules) == 1 else one_of(rules),
            cost=_cost(step),
        )
        return BoundLayers([launch], flagged)


def _expert_constants(layer: DecodeLayer, types: LayerTypes) -> dict[str, object]:
    if not layer.n_experts:
        return {"N_EXPERTS": 0}
    constants: dict[str, object] = {"TOP_K": layer.gate_up.top_k, "RENORMALIZE": layer.renormalize}
    if layer.router is not None and layer.router.dtype == "float32":
        constants["ROUTER_IS_FLOAT"] = 1
    if types.experts is not None:
        constants["EXPERT_WEIGHT"] = kernel_name(types.experts)
    return {"N_EXPERTS": layer.n_experts, **constants}


def _types(step: DecodeLayers) -> LayerTypes:
    """Returns the storage types. The layers must have passed `unsupported_reason`."""
    types = types_of(step)
    assert not isinstance(types, str), types
    return types


def _vectors(layer: DecodeLayer) -> set[str]:
    """Returns the vector names that all layers must agree on."""
    return set(layer.vectors) - OF_ATTENTION


def _why_not_mixed(device: Device, step: DecodeLayers) -> str | None:
    """Returns the reason why attention and recurrent layers can't share a launch, or None."""
    mixers = [layer.mixer for layer in step.recurrent_layers if layer.mixer is not None]
    mixer, units = mixers[0], device.compute_units
    if any((other.kind, other.sizes) != (mixer.kind, mixer.sizes) for other in mixers):
        return "its recurrent layers differ in their sizes"
    if len({layer.output.k for layer in step.layers}) > 1:
        return "its attention leaves other rows than its recurrent layers"
    # A group must receive x in every layer or in none, and a receiving group sends rows in every layer.
    busy = {min(units, max(layer.first_rows, step.ffn) // TILE_ROWS) for layer in step.layers}
    if len(busy) > 1:
        return "its attention has work for another number of work-groups than its recurrent layers"
    if mixer.kind != "delta_net":
        return None
    n_v, d_k, d_v = (int(str(mixer.sizes[name])) for name in ("N_V", "D_K", "D_V"))
    items = 32 * WARPS
    fits = d_k % 32 == 0 and d_v % 32 == 0 and items % d_v == 0 and 2 * d_k + d_v <= items
    if not fits or d_k % (items // d_v) or d_k * d_v > STATE_ROWS * items:
        return f"its delta net has heads of {d_k} for keys and {d_v} for values; 32, 64 and 128 each run so"
    if n_v > min(units, step.ffn // TILE_ROWS):
        return f"its delta net has {n_v} heads, more than there are work-groups for them"
    return None


def _mixer_constants(step: DecodeLayers) -> dict[str, object]:
    if not step.recurrent_layers:
        return {}
    layer = step.recurrent_layers[0]
    assert layer.mixer is not None
    constants = {"MIXER_ROWS": layer.qkv.rows, "N_RECURRENT": len(step.recurrent_layers), layer.mixer.kind.upper(): 1}
    constants["STATE_RECURRENT"] = RECURRENT
    return {**constants, **layer.mixer.sizes}


def _rules(step: DecodeLayers) -> list[Mods]:
    """Returns the distinct attention rules in the layers."""
    return list({id(layer.mods): layer.mods for layer in step.attention_layers if layer.mods is not None}.values())


def _words(step: DecodeLayers) -> list[str]:
    """Returns the names of the words that each layer has in the address table."""
    ropes = {id(layer.rope) for layer in step.attention_layers}
    had = {name for layer in step.layers for name in _buffers(layer) if name != "rope" or len(ropes) > 1}
    had |= {"rules"} if len(_rules(step)) > 1 else set()
    had |= {"mixer"} if step.recurrent_layers else set()
    had |= {"types"} if _types(step).other is not None else set()
    return [name for name in (*WORDS, *OF_TYPES) if name in had]


def _buffers(layer: DecodeLayer) -> dict[str, Buffer]:
    """Returns the buffers whose addresses go into the table."""
    weights = {name: getattr(layer, name) for name in WEIGHTS}
    buffers = {name: weight.parts[0].buffer for name, weight in weights.items() if weight is not None}
    buffers |= {name: part.buffer for name, part in parts_of(layer).items()}
    of_attention = {name: getattr(layer, name) for name in (*CACHE, "rope")}
    buffers |= {name: buffer for name, buffer in of_attention.items() if buffer is not None}
    return {**buffers, **layer.vectors, **(layer.mixer.buffers if layer.mixer is not None else {})}


def _address_table(device: Device, step: DecodeLayers) -> Buffer:
    """Builds the table, ulong [layers, words]. A kernel fills in addresses because the host does not know them."""
    words, rules = _words(step), [id(mods) for mods in _rules(step)]
    numbers = np.zeros((len(step.layers), len(words)), np.uint64)
    if "rules" in words:
        of_layers = [0 if layer.mixer is not None else rules.index(id(layer.mods)) for layer in step.layers]
        numbers[:, words.index("rules")] = of_layers
    if "types" in words:
        types = _types(step)
        numbers[:, words.index("types")] = [types_word(layer, types) for layer in step.layers]
    if "mixer" in words:
        recurrent = np.array([layer.mixer is not None for layer in step.layers])
        numbers[:, words.index("mixer")] = (
            2 * np.where(recurrent, recurrent.cumsum(), (~recurrent).cumsum()) + recurrent
        )
    table = device.upload(numbers, "addresses of the layers")
    for i, layer in enumerate(step.layers):
        of_layer = _buffers(layer)
        for word, name in enumerate(words):
            if name in of_layer:
                args: list[KernelArg] = [table, np.int32(i * len(words) + word), of_layer[name]]
                launch = device.launch("common/store_address.cl", "store_address", {}, args, groups=(1,), local=(1,))
                launch.share_kernel()
                launch.enqueue()
    return table


def _local_limit(device: Device) -> int:
    return LOCAL_BYTES.get(device.entry.fact("ptx_arch"), MIN_LOCAL_BYTES)


def _local_bytes(device: Device, step: DecodeLayers, split_k: int) -> int:
    normed = "attention_post_norm" in step.layers[0].vectors
    columns = max(step.ffn // split_k, step.hidden, step.shape.n_q_heads * step.shape.head_dim // split_k)
    attend_own, attend_shared = decode_floats(step.shape)
    types, exact = _types(step), step.layers[0].qkv.exact_activations
    product_own, product_shared = local_floats(types.main, columns, exact_activations=exact)
    per_warp = max(
        attend_own // (2 if step.shape.head_dim > 128 else 1), product_own
    )  # for wide heads, half the warps attend
    residual = 16 * -(-step.hidden // (16 * device.compute_units))
    if split_k > 1 or normed:
        kept = 1 + normed  # x and norm weights
        residual = kept * 32 * WARPS * 4 * stream_fours(types.main, step.hidden) + 2 * WARPS
    residual += 2 * step.layers[0].n_experts  # includes data about the chosen experts
    if types.experts is not None:
        expert_own, expert_shared = local_floats(types.experts, columns, exact_activations=exact)
        per_warp, product_shared = max(per_warp, expert_own), product_shared + max(expert_shared, step.hidden)
    if step.recurrent_layers:
        mixer = step.recurrent_layers[0].mixer  # channels in a head, and the inputs the convolution keeps
        residual += 32 * WARPS * int(str(mixer.sizes["LENGTH"])) + 4 * WARPS if mixer is not None else 0
    floats = WARPS * (per_warp + 4) + attend_shared + product_shared + residual + 34 * WARPS
    return 4 * floats + 8 * len(_words(step)) * len(step.layers) + 64 * MAX_RULES


def _split_k(device: Device, step: DecodeLayers) -> int:
    """Returns the number of work-groups that share a product's columns. Splitting helps if the product's rows match x
    and its tiles are few compared with the work-groups.
    """
    columns = [step.ffn, step.layers[0].output.k]
    down = step.layers[0].down
    if down.dtype in QUANTIZED and down.top_k % SPLIT_K:
        return 1
    divides = device.compute_units % SPLIT_K == 0 and all(k % (SPLIT_K * TILE_ROWS) == 0 for k in columns)
    if not divides or _types(step).main in QUANTIZED:
        return 1
    return SPLIT_K if _local_bytes(device, step, SPLIT_K) <= _local_limit(device) else 1


def _n_splits(device: Device, step: DecodeLayers) -> int:
    return min(step.n_splits, device.compute_units // step.shape.n_kv_heads)


def _cost(step: DecodeLayers) -> CostModel:
    costs = [step.shape.cost() for _ in step.attention_layers]
    costs += [per_token(layer.mixer.token_bytes) for layer in step.recurrent_layers if layer.mixer is not None]
    for layer in step.layers:
        for weight, outputs_each in (
            *((weight, 1) for weight in (layer.qkv, layer.attention_gate, layer.router) if weight is not None),
            (layer.output, 2),
            (layer.gate_up, 0.5),
            (layer.down, 2),
        ):
            rows = weight.rows * weight.top_k // weight.n_experts
            costs.append(linear_cost(weight.token_bytes, rows, weight.k, int(rows * outputs_each)))
    return fused_cost(*costs)
