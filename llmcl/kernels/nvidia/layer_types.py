"""Storage types in a persistent launch's weights, and how the kernel's products map to storage types."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from llmcl.kernels.common.dtype import QUANTIZED, kernel_name
from llmcl.kernels.common.persistent import DecodeLayer, DecodeLayers
from llmcl.kernels.common.weight import WeightPart
from llmcl.kernels.nvidia.linear import TYPES

# Bits in a layer's word, in the order used by nvidia/layer_types.cl.
PRODUCTS = ("qkv", "qkv_rest", "output", "gate_up", "down")
FIRST_UNIT_AT = 8


@dataclass(frozen=True)
class LayerTypes:
    """Storage types in a persistent launch."""

    main: str  # most weights
    other: str | None = None  # second quantised type, only if main is quantised
    experts: str | None = None  # quantised type for experts, only if main has 16 bits


def parts_of(layer: DecodeLayer) -> dict[str, WeightPart]:
    """Returns the layer's weight parts by name, for the names in PRODUCTS that exist in the layer."""
    weights = {"qkv": layer.qkv, "output": layer.output, "gate_up": layer.gate_up, "down": layer.down}
    parts = {name: weight.parts[0] for name, weight in weights.items()}
    return {**parts, "qkv_rest": layer.qkv.parts[1]} if len(layer.qkv.parts) > 1 else parts


def types_of(step: DecodeLayers) -> LayerTypes | str:
    """Returns the storage types, or the reason why a single launch can't handle the weights."""
    layers = step.layers
    qkv_parts = max(len(layer.qkv.parts) for layer in layers)
    if qkv_parts > 2 or any(len(w.parts) > 1 for layer in layers for w in layer.products if w is not layer.qkv):
        return "a weight is in several buffers"
    sizes: Counter[str] = Counter()
    experts: Counter[str] = Counter()
    for layer in layers:
        gate = layer.attention_gate
        parts = {**parts_of(layer), **({} if gate is None else {"attention_gate": gate.parts[0]})}
        if len(layer.qkv.parts) == 2 and layer.qkv.dtype != "mixed":
            return "a weight is in several buffers"
        for name, part in parts.items():
            (experts if layer.n_experts and name in ("gate_up", "down") else sizes)[part.dtype] += part.buffer.nbytes
    types = _quantized(sizes + experts) if any(dtype in QUANTIZED for dtype in sizes) else _of_16_bits(sizes, experts)
    if isinstance(types, str):
        return types
    for layer in layers:
        router = layer.router
        if router is not None and router.dtype != "float32" and (router.dtype != types.main or types.main in QUANTIZED):
            return f"its router is float32, or of 16 bits as its other weights, this one is {router.dtype}"
        if types.other is not None and (layer.mixer is not None or layer.attention_gate is not None):
            both = f"{types.main}, {types.other}"
            return f"beside recurrent layers or attention with a gate weights are of one type, not {both}"
    return types


def _quantized(sizes: Counter[str]) -> LayerTypes | str:
    dtypes = [dtype for dtype, _ in sizes.most_common()]
    if unknown := [dtype for dtype in dtypes if dtype in QUANTIZED and dtype not in TYPES]:
        return f"weights in {', '.join(sorted(unknown))} have portable kernels"
    if len(dtypes) > 2 or any(dtype not in QUANTIZED for dtype in dtypes):
        return f"its weights are stored in {', '.join(sorted(dtypes))}; a launch has two quantised types at most"
    return LayerTypes(*dtypes)


def _of_16_bits(sizes: Counter[str], experts: Counter[str]) -> LayerTypes | str:
    if len(sizes) > 1 or len(experts) > 1:
        return "the layers' weights differ in dtype"
    [main], expert = sizes, next(iter(experts), None)
    if expert is None or expert == main:
        return LayerTypes(main)
    if expert not in TYPES:
        return f"its experts are {main} as its other weights, or quantised beside 16 bits, these are {expert}"
    return LayerTypes(main, experts=expert)


def type_constants(step: DecodeLayers, types: LayerTypes, words: list[str]) -> dict[str, object]:
    constants: dict[str, object] = {"WEIGHT": kernel_name(types.main)}
    if types.other is None:
        return constants
    products = 0
    for layer in step.layers:
        products |= types_word(layer, types)
    positions = {f"AT_{name.upper()}": words.index(name) for name in ("types", "qkv_rest") if name in words}
    names = {"MAIN_WEIGHT": kernel_name(types.main), "OTHER_WEIGHT": kernel_name(types.other)}
    return {**constants, **names, **positions, "OTHER_PRODUCTS": products & (1 << FIRST_UNIT_AT) - 1}


def types_word(layer: DecodeLayer, types: LayerTypes) -> int:
    """Returns the layer's word at AT_TYPES (nvidia/layer_types.cl)."""
    parts = parts_of(layer)
    bits = sum(1 << PRODUCTS.index(name) for name, part in parts.items() if part.dtype == types.other)
    return bits | parts["qkv"].n_tiles << FIRST_UNIT_AT
