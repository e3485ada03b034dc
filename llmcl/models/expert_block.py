"""A mixture of experts on the device: router, routed experts, and a shared expert for every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from llmcl.architectures.families.blocks import Scores
from llmcl.kernels.common.weight import Weight
from llmcl.models.bound_block import BlockWeights, BoundBlock
from llmcl.models.expert_ops import RoutedExperts
from llmcl.models.layer_ops import LayerOps
from llmcl.ops.choose_experts import choose_experts, choose_scored_experts
from llmcl.ops.rms_norm import rms_norm
from llmcl.ops.scale_rows import scale_rows
from llmcl.ops.scale_shares import scale_shares
from llmcl.ops.sigmoid_gate import sigmoid_gate
from llmcl.ops.squared_relu import squared_relu
from llmcl.ops.zero_rows import zero_rows
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class ExpertsWeights(BlockWeights):
    router: Weight  # [n_experts, hidden], plus a last row for the shared expert's gate if present
    gate_up: Weight  # [n_experts 2 size, hidden], tiles alternate; without a gate [n_experts size, hidden]
    down: Weight  # [n_experts hidden, size]
    router_bias: Buffer | None  # float32 [n_experts]
    gate_up_bias: Buffer | None  # float32 [n_experts, 2, size], gate and up
    down_bias: Buffer | None  # float32 [n_experts, hidden]
    correction: Buffer | None = None  # float32 [n_experts], added to the scores for the choice
    shared_gate_up: Weight | None = None  # [2 shared size, hidden], tiles alternate
    shared_down: Weight | None = None  # [hidden, shared size]
    scales: Buffer | None = None  # float32 [n_experts]
    router_norm: Buffer | None = None  # float32 [hidden], like the norms below; None: `norm` serves all parts
    shared_norm: Buffer | None = None
    shared_post_norm: Buffer | None = None
    chosen_post_norm: Buffer | None = None


@dataclass(frozen=True)
class ExpertsBlock(BoundBlock):
    """gate: an entry in `linear.EXPERT_GATES`. renormalize, scores: see `families.blocks.ExpertSettings`.
    has_shared_gate: the router's last logit gates the shared expert.
    """

    keeps = False
    weights: ExpertsWeights
    gate: str
    renormalize: bool
    has_shared_gate: bool = False
    scores: Scores | None = None
    scaled_inputs: bool = False  # see `families.blocks.Experts`

    @property
    def why_separate(self) -> str | None:
        if self.scores is not None:
            return "its router chooses experts by scores"
        return None if self.weights.shared_gate_up is None else "it has an expert that every token goes to"

    def add(self, ops: LayerOps) -> Iterator[Launch]:
        if self.weights.router_norm is not None:
            yield from self._with_own_norms(ops)
            return
        if self.scaled_inputs:
            yield from self._with_scaled_inputs(ops)
            return
        weights, act = self.weights, ops.act
        x, norm, launches = ops.normed_rows(weights.norm)
        yield from launches
        yield from self._choose(ops, x, norm)
        # The shared expert also reads x, so run it before anything is added to x.
        if weights.shared_gate_up is not None:
            epilogue = self.gate if self.gate != "relu2" else "store"
            yield from ops.product(x, norm, weights.shared_gate_up, act.ffn, epilogue=epilogue)
            if self.gate == "relu2":
                yield from squared_relu(ops.device, act.ffn, weights.shared_gate_up.rows)
        if self.has_shared_gate and weights.shared_down is not None:
            sizes = {"columns": weights.shared_down.k, "gate_row": weights.router.rows}
            yield from sigmoid_gate(ops.device, act.ffn, act.of("router_logits"), **sizes)
        is_plain = self.why_separate is None and weights.scales is None
        yield from ops.chosen_experts(x, norm, self._routed(is_plain=is_plain), act.x)
        if weights.shared_down is not None:
            yield from ops.add_linear(act.ffn, weights.shared_down, None, None)

    def _with_scaled_inputs(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, device = self.weights, ops.act, ops.device
        x, shares, hidden = act.normed, act.of("expert_weights"), ops.config.hidden_size
        assert weights.norm is not None and weights.shared_gate_up is not None and weights.shared_down is not None
        yield from rms_norm(device, act.x, weights.norm, x, ops.config.stream_eps)
        yield from self._choose(ops, x, None)
        yield from ops.product(x, None, weights.shared_gate_up, act.ffn, epilogue=self.gate)
        yield from scale_rows(device, x, shares, hidden, per_row=True)
        # Choosing again by the largest logit leaves the id and makes the share 1.
        operands, n_experts = (act.of("router_logits"), act.of("expert_ids"), shares), weights.gate_up.n_experts
        yield from choose_experts(device, *operands, n_experts=n_experts, top_k=1, renormalize=True)
        yield from ops.chosen_experts(x, None, self._routed(is_plain=False), act.x)
        yield from ops.add_linear(act.ffn, weights.shared_down, None, None)

    def _with_own_norms(self, ops: LayerOps) -> Iterator[Launch]:
        weights, act, device, eps = self.weights, ops.act, ops.device, ops.config.rms_norm_eps
        sums, gate_up, down = act.of("expert_sums"), weights.shared_gate_up, weights.shared_down
        after_chosen, after_shared, post_norm = weights.chosen_post_norm, weights.shared_post_norm, weights.post_norm
        assert gate_up is not None and down is not None
        assert after_chosen is not None and after_shared is not None and post_norm is not None
        x, norm, launches = ops.normed_rows(weights.router_norm)
        yield from launches
        yield from self._choose(ops, x, norm)
        x, norm, launches = ops.normed_rows(weights.shared_norm)
        yield from launches
        yield from ops.product(x, norm, gate_up, act.ffn, epilogue=self.gate)
        x, norm, launches = ops.normed_rows(weights.norm)
        yield from launches
        yield from zero_rows(device, sums, ops.config.hidden_size)
        yield from ops.chosen_experts(x, norm, self._routed(is_plain=False), sums)
        yield from rms_norm(device, sums, after_chosen, sums, eps)
        yield from ops.linear(act.ffn, down, act.normed)
        yield from rms_norm(device, act.normed, after_shared, sums, eps, add=True)
        yield from rms_norm(device, sums, post_norm, act.x, eps, add=True)

    def _routed(self, *, is_plain: bool) -> RoutedExperts:
        weights = self.weights
        biases = weights.gate_up_bias, weights.down_bias
        return RoutedExperts(weights.gate_up, weights.down, self.gate, *biases, is_plain=is_plain)

    def _choose(self, ops: LayerOps, x: Buffer, norm: Buffer | None) -> Iterator[Launch]:
        """Fills the expert ids and shares for each token. x, norm: from `normed_rows`."""
        weights, act = self.weights, ops.act
        logits, ids, shares = (act.of(name) for name in ("router_logits", "expert_ids", "expert_weights"))
        top_k = weights.gate_up.top_k
        yield from ops.product(x, norm, weights.router, logits)
        if (scores := self.scores) is not None:
            yield from choose_scored_experts(
                ops.device,
                logits,
                ids,
                shares,
                n_experts=weights.gate_up.n_experts,
                top_k=top_k,
                renormalize=self.renormalize,
                sigmoid=scores.scoring == "sigmoid",
                n_groups=scores.n_groups,
                top_groups=scores.top_groups,
                per_group=scores.per_group,
                scale=scores.scale,
                correction=weights.correction,
            )
            return
        yield from choose_experts(
            ops.device,
            logits,
            ids,
            shares,
            n_experts=weights.gate_up.n_experts,
            top_k=top_k,
            renormalize=self.renormalize,
            bias=weights.router_bias,
            row=weights.router.rows,
        )
        if weights.scales is not None:
            yield from scale_shares(ops.device, shares, ids, weights.scales, top_k=top_k)
