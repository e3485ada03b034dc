"""Products of experts on NVIDIA GPUs' matrix units."""

from __future__ import annotations

from collections.abc import Mapping

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import KERNEL_NAMES, is_16_bit
from llmcl.kernels.common.experts import BLOCK_ROWS, ExpertProduct, ExpertsPrefill, Size, block_count
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.nvidia.wgmma import has_wgmma
from llmcl.runtime.device import Buffer, Device, Launch

GROUP_TILES = 8  # of a work-group, see nvidia/experts_prefill_wgmma.cl


class HopperExpertsPrefill(ExpertsPrefill):
    """Two blocks of an expert a work-group; rows are gathered as they are read."""

    name, file = "hopper", "nvidia/experts_prefill_wgmma.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return has_wgmma(device.entry)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype == "mxfp4") and size % 32 == 0

    def size(self, device: Device, product: ExpertProduct) -> Size:
        groups, n_experts, top_k = -(-product.tiles // GROUP_TILES), product.weight.n_experts, product.top_k
        own = {"BLOCK_ROWS": BLOCK_ROWS, "INPUT": _input(product.part.dtype)}
        return own, lambda n: (groups, block_count(n, n_experts, top_k)), (256, 1)

    def pack(
        self, device: Device, product: ExpertProduct, x: Buffer, order: Buffer, blocks: Buffer, step: StepState
    ) -> tuple[Buffer, list[Launch]]:
        weight, k = product.weight, product.weight.k
        n_blocks = block_count(step.max_tokens, weight.n_experts, weight.top_k)
        rows = step.scratch(*next(iter(self.scratch(device, product.part.dtype, k, False, n_blocks).items())))
        token = k * (weight.top_k // product.slots)  # values of x
        constants = {"WEIGHT": _input(product.part.dtype), "K": token, "BLOCKS": False, "LOCAL_SIZE": 128}
        launch = device.launch(
            "nvidia/pack_activations.cl",
            "pack_activations",
            {**step_state.CONSTANTS, **constants},
            [x, rows, step.state],
            groups=lambda n: (-(-token // 1024), n),
            local=(128, 1),
            cost=per_token(6.0 * token),
        )
        return rows, [launch]

    def scratch(self, device: Device, dtype: str, k: int, exact_activations: bool, n_blocks: int) -> Mapping[str, int]:
        return {f"rows of experts in 16 bits, {k} columns": 2 * n_blocks * BLOCK_ROWS * k}


def _input(dtype: str) -> str:
    """What a weight's values and the rows that they meet have, as a build constant."""
    return KERNEL_NAMES[dtype] if is_16_bit(dtype) else "bf16"
