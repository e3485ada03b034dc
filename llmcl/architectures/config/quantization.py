"""Reads quantization_config of config.json: how a folder's weights are packed, or why llmcl cannot read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from llmcl.architectures.config.reader import Reader, unsupported
from llmcl.errors import shown

_MAX_BLOCK = 1 << 20
_REMEDY = "use the original bfloat16 or float16 checkpoint, or a GGUF file"
_FORMATS = (
    *("dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
    *("nvfp4-pack-quantized", "mixed-precision"),
)


@dataclass(frozen=True)
class Quantization:
    """How weights are packed, as far as their tensors do not say it."""

    method: str
    block: tuple[int, int] | None = None  # rows and columns under one scale; None: follows from the shapes
    zero_offset: int = 0  # added to stored zero points
    has_zeros: bool = False  # every weight has zero points
    has_groups: bool = False  # every weight lists its columns' groups


def quantization_from_hf(config: Mapping[str, Any], of_family: tuple[str, ...] = ()) -> Quantization | None:
    """Returns how the weights beside a config.json are packed, or None if it says nothing.

    of_family: the methods of a family that has its own (`Family.quant_methods`).

    Raises UnsupportedModelError for an unsupported method, and CheckpointError for a senseless value.
    """
    read = Reader(config, "config.json")
    if (table := read.table("quantization_config")) is None and (text := read.table("text_config")) is not None:
        table = text.table("quantization_config")
    if table is None:
        if isinstance(config.get("quantization"), Mapping):  # where MLX stores its settings
            _refuse_nameless(Reader(config["quantization"], "config.json: quantization"))
        return None
    if table.get("quant_method") is None:
        _refuse_nameless(table)
    method = table.text("quant_method")
    if method not in (of_family or _METHODS):
        unsupported(
            f"safetensors quantised by {shown(method)} (quantization_config)",
            f"it supports {', '.join(of_family or _METHODS)}; {_REMEDY}",
        )
    return Quantization(method) if of_family else _METHODS[method](table)


def _refuse_nameless(table: Reader) -> NoReturn:
    if table.get("bits") is not None and table.get("group_size") is not None:
        unsupported("weights packed by MLX (quantization in config.json)", _REMEDY)
    unsupported(f"safetensors quantised by {shown('unknown')} (quantization_config)", _REMEDY)


def _refuse(table: Reader, key: str, value: object) -> NoReturn:
    method = table.get("quant_method")
    unsupported(f"{key} {shown(value)} of quant_method {shown(method)} (quantization_config)", _REMEDY)


def _check_one_of(table: Reader, key: str, *known: object) -> None:
    """Checks a value that may be missing."""
    value = table.get(key, known[0])
    if value not in known:
        _refuse(table, key, value)


def _block(table: Reader, key: str) -> tuple[int, int] | None:
    value = table.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < _MAX_BLOCK for n in value):
        table.fail(key, value, "two whole numbers, rows and columns")
    return value[0], value[1]


def _fp8(table: Reader) -> Quantization:
    _check_one_of(table, "fmt", "e4m3", "float8_e4m3fn")
    return Quantization("fp8", _block(table, "weight_block_size"))


def _plain(table: Reader) -> Quantization:
    return Quantization(table.text("quant_method"))


def _modelopt(table: Reader) -> Quantization:
    _check_one_of(table, "quant_algo", "FP8", "NVFP4")
    return _plain(table)


def _compressed(table: Reader) -> Quantization:
    _check_one_of(table, "format", *_FORMATS)
    if (sparsity := table.table("sparsity_config")) is not None:
        _check_one_of(sparsity, "format", "dense")
    if table.get("transform_config", {}):
        unsupported("weights rotated before quantising (transform_config of quantization_config)", _REMEDY)
    block, integers = None, list[Reader]()
    groups = table.table("config_groups") or Reader({}, "")
    for name in groups.values:
        if (group := groups.table(name)) is None:
            continue
        _check_one_of(group, "format", *_FORMATS)
        if (weights := group.table("weights")) is None:
            continue
        is_float = weights.get("type", "int") == "float"
        if weights.get("num_bits") not in (4, 8):
            _refuse(table, "num_bits", weights.get("num_bits"))
        if is_float:
            block = _block(weights, "block_structure")
        else:
            integers.append(weights)
    return Quantization(
        "compressed-tensors",
        block,
        has_zeros=bool(integers) and not any(weights.flag("symmetric", default=True) for weights in integers),
        has_groups=bool(integers) and all(weights.get("actorder") == "group" for weights in integers),
    )


def _awq(table: Reader) -> Quantization:
    if (bits := table.get("bits", table.get("w_bit", 4))) != 4:
        _refuse(table, "bits", bits)
    _check_one_of(table, "zero_point", True)
    if str(version := table.get("version", "gemm")).lower() != "gemm":
        _refuse(table, "version", version)
    return Quantization("awq")


def _gptq(table: Reader) -> Quantization:
    _check_one_of(table, "bits", 4, 8)
    _check_one_of(table, "checkpoint_format", "gptq", "gptq_v2")
    # The first version of the format stores zero points less one.
    is_first = table.get("checkpoint_format", "gptq") == "gptq"
    return Quantization("gptq", zero_offset=int(is_first), has_groups=table.flag("desc_act", default=False))


_METHODS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _plain,
    "modelopt": _modelopt,
    "fbgemm_fp8": _plain,
}
METHODS = tuple(_METHODS)
