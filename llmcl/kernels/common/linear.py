"""What the products of every device class share: operands, epilogues, and how activations lie for a product."""

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
from llmcl.kernels.implementation import Implementation
from llmcl.runtime.device import Buffer, CostModel, Device, Groups, KernelArg, Launch

EPILOGUES = {"store": "EPILOGUE_STORE", "add": "EPILOGUE_ADD", "swiglu": "EPILOGUE_SWIGLU", "geglu": "EPILOGUE_SWIGLU"}
# The epilogues of a weight whose tiles alternate gate and up, and what they make of the gate.
GATES = {"swiglu": "GATE_SILU", "geglu": "GATE_GELU_TANH"}
# What experts make of it.
EXPERT_GATES = {**GATES, "clamped_swiglu": "GATE_CLAMPED_SWIGLU"}

Size = tuple[Mapping[str, object], Groups, tuple[int, ...]]
"""Build constants of an implementation's own, work-groups, and work-items of a group."""


class ActivationLayout(ABC):
    """How a product takes a step's activations of k columns, where that is not float32 [n, k].

    can_be_output: a kernel may leave its result so for the next product. fuses_norm: `pack` can normalise the rows as
    well. only_for_norm: without a norm the product takes float32 [n, k]. columns_at_once: that are rounded together, 8
    or a multiple of 16. label: layouts with the same label share their working memory, one being packed when the other
    was used. Equal layouts are interchangeable.
    """

    can_be_output = False
    fuses_norm = False
    only_for_norm = False
    columns_at_once = 8

    @property
    @abstractmethod
    def label(self) -> str: ...

    @abstractmethod
    def nbytes(self, max_tokens: int, k: int) -> int:
        """Of the rows of a step."""

    @abstractmethod
    def pack(
        self, device: Device, x: Buffer, rows: PackedActivations, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        """Brings x float32 [n, k] into this layout, normalised first where there is a `norm` float32 [k]."""

    def for_rows(self, max_rows: int) -> ActivationLayout:
        """The same, packed in the way that is best for steps of up to max_rows tokens (0: any number)."""
        return self

    def packed(self, step: StepState, k: int, use: str = "input") -> PackedActivations:
        """Working memory of the step for rows of this layout.

        use: a name for what is needed at the same time as other rows of k columns.
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
    """A norm whose weights the product before applies and whose scale the product after.

    weight: float32 [k]; rows: x times weight, not yet scaled; squares: float32 [max_tokens, k / 16], sums of squares of
    16 values of x each.
    """

    weight: Buffer
    rows: PackedActivations
    squares: Buffer
    eps: float


@dataclass(frozen=True)
class Product:
    """out = epilogue(W x) with one part of a weight.

    epilogue: "store", "add" (out += ...), "swiglu" or "geglu" (silu or tanh-approximated gelu of the gate; the weight
    alternates gate and up tiles, and out has half as many columns).
    """

    weight: Weight
    part: WeightPart
    out: ActivationOperand
    epilogue: str
    max_rows: int = 0  # tokens of a step at most, of FEW_ROWS or LinearOfRows.bounds; 0: any number
    begins: SplitNorm | None = None  # of its output, which is added to the residual
    ends: SplitNorm | None = None  # of its input

    @property
    def tiles_at_once(self) -> int:
        """Tiles that an epilogue needs together."""
        return 2 if self.epilogue in GATES else 1

    @property
    def units(self) -> int:
        """What a work-group can compute by itself: tiles, or pairs of a gate and an up tile."""
        return self.part.n_tiles // self.tiles_at_once

    @property
    def first_row(self) -> np.int32:
        """The first column of `out` that this part computes."""
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
        # "add" reads what it adds to, a gate leaves one value for two rows.
        outputs = rows // 2 if self.epilogue in GATES else 2 * rows if self.epilogue == "add" else rows
        return linear_cost(self.part.buffer.nbytes, rows, self.weight.k, outputs)


class ProductImplementation(Implementation):
    """What products of one token and of many share: build constants that a device may have tuned. kernel: its function
    in the file.
    """

    kernel = "linear_prefill"

    def choices(self, device: Device, product: Product) -> Mapping[str, Sequence[int]]:
        """Build constants of its own that may be chosen, and the values that fit, the default first; {}: none."""
        return {}

    def tuned_key(self, product: Product) -> str:
        """The name of the constants that `llmcl tune` stores for a size of product."""
        gate = ", gate and up" if product.tiles_at_once == 2 else ""
        part = product.part
        return f"{self.kernel} {self.name} {part.dtype} {part.n_tiles} tiles of {product.weight.k} columns{gate}"

    def chosen(self, device: Device, product: Product) -> dict[str, int]:
        """The value of each of `choices`: as tuned where the device's cache has values that fit, else the default."""
        choices = self.choices(device, product)
        tuned = device.cache.tuned.get(self.tuned_key(product), {})
        fits = tuned.keys() == choices.keys() and all(value in choices[name] for name, value in tuned.items())
        return dict(tuned) if fits else {name: values[0] for name, values in choices.items()}


class LinearDecode(ProductImplementation):
    """A product for the last token of a step, which may normalise its input first."""

    kernel = "linear_decode"

    @abstractmethod
    def size(self, device: Device, product: Product) -> Size: ...

    def launch(
        self, device: Device, product: Product, x: Buffer, step: StepState, norm: Buffer | None, eps: float
    ) -> Launch:
        assert isinstance(product.out, Buffer)
        own, groups, local = self.size(device, product)
        constants = {**product.constants(), "NORM": norm is not None, "EPS": float(eps), **own}
        constants, sizes = self.with_arguments(constants)
        inputs = [x, x if norm is None else norm]
        args: list[KernelArg] = [product.part.buffer, *inputs, product.out, step.state, product.first_row, *sizes]
        return device.launch(self.file, self.kernel, constants, args, groups=groups, local=local, cost=product.cost())


class LinearOfRows(ProductImplementation):
    """A product for every token of a step. bounds: up to how many tokens of a prompt a step is worth launches of its
    own, bound with `product.max_rows`.
    """

    bounds: Sequence[int] = ()

    def activation_layout(self, device: Device, dtype: str, k: int, exact_activations: bool) -> ActivationLayout | None:
        """How it takes activations beside a weight of this dtype; None: as float32 [n, k]."""
        return None

    def supports_output(self, layout: ActivationLayout, dtype: str) -> bool:
        """Whether it can leave its result, beside a weight of this dtype, in this layout."""
        return False

    def splits_norm(self, layout: ActivationLayout) -> bool:
        """Whether it can begin a SplitNorm with rows in this layout, and end one."""
        return False

    @abstractmethod
    def size(self, device: Device, product: Product, layout: ActivationLayout | None) -> Size: ...

    def kernel_file(self, layout: ActivationLayout | None) -> str:
        return self.file

    def launches(self, device: Device, product: Product, x: ActivationOperand, step: StepState) -> list[Launch]:
        """x: in the layout that `activation_layout` names."""
        weight, layout = product.weight, x.layout if isinstance(x, PackedActivations) else None
        own, groups, local = self.size(device, product, layout)
        constants, sizes = self.with_arguments(
            {**product.constants(), "OUT_STRIDE": weight.rows // product.tiles_at_once, **own}
        )
        buffers = [rows.buffer if isinstance(rows, PackedActivations) else rows for rows in (x, product.out)]
        args: list[KernelArg] = [product.part.buffer, *buffers, step.state, product.first_row, *sizes]
        file, cost = self.kernel_file(layout), product.cost()
        return [device.launch(file, self.kernel, constants, args, groups=groups, local=local, cost=cost)]

    def scratch(
        self, device: Device, dtype: str, k: int, exact_activations: bool, max_tokens: int
    ) -> Mapping[str, int]:
        """Bytes of working memory by name, equal names shared: for the forecast of memory."""
        layout = self.activation_layout(device, dtype, k, exact_activations)
        return {} if layout is None else {layout.scratch_name(k): layout.nbytes(max_tokens, k)}


class LinearPrefill(LinearOfRows):
    """For any number of tokens."""


FEW_ROWS = 8, 16, 32, 64
"""Tokens of a step up to which products are bound apart from those of prefill."""


def few_rows(most: int) -> list[int]:
    """For which of FEW_ROWS steps of 1 to `most` tokens are bound."""
    return [rows for rows, fewer in zip(FEW_ROWS, (0, *FEW_ROWS), strict=False) if fewer < most]


class LinearFewRows(LinearOfRows):
    """For at most `product.max_rows` tokens, one of FEW_ROWS: it reads each weight once, at the memory's speed."""

    bounds: Sequence[int] = (16, 64)

    def same_as_decode(self, device: Device, dtype: str, exact_activations: bool) -> bool:
        """Whether a row has the bits that LinearDecode gives it, beside a weight of this dtype."""
        return False
