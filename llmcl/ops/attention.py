"""attention_decode, attention_merge, rope_append and attention_prefill: tuned sizes and launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from llmcl.errors import UsageError
from llmcl.kernels import table
from llmcl.kernels.common.attention import (
    DECODE_BLOCK_N,
    MAX_ROWS,
    AttentionDecode,
    AttentionFewQueries,
    AttentionPrefill,
    AttentionShape,
    PrefillTiles,
    RopeAppend,
    TileRequest,
)
from llmcl.kernels.common.cost import once, per_token
from llmcl.kernels.common.linear import ActivationLayout, ActivationOperand, PackedActivations
from llmcl.kernels.common.mods import NO_MODS, Mods
from llmcl.kernels.common.ragged_step import FIRST_CHUNK_ROW, Cut, RaggedStep
from llmcl.kernels.common.sizes import columns_a_work_item, local_size
from llmcl.kernels.common.step_state import StepState, for_rows
from llmcl.kernels.implementation import pick
from llmcl.ops.attention_sizes import tuned_constants
from llmcl.runtime.device import Buffer, Device, Launch


def prefill_key(variant: str, head_dim: int, kv_dtype: str) -> str:
    """Returns the cache key for tuned prefill tiles."""
    return f"attention_prefill {variant} head_dim {head_dim} {kv_dtype}"


def decode_key(variant: str, n_kv_heads: int, head_dim: int, kv_dtype: str) -> str:
    """Returns the cache key for tuned decode constants."""
    return f"attention_decode {variant} kv_heads {n_kv_heads} head_dim {head_dim} {kv_dtype}"


def _queries_alone(device: Device, shape: AttentionShape) -> AttentionDecode:
    """Picks the decode kernel for keys and values appended by another layer."""
    rows = [row for row in table.implementations(AttentionDecode) if row.takes_queries_alone]
    return pick(rows, device, shape.kv_dtype, shape.head_dim)


def decode_splits(device: Device, n_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Returns the KV splits per head in decode: the tuned value or the default."""
    chosen = table.pick(AttentionDecode, device, kv_dtype, head_dim)
    tuned = tuned_constants(device, decode_key(chosen.name, n_kv_heads, head_dim, kv_dtype))
    return tuned.get("N_SPLITS") or chosen.default_splits(device, n_kv_heads)


