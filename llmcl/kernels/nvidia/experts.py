"""Products of experts on NVIDIA GPUs' matrix units."""

from __future__ import annotations

from collections.abc import Mapping

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import KERNEL_NAMES, QUANTIZED, is_16_bit
from llmcl.kernels.common.experts import BLOCK_ROWS, ExpertProduct, ExpertRows, ExpertsPrefill, Size, block_count
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.nvidia.wgmma import has_wgmma
from llmcl.runtime.device import Buffer, Device, Launch


class HopperExpertsPrefill(ExpertsPrefill):
    """Work-groups that take one unit of a block and 16 tiles after the other; rows are gathered as they are read."""

    name, file = "hopper", "nvidia/experts_prefill_wgmma.cl"
    rounds_to_16_bits = True
    runs_anywhere = False
    block_rows = 192

    def supports_device(self, device: Device) -> bool:
        return has_wgmma(device.entry)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype in QUANTIZED) and size % 32 == 0

    def size(self, device: Device, product: ExpertProduct) -> Size:
        own = {"BLOCK_ROWS": self.block_rows, "INPUT": _input(product.part.dtype)}
        return own, (device.compute_units,), (384,)

    def rows(self, device: Device, weight: Weight, dtype: str, step: StepState) -> ExpertRows:
        return ExpertRows(self._working_memory(device, weight, step, "slots"), _storage(dtype))

    def output_dtype(self, dtype: str) -> str:
        return _storage(dtype)

    def leaves(self, dtype: str) -> bool:
        return is_16_bit(dtype)

    def pack(
        self, device: Device, product: ExpertProduct, x: Buffer, order: Buffer, blocks: Buffer, step: StepState
    ) -> tuple[Buffer, list[Launch]]:
        weight = product.weight
        rows = self._working_memory(device, weight, step, "tokens" if product.tiles_at_once == 2 else "slots")
        token = weight.k * (weight.top_k // product.slots)  # values of x
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

    def _working_memory(self, device: Device, weight: Weight, step: StepState, what: str) -> Buffer:
        """For rows of x: not the same for those of tokens and of slots, which one product takes and leaves."""
        n_blocks = block_count(step.max_tokens, weight.n_experts, weight.top_k)
        sizes = self.scratch(device, weight.dtype, weight.k, False, n_blocks)
        return step.scratch(*next(item for item in sizes.items() if what in item[0]))

    def scratch(self, device: Device, dtype: str, k: int, exact_activations: bool, n_blocks: int) -> Mapping[str, int]:
        nbytes = 2 * n_blocks * BLOCK_ROWS * k
        return {f"rows of {what} for experts in 16 bits, {k} columns": nbytes for what in ("tokens", "slots")}


def _storage(dtype: str) -> str:
    """The storage type of the rows that a weight meets, and that it is widened to: mxfp4 has values beyond float16."""
    if is_16_bit(dtype):
        return dtype
    return "bfloat16" if dtype == "mxfp4" else "float16"


def _input(dtype: str) -> str:
    """The same as a build constant."""
    return KERNEL_NAMES[_storage(dtype)]
