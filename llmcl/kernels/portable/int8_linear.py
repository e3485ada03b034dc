"""Products with activations rounded to 8 bits, for devices with a 4x8-bit dot product."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import ActivationLayout, PackedActivations, Product
from llmcl.kernels.common.sizes import power_of_two_at_least
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.implementation import Size
from llmcl.kernels.portable.dot_product import NONE, dot_form
from llmcl.kernels.portable.linear import LOCAL_BYTES, PortableLinearDecode, PortableLinearFewRows
from llmcl.runtime.device import Buffer, Device, Launch


class _Int8:
    """Shared by the products for one token and for few rows."""

    name = "portable-int8"
    file: str

    def supports_device(self, device: Device) -> bool:
        return dot_form(device.entry) != NONE

    def supports(self, dtype: str, size: int) -> bool:
        return dtype in QUANTIZED

    def key(self, dtype: str) -> str:
        return f"{self.file} int8 {dtype}"


class Int8LinearDecode(_Int8, PortableLinearDecode):
    """The product for one token. Each work-group rounds the token into local memory."""

    most_vectors = 2  # weights stay packed, so larger pieces gain little

    def size(self, device: Device, product: Product) -> Size:
        constants, groups, local = super().size(device, product)
        # Activations stay float32 if they don't fit into local memory or the user wants exact activations.
        needed = product.weight.k * 9 // 8 + LOCAL_BYTES * local[0]
        if product.weight.exact_activations or needed > device.entry.local_mem_bytes:
            return constants, groups, local
        return {**constants, "DOT": dot_form(device.entry)}, groups, local


@dataclass(frozen=True)
class Int8Rows(ActivationLayout):
    """Rows rounded to 8 bits in groups of 32 columns: portable/round_rows.cl."""

    label = "rows of 8 bits"

    def nbytes(self, max_tokens: int, k: int) -> int:
        return max_tokens * (k + k // 8)

    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        assert norm is None  # fuses_norm is not set
        width = min(64, power_of_two_at_least(rows.k // 32))
        constants = {"WEIGHT": "q8_0", "K": rows.k, "LOCAL_SIZE": width, "DOT": dot_form(device.entry)}
        groups = -(-rows.k // (32 * width))
        return device.launch(
            "portable/round_rows.cl",
            "round_rows",
            constants,
            [x, rows.buffer],
            groups=lambda n: (groups, n),
            local=(width, 1),
            cost=per_token(5.125 * rows.k),
        )


class Int8LinearFewRows(_Int8, PortableLinearFewRows):
    """The product for few rows. A separate launch rounds the rows first."""

    most_vectors = 1

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return None if exact_activations else Int8Rows()

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        constants, groups, local = super().size(device, product, layout)
        return {**constants, **({"DOT": dot_form(device.entry)} if layout else {})}, groups, local
