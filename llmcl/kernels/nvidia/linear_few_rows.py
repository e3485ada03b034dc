"""Products for few tokens on NVIDIA GPUs. Weights pass through the matrix units once, at memory speed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from llmcl.kernels.common.dtype import KERNEL_NAMES, QUANTIZED, is_16_bit, tile_bytes
from llmcl.kernels.common.experts import FEW_BLOCK_ROWS
from llmcl.kernels.common.linear import (
    ActivationLayout,
    ActivationOperand,
    LinearFewRows,
    PackedActivations,
    Product,
)
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.implementation import Size
from llmcl.kernels.nvidia.linear import TYPES, TensorCoreLayout, supports_ptx
from llmcl.runtime.device import Device, KernelArg, Launch

PIECE_COLUMNS = 32
HOPPER_LOCAL_BYTES = 216 << 10


def piece_bytes(dtype: str) -> int:
    """Returns the bytes nvidia/linear_few_rows.cl copies for 32 columns in a tile. Super-blocks include their head."""
    if dtype not in QUANTIZED:
        return tile_bytes(PIECE_COLUMNS, dtype)
    block = QUANTIZED[dtype]
    head = 0 if block.block == PIECE_COLUMNS else 32 if dtype == "q6_k" else 64
    return (block.tile_bytes - head) * PIECE_COLUMNS // block.block + head


def local_bytes(device: Device) -> int:
    """Returns the local memory for stages: 256 bytes are reserved for scales. On Hopper a kernel may declare more than
    the driver reports.
    """
    return HOPPER_LOCAL_BYTES if device.entry.fact("ptx_arch") == 90 else device.entry.local_mem_bytes - 256


@dataclass(frozen=True)
class FewRowsShape:
    """The work-group and stage sizes of a product: build constants of nvidia/linear_few_rows.cl."""

    tiles: int  # tiles per work-group
    warps: int  # warps per work-group
    stages: int  # pipeline stages per warp
    depth: int  # 32-column pieces per stage


@cache
def few_rows_shape(
    dtype: str, n_tiles: int, part_tiles: int, tiles_at_once: int, max_rows: int, units: int, local: int
) -> FewRowsShape:
    """Picks the shape of a product.

    The number of warps, and with it the order of sums, depends only on the weight and the device: a token's results do
    not depend on max_rows.

    n_tiles: tiles in the whole weight. tiles_at_once: see `Product`. units: compute units. local: bytes in local
    memory.
    """
    many, quantized = n_tiles > 4 * units, dtype in QUANTIZED
    if local < HOPPER_LOCAL_BYTES:
        warps, tiles = 2, 2
    elif many:  # several small work-groups run on a compute unit at once
        warps, tiles = 4, 4 if max_rows > (32 if quantized else 16) else 2
        local //= 3 if quantized else 2
    else:  # smallest tile count per work-group without more groups than compute units
        warps, tiles = 8, next((t for t in (1, 2) if part_tiles <= t * units), 4)
    return fitting_shape(dtype, tiles, warps, tiles_at_once, max_rows, local)


def fitting_shape(dtype: str, most: int, warps: int, tiles_at_once: int, max_rows: int, local: int) -> FewRowsShape:
    """Returns the largest shape with at most max(most, tiles_at_once) tiles that fits into `local` bytes."""
    for tiles in (t for t in (4, 2, 1) if tiles_at_once <= t <= max(most, tiles_at_once)):
        # Quantised weights cost a warp many instructions, so a warp waits once for several pieces.
        for depth in (4, 2, 1) if dtype in QUANTIZED else (1,):
            stage = warps * depth * _stage_bytes(dtype, tiles, max_rows)
            stages = min(8, 16 // depth, local // stage)
            if stages >= 3 and 64 * warps * tiles * max_rows <= local:
                return FewRowsShape(tiles, warps, stages, depth)
    raise AssertionError(f"{local} bytes of local memory are too few for {max_rows} tokens")


def _stage_bytes(dtype: str, tiles: int, max_rows: int) -> int:
    """Returns the bytes for a warp's pieces, per depth step in a stage."""
    return tiles * piece_bytes(dtype) + 2 * PIECE_COLUMNS * max_rows


def _sum_bytes(shape: FewRowsShape, max_rows: int) -> int:
    return 64 * shape.warps * shape.tiles * max_rows


def group_bytes(dtype: str, shape: FewRowsShape, max_rows: int) -> int:
    """Returns LOCAL_BYTES of nvidia/linear_few_rows.cl."""
    stages = shape.warps * shape.stages * shape.depth * _stage_bytes(dtype, shape.tiles, max_rows)
    return max(stages, _sum_bytes(shape, max_rows))


