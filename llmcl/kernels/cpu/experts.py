"""Products of experts on a CPU: one work-item a group, vectors of 16 rows."""

from __future__ import annotations

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.experts import ExpertProduct, ExpertsDown, ExpertsGateUp, ExpertsPrefill, Size, block_count
from llmcl.kernels.cpu.dot_product import dot_form
from llmcl.kernels.cpu.linear import TILE_TOKENS, tile_columns
from llmcl.runtime.device import Device


class CpuExpertsGateUp(ExpertsGateUp):
    name, file = "cpu", "cpu/experts_gate_up.cl"

    def supports_device(self, device: Device) -> bool:
        return device.is_cpu

    def size(self, device: Device, product: ExpertProduct) -> Size:
        return _size(device, product, product.units * product.top_k)


class CpuExpertsDown(ExpertsDown):
    name, file = "cpu", "cpu/experts_down.cl"

    def supports_device(self, device: Device) -> bool:
        return device.is_cpu

    def size(self, device: Device, product: ExpertProduct) -> Size:
        return _size(device, product, product.units)


class CpuExpertsPrefill(ExpertsPrefill):
    name, file = "cpu", "cpu/experts_prefill.cl"

    def supports_device(self, device: Device) -> bool:
        return device.is_cpu

    def size(self, device: Device, product: ExpertProduct) -> Size:
        columns = tile_columns(product.tiles, product.tiles_at_once)
        groups, n_experts, top_k = product.tiles // columns, product.weight.n_experts, product.top_k
        own: dict[str, object] = {"TILE_COLS": columns, "TILE_TOKENS": TILE_TOKENS[columns]}
        return own, lambda n: (groups, block_count(n, n_experts, top_k)), (1, 1)


def _size(device: Device, product: ExpertProduct, units: int) -> Size:
    own: dict[str, object] = {}
    if product.part.dtype in QUANTIZED:
        own["DOT"] = 0 if product.weight.exact_activations else dot_form(device)
    streams = min(units, device.compute_units)
    return own, lambda n: (streams, n), (1, 1)
