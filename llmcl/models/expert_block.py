"""A mixture of experts on the device: router, the experts that it chooses, and the one that every token goes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.choose_experts import choose_experts
from llmcl.runtime.device import Launch


@dataclass(frozen=True)
class ExpertsWeights(BlockWeights):
    router: Weight  # [n_experts, hidden]
    gate_up: Weight  # [n_experts 2 size, hidden], tiles alternate
    down: Weight  # [n_experts hidden, size]
    shared_gate_up: Weight | None = None  # [2 shared size, hidden], tiles alternate
    shared_down: Weight | None = None  # [hidden, shared size]


@dataclass(frozen=True)
class ExpertsBlock(BoundBlock):
    """gate: "swiglu" or "geglu". renormalize: see `families.blocks.ExpertSettings`."""

    keeps = False
    weights: ExpertsWeights
    gate: str
    renormalize: bool

    @property
    def why_separate(self) -> str | None:
        return "it is a mixture of experts"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act = self.weights, ops.act
        logits, ids, shares = act.router_logits, act.expert_ids, act.expert_weights
        assert logits is not None and ids is not None and shares is not None
        x, norm, launches = ops.normed_rows(weights.norm)
        yield from launches
        yield from ops.product(x, norm, weights.router, logits)
        counts = {"n_experts": weights.router.rows, "top_k": weights.gate_up.top_k}
        yield from choose_experts(ops.device, logits, ids, shares, **counts, renormalize=self.renormalize)
        # The shared expert, too, takes x as it is before anything is added to it.
        if weights.shared_gate_up is not None:
            yield from ops.product(x, norm, weights.shared_gate_up, act.ffn, epilogue=self.gate)
        yield from ops.chosen_experts(x, norm, weights.gate_up, weights.down, self.gate)
        if weights.shared_down is not None:
            yield from ops.add_linear(act.ffn, weights.shared_down, None, None)
