"""Expert products on NVIDIA matrix units."""

from __future__ import annotations

from collections.abc import Mapping

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.dtype import KERNEL_NAMES, is_16_bit
from llmcl.kernels.common.experts import (
    BLOCK_ROWS,
    FEW_BLOCK_ROWS,
    ExpertProduct,
    ExpertRows,
    ExpertsFewRows,
    ExpertsPrefill,
    block_count,
)
from llmcl.kernels.common.linear import FEW_ROWS, PackedActivations
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.kernels.implementation import Size
from llmcl.kernels.nvidia.linear import TYPES, TensorCoreLayout, supports_ptx
from llmcl.kernels.nvidia.linear_few_rows import HOPPER_LOCAL_BYTES, PIECE_COLUMNS, experts_shape, local_bytes
from llmcl.kernels.nvidia.wgmma import has_wgmma
from llmcl.runtime.device import Buffer, Device, Launch

TILES = 4  # maximum number of tiles per work-group in few-row steps


class HopperExpertsPrefill(ExpertsPrefill):
    """Each work-group loops over units (a block and 16 tiles). Rows are gathered while reading."""

    name, file = "hopper", "nvidia/experts_prefill_wgmma.cl"
    rounds_to_16_bits = True
    runs_anywhere = False
    block_rows = 192

    def supports_device(self, device: Device) -> bool:
        return has_wgmma(device.entry)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype in TYPES) and size % 32 == 0

    def size(self, device: Device, product: ExpertProduct) -> Size:
        constants = {"BLOCK_ROWS": self.block_rows, "INPUT": _input(product.part.dtype)}
        return constants, (device.compute_units,), (384,)

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
        rows = self._working_memory(device, weight, step, "tokens" if product.is_first else "slots")
        token = weight.k * (weight.top_k // product.slots)  # values in a row of x
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
        """Returns scratch for rows of x. Token rows and slot rows get separate buffers: a product reads token rows and
        writes slot rows.
        """
        n_blocks = block_count(step.max_tokens, weight.n_experts, weight.top_k)
        sizes = self.scratch(device, weight.dtype, weight.k, False, n_blocks)
        return step.scratch(*next(item for item in sizes.items() if what in item[0]))

    def scratch(self, device: Device, dtype: str, k: int, exact_activations: bool, n_blocks: int) -> Mapping[str, int]:
        nbytes = 2 * n_blocks * BLOCK_ROWS * k
        return {f"rows of {what} for experts in 16 bits, {k} columns": nbytes for what in ("tokens", "slots")}


class NvidiaExpertsFewRows(ExpertsFewRows):
    """Uses 16-bit rows in blocks and widens weights in registers, like NvidiaLinearFewRows."""

    name, file = "nvidia", "nvidia/experts_few_rows.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype in TYPES) and size % PIECE_COLUMNS == 0

    def size(self, device: Device, product: ExpertProduct) -> Size:
        is_hopper = local_bytes(device) == HOPPER_LOCAL_BYTES
        warps, local = (8, HOPPER_LOCAL_BYTES // 2) if is_hopper else (2, local_bytes(device))
        shape = experts_shape(product.part.dtype, product.weight.k, TILES, warps, product.tiles_at_once, local)
        constants = {"TILES": shape.tiles, "WARPS": shape.warps, "STAGES": shape.stages, "DEPTH": shape.depth}
        n_experts, units = product.weight.n_experts, -(-product.tiles // shape.tiles)

        def groups(n: int) -> tuple[int]:
            return (min(2 * device.compute_units, units * block_count(n, n_experts, product.top_k, FEW_BLOCK_ROWS)),)

        return constants, groups, (32 * shape.warps,)

    def in_chains(self, device: Device) -> bool:
        return local_bytes(device) == HOPPER_LOCAL_BYTES

    def rows(self, device: Device, weight: Weight, dtype: str, step: StepState) -> ExpertRows:
        rows = self._slot_rows(weight, dtype, step)
        return ExpertRows(rows.buffer, self.layout(dtype).dtype)

    def leaves(self, dtype: str) -> bool:
        return is_16_bit(dtype)

    def pack(
        self, device: Device, product: ExpertProduct, x: Buffer, order: Buffer, blocks: Buffer, step: StepState
    ) -> tuple[Buffer, list[Launch]]:
        weight, dtype = product.weight, product.part.dtype
        of_slots = product.slots == 1
        rows = self._slot_rows(weight, dtype, step) if of_slots else self.layout(dtype).packed(step, weight.k)
        assert isinstance(rows.layout, TensorCoreLayout)
        return rows.buffer, [rows.layout.pack_rows(device, x, rows, step, weight.top_k if of_slots else 1)]

    def layout(self, dtype: str) -> TensorCoreLayout:
        return TensorCoreLayout(dtype if is_16_bit(dtype) else "float16", blocks=True, by_token=True)

    def _slot_rows(self, weight: Weight, dtype: str, step: StepState) -> PackedActivations:
        slots, layout = min(step.max_tokens, FEW_ROWS[-1]) * weight.top_k, self.layout(dtype)
        buffer = step.scratch(f"{slots} slots, {layout.scratch_name(weight.k)}", layout.nbytes(slots, weight.k))
        return PackedActivations(buffer, layout, weight.k)


def _storage(dtype: str) -> str:
    """Returns the storage type for activations and widened weights. mxfp4 has values beyond float16's range."""
    if is_16_bit(dtype):
        return dtype
    return "bfloat16" if dtype == "mxfp4" else "float16"


def _input(dtype: str) -> str:
    """Returns the storage type as a build constant."""
    return KERNEL_NAMES[_storage(dtype)]