def attention_decode(
    device: Device,
    shape: AttentionShape,
    qkv: Buffer,
    rope: Buffer,
    step: StepState,
    k_cache: Buffer,
    v_cache: Buffer,
    part_ml: Buffer,
    part_acc: Buffer,
    out: ActivationOperand,
    *,
    n_splits: int,
    variant: str | None = None,
    block_n: int | None = None,
    mods: Mods = NO_MODS,
    sinks: Buffer | None = None,
    n_rows: Callable[[], int] | None = None,
    shared_kv: bool = False,
) -> list[Launch]:
    """Rotates and appends the step's token, and attends to the cache including the new token.

    With several sequences, each sequence has a token, and all buffers except the cache have a row per token.

    qkv float32 [n_q_heads + 2 n_kv_heads, head_dim]; rope float32 [head_dim]; out float32 [n_q_heads, head_dim];
    part_ml float32 [n_q_heads, n_splits, 2], part_acc float32 [n_q_heads, n_splits, head_dim]. out may be
    PackedActivations [n, n_q_heads * head_dim] if `decode_supports_output` allows it.

    block_n: keys per loop step; None: tuned, or chosen for the device.
    sinks: float32 [n_q_heads], a logit per head that only counts in the softmax sum.
    n_rows: with several sequences, returns how many of the step's first rows to handle; None: all.
    shared_kv: the cache already holds the token, and qkv only holds queries.
    """
    chosen = table.pick(AttentionDecode, device, shape.kv_dtype, shape.head_dim, variant)
    if shared_kv and not chosen.takes_queries_alone:
        chosen = _queries_alone(device, shape)
    if block_n is None:
        key = decode_key(chosen.name, shape.n_kv_heads, shape.head_dim, shape.kv_dtype)
        tuned = tuned_constants(device, key).get("BLOCK_N")
        block_n = tuned if tuned in DECODE_BLOCK_N else None
    elif block_n not in DECODE_BLOCK_N:
        expected = ", ".join(map(str, DECODE_BLOCK_N))
        raise UsageError(f"BLOCK_N is {block_n}; expected one of {expected}")
    block_n = block_n or chosen.default_block_n(device)
    if step.n_sequences:
        size_constants, width = chosen.size_of_rows(device, shape, block_n, n_splits)
    else:
        size_constants, width = chosen.size(device, shape, block_n)
    constants = {
        **shape.constants(step),
        "N_SPLITS": n_splits,
        "SCALE": shape.scale,
        **size_constants,
        **chosen.out_constants(out),
        **_sinks(sinks),
        **({"SHARED_KV": True} if shared_kv else {}),
    }
    out_buffer = out.buffer if isinstance(out, PackedActivations) else out
    if chosen.one_split_keys:
        constants["ONE_SPLIT_KEYS"] = chosen.one_split_keys
        results = [part_acc, out_buffer]
    elif chosen.merges:
        results = [part_acc, out_buffer, device.zeros(4 * shape.n_kv_heads * max(1, step.n_sequences), "arrivals")]
    else:
        results = [out_buffer if n_splits == 1 else part_acc]
    constants, heads = chosen.with_arguments(constants)
    launches = [
        device.launch(
            chosen.file,
            "attention_decode",
            constants,
            [qkv, rope, step.state, k_cache, v_cache, part_ml, *results, *_given(sinks), *mods.buffers, *heads],
            groups=for_rows(step, shape.n_kv_heads, n_splits, n_rows=n_rows),
            local=(width, 1, 1) if step.n_sequences else (width, 1),
            prelude=mods.prelude,
            cost=shape.cost(),
        )
    ]
    if n_splits > 1 and not chosen.merges:
        launches += attention_merge(
            device,
            shape,
            part_ml,
            part_acc,
            out_buffer,
            step,
            n_splits=n_splits,
            one_split_keys=chosen.one_split_keys,
            sinks=sinks,
            n_rows=n_rows,
        )
    return launches


def decode_supports_output(device: Device, shape: AttentionShape, layout: ActivationLayout) -> bool:
    """Tells whether attention_decode can leave its output in `layout`."""
    return table.pick(AttentionDecode, device, shape.kv_dtype, shape.head_dim).supports_output(layout)


def attention_merge(
    device: Device,
    shape: AttentionShape,
    part_ml: Buffer,
    part_acc: Buffer,
    out: Buffer,
    step: StepState,
    *,
    n_splits: int,
    one_split_keys: int = 0,
    sinks: Buffer | None = None,
    n_rows: Callable[[], int] | None = None,
) -> list[Launch]:
    """Merges decode's partial online-softmax states. Shapes and n_rows are the same as in attention_decode.

    one_split_keys: up to this many keys, `out` is already final and the launch may be skipped.
    """
    size = local_size(device, 64)
    constants: dict[str, object] = {
        **step.constants,
        "N_Q_HEADS": shape.n_q_heads,
        "N_SPLITS": n_splits,
        "ONE_SPLIT_KEYS": one_split_keys,
        "HEAD_DIM": shape.head_dim,
        "COLUMNS": columns_a_work_item(device),  # a single column keeps the loads for all splits in flight together
        "LOCAL_SIZE": size,
        **_sinks(sinks),
    }
    launches = table.op_launches(
        device,
        "attention_merge",
        constants,
        [part_ml, part_acc, out, step.state, *_given(sinks)],
        groups=for_rows(step, shape.n_q_heads, n_rows=n_rows),
        local=(size, 1) if step.n_sequences else (size,),
        cost=once(4 * shape.n_q_heads * (n_splits * (2 + shape.head_dim) + shape.head_dim)),
    )
    return [launch.needed_from(one_split_keys) for launch in launches]


