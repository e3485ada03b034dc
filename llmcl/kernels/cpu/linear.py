"""Products on a CPU: single work-item groups, vectors of 16 rows, and the processor's narrow dot products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS, WITH_MINIMUM, kernel_name
from llmcl.kernels.common.linear import (
    ActivationLayout,
    LinearDecode,
    LinearFewRows,
    LinearPrefill,
    PackedActivations,
    Product,
)
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.cpu.dot_product import bf16_dot_form, dot_form
from llmcl.kernels.cpu.variant import CpuVariant
from llmcl.kernels.implementation import Size
from llmcl.runtime.device import Buffer, Device, Launch

# (tile tokens, tail tokens) by tile columns, with all sums beside the operands in vector registers: WIDE for 32
# registers with 512 bits, else 16 with 256. The tail size is computed when no more tokens are left.
WIDE_TILE_TOKENS = {1: (16, 4), 2: (12, 4), 3: (8, 2), 4: (6, 2)}
TILE_TOKENS = {1: (6, 2), 2: (3, 1)}
GROUP_TOKENS = 48
# By dot product form: tokens in an 8-bit tile, each with an integer and a float32 sum. 32 registers with 512 bits hold
# them all. With 16 of 256 some sums are in memory, which still beats unpacking weights for fewer tokens; with AVX2
# (5) they hold the sums of pairs alone.
INT8_TILE_TOKENS = {1: 12, 2: 12, 3: 8, 4: 8, 5: 6}
# By dot product form: tokens in a bfloat16 tile with the sums in registers (32 with 512 bits, or 16 with 256); 16
# divides a chunk.
BF16_TILE_TOKENS = {1: 16, 2: 6}
PACKED_GROUP_TOKENS = 96  # per work-group with packed activations: a multiple of every tile size
# (tile tokens, tail step) for steps with few tokens: padding up to the step is wasted work and counts more here.
INT8_FEW_TOKENS = {1: (8, 2), 2: (8, 2), 3: (8, 2), 4: (8, 2), 5: (4, 1)}
BF16_FEW_TOKENS = {1: (8, 2), 2: (6, 6)}
LEAST_UNITS = 512  # decode products with fewer units share a piece size (cpu/unit.cl), and so their program


@dataclass(frozen=True)
class DotProductLayout(ActivationLayout):
    """Activations rounded for dot products with weights of `dtype`: kernels/cpu/packed_activations.cl."""

    dtype: str
    dot: int  # dot product form (cpu/dot4.cl, cpu/dot2.cl)
    tile_tokens: int  # tokens with sums in registers
    tail_step: int = 0  # the last tile is padded to a multiple; 0: to tile_tokens
    parts: int = 1  # column parts of a block, rounded by separate threads

    fuses_norm = True
    columns_at_once = 32

    @property
    def can_be_output(self) -> bool:  # type: ignore[override]
        return self.is_int8

    @property
    def is_int8(self) -> bool:
        return self.dtype in QUANTIZED

    @property
    def label(self) -> str:
        return f"activations rounded to {8 if self.is_int8 else 16} bits"

    @property
    def product_file(self) -> str:
        return "cpu/linear_prefill_int8.cl" if self.is_int8 else "cpu/linear_prefill_bf16.cl"

    def nbytes(self, max_tokens: int, k: int) -> int:
        rows = -(-max_tokens // PACKED_GROUP_TOKENS) * PACKED_GROUP_TOKENS
        return rows * (k // 32) * 48 if self.is_int8 else 2 * rows * k

    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        kernel = "quantize_activations" if self.is_int8 else "pack_activations"
        constants = {
            **step_state.CONSTANTS,
            **({"WEIGHT": kernel_name(self.dtype)} if self.is_int8 else {}),
            "TILE_TOKENS": self.tile_tokens,
            "NORM": norm is not None,
            "EPS": float(eps),
        }
        return device.launch(
            f"cpu/{kernel}.cl",
            kernel,
            constants,
            [x, x if norm is None else norm, rows.buffer, step.state, np.int32(rows.k)],
            groups=lambda n: (-(-n // self.tile_tokens), self.parts),
            local=(1, 1),
            cost=per_token((5.5 if self.is_int8 else 6.0) * rows.k),
        )


@dataclass(frozen=True)
class FloatLayout(ActivationLayout):
    """Float32 activations in decode's format, for bit-identical sums: kernels/cpu/activation_row.cl."""

    has_sums: bool  # the product needs group sums
    parts: int = 1

    fuses_norm = True
    label = "activations and their sums"

    @property
    def only_for_norm(self) -> bool:  # type: ignore[override]
        return not self.has_sums

    def nbytes(self, max_tokens: int, k: int) -> int:
        return float_rows_bytes(max_tokens, k)

    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        return norm_activations(device, x, rows.buffer, step, rows.k, norm=norm, eps=eps, parts=self.parts)


