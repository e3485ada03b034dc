"""Products on NVIDIA GPUs: warps, matrix units, and wgmma with four warps on Hopper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import once, per_token
from llmcl.kernels.common.dtype import KERNEL_NAMES, QUANTIZED, TILE_ROWS, is_16_bit, kernel_name, tile_bytes
from llmcl.kernels.common.linear import (
    ActivationLayout,
    ActivationOperand,
    LinearDecode,
    LinearPrefill,
    PackedActivations,
    Product,
)
from llmcl.kernels.common.sizes import power_of_two_at_most
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import WeightPart
from llmcl.kernels.implementation import Size, pick
from llmcl.kernels.nvidia.wgmma import has_wgmma
from llmcl.runtime.device import Buffer, Device, Launch

GROUP_WARPS = 16  # for kernels that stay on their compute unit
WARP_TILES = 4  # see nvidia/linear_prefill.cl
HOPPER_TILES = 16, 8, 4  # tiles per work-group, see nvidia/linear_prefill_wgmma.cl
HOPPER_TOKENS = 128  # tokens per unit in nvidia/linear_prefill_wgmma.cl
ROWS_MULTIPLE = 128  # the last token block may reach beyond the step's last token
DEQUANTIZED_BYTES = 128 << 20
# Quantised types that this folder's kernels unpack. Other types have portable products, except in prefill.
TYPES = frozenset({"q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "mxfp4"})


def supports_ptx(device: Device) -> bool:
    """Tells whether the driver takes inline PTX with asynchronous copies and 16-bit matrix units."""
    return device.entry.fact("ptx_arch") >= 80


def decode_warps(device: Device, units: int, k: int) -> int:
    """Picks how many warps share the columns of a unit. Few units get more warps, to keep enough bytes in flight."""
    wanted = GROUP_WARPS if units <= 16 * device.compute_units else 4
    return min(wanted, power_of_two_at_most(k // TILE_ROWS))


def local_floats(dtype: str, columns: int, *, exact_activations: bool) -> tuple[int, int]:
    """Returns local memory in floats for products with up to `columns` columns: (per warp, shared by the work-group).

    Covers nvidia/product.cl and nvidia/product_quantized.cl.
    """
    steps = -(-columns // 2048)
    if dtype not in QUANTIZED:
        return 2048 // GROUP_WARPS * steps, 66 * GROUP_WARPS + 2
    groups = 4 * (steps + steps // 2 + 2)  # maximum number of groups per warp
    return groups * (32 if exact_activations else 9), 2 * 257 * GROUP_WARPS


def stream_fours(dtype: str, columns: int) -> int:
    """Returns STREAM_FOURS or more: the float4 values of x each work-item receives with GROUP_WARPS warps."""
    steps = -(-columns // 2048)
    if dtype not in QUANTIZED:
        return steps
    parts = [-(-steps // pieces) for pieces in (1, 2, 3, 4)]  # PIECES
    return max(-(-n * -(-steps // n) // 2) * 2 for n in parts)


@dataclass(frozen=True)
class TensorCoreLayout(ActivationLayout):
    """16-bit activations for tensor cores: [n, k], or blocks [ceil(n/8), k/8, 8, 8] for Hopper.

    The buffer has rows for a multiple of 128 tokens. Rows past the step's last token may hold anything. A kernel can
    write its output directly in blocks.
    """

    dtype: str
    blocks: bool
    by_token: bool = False  # a work-group packs a single token (for few tokens) instead of a block
    label = "activations in 16 bits"

    @property
    def can_be_output(self) -> bool:  # type: ignore[override]
        return self.blocks

    @property
    def fuses_norm(self) -> bool:  # type: ignore[override]
        return self.blocks

    def for_rows(self, max_rows: int) -> TensorCoreLayout:
        return replace(self, by_token=True) if self.blocks and max_rows else self

    def nbytes(self, max_tokens: int, k: int) -> int:
        return 2 * -(-max_tokens // ROWS_MULTIPLE) * ROWS_MULTIPLE * k

    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        k = rows.k
        if norm is not None:
            constants = {**step_state.CONSTANTS, "OUT": KERNEL_NAMES[self.dtype], "HIDDEN": k, "EPS": float(eps)}
            return device.launch(
                "nvidia/rms_norm_token.cl" if self.by_token else "nvidia/rms_norm_blocks.cl",
                "rms_norm",
                constants,
                [x, norm, rows.buffer, step.state],
                groups=(lambda n: (n,)) if self.by_token else lambda n: (-(-n // 8),),
                local=(256,),
                cost=per_token(6.0 * k),
            )
        return self.pack_rows(device, x, rows, step)

    def pack_rows(self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, slots: int = 1) -> Launch:
        """Packs x into `rows`. slots: rows per token."""
        k = rows.k
        constants = {
            **step_state.CONSTANTS,
            "WEIGHT": KERNEL_NAMES[self.dtype],
            "K": k,
            "BLOCKS": self.blocks,
            "SLOTS": slots,
            "LOCAL_SIZE": 128,
        }
        return device.launch(
            "nvidia/pack_activations.cl",
            "pack_activations",
            constants,
            [x, rows.buffer, step.state],
            groups=(lambda n: (-(-k // 128), -(-n * slots // 8))) if self.blocks else (lambda n: (-(-k // 1024), n)),
            local=(128, 1),
            cost=per_token(6.0 * k * slots),
        )


class NvidiaLinearDecode(LinearDecode):
    name, file = "nvidia", "nvidia/linear_decode.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return is_16_bit(dtype)

    def size(self, device: Device, product: Product) -> Size:
        warps = decode_warps(device, product.units, product.weight.k)
        return {"WARPS": warps}, (product.units,), (32 * warps,)


class NvidiaLinearDecodeQuantized(NvidiaLinearDecode):
    file = "nvidia/linear_decode_quantized.cl"

    def supports(self, dtype: str, size: int) -> bool:
        return dtype in TYPES

    def size(self, device: Device, product: Product) -> Size:
        groups = min(product.units, device.compute_units)
        constants = {"DOT": int(not product.weight.exact_activations), "WARPS": GROUP_WARPS, "N_GROUPS": groups}
        return constants, (groups,), (32 * GROUP_WARPS,)


def hopper_tiles(compute_units: int, n_tiles: int, max_rows: int) -> int:
    """Picks the tiles per unit in nvidia/linear_prefill_wgmma.cl for up to max_rows tokens (0: any number).

    Wide units move fewer bytes per multiplication. Narrow units leave fewer compute units idle when tokens are few.
    """
    if max_rows == 0:  # keeps compute units busy if a product has few units, as in a router
        return HOPPER_TILES[-1] if n_tiles <= HOPPER_TILES[1] else HOPPER_TILES[0]

    def clocks(tiles: int) -> int:
        """Estimates clocks per 32 columns on the busiest compute unit: matrix units, or copies (64 bytes per clock)."""
        units = -(-max_rows // HOPPER_TOKENS) * -(-n_tiles // tiles)
        return -(-units // compute_units) * max(31 * tiles, 16 * (tiles + 8))

    return min(HOPPER_TILES, key=clocks)


class NvidiaLinearPrefill(LinearPrefill):
    name, file = "nvidia", "nvidia/linear_prefill.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return is_16_bit(dtype) and size % 32 == 0

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return TensorCoreLayout(dtype, blocks=False)

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        n_tiles = product.part.n_tiles
        return {"WARP_TILES": WARP_TILES}, lambda n: (-(-n // 128), -(-n_tiles // 8)), (512 // WARP_TILES, 1)


class HopperLinearPrefill(NvidiaLinearPrefill):
    name, file = "hopper", "nvidia/linear_prefill_wgmma.cl"
    bounds = 256, 512

    def supports_device(self, device: Device) -> bool:
        return has_wgmma(device.entry)

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return TensorCoreLayout(dtype, blocks=True)

    def supports_output(self, layout: ActivationLayout, dtype: str) -> bool:
        """Requires the layout's dtype to equal the weight's dtype."""
        return isinstance(layout, TensorCoreLayout) and layout.blocks and layout.dtype == dtype

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        tiles = hopper_tiles(device.compute_units, product.part.n_tiles, product.max_rows)
        units = -(-product.part.n_tiles // tiles)
        constants = {"PACKED_OUT": isinstance(product.out, PackedActivations), "BLOCK_TILES": tiles}
        return constants, lambda n: (min(device.compute_units, -(-n // HOPPER_TOKENS) * units),), (256,)


WIDE = (HopperLinearPrefill(), NvidiaLinearPrefill())


class NvidiaLinearPrefillQuantized(NvidiaLinearPrefill):
    """Widens the weight to float16 first, as many tiles at once as the scratch buffer holds."""

    file = "nvidia/dequantize_weight.cl"
    bounds = HopperLinearPrefill.bounds

    def supports_device(self, device: Device) -> bool:
        wrong = device.cache.excluded
        return any(row.supports_device(device) and row.key("float16") not in wrong for row in WIDE)

    def supports(self, dtype: str, size: int) -> bool:
        return dtype in QUANTIZED

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return pick(WIDE, device, "float16", k).activation_layout(device, "float16", k, exact_activations)

    def supports_output(self, layout: ActivationLayout, dtype: str) -> bool:
        return WIDE[0].supports_output(layout, "float16")

    def launches(self, device: Device, product: Product, x: ActivationOperand, step: StepState) -> list[Launch]:
        weight, part = product.weight, product.part
        dequantized = step.scratch("tiles in 16 bits", DEQUANTIZED_BYTES)
        most = dequantized.nbytes // (2 * TILE_ROWS * weight.k) // 2 * 2
        wide = pick(WIDE, device, "float16", weight.k)
        launches = []
        for first in range(0, part.n_tiles, most):
            count = min(most, part.n_tiles - first)
            constants = {"WEIGHT": kernel_name(part.dtype), "K": weight.k, "LOCAL_SIZE": 256}
            items = count * weight.k // 2  # items with 4 rows and 8 columns
            launches.append(
                device.launch(
                    self.file,
                    "dequantize_weight",
                    constants,
                    [part.buffer, dequantized, np.int32(first), np.int32(items)],
                    groups=(-(-items // 256),),
                    local=(256,),
                    cost=once(count * (tile_bytes(weight.k, part.dtype) + 2 * TILE_ROWS * weight.k)),
                )
            )
            tiles = WeightPart(dequantized, part.first_tile + first, count, "float16")
            launches += wide.launches(device, replace(product, part=tiles), x, step)
        return launches

    def scratch(
        self, device: Device, dtype: str, k: int, exact_activations: bool, max_tokens: int
    ) -> Mapping[str, int]:
        rows = super().scratch(device, dtype, k, exact_activations, max_tokens)
        return {**rows, "tiles in 16 bits": DEQUANTIZED_BYTES}
