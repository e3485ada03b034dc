"""Finds the weights of a folder that several tensors make up, by the names beside each other.

    weight (F8_E4M3, I8)   weight_scale, weight_scale_inv, SCB                      FP8, compressed-tensors, int8
    weight (U8)            weight_scale, weight_scale_2                             NVFP4 of ModelOpt
    weight_packed          weight_scale, weight_zero_point, weight_shape, ...       compressed-tensors
    qweight                qzeros, scales, g_idx                                    AWQ, GPTQ
    weight (U8)            weight.absmax, weight.quant_map, weight.quant_state...   bitsandbytes, 4 bits

docs/design/scaled_weights.md describes the formats. Scales of activations and of a KV cache are left out, because
llmcl rounds neither to 8-bit floats.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import numpy as np

from llmcl.architectures.config.quantization import Quantization
from llmcl.checkpoint.files import parse_json, read_view
from llmcl.checkpoint.formats import FLOAT_FORMATS
from llmcl.checkpoint.low_bits import FP4
from llmcl.checkpoint.scaled import Columns, RowSource, by_column, e4m3, fields, float32_of, scaled_weight
from llmcl.checkpoint.tensors import StoredTensor, TensorInfo
from llmcl.errors import CheckpointError, UnsupportedModelError, shown

_log = logging.getLogger(__name__)

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight neighbouring rows
_UNUSED = (
    *(".input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".prob_output_scale", ".weight_format"),
)
_ITEMS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<u4", "I64": "<i8", "U8": "u1", "I8": "i1"}
_ITEMS |= {"F8_E4M3": "u1", "F8_E8M0": "u1"}


def with_scales(
    stored: Mapping[str, StoredTensor], quantization: Quantization | None, dtype: str
) -> dict[str, StoredTensor]:
    """Returns a folder's tensors, with each packed weight as one tensor.

    quantization: what config.json says. dtype: for weights that no exact format holds.

    Raises CheckpointError for parts that do not fit together, and UnsupportedModelError for an unknown packing.
    """
    float_format = next(format for format, name in FLOAT_FORMATS.items() if name == dtype)
    is_quantized = quantization is not None
    quantization = quantization or Quantization("none")
    tensors = {**stored}
    for name in stored:
        prefix, _, kind = name.rpartition(".")
        if kind not in ("weight", "weight_packed", "qweight"):
            continue
        weight = _Packed(prefix, tensors, quantization, float_format).read(kind)
        if weight is not None:
            tensors[f"{prefix}.weight"] = weight
    if is_quantized or len(tensors) < len(stored):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_UNUSED)}
    return tensors


def warn_if_expanded(infos: Iterable[TensorInfo], stored: Mapping[str, StoredTensor]) -> None:
    """Says what expanded weights take. infos: the model's tensors. stored: the folder's."""
    expanded = [info for info in infos if stored[info.name].view is not None and info.format in FLOAT_FORMATS]
    if expanded:
        _log.warning(
            "the packed weights are expanded to %s, because no format of the device holds them exactly: they take "
            "%.3g GB there; --quantize makes them smaller",
            FLOAT_FORMATS[expanded[0].format],
            sum(info.n_bytes for info in expanded) / 1e9,
        )


class _Packed:
    """Reads one module's weight. Tensors that are read are removed from `tensors`."""

    def __init__(
        self, prefix: str, tensors: dict[str, StoredTensor], quantization: Quantization, float_format: str
    ) -> None:
        self.prefix, self.tensors = prefix, tensors
        self.quantization, self.float_format = quantization, float_format

    def read(self, kind: str) -> StoredTensor | None:
        """Returns the weight, or None if it is an ordinary tensor."""
        if kind == "qweight":
            is_awq = self.quantization.method == "awq"
            if not is_awq and self.quantization.method != "gptq":
                raise UnsupportedModelError(
                    f"tensor {shown(self.prefix + '.qweight')} is packed, and config.json does not say how "
                    "(quantization_config is missing). Add it, or use another version of the model."
                )
            return self._awq() if is_awq else self._gptq()
        if kind == "weight_packed":
            return self._fp4("weight_packed") if self._has("weight_global_scale") else self._packed_integers()
        format = self.tensors[f"{self.prefix}.weight"].format
        if format == "U8" and self._has("weight.absmax"):
            return self._bitsandbytes()
        if format == "U8" and self._has("weight_scale_2"):
            return self._fp4("weight")
        if format == "I8" and self._has("SCB"):
            return self._numbers("SCB", 1 / 127)
        scale = next((name for name in ("weight_scale_inv", "weight_scale") if self._has(name)), None)
        return None if scale is None or format not in ("F8_E4M3", "I8") else self._numbers(scale)

    def _has(self, suffix: str) -> bool:
        return f"{self.prefix}.{suffix}" in self.tensors

    def _take(self, suffix: str, formats: tuple[str, ...], n_dimensions: int) -> np.ndarray:
        """Removes a tensor and returns its items, as they are mapped. Floats of 8 and of 16 bits are integers."""
        name = f"{self.prefix}.{suffix}"
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"tensor {shown(name)} is missing: it is a part of a weight. Fetch the model again.")
        if tensor.format not in formats or len(tensor.shape) != n_dimensions or 0 in tensor.shape:
            sizes = "size" if n_dimensions == 1 else "sizes"
            raise UnsupportedModelError(
                f"tensor {shown(name)} is {tensor.format} {shown(list(tensor.shape))}; llmcl reads such a part of a "
                f"weight as {' or '.join(formats)} of {n_dimensions} {sizes}. Use another version of the model."
            )
        return tensor.data.view(_ITEMS[tensor.format]).reshape(tensor.shape)

    def _wrong(self, suffix: str, actual: object, expected: object) -> CheckpointError:
        return CheckpointError(
            f"tensor {shown(f'{self.prefix}.{suffix}')} has {shown(actual)}, expected {shown(expected)} by the tensors "
            "beside it. The checkpoint is damaged; fetch it again."
        )

    def _check_shape(self, suffix: str, items: np.ndarray, expected: tuple[int, ...]) -> None:
        if items.shape != expected:
            raise self._wrong(suffix, list(items.shape), list(expected))

    def _scales(self, suffix: str, shape: tuple[int, int], factor: float = 1.0) -> tuple[RowSource, int]:
        """Takes a grid of scales. Returns its rows, and the columns under one scale."""
        tensor = self.tensors.get(f"{self.prefix}.{suffix}")
        n_dimensions = len(tensor.shape) if tensor is not None and len(tensor.shape) < 3 else 2
        grid = self._take(suffix, ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0"), n_dimensions)
        assert tensor is not None
        format = tensor.format
        grid = grid.reshape(1, 1) if grid.size == 1 else grid.reshape(len(grid), -1)
        blocks = self.quantization.block or (0, 0)
        rows, columns = (
            self._block(suffix, *sizes) for sizes in zip(shape, grid.shape, blocks, ("rows", "columns"), strict=True)
        )

        def scales(start: int, stop: int) -> np.ndarray:
            first = start // rows
            values = float32_of(format, read_view(grid[first : -(-stop // rows)])) * np.float32(factor)
            spread: np.ndarray = values[np.arange(start, stop) // rows - first]
            return spread

        return scales, columns

    def _block(self, suffix: str, size: int, n_scales: int, block: int, what: str) -> int:
        """Returns the rows or columns under one scale."""
        if block and -(-size // block) == n_scales:
            return block
        if size % n_scales:
            raise self._wrong(suffix, f"{n_scales} scales of {what}", f"a divisor of {size}")
        return size // n_scales

    def _numbers(self, scale: str, factor: float = 1.0) -> StoredTensor:
        """Reads a weight of FP8 numbers or int8 integers with scales and zero points beside it."""
        is_float = self.tensors[f"{self.prefix}.weight"].format == "F8_E4M3"
        codes = self._take("weight", ("F8_E4M3", "I8"), 2)
        shape = codes.shape[0], codes.shape[1]
        scales, columns = self._scales(scale, shape, factor)
        bounds: tuple[int, int] | None = None if is_float else (-128, 127)
        zeros = None
        if self._has("weight_zero_point") or (self.quantization.has_zeros and not is_float):
            zeros = self._take("weight_zero_point", ("I8", "F8_E4M3"), 2)
            self._check_shape("weight_zero_point", zeros, (shape[0], shape[1] // columns))
            zeros = zeros if read_view(zeros).any() else None
            if zeros is not None and is_float:
                raise self._wrong("weight_zero_point", "numbers that are not 0", 0)
            bounds = bounds if zeros is None else None

        def numbers(start: int, stop: int) -> np.ndarray:
            part = read_view(codes[start:stop])
            if is_float:
                part = e4m3()[part]
            if zeros is not None:
                part = part - by_column(read_view(zeros[start:stop]).astype(np.int16), columns, shape[1])
            return part

        return scaled_weight(shape, numbers, scales, columns, self.float_format, bounds)

    def _fp4(self, name: str) -> StoredTensor:
        """Reads NVFP4: two numbers in a byte, FP8 scales of 16 columns, and a scale of the whole weight."""
        packed = self._take(name, ("U8",), 2)
        shape = packed.shape[0], 2 * packed.shape[1]
        suffix = "weight_scale_2" if name == "weight" else "weight_global_scale"
        total = self.tensors.get(f"{self.prefix}.{suffix}")
        scalar = self._take(suffix, ("F32",), 0 if total is not None and not total.shape else 1)
        if scalar.size != 1:
            raise self._wrong(suffix, f"{scalar.size} numbers", 1)
        factor = np.float32(read_view(scalar).reshape(-1)[0])
        if not np.isfinite(factor) or factor <= 0:
            raise self._wrong(suffix, float(factor), "a positive number")
        # compressed-tensors stores the reciprocal.
        block_scales, columns = self._scales("weight_scale", shape)

        def scales(start: int, stop: int) -> np.ndarray:
            values = block_scales(start, stop)
            return values * factor if name == "weight" else values / factor

        def numbers(start: int, stop: int) -> np.ndarray:
            part = read_view(packed[start:stop])
            values: np.ndarray = FP4[np.stack([part & 15, part >> 4], axis=-1).reshape(len(part), -1)]
            return values

        return scaled_weight(shape, numbers, scales, columns, self.float_format)

    def _packed_integers(self) -> StoredTensor:
        """Reads pack-quantized integers of compressed-tensors: neighbouring columns in a word, stored as unsigned."""
        words = self._take("weight_packed", ("I32",), 2)
        sizes = [int(size) for size in read_view(self._take("weight_shape", ("I64", "I32"), 1))]
        n, n_words = words.shape
        k = sizes[-1]
        bits = next((bits for bits in (4, 8) if sizes == [n, k] and -(-k * bits // 32) == n_words), None)
        if bits is None:
            raise UnsupportedModelError(
                f"tensor {shown(f'{self.prefix}.weight_packed')} has {n} rows of {n_words} words for the shape "
                f"{shown(sizes)}; llmcl reads integers of 4 and 8 bits. Use another version of the model."
            )
        scales, columns = self._scales("weight_scale", (n, k))
        zeros: RowSource | None = None
        if self.quantization.has_zeros or self._has("weight_zero_point"):
            zeros = self._packed_zeros(bits, n, k // columns)
        groups: Columns = columns
        if self.quantization.has_groups or self._has("weight_g_idx"):
            groups = self._groups("weight_g_idx", columns, k)

        def codes(start: int, stop: int) -> np.ndarray:
            return fields(read_view(words[start:stop]), bits).reshape(stop - start, -1)[:, :k]

        return self._integers((n, k), codes, zeros, scales, groups, bits)

    def _packed_zeros(self, bits: int, n: int, n_groups: int) -> RowSource:
        """Takes zero points: int8, or unsigned with neighbouring rows in a word."""
        name, per_word = "weight_zero_point", 32 // bits
        if self._has(name) and self.tensors[f"{self.prefix}.{name}"].format == "I8":
            plain = self._take(name, ("I8",), 2)
            self._check_shape(name, plain, (n, n_groups))
            return lambda start, stop: read_view(plain[start:stop]).astype(np.int16) + (1 << bits - 1)
        words = self._take(name, ("I32",), 2)
        self._check_shape(name, words, (-(-n // per_word), n_groups))

        def zeros(start: int, stop: int) -> np.ndarray:
            first = start // per_word
            split = fields(read_view(words[first : -(-stop // per_word)]), bits)
            rows = split.swapaxes(1, 2).reshape(-1, n_groups)
            return rows[start - first * per_word :][: stop - start]

        return zeros

    def _groups(self, suffix: str, columns: int, k: int) -> Columns:
        """Takes each column's group. Returns a number if groups are neighbouring columns; -1 marks those, too."""
        index = read_view(self._take(suffix, ("I32",), 1)).view(np.int32).astype(np.int64)
        self._check_shape(suffix, index, (k,))
        if (index == np.arange(k) // columns).all() or (suffix == "weight_g_idx" and (index == -1).all()):
            return columns
        if index.min() < 0 or index.max() >= k // columns:
            raise self._wrong(suffix, f"groups {index.min()} to {index.max()}", f"groups 0 to {k // columns - 1}")
        return index

    def _awq(self) -> StoredTensor:
        """Reads AWQ's gemm layout: transposed, eight rows in a word in the order of `_AWQ_ORDER`."""
        words, zero_words = self._take("qweight", ("I32",), 2), self._take("qzeros", ("I32",), 2)
        k, n = words.shape[0], 8 * words.shape[1]
        scales, columns = self._transposed_scales(n, k)
        self._check_shape("qzeros", zero_words, (k // columns, n // 8))

        def rows_of(packed: np.ndarray, start: int, stop: int) -> np.ndarray:
            first = start // 8
            transposed = np.ascontiguousarray(read_view(packed[:, first : -(-stop // 8)]).T)
            split = fields(transposed, 4, _AWQ_ORDER).swapaxes(1, 2).reshape(-1, len(packed))
            return split[start - 8 * first :][: stop - start]

        return self._integers(
            (n, k),
            lambda start, stop: rows_of(words, start, stop),
            lambda start, stop: rows_of(zero_words, start, stop),
            scales,
            columns,
            4,
        )

    def _gptq(self) -> StoredTensor:
        """Reads GPTQ: transposed, neighbouring columns in a word, and the zero points of neighbouring rows."""
        words, zero_words = self._take("qweight", ("I32",), 2), self._take("qzeros", ("I32",), 2)
        n = words.shape[1]
        bits = 32 * zero_words.shape[1] // n
        if bits not in (4, 8):
            raise self._wrong("qzeros", list(zero_words.shape), f"words for {n} integers of 4 or 8 bits")
        per_word, mask = 32 // bits, (1 << bits) - 1
        k = words.shape[0] * per_word
        scales, columns = self._transposed_scales(n, k)
        self._check_shape("qzeros", zero_words, (k // columns, n // per_word))
        has_groups = self.quantization.has_groups or self._has("g_idx")
        groups = self._groups("g_idx", columns, k) if has_groups else columns

        def codes(start: int, stop: int) -> np.ndarray:
            split = fields(read_view(words[:, start:stop]), bits)
            return split.transpose(1, 0, 2).reshape(stop - start, k)

        def zeros(start: int, stop: int) -> np.ndarray:
            first = start // per_word
            split = fields(read_view(zero_words[:, first : -(-stop // per_word)]), bits).reshape(len(zero_words), -1)
            stored = split[:, start - first * per_word :][:, : stop - start].T
            return stored + np.uint8(self.quantization.zero_offset) & np.uint8(mask)

        return self._integers((n, k), codes, zeros, scales, groups, bits)

    def _transposed_scales(self, n: int, k: int) -> tuple[RowSource, int]:
        """Takes scales [groups, n]. Returns their rows, and the columns in a group."""
        format = self.tensors[f"{self.prefix}.scales"].format if self._has("scales") else "F16"
        grid = self._take("scales", ("F16", "BF16", "F32"), 2)
        if grid.shape[1] != n or k % grid.shape[0]:
            raise self._wrong("scales", list(grid.shape), f"groups of {k} columns by {n} rows")
        return lambda start, stop: float32_of(format, read_view(grid[:, start:stop])).T, k // grid.shape[0]

    def _integers(
        self,
        shape: tuple[int, int],
        codes: RowSource,
        zeros: RowSource | None,
        scales: RowSource,
        columns: Columns,
        bits: int,
    ) -> StoredTensor:
        """Returns unsigned codes less zero points, times scales. zeros: None is half the range."""
        middle = 1 << bits - 1
        if zeros is not None and (zeros(0, shape[0]) == middle).all():
            zeros = None

        def numbers(start: int, stop: int) -> np.ndarray:
            less: np.ndarray = np.array(middle, np.int16)
            if zeros is not None:
                less = by_column(zeros(start, stop).astype(np.int16), columns, shape[1])
            integers: np.ndarray = codes(start, stop).astype(np.int16) - less
            return integers

        bounds = (-middle, middle - 1) if zeros is None else (-2 * middle, 2 * middle - 1)
        return scaled_weight(shape, numbers, scales, columns, self.float_format, bounds)

    def _bitsandbytes(self) -> StoredTensor:
        """Reads nf4 and fp4: two numbers in a byte, the first in the high half, as places in a table.

        A scale covers a block of the flattened weight. With double quantisation, scales are places in a second table
        with scales of its own, less their mean.
        """
        kind = "fp4" if self._has("weight.quant_state.bitsandbytes__fp4") else "nf4"
        state_name = f"weight.quant_state.bitsandbytes__{kind}"
        state = parse_json(read_view(self._take(state_name, ("U8",), 1)).tobytes(), state_name)
        shape, block = state.get("shape"), state.get("blocksize")
        packed = self._take("weight", ("U8",), 2).reshape(-1)
        sizes = shape if isinstance(shape, list) and len(shape) == 2 and {*map(type, shape)} == {int} else [0, 0]
        n, k = sizes
        if type(block) is not int or block < 1 or n < 1 or n * k != 2 * packed.size:
            raise self._wrong(state_name, {"shape": shape, "blocksize": block}, f"a shape of {2 * packed.size} numbers")
        if k % block:
            raise UnsupportedModelError(
                f"tensor {shown(self.prefix)}.weight has scales of {block} numbers in rows of {k}; llmcl reads rows of "
                "whole blocks. Use another version of the model."
            )
        table = read_view(self._take("weight.quant_map", ("F32",), 1))
        self._check_shape("weight.quant_map", table, (16,))
        is_nested = self._has("weight.nested_absmax")
        absmax = self._take("weight.absmax", ("U8",) if is_nested else ("F32",), 1)
        self._check_shape("weight.absmax", absmax, (n * k // block,))
        per_row = k // block
        outer = inner = np.empty(0, np.float32)
        nested_block, offset = state.get("nested_blocksize", 0), state.get("nested_offset", 0.0)
        if is_nested:
            outer = read_view(self._take("weight.nested_absmax", ("F32",), 1))
            inner = read_view(self._take("weight.nested_quant_map", ("F32",), 1))
            self._check_shape("weight.nested_quant_map", inner, (256,))
            if type(nested_block) is not int or nested_block < 1 or -(-absmax.size // nested_block) != outer.size:
                raise self._wrong("weight.nested_absmax", f"{outer.size} scales", f"blocks of {shown(nested_block)}")
            if not isinstance(offset, float):
                raise self._wrong(state_name, {"nested_offset": offset}, "a number")

        def scales(start: int, stop: int) -> np.ndarray:
            part = read_view(absmax[start * per_row : stop * per_row])
            if is_nested:
                at = np.arange(start * per_row, stop * per_row) // nested_block
                part = inner[part] * outer[at] + np.float32(offset)
            return part.reshape(-1, per_row)

        def numbers(start: int, stop: int) -> np.ndarray:
            part = read_view(packed[start * k // 2 : stop * k // 2])
            values: np.ndarray = table[np.stack([part >> 4, part & 15], axis=-1).reshape(-1, k)]
            return values

        return scaled_weight((n, k), numbers, scales, block, self.float_format)
