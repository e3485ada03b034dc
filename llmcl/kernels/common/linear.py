"""Shared parts of products on every device class: operands, epilogues, and activation layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.kernels.common import step_state
from llmcl.kernels.common.cost import linear_cost
from llmcl.kernels.common.dtype import TILE_ROWS, kernel_name
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight, WeightPart
from llmcl.kernels.implementation import Implementation, Size
from llmcl.runtime.device import Buffer, CostModel, Device, KernelArg, Launch

EPILOGUES = {"store": "EPILOGUE_STORE", "add": "EPILOGUE_ADD", "swiglu": "EPILOGUE_SWIGLU", "geglu": "EPILOGUE_SWIGLU"}
# Epilogues of weights with alternating gate and up tiles, and the function applied to the gate.
GATES = {"swiglu": "GATE_SILU", "geglu": "GATE_GELU_TANH"}
# Gate functions for experts.
EXPERT_GATES = {**GATES, "clamped_swiglu": "GATE_CLAMPED_SWIGLU", "relu2": "GATE_RELU2"}


class ActivationLayout(ABC):
    """A layout for a step's activations (k columns), for products that do not take float32 [n, k].

    Equal layouts are interchangeable. Layouts with the same `label` share scratch memory: by the time one is packed,
    the other has been used.
    """

    can_be_output = False  # a kernel may leave results in this layout for the next product
    fuses_norm = False  # `pack` can normalise the rows as well
    only_for_norm = False  # without a norm, the product takes float32 [n, k]
    columns_at_once = 8  # columns rounded together: 8, or a multiple of 16

    @property
    @abstractmethod
    def label(self) -> str: ...

    @abstractmethod
    def nbytes(self, max_tokens: int, k: int) -> int:
        """Returns the bytes of a step's rows."""

    @abstractmethod
    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        """Packs x float32 [n, k] into this layout, after normalisation if `norm` (float32 [k]) is not None."""

    def for_rows(self, max_rows: int) -> ActivationLayout:
        """Returns the same layout with the best packing for steps of up to max_rows tokens (0: any number)."""
        return self

    def packed(self, step: StepState, k: int, use: str = "input") -> PackedActivations:
        """Returns the step's scratch rows in this layout.

        use: a name to separate rows (k columns) that are in use at the same time.
        """
        return PackedActivations(step.scratch(self.scratch_name(k, use), self.nbytes(step.max_tokens, k)), self, k)

    def scratch_name(self, k: int, use: str = "input") -> str:
        return f"{self.label}, {k} columns, {use}"


@dataclass(frozen=True)
class PackedActivations:
    """A step's activations of k columns in a layout other than float32 [n, k]."""

    buffer: Buffer
    layout: ActivationLayout
    k: int


ActivationOperand = Buffer | PackedActivations
"""A step's activations: float32 [n, k], or packed for a product."""


@dataclass(frozen=True)
class SplitNorm:
    """A norm split over two products: the product before applies the weights, the product after applies the scale."""

    weight: Buffer  # float32 [k]
    rows: PackedActivations  # x times weight, not yet scaled
    squares: Buffer  # float32 [max_tokens, k / 16], sums of squares, 16 values of x each
    eps: float


