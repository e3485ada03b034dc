"""linear_decode and linear_prefill: products with a weight, for one token and for all tokens of a step."""

from __future__ import annotations

from collections.abc import Iterable

from llmcl.kernels import table
from llmcl.kernels.common.linear import LinearDecode, LinearPrefill, PackedRows, Product, RowForm, Rows
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
    """out = epilogue(W rms_norm(x)) for the last token of the step; without `norm`, W x.

    weight [rows, k]; x float32 [n, k]; norm float32 [k]; out float32 [rows] ([rows / 2] with a gate).
    epilogue: "store", "add" (out += ...), "swiglu" or "geglu" (silu or tanh-approximated gelu of the gate; the weight
    alternates gate and up tiles). variant: an implementation by name; None: the one for the device.
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
    x: Rows,
    out: Rows,
    step: StepState,
    *,
    norm: Buffer | None = None,
    normed: Buffer | None = None,
    eps: float = 0.0,
    epilogue: str = "store",
    variant: str | None = None,
) -> list[Launch]:
    """out[t] = epilogue(W rms_norm(x[t])) for every token t of the step; without `norm`, W x[t].

    weight [rows, k]; x float32 [n, k]; norm float32 [k]; out float32 [n, rows] ([n, rows / 2] with a gate); normed:
    working memory as x, needed beside a norm; epilogue and variant as in linear_decode.
    PackedRows as x are in the form that the weight's product takes, as `out` in one that it leaves (`passed_form`).
    """
    chosen = [table.pick(LinearPrefill, device, part.dtype, weight.k, variant) for part in weight.parts]
    forms = [
        row.form(device, part.dtype, weight.k, weight.exact_activations)
        for row, part in zip(chosen, weight.parts, strict=True)
    ]
    launches: list[Launch] = []
    if norm is not None and not all(form is not None and form.normalises for form in forms):
        assert isinstance(x, Buffer) and normed is not None
        launches += rms_norm(device, x, norm, normed, eps)
        x, norm = normed, None
    packed: PackedRows | None = x if isinstance(x, PackedRows) else None
    for row, form, part in zip(chosen, forms, weight.parts, strict=True):
        rows = x
        if form is not None:
            if packed is None or packed.form != form:
                if isinstance(x, PackedRows):
                    raise TypeError(f"the {row.name} variant of linear_prefill does not take {x.form}")
                packed = form.rows(step, weight.k)
                launches.append(form.pack(device, x, packed, step, norm, eps))
            rows = packed
        elif isinstance(x, PackedRows):
            raise TypeError(f"the {row.name} variant of linear_prefill takes float32 rows")
        if isinstance(out, PackedRows) and not row.leaves(out.form):
            raise TypeError(f"the {row.name} variant of linear_prefill does not leave {out.form}")
        launches += row.launches(device, Product(weight, part, out, epilogue), rows, step)
    return launches


def passed_form(device: Device, weight: Weight) -> RowForm | None:
    """The form in which the kernel before may leave the rows of x for this product; None: float32 rows."""
    forms = {
        table.pick(LinearPrefill, device, part.dtype, weight.k).form(
            device, part.dtype, weight.k, weight.exact_activations
        )
        for part in weight.parts
    }
    form = forms.pop() if len(forms) == 1 else None
    return form if form is not None and form.passes_on else None


def leaves_form(device: Device, weight: Weight, form: RowForm) -> bool:
    """Whether linear_prefill with this weight can leave its result in `form`."""
    return all(table.pick(LinearPrefill, device, part.dtype, weight.k).leaves(form) for part in weight.parts)


def linear_scratch_bytes(
    device: Device, matrices: Iterable[tuple[str, int]], max_tokens: int, *, exact_activations: bool
) -> int:
    """Working memory that linear_prefill takes for weights of these (dtype, k), all of them together."""
    scratch: dict[str, int] = {}
    for dtype, k in set(matrices):
        row = table.pick(LinearPrefill, device, dtype, k)
        for name, nbytes in row.scratch(device, dtype, k, exact_activations, max_tokens).items():
            scratch[name] = max(nbytes, scratch.get(name, 0))
    return sum(scratch.values())
