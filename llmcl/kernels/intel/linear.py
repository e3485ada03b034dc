"""Products on Intel GPUs with matrix units.

No such device has run the kernels yet. Intel's compiler takes the kernels, and Intel's CPU runtime, which has
sub-groups, has run them with emulated matrix units.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import is_16_bit, kernel_name
from llmcl.kernels.common.linear import ActivationLayout, LinearPrefill, PackedActivations, Product
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.implementation import Size
from llmcl.kernels.intel.matrix_mad import NONE, matrix_form
from llmcl.runtime.device import Buffer, Device, Launch

SUB_GROUPS = 8  # per work-group
LANES = 8  # per sub-group; also tokens per block
TOKENS = 32  # tokens with sums in a sub-group's registers, for one tile


@dataclass(frozen=True)
class BlockLayout(ActivationLayout):
    """16-bit activations in blocks of 8 tokens by 16 columns (intel/pack_rows.cl)."""

    dtype: str
    label = "activations in 16 bits, blocks of 8 by 16"

    def nbytes(self, max_tokens: int, k: int) -> int:
        return 2 * -(-max_tokens // LANES) * LANES * k

    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        assert norm is None  # fuses_norm is not set
        constants = {**step_state.CONSTANTS, "WEIGHT": kernel_name(self.dtype), "K": rows.k, "LOCAL_SIZE": 32}
        groups = -(-rows.k // (16 * 32))
        return device.launch(
            "intel/pack_rows.cl",
            "pack_rows",
            constants,
            [x, rows.buffer, step.state],
            groups=lambda n: (groups, -(-n // LANES) * LANES),
            local=(32, 1),
            cost=per_token(6.0 * rows.k),
        )


class IntelLinearPrefill(LinearPrefill):
    name, file = "intel", "intel/linear_prefill.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return matrix_form(device.entry) != NONE

    def supports(self, dtype: str, size: int) -> bool:
        return is_16_bit(dtype)

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return BlockLayout(dtype)

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        tokens = TOKENS // product.tiles_at_once
        constants = {"TOKENS": tokens, "SUB_GROUPS": SUB_GROUPS, "MATRIX": matrix_form(device.entry)}
        groups = -(-product.units // SUB_GROUPS)
        return constants, lambda n: (groups, -(-n // tokens)), (LANES * SUB_GROUPS, 1)
