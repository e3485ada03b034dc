"""linear_decode and linear_prefill: products with a weight, for one token and for all tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable

from llmcl.kernels import implementation, table
from llmcl.kernels.common.dtype import TILE_ROWS
from llmcl.kernels.common.linear import (
    FEW_ROWS,
    ActivationLayout,
    ActivationOperand,
    LinearDecode,
    LinearFewRows,
    LinearOfRows,
    LinearPrefill,
    PackedActivations,
    Product,
    SplitNorm,
)
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Buffer, Device, Launch


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
    """Computes out = epilogue(W rms_norm(x)) for the last token of the step; without `norm`, epilogue(W x).

    weight [rows, k]; x float32 [n, k]; norm float32 [k]; out float32 [rows] ([rows / 2] with a gate). epilogue:
    "store", "add" (out += ...), "swiglu" or "geglu" (silu or tanh-approximated gelu of the gate; the weight alternates
    gate and up tiles). variant: an implementation by name; None: chosen for the device.
    """
    return [
        table.pick(LinearDecode, device, part.dtype, weight.k, variant).launch(
            device, Product(weight, part, out, epilogue), x, step, norm, eps
        )
        for part in weight.parts
    ]


def linear_prefill(
    device: Device,
    weight: Weight,
    x: ActivationOperand,
    out: ActivationOperand,
    step: StepState,
    *,
    norm: Buffer | None = None,
    normed: Buffer | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    max_rows: int = 0,
    begins: SplitNorm | None = None,
    ends: SplitNorm | None = None,
    variant: str | None = None,
) -> list[Launch]:
    """Computes out[t] = epilogue(W rms_norm(x[t])) for every token t of the step; without `norm`, epilogue(W x[t]).

    weight [rows, k]; x float32 [n, k]; norm float32 [k]; out float32 [n, rows] ([n, rows / 2] with a gate); normed:
    scratch shaped like x, needed with a norm; epilogue and variant as in linear_decode.

    max_rows: maximum tokens per step, from FEW_ROWS or `prefill_bounds`; 1 if `rows_are_decoded`; 0: any number.
    begins: a norm for out, with "add". ends: a norm for x; its rows replace x (see `split_norm`).

    PackedActivations must be in a layout that the product supports, for x (`input_layout`) and for out.
    """
    if max_rows == 1:
        assert isinstance(x, Buffer) and isinstance(out, Buffer)
        return linear_decode(device, weight, x, out, step, norm=norm, eps=eps, epilogue=epilogue, variant=variant)
    chosen = [_implementation(device, part.dtype, weight.k, max_rows, variant) for part in weight.parts]
    layouts = [
        _layout(device, row, weight, part.dtype, max_rows) for row, part in zip(chosen, weight.parts, strict=True)
    ]
    if ends is not None:
        x, norm = ends.rows, None
    launches: list[Launch] = []
    if norm is not None and not all(layout is not None and layout.fuses_norm for layout in layouts):
        assert isinstance(x, Buffer) and normed is not None
        launches += rms_norm(device, x, norm, normed, eps)
        x, norm = normed, None
    packed: PackedActivations | None = x if isinstance(x, PackedActivations) else None
    for row, layout, part in zip(chosen, layouts, weight.parts, strict=True):
        rows = x
        if layout is not None and not (layout.only_for_norm and norm is None):
            if packed is None or packed.layout != layout:
                if isinstance(x, PackedActivations):
                    raise TypeError(f"the {row.name} variant of linear_prefill does not take {x.layout}")
                packed = layout.packed(step, weight.k)
                launches.append(layout.pack(device, x, packed, step, norm, eps))
            rows = packed
        elif isinstance(x, PackedActivations):
            raise TypeError(f"the {row.name} variant of linear_prefill takes float32 rows")
        if isinstance(out, PackedActivations) and not row.supports_output(out.layout, part.dtype):
            raise TypeError(f"the {row.name} variant of linear_prefill does not leave {out.layout}")
        launches += row.launches(device, Product(weight, part, out, epilogue, max_rows, begins, ends), rows, step)
    return launches


def _implementation(device: Device, dtype: str, k: int, max_rows: int = 0, variant: str | None = None) -> LinearOfRows:
    """Picks the product kernel. Falls back to prefill's kernel if there is none for few rows."""
    few = 0 < max_rows <= FEW_ROWS[-1]
    rows: list[LinearOfRows] = [*table.implementations(LinearFewRows)] if few else []
    return implementation.pick([*rows, *table.implementations(LinearPrefill)], device, dtype, k, variant)