def experts_shape(dtype: str, k: int, most: int, warps: int, tiles_at_once: int, local: int) -> FewRowsShape:
    """Picks the shape for nvidia/experts_few_rows.cl. A block's first pieces follow the previous block's last pieces,
    so a partly filled stage wastes time.
    """
    tiles = max(most, tiles_at_once)
    sums, pieces = 2 * _sum_bytes(FewRowsShape(tiles, warps, 0, 0), FEW_BLOCK_ROWS), k // PIECE_COLUMNS
    fitting = []
    for depth in (4, 2, 1) if dtype in QUANTIZED else (1,):
        steps = -(-pieces // (warps * depth))
        stage = warps * depth * _stage_bytes(dtype, tiles, FEW_BLOCK_ROWS)
        stages = min(8, 16 // depth, (local - sums) // stage, steps + 1)
        if stages >= 2:
            fitting.append((stages < 3, steps * depth, FewRowsShape(tiles, warps, stages, depth)))
    return min(fitting, key=lambda found: found[:2])[2]


def experts_bytes(dtype: str, shape: FewRowsShape) -> int:
    """Returns LOCAL_BYTES of nvidia/experts_few_rows.cl."""
    stages = shape.warps * shape.stages * shape.depth * _stage_bytes(dtype, shape.tiles, FEW_BLOCK_ROWS)
    return stages + 2 * _sum_bytes(shape, FEW_BLOCK_ROWS)


class NvidiaLinearFewRows(LinearFewRows):
    """Handles 16-bit weights, and quantised weights widened to float16 in registers."""

    name, file = "nvidia", "nvidia/linear_few_rows.cl"
    bounds = 16, 32, 64
    rounds_to_16_bits = True
    runs_anywhere = False

    def supports_device(self, device: Device) -> bool:
        return supports_ptx(device)

    def supports(self, dtype: str, size: int) -> bool:
        return (is_16_bit(dtype) or (dtype in TYPES and dtype != "mxfp4")) and size % PIECE_COLUMNS == 0

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        return TensorCoreLayout(dtype if is_16_bit(dtype) else "float16", blocks=True, by_token=True)

    def supports_output(self, layout: ActivationLayout, dtype: str) -> bool:
        return isinstance(layout, TensorCoreLayout) and layout.blocks

    def splits_norm(self, layout: ActivationLayout) -> bool:
        """Requires bfloat16: an unscaled value may be beyond float16's range."""
        return isinstance(layout, TensorCoreLayout) and layout.by_token and layout.dtype == "bfloat16"

    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size:
        weight, part = product.weight, product.part
        sizes = weight.n_tiles, part.n_tiles, product.tiles_at_once, product.max_rows
        shape = few_rows_shape(part.dtype, *sizes, device.compute_units, local_bytes(device))
        constants: dict[str, object] = {
            "MAX_ROWS": product.max_rows,
            "TILES": shape.tiles,
            "WARPS": shape.warps,
            "STAGES": shape.stages,
            "DEPTH": shape.depth,
            "PACKED_OUT": isinstance(product.out, PackedActivations),
            "LEAVES": product.begins is not None,
            "SCALED": product.ends is not None,
        }
        return constants, (-(-part.n_tiles // shape.tiles),), (32 * shape.warps,)

    def launches(self, device: Device, product: Product, x: ActivationOperand, step: StepState) -> list[Launch]:
        assert isinstance(x, PackedActivations)
        out, begins, ends = product.out, product.begins, product.ends
        sizes, groups, local = self.size(device, product, x.layout)
        constants = {**product.constants(), "OUT_STRIDE": product.weight.rows // product.tiles_at_once, **sizes}
        left = out if begins is None else begins.rows
        if isinstance(left, PackedActivations):
            assert isinstance(left.layout, TensorCoreLayout)
            constants["OUT"] = KERNEL_NAMES[left.layout.dtype]
        if ends is not None:
            constants["EPS"] = float(ends.eps)
        results, unused = out.buffer if isinstance(out, PackedActivations) else out, step.state
        args: list[KernelArg] = [product.part.buffer, x.buffer, results, step.state, product.first_row]
        args += [unused, unused] if begins is None else [begins.weight, begins.rows.buffer]
        assert begins is None or ends is None
        split = begins or ends
        args.append(unused if split is None else split.squares)
        cost = product.cost()
        return [device.launch(self.file, "linear_few_rows", constants, args, groups=groups, local=local, cost=cost)]
