"""Products of experts in work-groups and local memory, for any device."""

from __future__ import annotations

from llmcl.kernels.common.experts import (
    BLOCK_ROWS,
    ExpertProduct,
    ExpertsDown,
    ExpertsGateUp,
    ExpertsPrefill,
    Size,
    block_count,
)
from llmcl.kernels.portable.linear import decode_size, has_small_blocks
from llmcl.runtime.device import Device


class PortableExpertsGateUp(ExpertsGateUp):
    name, file = "portable", "portable/experts_gate_up.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def size(self, device: Device, product: ExpertProduct) -> Size:
        own, width = decode_size(device, product.part.dtype, product.weight.k, product.units * product.top_k)
        return own, lambda n: (product.units, n * product.top_k), (width, 1)


class PortableExpertsDown(ExpertsDown):
    name, file = "portable", "portable/experts_down.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def size(self, device: Device, product: ExpertProduct) -> Size:
        own, width = decode_size(device, product.part.dtype, product.weight.k * product.top_k, product.units)
        return own, lambda n: (product.units, n), (width, 1)


class PortableExpertsPrefill(ExpertsPrefill):
    name, file = "portable", "portable/experts_prefill.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def size(self, device: Device, product: ExpertProduct) -> Size:
        rows = 4 if has_small_blocks(device) else 8
        groups, n_experts, top_k = -(-product.tiles // rows), product.weight.n_experts, product.top_k
        own = {"ITEM_TOKENS": BLOCK_ROWS // 16, "ITEM_ROWS": rows}
        return own, lambda n: (groups, block_count(n, n_experts, top_k)), (16, 16)