def float_rows_bytes(rows: int, k: int) -> int:
    """Bytes for rows in the format of kernels/cpu/activation_row.cl."""
    return 4 * rows * ((k + k // 32 + 16) // 16 * 16)


def norm_activations(
    device: Device,
    x: Buffer,
    to: Buffer,
    step: StepState,
    k: int,
    *,
    norm: Buffer | None = None,
    eps: float = 0.0,
    parts: int = 1,
    rows_of_token: int = 1,
) -> Launch:
    """Converts x float32 [n, rows_of_token, k] to the format of kernels/cpu/activation_row.cl."""
    return device.launch(
        "cpu/norm_activations.cl",
        "norm_activations",
        {**step_state.CONSTANTS, "NORM": norm is not None, "EPS": float(eps), "ROWS": rows_of_token},
        [x, x if norm is None else norm, to, step.state, np.int32(k)],
        groups=lambda n: (n * rows_of_token, parts),
        local=(1, 1),
        cost=per_token(8.0 * k * rows_of_token),
    )


class CpuLinearDecode(CpuVariant, LinearDecode):
    file = "cpu/linear_decode.cl"
    arguments = "N", "N_TILES"

    def size(self, device: Device, product: Product) -> Size:
        exact = product.weight.exact_activations
        constants = {"DOT": 0 if exact else dot_form(device)} if product.part.dtype in QUANTIZED else {}
        constants["MOST_UNITS"] = max(LEAST_UNITS, 1 << (product.units - 1).bit_length())
        return constants, (min(product.units, device.compute_units),), (1,)


class CpuLinearPrefill(CpuVariant, LinearPrefill):
    file = "cpu/linear_prefill.cl"
    arguments = "N", "N_TILES", "OUT_STRIDE"

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        if dot := _dot(device, dtype, exact_activations):
            tokens = (INT8_TILE_TOKENS if dtype in QUANTIZED else BF16_TILE_TOKENS)[dot]
            return DotProductLayout(dtype, dot, tokens, tail_step=tokens // 2)
        return FloatLayout(dtype in WITH_MINIMUM)

    def supports_output(self, layout: ActivationLayout, dtype: str) -> bool:
        return isinstance(layout, DotProductLayout) and layout.is_int8 and dtype in QUANTIZED

    def kernel_file(self, layout: ActivationLayout | None) -> str:
        return layout.product_file if isinstance(layout, DotProductLayout) else self.file

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        if isinstance(layout, DotProductLayout):
            constants = _dot_constants(product, layout)
            return (
                constants,
                lambda n: (product.part.n_tiles // constants["TILE_COLS"], -(-n // PACKED_GROUP_TOKENS)),
                (1, 1),
            )
        return _float_size(device, product, layout)


class CpuLinearFewRows(CpuVariant, LinearFewRows):
    """Prefill's dot products with a run of tiles per core: like decode, reads weights front to back."""

    file = "cpu/linear_prefill.cl"
    arguments = "N", "N_TILES", "OUT_STRIDE"

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        if dot := _dot(device, dtype, exact_activations):
            tokens, tail = (INT8_FEW_TOKENS if dtype in QUANTIZED else BF16_FEW_TOKENS)[dot]
            return DotProductLayout(dtype, dot, tokens, tail, parts=min(max(1, k // 32), device.compute_units))
        return FloatLayout(dtype in WITH_MINIMUM, parts=min(max(1, k // 32), device.compute_units))

    def same_as_decode(self, device: Device, dtype: str, exact_activations: bool) -> bool:
        """False if rows are rounded to bfloat16, because decode doesn't round."""
        return dtype in QUANTIZED or not _dot(device, dtype, exact_activations)

    def kernel_file(self, layout: ActivationLayout | None) -> str:
        return layout.product_file if isinstance(layout, DotProductLayout) else self.file

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        if not isinstance(layout, DotProductLayout):
            return _float_size(device, product, layout)
        return _dot_constants(product, layout), (min(product.units, device.compute_units), 1), (1, 1)


def _float_size(device: Device, product: Product, layout: ActivationLayout | None) -> Size:
    n_tiles = product.part.n_tiles
    constants = float_constants(device, n_tiles, product.tiles_at_once)
    columns = constants["TILE_COLS"]
    return (
        {**constants, "PACKED": layout is not None, "MOST_TOKENS": GROUP_TOKENS},
        lambda n: (n_tiles // columns, -(-n // GROUP_TOKENS)),
        (1, 1),
    )


def _dot(device: Device, dtype: str, exact_activations: bool) -> int:
    """Returns the dot product form for a weight dtype; 0: float32 multiply-adds."""
    if exact_activations:
        return 0
    return dot_form(device) if dtype in QUANTIZED else bf16_dot_form(device) if dtype == "bfloat16" else 0


def _dot_constants(product: Product, layout: DotProductLayout) -> dict[str, Any]:
    columns, left = product.tiles_at_once, dict[str, Any]()
    if isinstance(product.out, PackedActivations):
        out = product.out.layout
        assert isinstance(out, DotProductLayout) and out.tile_tokens == layout.tile_tokens
        columns, left = columns * out.columns_at_once // TILE_ROWS, {"OUT_WEIGHT": kernel_name(out.dtype)}
    return {
        **left,
        "DOT": layout.dot,
        "TILE_COLS": columns,
        "TILE_TOKENS": layout.tile_tokens,
        "TAIL_STEP": layout.tail_step or layout.tile_tokens,
        "GROUP_TOKENS": PACKED_GROUP_TOKENS,
    }


def has_wide_registers(device: Device) -> bool:
    """Whether the processor has 32 vector registers with 512 bits, not 16 with 256."""
    return device.entry.device.native_vector_width_float >= TILE_ROWS


def float_constants(device: Device, n_tiles: int, at_once: int) -> dict[str, int]:
    """Build constants for cpu/token_product.cl. at_once: 2 if gate and up tiles alternate."""
    tokens = WIDE_TILE_TOKENS if has_wide_registers(device) else TILE_TOKENS
    columns = max(n for n in tokens if n_tiles % n == 0 and n % at_once == 0)
    return {"TILE_COLS": columns, "TILE_TOKENS": tokens[columns][0], "TAIL_TOKENS": tokens[columns][1]}