def rope_append(
    device: Device,
    shape: AttentionShape,
    qkv: Buffer,
    rope: Buffer,
    step: StepState,
    k_cache: Buffer,
    v_cache: Buffer,
    *,
    variant: str | None = None,
) -> list[Launch]:
    """Rotates queries in place, and appends keys and values to the cache.

    Handles the chunks of a RaggedStep, or all rows of another step. qkv float32
    [n, n_q_heads + 2 n_kv_heads, head_dim].
    """
    chosen = table.pick(RopeAppend, device, shape.kv_dtype, shape.head_dim, variant)
    size_constants, groups_each, width = chosen.size(device, shape)
    constants: dict[str, object] = {**shape.constants(step), **size_constants}
    tile, tiles = chosen.tile_rows, None
    if isinstance(step, RaggedStep) and tile > 1:
        tiles = step.pieces(Cut(tile, aligned=True))
        constants |= tiles.constants
    elif tile == 1:
        constants["FIRST_ROW"] = f"state[{FIRST_CHUNK_ROW}]" if isinstance(step, RaggedStep) else 0
    constants, heads = chosen.with_arguments(constants)

    def groups(n: int) -> tuple[int, int]:
        if tiles is not None:
            return tiles.n, groups_each
        if isinstance(step, RaggedStep):
            return step.n_chunk_rows, groups_each
        return (n + 2 * tile - 2) // tile, groups_each

    return [
        device.launch(
            chosen.file,
            "rope_append",
            constants,
            [qkv, rope, step.state, k_cache, v_cache, *heads],
            groups=groups,
            local=(width, 1),
            cost=per_token(
                8 * shape.n_q_heads * shape.head_dim + 2 * shape.n_kv_heads * (4 * shape.head_dim + shape.row_bytes)
            ),
        )
    ]


def prefill_implementation(device: Device, shape: AttentionShape, variant: str | None = None) -> AttentionPrefill:
    """Picks the prefill kernel for a cache shape, regardless of tile sizes."""
    chosen = table.pick(AttentionPrefill, device, shape.kv_dtype, shape.head_dim, variant)
    if not shape.bidirectional or chosen.is_bidirectional:
        return chosen
    rows = [row for row in table.implementations(AttentionPrefill) if row.is_bidirectional]
    return pick(rows, device, shape.kv_dtype, shape.head_dim, variant)


def prefill_dtype(device: Device, shape: AttentionShape, variant: str | None = None) -> str:
    """Returns the dtype in which prefill reads keys and values: the cache's dtype or the dtype of a rounded copy."""
    return prefill_implementation(device, shape, variant).operand_dtype(device, shape)


def prefill_tiles(
    device: Device,
    head_dim: int,
    kv_dtype: str,
    *,
    variant: str | None = None,
    request: TileRequest | None = None,
    tuned: bool = True,
) -> PrefillTiles:
    """Picks tile sizes: as requested (here or by the device's user), as tuned, or chosen for the device.

    tuned: look for sizes stored by `llmcl tune`.

    Raises UsageError for sizes that the kernel does not support. The error names the constant to change.
    """
    request = request or TileRequest()
    if tuned and request.is_open:
        options = device.kernel_options
        usual = table.pick(AttentionPrefill, device, kv_dtype, head_dim, variant).name
        sizes = None if options else tuned_constants(device, prefill_key(usual, head_dim, kv_dtype))
        if sizes:
            stored = TileRequest.of(sizes, request.q_block)
            with suppress(UsageError):  # tuned tiles may not fit here: fall back to the defaults
                return prefill_tiles(device, head_dim, kv_dtype, variant=variant, request=stored, tuned=False)
        request = TileRequest.of(options, request.q_block)
    if request.block_m is not None and not 1 <= request.block_m <= MAX_ROWS:
        raise UsageError(f"BLOCK_M is {request.block_m}; expected 1 to {MAX_ROWS}")
    rows = table.implementations(AttentionPrefill)
    if variant is None:
        rows = tuple(
            row for row in rows if row.supports(kv_dtype, head_dim) and row.supports_tiles(head_dim, kv_dtype, request)
        )
        if not any(
            row.supports_device(device) for row in rows
        ):  # only another device's kernel has such tiles; that kernel runs here, too
            variant = rows[0].name
    return pick(rows, device, kv_dtype, head_dim, variant).tiles(device, head_dim, kv_dtype, request)