@dataclass(frozen=True)
class Product:
    """out = epilogue(W x), for a single weight part.

    "swiglu" and "geglu" apply silu or tanh-approximated gelu to the gate. The weight then alternates gate and up tiles,
    and out has half as many columns.
    """

    weight: Weight
    part: WeightPart
    out: ActivationOperand
    epilogue: str  # "store", "add" (out += ...), "swiglu" or "geglu"
    max_rows: int = 0  # maximum tokens per step, from FEW_ROWS or LinearOfRows.bounds; 0: any number
    begins: SplitNorm | None = None  # a norm for the output, after addition to the residual
    ends: SplitNorm | None = None  # a norm for the input

    @property
    def tiles_at_once(self) -> int:
        """Returns how many tiles the epilogue needs together."""
        return 2 if self.epilogue in GATES else 1

    @property
    def units(self) -> int:
        """Returns the units that a work-group can compute alone: tiles, or pairs of a gate and an up tile."""
        return self.part.n_tiles // self.tiles_at_once

    @property
    def first_row(self) -> np.int32:
        """Returns the part's first column in `out`."""
        return np.int32(self.part.first_tile * TILE_ROWS // self.tiles_at_once)

    def constants(self) -> dict[str, object]:
        halves = self.tiles_at_once
        rows = min(self.part.n_tiles * TILE_ROWS // halves, self.weight.rows // halves - int(self.first_row))
        constants: dict[str, object] = {
            **step_state.CONSTANTS,
            "WEIGHT": kernel_name(self.part.dtype),
            "K": self.weight.k,
            "N": rows,
            "N_TILES": self.part.n_tiles,
            "EPILOGUE": EPILOGUES[self.epilogue],
        }
        return constants | ({"GATE": GATES[self.epilogue]} if self.epilogue in GATES else {})

    def cost(self) -> CostModel:
        rows = self.part.n_tiles * TILE_ROWS
        # "add" also reads its output. A gate leaves one value for two rows.
        outputs = rows // 2 if self.epilogue in GATES else 2 * rows if self.epilogue == "add" else rows
        return linear_cost(self.part.buffer.nbytes, rows, self.weight.k, outputs)


class ProductImplementation(Implementation):
    """Shared base for decode and prefill products. Build constants may be tuned per device.

    kernel: the kernel's function name.
    """

    kernel = "linear_prefill"

    def choices(self, device: Device, product: Product) -> Mapping[str, Sequence[int]]:
        """Returns the tunable build constants and the values that fit, with the default first; {} if there are none."""
        return {}

    def tuned_key(self, product: Product) -> str:
        """Returns the name under which `llmcl tune` stores constants for the product's size."""
        gate = ", gate and up" if product.tiles_at_once == 2 else ""
        part = product.part
        return f"{self.kernel} {self.name} {part.dtype} {part.n_tiles} tiles of {product.weight.k} columns{gate}"

    def chosen(self, device: Device, product: Product) -> dict[str, int]:
        """Returns a value for each of `choices`: the device's tuned value if it fits, or the default."""
        choices = self.choices(device, product)
        tuned = device.cache.tuned.get(self.tuned_key(product), {})
        fits = tuned.keys() == choices.keys() and all(value in choices[name] for name, value in tuned.items())
        return dict(tuned) if fits else {name: values[0] for name, values in choices.items()}


class LinearDecode(ProductImplementation):
    """A product for the last token of a step. The kernel may normalise its input first."""

    kernel = "linear_decode"

    @abstractmethod
    def size(self, device: Device, product: Product) -> Size: ...

    def launch(
        self, device: Device, product: Product, x: Buffer, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        assert isinstance(product.out, Buffer)
        size_constants, groups, local = self.size(device, product)
        constants = {**product.constants(), "NORM": norm is not None, "EPS": float(eps), **size_constants}
        constants, sizes = self.with_arguments(constants)
        inputs = [x, x if norm is None else norm]
        args: list[KernelArg] = [product.part.buffer, *inputs, product.out, step.state, product.first_row, *sizes]
        return device.launch(self.file, self.kernel, constants, args, groups=groups, local=local, cost=product.cost())


class LinearOfRows(ProductImplementation):
    """A product for every token of a step.

    bounds: token counts for which a step has separate launches, bound with `product.max_rows`.
    """

    bounds: Sequence[int] = ()

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        """Returns the input layout for `dtype` weights; None for float32 [n, k]."""
        return None

    def supports_output(self, layout: ActivationLayout, dtype: str) -> bool:
        """Tells whether the kernel can leave results in `layout`, for `dtype` weights."""
        return False

    def splits_norm(self, layout: ActivationLayout) -> bool:
        """Tells whether the kernel can begin and end a SplitNorm with rows in `layout`."""
        return False

    @abstractmethod
    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size: ...

    def kernel_file(self, layout: ActivationLayout | None) -> str:
        return self.file

    def launches(self, device: Device, product: Product, x: ActivationOperand, step: StepState) -> list[Launch]:
        """Returns the launches. x must be in the layout named by `activation_layout`."""
        weight, layout = product.weight, x.layout if isinstance(x, PackedActivations) else None
        size_constants, groups, local = self.size(device, product, layout)
        constants, sizes = self.with_arguments(
            {**product.constants(), "OUT_STRIDE": weight.rows // product.tiles_at_once, **size_constants}
        )
        buffers = [rows.buffer if isinstance(rows, PackedActivations) else rows for rows in (x, product.out)]
        args: list[KernelArg] = [product.part.buffer, *buffers, step.state, product.first_row, *sizes]
        file, cost = self.kernel_file(layout), product.cost()
        return [device.launch(file, self.kernel, constants, args, groups=groups, local=local, cost=cost)]

    def scratch(
        self, device: Device, dtype: str, k: int, exact_activations: bool, max_tokens: int
    ) -> Mapping[str, int]:
        """Returns the scratch bytes by name, for the memory forecast. Equal names share memory."""
        layout = self.activation_layout(device, dtype, k, exact_activations)
        return {} if layout is None else {layout.scratch_name(k): layout.nbytes(max_tokens, k)}


class LinearPrefill(LinearOfRows):
    """A product for any number of tokens."""


FEW_ROWS = 8, 16, 32, 64
"""Token counts for which products are bound separately from prefill's."""


def few_rows(most: int) -> list[int]:
    """Returns the members of FEW_ROWS needed for steps with 1 to `most` tokens."""
    return [rows for rows, fewer in zip(FEW_ROWS, (0, *FEW_ROWS), strict=False) if fewer < most]


class LinearFewRows(LinearOfRows):
    """A product for at most `product.max_rows` tokens, a member of FEW_ROWS. Reads each weight once, at
    memory speed.
    """

    bounds: Sequence[int] = (16, 64)

    def same_as_decode(self, device: Device, dtype: str, exact_activations: bool) -> bool:
        """Tells whether results equal LinearDecode's bit by bit, for `dtype` weights."""
        return False
