"""Products of a few tokens on NVIDIA GPUs: the weights go through the matrix units once, at the memory's speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from llmcl.kernels.common.dtype import KERNEL_NAMES, QUANTIZED, is_16_bit, tile_bytes
from llmcl.kernels.common.linear import (
    ActivationLayout,
    ActivationOperand,
    LinearFewRows,
    PackedActivations,
    Product,
    Size,
)
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.nvidia.linear import TensorCoreLayout, supports_ptx
from llmcl.runtime.device import Device, KernelArg, Launch

PIECE_COLUMNS = 32
MAX_UNITS = 1024  # that several groups share


def piece_bytes(dtype: str) -> int:
    """Of a tile's 32 columns as nvidia/linear_few_rows.cl copies them: of a super-block with its head."""
    if dtype not in QUANTIZED:
        return tile_bytes(PIECE_COLUMNS, dtype)
    block = QUANTIZED[dtype]
    head = 0 if block.block == PIECE_COLUMNS else 32 if dtype == "q6_k" else 64
    return (block.tile_bytes - head) * PIECE_COLUMNS // block.block + head


def local_bytes(device: Device) -> int:
    """Local memory that a kernel may declare: on Hopper more than the driver says."""
    return 216 << 10 if device.entry.ptx_arch >= 90 else device.entry.local_mem_bytes - 256


