"""qkv_adjust: biases and head norms that some models apply to queries, keys and values."""

from __future__ import annotations

from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.sizes import largest_divisor, local_size, power_of_two_at_most, run_of
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch

WORK_ITEMS = 128  # per work-group at most, if a group handles several heads at once


def qkv_adjust(
    device: Device,
    qkv: Buffer,
    bias: Buffer | None,
    head_norms: Buffer | None,
    *,
    n_q_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    value_norms: bool = False,
    rope: Buffer | None = None,
) -> list[Launch]:
    """Adds bias to qkv float32 [n, n_q_heads + 2 n_kv_heads, head_dim], then normalises query and key heads.

    bias float32 [n_q_heads + 2 n_kv_heads, head_dim]; head_norms float32 [2, head_dim], for queries and keys. Returns
    no launch if both are None. value_norms: with head_norms, also normalises value heads, without weights. rope float32
    [n, head_dim], cosines, then sines: with head_norms, rotates query and key heads before their norm.
    """
    if bias is None and head_norms is None:
        return []
    heads = n_q_heads + (n_kv_heads if bias is None and not value_norms else 2 * n_kv_heads)
    per_head = local_size(device, min(8, power_of_two_at_most(head_dim // 16)))
    at_once = largest_divisor(heads, local_size(device, WORK_ITEMS) // per_head)
    in_turn = run_of(device, heads)
    constants: dict[str, object] = {
        "N_Q_HEADS": n_q_heads,
        "N_KV_HEADS": n_kv_heads,
        "HEAD_DIM": head_dim,
        "BIAS": bias is not None,
        "HEAD_NORM": head_norms is not None,
        "EPS": float(eps),
        "HEADS_PER_GROUP": in_turn,
        "HEADS_AT_ONCE": at_once,
        "LOCAL_SIZE": per_head,
        **({"VALUE_NORM": True} if value_norms else {}),
        **({} if rope is None else {"ROTATE": True}),
    }
    return op_launches(
        device,
        "qkv_adjust",
        constants,
        [qkv, bias or qkv, head_norms or qkv, *([] if rope is None else [rope])],
        groups=lambda n: (heads // (in_turn * at_once), n),
        local=(per_head * at_once, 1),
        cost=per_token(8 * heads * head_dim),
    )
