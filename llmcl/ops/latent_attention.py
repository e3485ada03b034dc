"""latent_append and latent_attention: attention to cached rows, a latent and a rotated key, shared by all
query heads.
"""

from __future__ import annotations

from dataclasses import replace

from llmcl.kernels import table
from llmcl.kernels.common.cost import per_token
from llmcl.kernels.common.latent import LatentAttentionKernel, LatentShape
from llmcl.kernels.common.mods import NO_MODS, Mods
from llmcl.kernels.common.sizes import local_size
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.table import op_launches
from llmcl.ops.attention import attention_merge
from llmcl.runtime.device import Buffer, Device, Launch


def latent_append(
    device: Device,
    shape: LatentShape,
    latents: Buffer,
    norm: Buffer,
    queries: Buffer,
    rope: Buffer,
    step: StepState,
    cache: Buffer,
    *,
    eps: float,
) -> list[Launch]:
    """Appends a row per token of the step to the cache: the normalised latent and the rotated key.

    latents float32 [n, width], where the first `rank` values are the latent; norm float32 [rank]; queries float32
    [n, n_heads, query], where the last `rope` values are rotated in place; rope float32 [n, width], from `embed`;
    cache: rows as in kernels/common/latent_row.cl.
    """
    size = local_size(device, 128)
    constants = shape.constants(step) | {"INTERLEAVED": shape.interleaved, "EPS": float(eps), "LOCAL_SIZE": size}
    return op_launches(
        device,
        "latent_append",
        constants,
        [latents, norm, queries, rope, step.state, cache],
        groups=lambda n: (n,),
        local=(size,),
        cost=per_token(4 * shape.width + shape.cache.row_bytes + 8 * shape.n_heads * shape.rope),
    )


def latent_attention(
    device: Device,
    shape: LatentShape,
    absorbed: Buffer,
    queries: Buffer,
    step: StepState,
    cache: Buffer,
    part_ml: Buffer,
    part_acc: Buffer,
    out: Buffer,
    *,
    n_splits: int,
    variant: str | None = None,
    mods: Mods = NO_MODS,
) -> list[Launch]:
    """Attends every token of the step to its own sequence in the cache (causal). The result is a weighted sum of
    latents.

    `latent_append` must have filled the cache.

    absorbed float32 [n, n_heads, rank], queries in latent space; queries float32 [n, n_heads, query], where only the
    last `rope` values count, rotated; out float32 [n, n_heads, rank]. n_splits > 1 requires a step with one token per
    sequence, part_ml float32 [n, n_heads, n_splits, 2] and part_acc float32 [n, n_heads, n_splits, rank].
    """
    chosen = table.pick(LatentAttentionKernel, device, shape.cache.kv_dtype, shape.width, variant)
    size_constants, width = chosen.size(device, shape)
    heads = size_constants["HEADS"]
    assert isinstance(heads, int)
    blocks = shape.n_heads // heads
    launches = [
        device.launch(
            chosen.file,
            "latent_attention",
            {**shape.constants(step), "N_SPLITS": n_splits, "SCALE": shape.cache.scale, **size_constants},
            [absorbed, queries, step.state, cache, part_ml, part_acc, out, *mods.buffers],
            groups=lambda n: (n_splits, blocks, n),
            local=(width, 1, 1),
            prelude=mods.prelude,
            cost=shape.cost(),
        )
    ]
    if n_splits > 1:
        merged = replace(shape.cache, head_dim=shape.rank)
        launches += attention_merge(device, merged, part_ml, part_acc, out, step, n_splits=n_splits)
    return launches
