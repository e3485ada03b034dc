"""Layer ops with LoRA adapters: each product that adapters change is followed by their own products.

The persistent kernels and packed activations of the plain ops are left out where an adapter reads or writes between
them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from llmcl.kernels.common.linear import GATES, ActivationOperand
from llmcl.kernels.common.weight import Weight
from llmcl.models.adapters import DeviceAdapters
from llmcl.models.layer_ops import DecodeOps, LayerOps, PrefillOps
from llmcl.ops.lora import LowRankWeight, lora
from llmcl.runtime.device import Buffer, Launch

NO_ADAPTERS_HERE = DeviceAdapters((), {})


@dataclass(frozen=True)
class AdaptedDecodeOps(DecodeOps):
    """scales float32 [1, adapters]."""

    adapters: DeviceAdapters = NO_ADAPTERS_HERE
    scales: Buffer | None = None

    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        assert isinstance(out, Buffer)
        low, product = _beside(self, weight, out, epilogue)
        base = super().norm_linear(norm, weight, product, "store" if epilogue in GATES and low else epilogue)
        return base + _added(self, low, self.act.x, out, product, norm, epilogue)

    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        low, product = _beside(self, weight, out, epilogue)
        assert isinstance(product, Buffer)
        base = super().product(x, norm, weight, product, "store" if epilogue in GATES and low else epilogue)
        return base + _added(self, low, x, out, product, norm, epilogue)

    def linear(self, x: ActivationOperand, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]:
        low, _ = _beside(self, weight, out, epilogue)
        return super().linear(x, weight, out, epilogue) + _added(self, low, x, out, out, None, epilogue)


@dataclass(frozen=True)
class AdaptedPrefillOps(PrefillOps):
    """scales float32 [sequences, adapters]."""

    adapters: DeviceAdapters = NO_ADAPTERS_HERE
    scales: Buffer | None = None

    def before(self, norm: Buffer | None, weight: Weight | None) -> LayerOps:
        return self  # a norm split over two products would miss what adapters add in between

    def attended(self, output: Weight) -> ActivationOperand:
        return self.act.attended if output.name in self.adapters.weights else super().attended(output)

    def gated(self, gate_up: Weight, down: Weight) -> ActivationOperand:
        changed = {gate_up.name, down.name} & self.adapters.weights.keys()
        return self.act.ffn if changed else super().gated(gate_up, down)

    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        low, product = _beside(self, weight, out, epilogue)
        base = super().norm_linear(norm, weight, product, "store" if epilogue in GATES and low else epilogue)
        return base + _added(self, low, self.act.x, out, product, norm, epilogue)

    def linear(
        self, x: ActivationOperand, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        low, product = _beside(self, weight, out, epilogue)
        base = super().linear(x, weight, product, "store" if epilogue in GATES and low else epilogue)
        return base + _added(self, low, x, out, product, None, epilogue)

    def add_linear(
        self, x: ActivationOperand, weight: Weight, post_norm: Buffer | None, bias: Buffer | None
    ) -> list[Launch]:
        return LayerOps.add_linear(self, x, weight, post_norm, bias)


AdaptedOps = AdaptedDecodeOps | AdaptedPrefillOps


def adapted_decode(ops: DecodeOps, adapters: DeviceAdapters, scales: Buffer) -> AdaptedDecodeOps:
    """Returns the ops with adapters."""
    return AdaptedDecodeOps(**_fields(ops), adapters=adapters, scales=scales)


def adapted_prefill(ops: PrefillOps, adapters: DeviceAdapters, scales: Buffer) -> AdaptedPrefillOps:
    """Returns the ops with adapters."""
    return AdaptedPrefillOps(**_fields(ops), adapters=adapters, scales=scales)


def _fields(ops: LayerOps) -> dict[str, Any]:
    return {field.name: getattr(ops, field.name) for field in fields(ops)}


def _beside(
    ops: AdaptedOps, weight: Weight, out: ActivationOperand, epilogue: str
) -> tuple[LowRankWeight | None, ActivationOperand]:
    """Returns the adapters of a weight, and where its product goes: before a gate, which follows the addition, to
    scratch rows.
    """
    low = ops.adapters.weights.get(weight.name)
    if low is not None:
        ops.adapters.bound.add(weight.name)
    if low is None or epilogue not in GATES:
        return low, out
    return low, ops.step.scratch(f"gate and up, {weight.rows} columns", 4 * ops.step.max_tokens * weight.rows)


def _added(
    ops: AdaptedOps,
    low: LowRankWeight | None,
    x: ActivationOperand,
    out: ActivationOperand,
    product: ActivationOperand,
    norm: Buffer | None,
    epilogue: str,
) -> list[Launch]:
    """Returns the adapters' launches after a product of x."""
    if low is None:
        return []
    assert isinstance(x, Buffer) and isinstance(out, Buffer) and isinstance(product, Buffer) and ops.scales is not None
    base, end = (product, epilogue) if epilogue in GATES else (None, "add")
    eps = ops.config.stream_eps
    return lora(ops.device, low, x, out, ops.scales, ops.step, norm=norm, eps=eps, base=base, epilogue=end)
