"""Latent attention on a CPU: single work-item groups, vectors of columns."""

from __future__ import annotations

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.latent import LatentAttentionKernel, LatentShape, LinearHeads
from llmcl.kernels.common.sizes import largest_divisor
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.cpu.dot_product import dot_form
from llmcl.kernels.cpu.variant import CpuVariant
from llmcl.kernels.implementation import Size
from llmcl.runtime.device import Device

MAX_HEADS = 32  # per work-group: queries and sums stay in the second-level cache
BLOCK = 4  # heads, and column vectors, with sums in registers
TOKENS = 32  # tokens per head while the head's tiles are in cache


class CpuLatentAttention(CpuVariant, LatentAttentionKernel):
    file = "cpu/latent_attention.cl"

    def size(self, device: Device, shape: LatentShape) -> tuple[dict[str, object], int]:
        heads = largest_divisor(shape.n_heads, MAX_HEADS)
        columns = largest_divisor(shape.rank // 16, BLOCK)
        return {"HEADS": heads, "HEAD_ROWS": largest_divisor(heads, BLOCK), "COLUMNS": columns}, 1


class CpuLinearHeads(CpuVariant, LinearHeads):
    file = "cpu/linear_heads.cl"

    def size(self, device: Device, weight: Weight, part: WeightPart) -> Size:
        constants: dict[str, object] = {"TOKENS": TOKENS}
        if part.dtype in QUANTIZED:
            constants["DOT"] = 0 if weight.exact_activations else dot_form(device)
        streams = min(part.n_tiles, device.compute_units)
        return constants, lambda n: (streams, -(-n // TOKENS)), (1, 1)