def head_dim_for_arrays(device: Device, width: int, kv_dtype: str, variant: str | None = None) -> int:
    """Returns the column count used for attention on arrays with `width` columns.

    Rounds up to a multiple of 16, or of 64 or 256 if only then the device has a specialised kernel. variant: the
    requested variant.
    """
    sizes = [-(-width // multiple) * multiple for multiple in (16, 64, 256)]
    special = (size for size in sizes if not table.pick(AttentionPrefill, device, kv_dtype, size).runs_anywhere)
    return sizes[0] if variant is not None else next(special, sizes[0])


def few_queries_implementation(device: Device, dtype: str, width: int, rows: int) -> AttentionFewQueries | None:
    """Picks the kernel for few queries on arrays, read in place, with `rows` rows per KV head.

    Returns None if the kernel for many queries is at least as good.
    """
    wrong = device.cache.excluded
    for row in table.implementations(AttentionFewQueries):
        fits = row.supports_device(device) and row.supports(dtype, width) and row.takes(rows)
        if fits and row.key(dtype) not in wrong:
            return row
    return None


def attention_supports_output(device: Device, shape: AttentionShape, layout: ActivationLayout) -> bool:
    """Tells whether attention_prefill can leave its output in `layout`."""
    variant = prefill_implementation(device, shape).name if shape.bidirectional else None
    tiles = prefill_tiles(device, shape.head_dim, shape.kv_dtype, variant=variant)
    return tiles.implementation.supports_output(layout)


def attention_prefill(
    device: Device,
    shape: AttentionShape,
    qkv: Buffer,
    step: StepState,
    k_cache: Buffer,
    v_cache: Buffer,
    out: ActivationOperand,
    *,
    variant: str | None = None,
    request: TileRequest | None = None,
    mods: Mods = NO_MODS,
    sinks: Buffer | None = None,
    shared_kv: bool = False,
) -> list[Launch]:
    """Attends every token of the step, or of a RaggedStep's chunks, to its own sequence in the cache: to earlier tokens
    and itself, or with `shape.bidirectional` to all tokens (no RaggedStep).

    `rope_append` must have filled the cache.

    qkv float32 [n, n_q_heads + 2 n_kv_heads, head_dim]; out float32 [n, n_q_heads, head_dim], or PackedActivations
    [n, n_q_heads * head_dim] if `attention_supports_output` allows it. request: tile sizes; None: chosen for the
    device. mods: further rules for scores and visible keys. sinks, shared_kv: see `attention_decode`.
    """
    cost = shape.cost()
    pieces = None
    usual = prefill_implementation(device, shape, variant)
    met, keys, values, cache_constants, launches = usual.prepare(device, shape, step, k_cache, v_cache)
    variant = usual.name if shape.bidirectional else variant
    tiles = prefill_tiles(device, shape.head_dim, met.kv_dtype, variant=variant, request=request)
    constants = {
        **cache_constants,
        **tiles.constants(),
        "SCALE": shape.scale,
        "Q_STRIDE": (shape.n_q_heads + (0 if shared_kv else 2 * shape.n_kv_heads)) * shape.head_dim,
        "HEADS_FIRST": False,
        "KV_BLOCK_RANGES": False,
        "LSE": False,
        **({"BIDIRECTIONAL": True} if shape.bidirectional else {}),
        **tiles.implementation.out_constants(out),
        **_sinks(sinks),
    }
    if isinstance(step, RaggedStep):
        pieces = step.pieces(Cut(tiles.block_m))
        constants |= pieces.constants
    constants, heads = tiles.implementation.with_arguments(constants)

    def groups(n: int) -> tuple[int, ...]:
        rows = n if pieces is None else pieces.n * tiles.block_m
        return tiles.implementation.groups(device, tiles, shape.n_q_heads, rows)

    result = out if isinstance(out, Buffer) else out.buffer
    unused = result  # for the kernel arguments lse and ranges
    return [
        *launches,
        device.launch(
            tiles.implementation.file,
            "attention_prefill",
            constants,
            [qkv, step.state, keys, values, result, unused, unused, *_given(sinks), *mods.buffers, *heads],
            groups=groups,
            local=tiles.local,
            prelude=mods.prelude,
            cost=cost,
        ),
    ]


def _sinks(sinks: Buffer | None) -> dict[str, object]:
    """Returns the build constants of a kernel with sinks (kernels/common/online_softmax.cl)."""
    return {} if sinks is None else {"HAS_SINKS": True}


def _given(sinks: Buffer | None) -> list[Buffer]:
    return [] if sinks is None else [sinks]
