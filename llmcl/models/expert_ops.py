"""Routed experts in a step: token by token, or grouped so that an expert's weights are read once for all its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmcl.kernels.common.weight import Weight
from llmcl.models.step_context import StepContext
from llmcl.ops.experts import (
    block_rows,
    experts_down,
    experts_gate_up,
    experts_prefill,
    experts_sum,
    gated_rows,
    group_by_expert,
    has_few_rows,
    slot_outputs,
    suits_single_slots,
)
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class RoutedExperts:
    """Weights of all experts, of which a router has chosen some for each token (act.expert_ids)."""

    gate_up: Weight
    down: Weight
    gate: str
    gate_up_bias: Buffer | None = None
    down_bias: Buffer | None = None
    is_plain: bool = False  # nothing runs between router, choice and experts


def experts_by_token(
    context: StepContext, x: Buffer, norm: Buffer | None, experts: RoutedExperts, out: Buffer
) -> list[Launch]:
    """out += the chosen experts' output for x, token by token. x, norm: from `LayerOps.normed_rows`."""
    act, device, eps = context.act, context.device, context.config.stream_eps
    ids, rows, shares = (act.of(name) for name in ("expert_ids", "expert_rows", "expert_weights"))
    return [
        *experts_gate_up(
            device, experts.gate_up, x, ids, rows, gate=experts.gate, norm=norm, eps=eps, bias=experts.gate_up_bias
        ),
        *experts_down(device, experts.down, rows, ids, shares, out, bias=experts.down_bias),
    ]


def experts_by_block(
    context: StepContext, x: Buffer, experts: RoutedExperts, out: Buffer, *, max_rows: int, chosen_for: int
) -> list[Launch]:
    """out += the chosen experts' output for x, in blocks of tokens that chose the same expert.

    max_rows: limit of tokens per step for few-row kernels. chosen_for: the row limit that chooses the kernels.
    """
    act, device, gate_up, down = context.act, context.device, experts.gate_up, experts.down
    n_experts, top_k = gate_up.n_experts, gate_up.top_k
    most_alone = 0 < chosen_for * top_k <= n_experts  # most experts get a single slot
    few = all(has_few_rows(device, weight, max_rows, in_chains=most_alone) for weight in (gate_up, down)) and (
        not most_alone or (experts.is_plain and chosen_for == max_rows)
    )
    if most_alone and not few and not all(suits_single_slots(device, weight) for weight in (gate_up, down)):
        return experts_by_token(context, x, None, experts, out)
    of_slots, most = act.of("expert_rows"), max_rows if few else 0
    ids, order, shares = (act.of(name) for name in ("expert_ids", "expert_order", "expert_weights"))
    blocks, outputs = act.of("expert_blocks"), act.of("expert_outputs")
    sizes = [block_rows(device, weight, most) for weight in (gate_up, down)]
    groupings = [
        group_by_expert(device, ids, order, blocks, context.step, n_experts=n_experts, top_k=top_k, block_rows=size)
        for size in dict.fromkeys(sizes)
    ]
    has_gate = experts.gate != "relu2"
    gated = (gated_rows(device, gate_up, down, context.step, most) if has_gate else None) or of_slots
    summands = slot_outputs(device, down, outputs, most)
    grouped, step = (order, blocks), context.step
    first: dict[str, Any] = {"gate": experts.gate, "bias": experts.gate_up_bias}
    if not has_gate:
        first["weights"] = act.of("expert_ones")
    return [
        *groupings[0],
        *experts_prefill(device, gate_up, x, *grouped, gated, step, **first, max_rows=most),
        *(launch for grouping in groupings[1:] for launch in grouping),
        *experts_prefill(
            device, down, gated, *grouped, summands, step, weights=shares, bias=experts.down_bias, max_rows=most
        ),
        *experts_sum(device, summands, out, top_k=top_k, columns=context.config.hidden_size),
    ]
