"""Latent attention with work-groups and local memory, for any device."""

from __future__ import annotations

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.latent import LatentAttentionKernel, LatentShape, LinearHeads
from llmcl.kernels.common.sizes import has_few_registers, largest_divisor, power_of_two_at_least, power_of_two_at_most
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Size
from llmcl.kernels.portable.linear import decode_size
from llmcl.runtime.device import Device

MAX_HEADS = 4  # per work-group: the sums stay in registers
TOKENS = 4  # tokens per head tile while the tile is in cache


class PortableLatentAttention(LatentAttentionKernel):
    name, file = "portable", "portable/latent_attention.cl"

    def size(self, device: Device, shape: LatentShape) -> tuple[dict[str, object], int]:
        most = min(256, power_of_two_at_most(device.entry.max_work_group_size))
        width = min(most, max(64, power_of_two_at_least(shape.rank // 4)))
        return {"HEADS": largest_divisor(shape.n_heads, MAX_HEADS), "LOCAL_SIZE": width}, width


class PortableLinearHeads(LinearHeads):
    name, file = "portable", "portable/linear_heads.cl"

    def size(self, device: Device, weight: Weight, part: WeightPart) -> Size:
        constants = decode_size(device, part.dtype, weight.k, part.n_tiles)
        if part.dtype in QUANTIZED:  # Intel's compiler spills the loop over smaller pieces to memory
            constants |= {"AT_ONCE": 1, "AHEAD": int(not has_few_registers(device)), "VECTORS": 2}
        return {**constants, "TOKENS": TOKENS}, lambda n: (part.n_tiles, -(-n // TOKENS)), (constants["LOCAL_SIZE"], 1)
