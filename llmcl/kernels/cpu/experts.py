"""Expert products on a CPU: single work-item groups, vectors of 16 rows, and the processor's 8-bit dot products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import QUANTIZED, WITH_MINIMUM, kernel_name
from llmcl.kernels.common.experts import (
    BLOCK_ROWS,
    ExpertProduct,
    ExpertsDown,
    ExpertsGateUp,
    ExpertsPrefill,
    block_count,
)
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.cpu.dot_product import dot_form
from llmcl.kernels.cpu.linear import INT8_TILE_TOKENS, float_constants, float_rows_bytes, norm_activations
from llmcl.kernels.cpu.variant import CpuVariant
from llmcl.kernels.implementation import Size
from llmcl.runtime.device import Buffer, Device, Launch

# For a product in blocks: fewer groups would leave a core idle at the end, more cost more to start.
GROUPS_PER_CORE = 16


class CpuExpertsGateUp(CpuVariant, ExpertsGateUp):
    file = "cpu/experts_gate_up.cl"

    def size(self, device: Device, product: ExpertProduct) -> Size:
        return _size(device, product, product.units * product.top_k)


class CpuExpertsDown(CpuVariant, ExpertsDown):
    file = "cpu/experts_down.cl"

    def size(self, device: Device, product: ExpertProduct) -> Size:
        return _size(device, product, product.units)


class CpuExpertsPrefill(CpuVariant, ExpertsPrefill):
    file = "cpu/experts_prefill.cl"

    def size(self, device: Device, product: ExpertProduct) -> Size:
        if dot := _dot(device, product.part.dtype, product.weight.exact_activations):
            constants = {"DOT": dot, "TILE_TOKENS": INT8_TILE_TOKENS[dot], "TILE_COLS": product.tiles_at_once}
        else:
            constants = float_constants(device, product.tiles, product.tiles_at_once)
            constants |= {"PACKED": product.part.dtype in WITH_MINIMUM, "MOST_TOKENS": BLOCK_ROWS}
        units, n_experts, top_k = product.tiles // constants["TILE_COLS"], product.weight.n_experts, product.top_k

        def groups(n: int) -> tuple[int, int]:
            blocks = block_count(n, n_experts, top_k)
            return min(units, -(-GROUPS_PER_CORE * device.compute_units // blocks)), blocks

        return constants, groups, (1, 1)

    def kernel_file(self, device: Device, product: ExpertProduct) -> str:
        is_packed = _dot(device, product.part.dtype, product.weight.exact_activations)
        return "cpu/experts_prefill_int8.cl" if is_packed else self.file

    def pack(
        self, device: Device, product: ExpertProduct, x: Buffer, order: Buffer, blocks: Buffer, step: StepState
    ) -> tuple[Buffer, list[Launch]]:
        weight, dtype = product.weight, product.part.dtype
        is_packed = _dot(device, dtype, weight.exact_activations)
        if not is_packed and dtype not in WITH_MINIMUM:
            return x, []
        n_blocks = block_count(step.max_tokens, weight.n_experts, weight.top_k)
        scratch = self.scratch(device, dtype, weight.k, weight.exact_activations, n_blocks)
        rows = step.scratch(*next(iter(scratch.items())))
        if not is_packed:
            slots = weight.top_k // product.slots
            return rows, [norm_activations(device, x, rows, step, weight.k, rows_of_token=slots)]
        # This kernel sees a token's slots as a single long row.
        k = weight.k * (weight.top_k // product.slots)
        constants = {**step_state.CONSTANTS, "WEIGHT": kernel_name(dtype), "TILE_TOKENS": 1}
        launch = device.launch(
            "cpu/quantize_activations.cl",
            "quantize_activations",
            {**constants, "NORM": False, "EPS": 0.0},
            [x, x, rows, step.state, np.int32(k)],
            groups=lambda n: (n, min(k // 32, -(-device.compute_units // n))),
            local=(1, 1),
            cost=per_token(5.5 * k),
        )
        return rows, [launch]

    def suits_single_slots(self, device: Device, weight: Weight, dtype: str) -> bool:
        """True with 8-bit dot products: pairs would round a row for each expert. In float32 a slot would be TILE_TOKENS
        rows."""
        return bool(_dot(device, dtype, weight.exact_activations))

    def scratch(self, device: Device, dtype: str, k: int, exact_activations: bool, n_blocks: int) -> Mapping[str, int]:
        rows = n_blocks * BLOCK_ROWS
        if not _dot(device, dtype, exact_activations):
            has_sums = dtype in WITH_MINIMUM
            return {f"rows of experts and their sums, {k} columns": float_rows_bytes(rows, k)} if has_sums else {}
        return {f"rows of experts in 8 bits, {k} columns": rows * k // 32 * 48}


def _dot(device: Device, dtype: str, exact_activations: bool) -> int:
    """Returns the form of the 8-bit dot product for a weight; 0: activations stay float32."""
    return dot_form(device) if dtype in QUANTIZED and not exact_activations else 0


def _size(device: Device, product: ExpertProduct, units: int) -> Size:
    dtype = product.part.dtype
    constants = {"DOT": _dot(device, dtype, product.weight.exact_activations)} if dtype in QUANTIZED else {}
    streams = min(units, device.compute_units)
    return constants, lambda n: (streams, n), (1, 1)
