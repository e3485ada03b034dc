"""A mixture of experts on the device: router, the experts that it chooses, and the one that every token goes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.choose_experts import choose_experts
from llmcl.ops.sigmoid_gate import sigmoid_gate
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class ExpertsWeights(BlockWeights):
    router: Weight  # [n_experts, hidden], below it the gate of the shared expert if it has one
    gate_up: Weight  # [n_experts 2 size, hidden], tiles alternate
    down: Weight  # [n_experts hidden, size]
    router_bias: Buffer | None  # float32 [n_experts]
    gate_up_bias: Buffer | None  # float32 [n_experts, 2, size], of gate and of up
    down_bias: Buffer | None  # float32 [n_experts, hidden]
    shared_gate_up: Weight | None = None  # [2 shared size, hidden], tiles alternate
    shared_down: Weight | None = None  # [hidden, shared size]


@dataclass(frozen=True)
class ExpertsBlock(BoundBlock):
    """gate: one of `linear.EXPERT_GATES`. renormalize: see `families.blocks.ExpertSettings`. has_shared_gate: the last
    of the router's numbers is that of the shared expert.
    """

    keeps = False
    weights: ExpertsWeights
    gate: str
    renormalize: bool
    has_shared_gate: bool = False

    @property
    def why_separate(self) -> str | None:
        return None if self.weights.shared_gate_up is None else "it has an expert that every token goes to"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act = self.weights, ops.act
        logits, ids, shares = act.router_logits, act.expert_ids, act.expert_weights
        assert logits is not None and ids is not None and shares is not None
        x, norm, launches = ops.normed_rows(weights.norm)
        yield from launches
        yield from ops.product(x, norm, weights.router, logits)
        yield from choose_experts(
            ops.device,
            logits,
            ids,
            shares,
            n_experts=weights.gate_up.n_experts,
            top_k=weights.gate_up.top_k,
            renormalize=self.renormalize,
            bias=weights.router_bias,
            row=weights.router.rows,
        )
        # The shared expert, too, takes x as it is before anything is added to it.
        if weights.shared_gate_up is not None:
            yield from ops.product(x, norm, weights.shared_gate_up, act.ffn, epilogue=self.gate)
        if self.has_shared_gate and weights.shared_down is not None:
            sizes = {"columns": weights.shared_down.k, "gate_row": weights.router.rows}
            yield from sigmoid_gate(ops.device, act.ffn, logits, **sizes)
        biases = weights.gate_up_bias, weights.down_bias
        yield from ops.chosen_experts(x, norm, weights.gate_up, weights.down, self.gate, biases)
        if weights.shared_down is not None:
            yield from ops.add_linear(act.ffn, weights.shared_down, None, None)
