"""Products in work-groups and local memory, for any device."""

from __future__ import annotations

from llmcl.kernels.common.dtype import QUANTIZED
from llmcl.kernels.common.linear import ActivationLayout, LinearDecode, LinearPrefill, Product, Size
from llmcl.kernels.common.sizes import power_of_two_at_most
from llmcl.runtime.device import Device


class PortableLinearDecode(LinearDecode):
    name, file = "portable", "portable/linear_decode.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def supports(self, dtype: str, size: int) -> bool:
        return dtype not in QUANTIZED

    def size(self, device: Device, product: Product) -> Size:
        width = min(256, power_of_two_at_most(device.entry.max_work_group_size))
        return {"LOCAL_SIZE": width}, (product.units,), (width,)


class PortableLinearDecodeQuantized(PortableLinearDecode):
    file = "portable/linear_decode_quantized.cl"

    def supports(self, dtype: str, size: int) -> bool:
        return dtype in QUANTIZED


class PortableLinearPrefill(LinearPrefill):
    name, file = "portable", "portable/linear_prefill.cl"

    def supports_device(self, device: Device) -> bool:
        return True

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        n_tiles = product.part.n_tiles
        return {}, lambda n: (-(-n_tiles // 4), -(-n // 64)), (16, 16)
