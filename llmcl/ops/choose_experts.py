"""choose_experts: chooses experts for each token of a step, and computes the weights of their outputs."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.experts import bias_constants
from llmcl.kernels.common.sizes import local_size, power_of_two_at_least
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch


def choose_experts(
    device: Device,
    logits: Buffer,
    ids: Buffer,
    weights: Buffer,
    *,
    n_experts: int,
    top_k: int,
    renormalize: bool,
    bias: Buffer | None = None,
    row: int | None = None,
) -> list[Launch]:
    """Chooses the top_k experts with the largest logits, the largest first, and computes the softmax of their logits.

    logits float32 [n, row], where only the first n_experts count (row None: [n, n_experts]); ids int32 [n, top_k];
    weights float32 [n, top_k]. renormalize: the weights of the chosen experts add up to 1; otherwise the weights of all
    experts would. bias float32 [n_experts]: added to the logits.
    """
    size = local_size(device, min(256, power_of_two_at_least(n_experts)))
    constants: dict[str, object] = {
        "N_EXPERTS": n_experts,
        "ROW": row or n_experts,
        "TOP_K": top_k,
        "RENORMALIZE": renormalize,
        "LOCAL_SIZE": size,
        **bias_constants(bias),
    }
    return op_launches(
        device,
        "choose_experts",
        constants,
        [logits, ids, weights, *([] if bias is None else [bias])],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(4 * n_experts + 8 * top_k),
    )


def choose_scored_experts(
    device: Device,
    logits: Buffer,
    ids: Buffer,
    weights: Buffer,
    *,
    n_experts: int,
    top_k: int,
    renormalize: bool,
    sigmoid: bool,
    n_groups: int = 1,
    top_groups: int = 1,
    per_group: int = 1,
    scale: float = 1.0,
    correction: Buffer | None = None,
) -> list[Launch]:
    """Chooses the top_k experts by score within the best groups of neighbours, and computes output weights.

    logits float32 [n, n_experts]; ids int32 [n, top_k]; weights float32 [n, top_k], the scores times `scale`.

    sigmoid: a score is the sigmoid of a logit; otherwise the softmax over all logits.
    correction float32 [n_experts]: added to the scores for the choice only.
    n_groups, top_groups: of n_groups groups, only top_groups count: the groups with the largest sums over their
    per_group best experts.
    renormalize: the scores of the chosen experts are divided by their sum.
    """
    size = local_size(device, min(256, power_of_two_at_least(n_experts)))
    constants: dict[str, object] = {
        "N_EXPERTS": n_experts,
        "TOP_K": top_k,
        "SIGMOID": sigmoid,
        "N_GROUPS": n_groups,
        "TOP_GROUPS": top_groups,
        "PER_GROUP": min(per_group, n_experts // n_groups),
        "RENORMALIZE": renormalize,
        "SCALE": float(scale),
        "CORRECTION": correction is not None,
        "LOCAL_SIZE": size,
    }
    return op_launches(
        device,
        "choose_scored_experts",
        constants,
        [logits, logits if correction is None else correction, ids, weights],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(4 * n_experts + 8 * top_k),
    )