def _layout(device: Device, row: LinearOfRows, weight: Weight, dtype: str, max_rows: int) -> ActivationLayout | None:
    layout = row.activation_layout(device, dtype, weight.k, weight.exact_activations)
    return None if layout is None else layout.for_rows(max_rows)


def rows_are_decoded(device: Device, weights: Iterable[Weight]) -> bool:
    """Tells whether a row in a few-row step gets the same bits as from linear_decode, for all weights."""
    return all(
        isinstance(row := _implementation(device, part.dtype, weight.k, FEW_ROWS[0]), LinearFewRows)
        and row.same_as_decode(device, part.dtype, weight.exact_activations)
        for weight in weights
        for part in weight.parts
    )


def prefill_bounds(device: Device, weights: Iterable[Weight]) -> list[int]:
    """Returns the token counts for which prefill has separate launches, besides launches for any number.

    Each count is a max_rows for linear_prefill.
    """
    kinds = {(part.dtype, weight.k) for weight in weights for part in weight.parts}
    rows = [_implementation(device, *kind, max_rows) for kind in kinds for max_rows in (1, 0)]
    return sorted({bound for row in rows for bound in row.bounds})


def input_layout(device: Device, weight: Weight, max_rows: int = 0) -> ActivationLayout | None:
    """Returns the layout in which the previous kernel may leave x for this product; None: float32 rows."""
    if max_rows == 1:
        return None
    layouts = {
        _layout(device, _implementation(device, part.dtype, weight.k, max_rows), weight, part.dtype, max_rows)
        for part in weight.parts
    }
    layout = layouts.pop() if len(layouts) == 1 else None
    return layout if layout is not None and layout.can_be_output else None


def split_norm(
    device: Device, before: Weight, norm: Buffer, after: Weight, step: StepState, *, eps: float, max_rows: int
) -> SplitNorm | None:
    """Returns a norm that the product with `before` begins and the product with `after` ends, or None.

    The product with `before` adds to the residual. norm float32 [after.k].
    """
    layout = input_layout(device, after, max_rows)
    chosen = (_implementation(device, part.dtype, w.k, max_rows) for w in (before, after) for part in w.parts)
    if layout is None or not all(row.splits_norm(layout) for row in chosen):
        return None
    squares = step.scratch(f"squares of {after.k} columns", 4 * step.max_tokens * after.k // TILE_ROWS)
    return SplitNorm(norm, layout.packed(step, after.k, "normed"), squares, eps)


def linear_supports_output(device: Device, weight: Weight, layout: ActivationLayout, max_rows: int = 0) -> bool:
    """Tells whether linear_prefill can leave its result in `layout`, for a weight with gate and up tiles."""
    tiles = max(1, 2 * layout.columns_at_once // TILE_ROWS)  # gate and up tiles that must be in the same part
    if any(n % tiles for part in weight.parts for n in (part.first_tile, part.n_tiles)):
        return False
    dtypes = {part.dtype for part in weight.parts}
    return all(_implementation(device, d, weight.k, max_rows).supports_output(layout, d) for d in dtypes)


def linear_scratch_bytes(
    device: Device, matrices: Iterable[tuple[str, int]], max_tokens: int, *, exact_activations: bool
) -> int:
    """Returns the total scratch bytes of linear_prefill for weights given as (dtype, k)."""
    scratch: dict[str, int] = {}
    for dtype, k in set(matrices):
        row = _implementation(device, dtype, k)
        for name, nbytes in row.scratch(device, dtype, k, exact_activations, max_tokens).items():
            scratch[name] = max(nbytes, scratch.get(name, 0))
    return sum(scratch.values())