@dataclass(frozen=True)
class FewRowsShape:
    """How a product is cut into warps and groups: the build constants of nvidia/linear_few_rows.cl."""

    tiles: int
    warps_m: int
    warps_k: int
    splits: int
    inner: int
    stages: int = 0

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_k

    def units(self, n_tiles: int) -> int:
        return -(-n_tiles // (self.tiles * self.warps_m))

    def stage_bytes(self, max_rows: int, dtype: str) -> int:
        return self.warps * self.tiles * piece_bytes(dtype) + self.warps_k * 2 * PIECE_COLUMNS * max_rows

    def sum_bytes(self, max_rows: int) -> int:
        return 64 * self.warps * self.tiles * max_rows

    def partial_bytes(self, n_tiles: int, max_rows: int) -> int:
        """Of the sums that the groups of all units leave for the last."""
        return 64 * self.units(n_tiles) * self.warps_m * self.tiles * self.splits * max_rows if self.splits > 1 else 0

    def registers(self, max_rows: int) -> int:
        """Of a work-item, about: sums, operands and addresses."""
        return self.tiles * max_rows // 2 + 12 * self.tiles + 50

    def constants(self) -> dict[str, object]:
        return {
            "TILES": self.tiles,
            "WARPS_M": self.warps_m,
            "WARPS_K": self.warps_k,
            "SPLITS": self.splits,
            "INNER": self.inner,
            "STAGES": self.stages,
        }


@dataclass(frozen=True)
class FewRowsProblem:
    """What a shape depends on: the product, and the device's compute units and local memory."""

    dtype: str
    k: int
    n_tiles: int  # of the whole weight
    part_tiles: int
    tiles_at_once: int
    max_rows: int
    compute_units: int
    local_bytes: int

    @classmethod
    def of(cls, device: Device, product: Product) -> FewRowsProblem:
        weight, part = product.weight, product.part
        sizes = part.dtype, weight.k, weight.n_tiles, part.n_tiles, product.tiles_at_once, product.max_rows
        return cls(*sizes, device.compute_units, local_bytes(device))

    def shapes(self) -> Iterator[FewRowsShape]:
        """What fits local memory and registers.

        The order of sums, runs of columns and how many come first, follows from the weight alone: results do not depend
        on max_rows.
        """
        quantized = self.dtype in QUANTIZED
        inner = 2 if self.n_tiles >= 4 * self.compute_units or self.local_bytes < 100 << 10 else 4
        splits = 2 if inner == 4 and (self.k >= 8192 or quantized) else 1
        for tiles in (2, 4, 1):
            for warps_m in range(1, 9):
                for warps_k, own_splits in dict.fromkeys([(inner, splits), (inner * splits, 1)]):
                    shape = FewRowsShape(tiles, warps_m, warps_k, own_splits, inner)
                    stages = min(
                        16 if quantized else 8, self.local_bytes // shape.stage_bytes(self.max_rows, self.dtype)
                    )
                    fits = stages >= 3 and shape.sum_bytes(self.max_rows) <= self.local_bytes and shape.warps <= 16
                    fits = fits and shape.registers(self.max_rows) * 32 * shape.warps <= 65536
                    if fits and tiles >= self.tiles_at_once:
                        yield replace(shape, stages=stages)

    def cost(self, shape: FewRowsShape) -> tuple[float, ...]:
        """Microseconds on an H200, by what memory gives and compute units copy; then what decides between equals."""
        units, weights = shape.units(self.part_tiles), tile_bytes(self.k, self.dtype)
        copied = (shape.tiles * shape.warps_m * weights + 2 * self.k * self.max_rows) / shape.splits
        rounds = -(-units * shape.splits // self.compute_units)
        memory, copies = self.part_tiles * weights / 4.4e6, rounds * copied / 48e3
        us = max(memory, copies) + 0.25 * min(memory, copies) + (4.0 if shape.splits > 1 else 0.0)
        if self.dtype in QUANTIZED:  # a warp's instructions count: two tiles share those for activations
            return us, shape.tiles == 1, -shape.warps
        return us, -min(shape.warps, 8), copied


@cache
def few_rows_shape(problem: FewRowsProblem) -> FewRowsShape:
    """The quickest of the shapes that fit, by an estimate."""
    return min(problem.shapes(), key=problem.cost)


class NvidiaLinearFewRows(LinearFewRows):
    """Weights of 16 bits, or quantised ones that are widened to float16 in registers."""

    name, file = "nvidia", "nvidia/linear_few_rows.cl"
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or dtype in QUANTIZED) and size % PIECE_COLUMNS == 0

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return TensorCoreLayout(dtype if is_16_bit(dtype) else "float16", blocks=True, by_token=True)

    def supports_output(self, layout: ActivationLayout) -> bool:
        return isinstance(layout, TensorCoreLayout) and layout.blocks

    def splits_norm(self, layout: ActivationLayout) -> bool:
        """Before its scale a value may be beyond float16."""
        return isinstance(layout, TensorCoreLayout) and layout.by_token and layout.dtype == "bfloat16"

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        shape = few_rows_shape(FewRowsProblem.of(device, product))
        own: dict[str, object] = {
            "MAX_ROWS": product.max_rows,
            "PACKED_OUT": isinstance(product.out, PackedActivations),
        }
        own |= {"LEAVES": product.begins is not None, "SCALED": product.ends is not None}
        return {**own, **shape.constants()}, (shape.units(product.part.n_tiles), shape.splits), (32 * shape.warps, 1)

    def launches(self, device: Device, product: Product, x: ActivationOperand, step: StepState) -> list[Launch]:
        assert isinstance(x, PackedActivations)
        weight, part, out = product.weight, product.part, product.out
        own, groups, local = self.size(device, product, x.layout)
        constants = {**product.constants(), "OUT_STRIDE": weight.rows // product.tiles_at_once, **own}
        begins, ends = product.begins, product.ends
        left = out if begins is None else begins.rows
        if isinstance(left, PackedActivations):
            assert isinstance(left.layout, TensorCoreLayout)
            constants["OUT"] = KERNEL_NAMES[left.layout.dtype]
        if ends is not None:
            constants["EPS"] = float(ends.eps)
        assert begins is None or ends is None
        shape = few_rows_shape(FewRowsProblem.of(device, product))
        assert shape.splits == 1 or shape.units(part.n_tiles) <= MAX_UNITS
        nbytes = shape.partial_bytes(part.n_tiles, product.max_rows)
        partial = step.scratch(f"sums of several groups, {nbytes} bytes", nbytes)
        arrived = step.scratch("groups that have left their sums", 4 * MAX_UNITS, zeroed=True)
        out = out.buffer if isinstance(out, PackedActivations) else out
        norm, normed = (step.state, step.state) if begins is None else (begins.weight, begins.rows.buffer)
        split = begins or ends
        squares = step.state if split is None else split.squares  # where there is nothing, an argument that is not read
        args: list[KernelArg] = [part.buffer, x.buffer, out, step.state, product.first_row, partial, arrived]
        args += [norm, normed, squares]
        cost = product.cost()
        return [device.launch(self.file, "linear_few_rows", constants, args, groups=groups, local=local, cost=cost)]
