"""linear_decode and linear_prefill: products with a weight, for one token and for all tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from llmcl.kernels.common import step_state
from llmcl.kernels.common.dtype import QUANTIZED, TILE_ROWS, is_16_bit, kernel_name, tile_bytes
from llmcl.kernels.common.step_state import CPU_ROWS_MULTIPLE, StepState, narrowed_rows_bytes, quantized_rows_bytes
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.common.work import linear_work, once, per_token
from llmcl.kernels.variant import PTX_VARIANTS, Variant, largest_divisor, pick, power_of_two_at_most, variants
from llmcl.ops.narrow import NarrowRows, narrow_rows
from llmcl.runtime.device import Buffer, Device, Groups, KernelArg, Launch, WorkOf

DECODE_VARIANTS = variants("linear_decode", nvidia=lambda dtype, k: is_16_bit(dtype))
PREFILL_VARIANTS = variants(
    "linear_prefill",
    nvidia=lambda dtype, k: is_16_bit(dtype) and k % 32 == 0,
    hopper=lambda dtype, k: is_16_bit(dtype) and k % 32 == 0,
)
# On a CPU the same files as for floating-point weights. Elsewhere decode cuts the work differently, and prefill on
# NVIDIA GPUs widens a weight for the matrix units first.
QUANTIZED_DECODE_VARIANTS = (
    Variant("nvidia", "nvidia/linear_decode_quantized.cl", DECODE_VARIANTS[0].suits),
    *(variant for variant in DECODE_VARIANTS if variant.name == "cpu"),
    Variant("portable", "portable/linear_decode_quantized.cl", lambda device: True),
)
QUANTIZED_PREFILL_VARIANTS = (
    Variant("nvidia", "nvidia/expand_weight.cl", DECODE_VARIANTS[0].suits),
    *(variant for variant in PREFILL_VARIANTS if variant.name in ("cpu", "portable")),
)

EPILOGUES = {"store": "EPILOGUE_STORE", "add": "EPILOGUE_ADD", "swiglu": "EPILOGUE_SWIGLU", "geglu": "EPILOGUE_SWIGLU"}
# The epilogues of a weight whose tiles alternate gate and up, and what they make of the gate.
GATES = {"swiglu": "GATE_SILU", "geglu": "GATE_GELU_TANH"}

# Accumulator vectors that fit beside the operands in 32 vector registers: tokens for each number of tile columns.
CPU_TILE_TOKENS = {1: 16, 2: 12, 3: 8, 4: 6}
CPU_GROUP_TOKENS = 48
# Tokens for which the 8-bit product keeps an integer and a float32 sum in registers: 32 of 512 bits, or 16 of 256.
INT8_TILE_TOKENS = {1: 12, 2: 12, 3: 3}
# Tokens for which the bfloat16 product keeps a sum in registers, 32 of 512 bits or 16 of 256; 16 divides a chunk.
BF16_TILE_TOKENS = {1: 16, 2: 6}
NVIDIA_GROUP_WARPS = 16  # of kernels that stay on their compute unit
NVIDIA_WARP_TILES = 4  # see nvidia/linear_prefill.cl
HOPPER_TILES = 16  # of a work-group, see nvidia/linear_prefill_wgmma.cl


def _shape_constants(weight: Weight, part: WeightPart, epilogue: str) -> tuple[dict[str, object], np.int32]:
    """Build constants of one part of a weight, and the first output row that it computes."""
    halves = 2 if epilogue in GATES else 1
    first = part.first_tile * TILE_ROWS // halves
    rows = min(part.n_tiles * TILE_ROWS // halves, weight.rows // halves - first)
    constants: dict[str, object] = {
        **step_state.CONSTANTS,
        "WEIGHT": kernel_name(part.dtype),
        "K": weight.k,
        "N": rows,
        "N_TILES": part.n_tiles,
        "EPILOGUE": EPILOGUES[epilogue],
    }
    if epilogue in GATES:
        constants["GATE"] = GATES[epilogue]
    return constants, np.int32(first)


def nvidia_decode_warps(device: Device, units: int, k: int) -> int:
    """Warps that share the columns of a unit: the fewer units, the more, so that enough bytes are in flight."""
    wanted = NVIDIA_GROUP_WARPS if units <= 16 * device.compute_units else 4
    return min(wanted, power_of_two_at_most(k // TILE_ROWS))


def nvidia_local_floats(weight: Weight, columns: int) -> tuple[int, int]:
    """Local floats of nvidia/product.cl, or of nvidia/product_quantized.cl, for products of up to so many columns.

    Of each warp, and of a group beside them.
    """
    steps = -(-columns // 2048)
    if weight.dtype not in QUANTIZED:
        return 2048 // NVIDIA_GROUP_WARPS * steps, 66 * NVIDIA_GROUP_WARPS + 2
    groups = 4 * (steps + steps // 2 + 2)  # of a warp, at most
    return groups * (32 if weight.exact_activations else 9), 2 * 257 * NVIDIA_GROUP_WARPS


def prefill_variant(device: Device, dtype: str, k: int, name: str | None = None) -> Variant:
    """The variant of linear_prefill for a storage type and a number of columns; `name`: see `pick`."""
    return pick(QUANTIZED_PREFILL_VARIANTS if dtype in QUANTIZED else PREFILL_VARIANTS, device, dtype, k, name)


def expands(device: Device, dtype: str) -> bool:
    """Whether prefill widens a weight of this type first, for which it needs EXPANDED_BYTES."""
    return dtype in QUANTIZED and prefill_variant(device, dtype, 256).name == "nvidia"


def rounded_input_bytes(
    device: Device, matrices: Iterable[tuple[str, int]], max_tokens: int, *, exact_activations: bool
) -> int:
    """Working memory for what prefill multiplies in 8 or 16 bits with weights of these (dtype, k): see StepState."""
    n_bytes: dict[tuple[bool, int], int] = {}
    for dtype, k in set(matrices):
        name = prefill_variant(device, dtype, k).name
        rounding = _rounding(device, dtype, exact_activations) if name == "cpu" else None
        if rounding is not None and rounding.dtype in QUANTIZED:
            n_bytes[True, k] = quantized_rows_bytes(max_tokens, k)
        elif rounding is not None or name in PTX_VARIANTS:
            n_bytes[False, k] = narrowed_rows_bytes(max_tokens, k)
    return sum(n_bytes.values())


def decode_variant(device: Device, dtype: str, k: int, name: str | None = None) -> Variant:
    """The variant of linear_decode for a storage type and a number of columns; `name`: see `pick`."""
    return pick(QUANTIZED_DECODE_VARIANTS if dtype in QUANTIZED else DECODE_VARIANTS, device, dtype, k, name)


@dataclass(frozen=True)
class _Rounding:
    """How prefill on a CPU rounds activations for weights of a dtype, and the product that takes them.

    product: its kernel file; kernel: the name of the one that rounds; dot: form of the dot product (cpu/dot4.cl,
    cpu/dot2.cl); tile_tokens: tokens whose sums stay in registers.
    """

    product: str
    kernel: str
    dtype: str
    dot: int
    tile_tokens: int

    def rows(self, step: StepState, k: int) -> Buffer:
        """Where the rounded activations of k columns go."""
        return step.quantized_rows(k) if self.dtype in QUANTIZED else step.narrowed_rows(k)


def linear_decode(
    device: Device,
    weight: Weight,
    x: Buffer,
    out: Buffer,
    step: StepState,
    *,
    norm: Buffer | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    variant: str | None = None,
) -> list[Launch]:
    """out = epilogue(W rms_norm(x)) for the last token of the step; without `norm`, W x.

    weight [rows, k]; x float32 [n, k]; norm float32 [k]; out float32 [rows] ([rows / 2] with a gate).
    epilogue: "store", "add" (out += ...), "swiglu" or "geglu" (silu or tanh-approximated gelu of the gate; the weight
    alternates gate and up tiles).
    """
    tiles_at_once = 2 if epilogue in GATES else 1
    launches = []
    for part in weight.parts:
        is_quantized = part.dtype in QUANTIZED
        chosen = decode_variant(device, part.dtype, weight.k, variant)
        constants, first = _shape_constants(weight, part, epilogue)
        constants |= {"NORM": norm is not None, "EPS": float(eps)}
        units = part.n_tiles // tiles_at_once
        if chosen.name == "cpu":
            groups, local = (min(units, device.compute_units),), (1,)
            if is_quantized:
                constants["DOT"] = 0 if weight.exact_activations else device.dot_form
        elif chosen.name == "nvidia" and is_quantized:
            count = min(units, device.compute_units)
            constants |= {"DOT": int(not weight.exact_activations), "WARPS": NVIDIA_GROUP_WARPS, "N_GROUPS": count}
            groups, local = (count,), (32 * NVIDIA_GROUP_WARPS,)
        elif chosen.name == "nvidia":
            warps = nvidia_decode_warps(device, units, weight.k)
            constants["WARPS"] = warps
            groups, local = (units,), (32 * warps,)
        else:
            size = min(256, power_of_two_at_most(device.entry.max_work_group_size))
            constants["LOCAL_SIZE"] = size
            groups, local = (units,), (size,)
        args: list[KernelArg] = [part.buffer, x, x if norm is None else norm, out, step.state, first]
        work = _work(weight, part, epilogue)
        launches.append(
            device.launch(chosen.file, "linear_decode", constants, args, groups=groups, local=local, work=work)
        )
    return launches


def narrow_dtype(device: Device, weight: Weight) -> str | None:
    """The dtype of the NarrowRows that linear_prefill takes for this weight, None where it takes float32 rows."""
    taken = set()
    for part in weight.parts:
        widened = part.dtype in QUANTIZED and prefill_variant(device, part.dtype, weight.k).name == "nvidia"
        dtype = "float16" if widened else part.dtype
        taken.add(dtype if prefill_variant(device, dtype, weight.k).name == "hopper" else None)
    return taken.pop() if len(taken) == 1 else None


def rounds_rows(device: Device, weight: Weight) -> bool:
    """Whether linear_prefill rounds its float32 rows for this weight on a CPU, and so can normalise them as well."""
    return all(
        prefill_variant(device, part.dtype, weight.k).name == "cpu"
        and _rounding(device, part.dtype, weight.exact_activations)
        for part in weight.parts
    )


def linear_prefill(
    device: Device,
    weight: Weight,
    x: Buffer | NarrowRows,
    out: Buffer | NarrowRows,
    step: StepState,
    *,
    norm: Buffer | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    variant: str | None = None,
) -> list[Launch]:
    """out[t] = epilogue(W rms_norm(x[t])) for every token t of the step; without `norm`, W x[t].

    weight [rows, k]; x float32 [n, k]; norm float32 [k], only where `rounds_rows` says so; out float32 [n, rows]
    ([n, rows / 2] with a gate); epilogue as in linear_decode.
    NarrowRows only where `narrow_dtype` of the weight is theirs, and as `out` not to be added to.
    """
    launches = []
    rounded: _Rounding | None = None  # for the part before, and so for the next if it takes the same
    for part in weight.parts:
        chosen = prefill_variant(device, part.dtype, weight.k, variant)
        rounding = _rounding(device, part.dtype, weight.exact_activations) if chosen.name == "cpu" else None
        if norm is not None and rounding is None:
            raise TypeError(f"the {chosen.name} variant of linear_prefill does not normalise rows of {part.dtype}")
        if rounding is not None and not isinstance(x, NarrowRows):
            rows = rounding.rows(step, weight.k)
            if rounding != rounded:
                launches.append(_round_rows(device, rounding, x, rows, step, weight.k, norm, eps))
            rounded = rounding
            launches += _prefill_part(device, weight, part, chosen, rows, out, step, epilogue, rounding)
        elif chosen.name == "nvidia" and part.dtype in QUANTIZED:
            launches += _prefill_expanded(device, weight, part, x, out, step, epilogue)
        else:
            launches += _prefill_part(device, weight, part, chosen, x, out, step, epilogue)
    return launches


def _prefill_part(
    device: Device,
    weight: Weight,
    part: WeightPart,
    chosen: Variant,
    x: Buffer | NarrowRows,
    out: Buffer | NarrowRows,
    step: StepState,
    epilogue: str,
    rounding: _Rounding | None = None,
) -> list[Launch]:
    """The product with one part of a weight as it is stored, after the launches that bring `x` into the variant's type.

    rounding: how `x` is rounded already, on a CPU.
    """
    if chosen.name != "hopper" and (isinstance(x, NarrowRows) or isinstance(out, NarrowRows)):
        raise TypeError(f"the {chosen.name} variant of linear_prefill takes and leaves float32 rows")
    x_rows, out_rows = (rows.buffer if isinstance(rows, NarrowRows) else rows for rows in (x, out))
    constants, first = _shape_constants(weight, part, epilogue)
    constants["OUT_STRIDE"] = weight.rows // (2 if epilogue in GATES else 1)
    file, n_tiles = chosen.file, part.n_tiles
    rows: list[KernelArg] = [x_rows]
    launches: list[Launch] = []
    groups: Groups
    local: tuple[int, ...]
    if chosen.name == "cpu":
        if rounding is not None:
            file, columns = rounding.product, 2 if epilogue in GATES else 1
            tile_tokens, group_tokens = rounding.tile_tokens, CPU_ROWS_MULTIPLE
            constants["DOT"] = rounding.dot
        else:
            columns = _cpu_tile_columns(n_tiles, epilogue)
            tile_tokens, group_tokens = CPU_TILE_TOKENS[columns], CPU_GROUP_TOKENS
        constants |= {"TILE_COLS": columns, "TILE_TOKENS": tile_tokens, "GROUP_TOKENS": group_tokens}
        groups, local = lambda n: (n_tiles // columns, -(-n // group_tokens)), (1, 1)
    elif chosen.name == "hopper":
        if not isinstance(x, NarrowRows):
            launches = narrow_rows(device, x, weight.k, part.dtype, step, blocks=True)
            rows = [step.narrowed_rows(weight.k)]
        constants["NARROW_OUT"] = isinstance(out, NarrowRows)
        units = -(-n_tiles // HOPPER_TILES)
        groups, local = lambda n: (min(device.compute_units, -(-n // 128) * units),), (256,)
    elif chosen.name == "nvidia":
        launches = narrow_rows(device, x_rows, weight.k, part.dtype, step, blocks=False)
        rows = [step.narrowed_rows(weight.k)]
        constants["WARP_TILES"] = NVIDIA_WARP_TILES
        groups, local = lambda n: (-(-n // 128), -(-n_tiles // 8)), (512 // NVIDIA_WARP_TILES, 1)
    else:
        groups, local = lambda n: (-(-n_tiles // 4), -(-n // 64)), (16, 16)
    args: list[KernelArg] = [part.buffer, *rows, out_rows, step.state, first]
    work = _work(weight, part, epilogue)
    return [*launches, device.launch(file, "linear_prefill", constants, args, groups=groups, local=local, work=work)]


def _prefill_expanded(
    device: Device,
    weight: Weight,
    part: WeightPart,
    x: Buffer | NarrowRows,
    out: Buffer | NarrowRows,
    step: StepState,
    epilogue: str,
) -> list[Launch]:
    """The product with a weight that is widened to float16 first, as many tiles at once as the working memory holds."""
    expanded = step.expanded_weight()
    most = expanded.nbytes // (2 * TILE_ROWS * weight.k) // 2 * 2
    launches = []
    for first in range(0, part.n_tiles, most):
        count = min(most, part.n_tiles - first)
        constants = {"WEIGHT": kernel_name(part.dtype), "K": weight.k, "LOCAL_SIZE": 256}
        items = count * weight.k // 2  # of 4 rows and 8 columns
        launches.append(
            device.launch(
                "nvidia/expand_weight.cl",
                "expand_weight",
                constants,
                [part.buffer, expanded, np.int32(first), np.int32(items)],
                groups=(-(-items // 256),),
                local=(256,),
                work=once(count * (tile_bytes(weight.k, part.dtype) + 2 * TILE_ROWS * weight.k)),
            )
        )
        wide = WeightPart(expanded, part.first_tile + first, count, "float16")
        whole = Weight(weight.name, weight.rows, weight.k, (wide,))
        launches += linear_prefill(device, whole, x, out, step, epilogue=epilogue)
    return launches


def _work(weight: Weight, part: WeightPart, epilogue: str) -> WorkOf:
    rows = part.n_tiles * TILE_ROWS
    # "add" reads what it adds to, a gate leaves one value for two rows.
    outputs = rows // 2 if epilogue in GATES else 2 * rows if epilogue == "add" else rows
    return linear_work(part.buffer.nbytes, rows, weight.k, outputs)


def _rounding(device: Device, dtype: str, exact_activations: bool) -> _Rounding | None:
    """How the CPU variant rounds activations for a weight of this type; None where it leaves them in float32."""
    if exact_activations:
        return None
    if dtype in QUANTIZED and (dot := device.dot_form):
        return _Rounding("cpu/linear_prefill_int8.cl", "quantize_rows", dtype, dot, INT8_TILE_TOKENS[dot])
    if dtype == "bfloat16" and (dot := device.bf16_dot_form):
        return _Rounding("cpu/linear_prefill_bf16.cl", "narrow_rows", dtype, dot, BF16_TILE_TOKENS[dot])
    return None


def _round_rows(
    device: Device,
    rounding: _Rounding,
    x: Buffer,
    rows: Buffer,
    step: StepState,
    k: int,
    norm: Buffer | None,
    eps: float,
) -> Launch:
    """Rounds x float32 [n, k], normalised with `norm`, into `rows`: kernels/cpu/quantize_rows.cl or narrow_rows.cl."""
    constants = {
        **step_state.CONSTANTS,
        "WEIGHT": kernel_name(rounding.dtype),
        "K": k,
        "DOT": rounding.dot,
        "TILE_TOKENS": rounding.tile_tokens,
        "NORM": norm is not None,
        "EPS": float(eps),
    }
    return device.launch(
        f"cpu/{rounding.kernel}.cl",
        rounding.kernel,
        constants,
        [x, x if norm is None else norm, rows, step.state],
        groups=lambda n: (-(-n // rounding.tile_tokens),),
        local=(1,),
        work=per_token((5.5 if rounding.dtype in QUANTIZED else 6.0) * k),
    )


def _cpu_tile_columns(n_tiles: int, epilogue: str) -> int:
    if epilogue in GATES:  # gate and up tiles alternate: an even number of columns
        return 2 * largest_divisor(n_tiles // 2, 2)
    return 3 if n_tiles % 3 == 0 else largest_divisor(n_tiles, 4)
