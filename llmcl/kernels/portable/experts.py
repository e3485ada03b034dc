"""Expert products with work-groups and local memory, for any device."""

from __future__ import annotations

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.experts import (
    BLOCK_ROWS,
    ExpertProduct,
    ExpertsDown,
    ExpertsFewRows,
    ExpertsGateUp,
    ExpertsPrefill,
    block_count,
)
from llmcl.kernels.common.sizes import has_few_registers
from llmcl.kernels.implementation import Size
from llmcl.kernels.portable.linear import decode_size, group_width, has_small_blocks, large_pieces, register_limit
from llmcl.runtime.device import Device

FEW_ROWS_EXPECTED = 4  # tokens in a step with few rows; together their work-groups fill the device


class PortableExpertsGateUp(ExpertsGateUp):
    name, file = "portable", "portable/experts_gate_up.cl"

    def size(self, device: Device, product: ExpertProduct) -> Size:
        constants = decode_size(device, product.part.dtype, product.weight.k, product.units * product.top_k)
        return constants, lambda n: (product.units, n * product.top_k), (constants["LOCAL_SIZE"], 1)


class PortableExpertsDown(ExpertsDown):
    name, file = "portable", "portable/experts_down.cl"

    def size(self, device: Device, product: ExpertProduct) -> Size:
        constants = large_pieces(device, product.part.dtype, product.weight.k * product.top_k, product.units)
        return constants, lambda n: (product.units, n), (constants["LOCAL_SIZE"], 1)


class PortableExpertsFewRows(ExpertsFewRows):
    name, file = "portable", "portable/experts_few_rows.cl"
    block_rows = 4  # more would need too many registers beside the gate and up tiles

    def supports_device(self, device: Device) -> bool:
        return not device.is_cpu  # CPUs multiply few tokens with the kernel for many

    def size(self, device: Device, product: ExpertProduct) -> Size:
        n_experts, top_k = product.weight.n_experts, product.top_k
        width = group_width(device, product.part.dtype, product.weight.k, product.units * top_k * FEW_ROWS_EXPECTED)
        # Two quantised weight tiles plus the sums for several slots spill registers on Intel's GPUs.
        is_large = product.tiles_at_once == 2 and product.part.dtype in QUANTIZED and has_few_registers(device)
        parts = self.block_rows if is_large else 1
        constants = {"LOCAL_SIZE": width, "BLOCK_ROWS": self.block_rows, "ROWS": self.block_rows // parts}
        return (
            constants,
            lambda n: (parts * block_count(n, n_experts, top_k, self.block_rows), product.units),
            (width, 1),
        )


class PortableExpertsPrefill(ExpertsPrefill):
    name, file = "portable", "portable/experts_prefill.cl"

    def size(self, device: Device, product: ExpertProduct) -> Size:
        rows = 4 if has_small_blocks(device) else 8
        groups, n_experts, top_k = -(-product.tiles // rows), product.weight.n_experts, product.top_k
        constants = {"ITEM_TOKENS": BLOCK_ROWS // 16, "ITEM_ROWS": rows}
        constants |= register_limit(device, product.part.dtype, BLOCK_ROWS // 16 * rows)
        return constants, lambda n: (groups, block_count(n, n_experts, top_k)), (16, 16)
