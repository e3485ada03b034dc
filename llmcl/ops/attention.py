"""attention_decode, attention_merge, rope_append and attention_prefill: variants, tile sizes and launches."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from llmcl.attention.mods import NO_MODS, Mods
from llmcl.errors import UsageError
from llmcl.kernels.common import step_state
from llmcl.kernels.common.dtype import QUANTIZED, is_16_bit, kernel_name, kv_row_bytes
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.work import attention_work, once, per_token
from llmcl.kernels.variant import Variant, largest_divisor, local_size, pick, power_of_two_at_most, variants
from llmcl.ops.attention_tiles import (
    CPU_SUMS,
    KERNEL_OPTIONS,
    MOST_ROWS,
    check_prefill_tiles,
    cpu_tile,
    dv_tile_for,
    largest_dv_tile,
    prefill_local_bytes,
    tuned_constants,
)
from llmcl.ops.narrow import NarrowRows
from llmcl.runtime.device import Buffer, Device, Launch, Work, WorkOf

TENSOR_DTYPES = ("float32", "float16", "bfloat16")
DECODE_VARIANTS = variants("attention_decode", nvidia=lambda dtype, d: is_16_bit(dtype) and d in (64, 128, 256))
PREFILL_VARIANTS = variants(
    "attention_prefill",
    nvidia=lambda dtype, d: dtype in TENSOR_DTYPES and d in (64, 128),
    hopper=lambda dtype, d: is_16_bit(dtype) and d in (64, 128),
)
ROPE_VARIANTS = (
    Variant("nvidia", "nvidia/rope_append.cl", lambda device: device.entry.ptx_arch >= 80, lambda t, d: is_16_bit(t)),
    Variant("cpu", "cpu/rope_append.cl", lambda device: device.is_cpu, lambda t, d: t not in QUANTIZED),
    Variant("shared", "portable/rope_append.cl", lambda device: True),
)

CAPACITY_MULTIPLE = 64  # every BLOCK_N divides it
DECODE_BLOCK_N = (16, 32, 64)
PAIRED = "bf16x2"  # how prefill on a CPU meets keys and values that are rounded to bfloat16: see cpu/pair_cache.cl
# Of its kernel, for each form of the dot product (32 registers of 512 bits, 16 of 256): vectors of sums, keys a step.
PAIRED_SUMS = {1: CPU_SUMS, 2: 6}
PAIRED_BLOCK_N = {1: 64, 2: 16}


@dataclass(frozen=True)
class AttentionShape:
    """n_q_heads a multiple of n_kv_heads; head_dim of 16, or of 32 with q8_0; capacity (keys) of 64.

    kv_dtype: as ops.dtype.KV_DTYPES; kernels/common/kv_cache.cl has the layouts.
    page_tokens: 0 where the cache is contiguous; else capacity is a pool of pages of that many keys (a multiple of 64).
    score_scale: factor of the scores; None for 1/sqrt(head_dim).
    exact_queries: attention is in float32 even where the device has it faster: in decode queries rounded to 8 bits
    beside a quantised cache; in prefill queries, keys and values rounded to bfloat16 beside any but one of float32.
    """

    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    capacity: int
    kv_dtype: str
    page_tokens: int = 0
    score_scale: float | None = None
    exact_queries: bool = False

    @property
    def group_size(self) -> int:
        return self.n_q_heads // self.n_kv_heads

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim) if self.score_scale is None else self.score_scale

    @property
    def row_bytes(self) -> int:
        """Bytes of a key or a value of one head."""
        return kv_row_bytes(self.head_dim, self.kv_dtype)

    def work(self) -> WorkOf:
        return attention_work(self.n_q_heads, self.n_kv_heads, self.head_dim, self.row_bytes)

    def constants(self, step: StepState) -> dict[str, object]:
        """Build constants of a kernel whose argument `state` is that of `step`, which is to hold the capacity."""
        slot = step_state.PAIRED_CAPACITY if self.kv_dtype == PAIRED else step_state.CAPACITY
        return {
            **step_state.CONSTANTS,
            "KV": kernel_name(self.kv_dtype),
            "N_Q_HEADS": self.n_q_heads,
            "N_KV_HEADS": self.n_kv_heads,
            "HEAD_DIM": self.head_dim,
            "CAPACITY": step.capacity(slot, self.capacity),
            **({"KV_PAGE": self.page_tokens, "STATE_PAGES": step_state.N_SLOTS} if self.page_tokens else {}),
        }


def prefill_key(variant: str, head_dim: int, kv_dtype: str) -> str:
    """The name of the tuned tiles of prefill among a device's findings."""
    return f"attention_prefill {variant} head_dim {head_dim} {kv_dtype}"


def decode_key(variant: str, n_kv_heads: int, head_dim: int, kv_dtype: str) -> str:
    """The name of the tuned constants of decode among a device's findings."""
    return f"attention_decode {variant} kv_heads {n_kv_heads} head_dim {head_dim} {kv_dtype}"


def decode_splits(device: Device, n_kv_heads: int, head_dim: int, kv_dtype: str) -> int:
    """Into how many runs the keys of a head are cut in decode: as tuned, or by default."""
    variant = pick(DECODE_VARIANTS, device, kv_dtype, head_dim).name
    tuned = tuned_constants(device, decode_key(variant, n_kv_heads, head_dim, kv_dtype))
    return tuned.get("N_SPLITS") or default_splits(device, n_kv_heads)


def default_splits(device: Device, n_kv_heads: int) -> int:
    """Runs such that every compute unit has an equal share."""
    if device.is_cpu:
        return math.lcm(n_kv_heads, device.compute_units) // n_kv_heads
    return max(1, min(32, 2 * device.compute_units // n_kv_heads))


def default_block_n(variant: str) -> int:
    """Keys a step of decode: on a CPU one tile, so that memory is read from front to back, not in several places."""
    return 16 if variant == "cpu" else 64


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
    out: Buffer,
    *,
    n_splits: int,
    variant: str | None = None,
    block_n: int | None = None,
    mods: Mods = NO_MODS,
) -> list[Launch]:
    """Rotates and appends the step's one token and attends to the cache, itself included.

    qkv float32 [n_q_heads + 2 n_kv_heads, head_dim]; rope float32 [head_dim]; out float32 [n_q_heads, head_dim];
    part_ml float32 [n_q_heads, n_splits, 2], part_acc float32 [n_q_heads, n_splits, head_dim].
    block_n: keys a step; None: as tuned, or chosen for the device.
    """
    chosen = pick(DECODE_VARIANTS, device, shape.kv_dtype, shape.head_dim, variant)
    constants = {**shape.constants(step), "N_SPLITS": n_splits, "SCALE": shape.scale}
    if block_n is None:
        key = decode_key(chosen.name, shape.n_kv_heads, shape.head_dim, shape.kv_dtype)
        tuned = tuned_constants(device, key).get("BLOCK_N")
        block_n = tuned if tuned in DECODE_BLOCK_N else None
    elif block_n not in DECODE_BLOCK_N:
        expected = ", ".join(map(str, DECODE_BLOCK_N))
        raise UsageError(f"BLOCK_N is {block_n}; expected one of {expected}")
    block_n = block_n or default_block_n(chosen.name)
    if chosen.name == "cpu":
        rows = shape.group_size
        constants |= cpu_tile(rows, block_n, dv_tile_for(shape.head_dim, rows))
        constants |= _dot_constant(device, shape)
        width = 1
    elif chosen.name == "nvidia":
        warps = _nvidia_decode_warps(device, shape)
        constants |= {"GROUP_SIZE": shape.group_size, "WARPS": warps}
        width = 32 * warps
    else:
        width = block_n
        constants |= {"GROUP_SIZE": shape.group_size, "BLOCK_N": width}
    merges_itself = chosen.name == "nvidia"
    if merges_itself:
        results = [part_acc, out, device.zeros(4 * shape.n_kv_heads, "arrivals")]
    else:
        results = [out if n_splits == 1 else part_acc]
    launches = [
        device.launch(
            chosen.file,
            "attention_decode",
            constants,
            [qkv, rope, step.state, k_cache, v_cache, part_ml, *results, *mods.buffers],
            groups=(shape.n_kv_heads, n_splits),
            local=(width, 1),
            prelude=mods.prelude,
            work=shape.work(),
        )
    ]
    if n_splits > 1 and not merges_itself:
        launches += attention_merge(device, shape, part_ml, part_acc, out, n_splits=n_splits)
    return launches


def attention_merge(
    device: Device, shape: AttentionShape, part_ml: Buffer, part_acc: Buffer, out: Buffer, *, n_splits: int
) -> list[Launch]:
    """Merges the partial online-softmax states of decode; shapes as in attention_decode."""
    # On a GPU a work-item has one column, and the loads of all its splits are under way together.
    size, columns = (1, 16) if device.is_cpu else (local_size(device, 64), 1)
    return [
        device.launch(
            "portable/attention_merge.cl",
            "attention_merge",
            {"N_SPLITS": n_splits, "HEAD_DIM": shape.head_dim, "COLUMNS": columns, "LOCAL_SIZE": size},
            [part_ml, part_acc, out],
            groups=(shape.n_q_heads,),
            local=(size,),
            work=once(4 * shape.n_q_heads * (n_splits * (2 + shape.head_dim) + shape.head_dim)),
        )
    ]


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
    """Rotates the queries of qkv float32 [n, n_q_heads + 2 n_kv_heads, head_dim] in place and fills the cache."""
    chosen = pick(ROPE_VARIANTS, device, shape.kv_dtype, shape.head_dim, variant)
    by_tiles = chosen.name == "nvidia"  # of 16 positions and a head; else a group has a token
    size = 128 if by_tiles else local_size(device, 256)
    heads = shape.n_q_heads + 2 * shape.n_kv_heads
    return [
        device.launch(
            chosen.file,
            "rope_append",
            {**shape.constants(step), "LOCAL_SIZE": size},
            [qkv, rope, step.state, k_cache, v_cache],
            groups=lambda n: ((n + 30) // 16, heads) if by_tiles else (n, 1),
            local=(size, 1),
            work=per_token(
                8 * shape.n_q_heads * shape.head_dim + 2 * shape.n_kv_heads * (4 * shape.head_dim + shape.row_bytes)
            ),
        )
    ]


@dataclass(frozen=True)
class PrefillTiles:
    """BLOCK_M query rows, BLOCK_N keys a step, DV_TILE output columns a pass, and the kernel variant they are for."""

    variant: Variant
    block_m: int
    block_n: int
    dv_tile: int
    key_splits: int = 1  # of the nvidia variant: warps that share rows and have different keys
    sums: int = CPU_SUMS  # of the cpu variant

    def constants(self) -> dict[str, object]:
        if self.variant.name == "cpu":
            return cpu_tile(self.block_m, self.block_n, self.dv_tile, self.sums)
        splits = {"KEY_SPLITS": self.key_splits} if self.variant.name == "nvidia" else {}
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "DV_TILE": self.dv_tile, **splits}

    @property
    def local(self) -> tuple[int, int, int]:
        warps = (32 * self.block_m // 16 * self.key_splits, 1, 1)
        sizes = {"cpu": (1, 1, 1), "hopper": (320, 1, 1), "nvidia": warps, "portable": (16, 8, 1)}
        return sizes[self.variant.name]


def prefill_dtype(device: Device, shape: AttentionShape, variant: str | None = None) -> str:
    """As what prefill meets keys and values: PAIRED where a CPU rounds them to bfloat16, else the cache's dtype."""
    if shape.exact_queries or shape.kv_dtype == "float32" or not device.bf16_dot_form:
        return shape.kv_dtype
    chosen = pick(PREFILL_VARIANTS, device, shape.kv_dtype, shape.head_dim, variant)
    return PAIRED if chosen.name == "cpu" else shape.kv_dtype


def paired_bytes(device: Device, shape: AttentionShape) -> int:
    """Bytes of working memory that prefill takes for the rounded keys and values of shape.capacity keys."""
    return 4 * shape.n_kv_heads * shape.head_dim * shape.capacity if prefill_dtype(device, shape) == PAIRED else 0


def prefill_tiles(
    device: Device,
    head_dim: int,
    kv_dtype: str,
    *,
    variant: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    dv_tile: int | None = None,
    q_block: int | None = None,
    tuned: bool = True,
) -> PrefillTiles:
    """Tile sizes as asked for (here, or by the user of the device), as tuned, or chosen for the device where None.

    q_block: a multiple of the query rows, if given. tuned: whether to look for what `llmcl tune` stored.

    Raises UsageError for sizes that the kernel cannot have, naming the constant to change.
    """
    if variant is None and q_block is not None and q_block % 8:
        variant = "cpu"  # its query rows can be any number
    if tuned and block_m is block_n is dv_tile is None:
        given = device.kernel_options
        block_m, block_n, dv_tile = (given.get(name) for name in KERNEL_OPTIONS)
        usual = pick(PREFILL_VARIANTS, device, kv_dtype, head_dim, variant).name
        sizes = None if given else tuned_constants(device, prefill_key(usual, head_dim, kv_dtype))
        if sizes:
            with suppress(UsageError):  # tuned tiles may not fit this use: then the defaults do
                return prefill_tiles(
                    device,
                    head_dim,
                    kv_dtype,
                    variant=variant,
                    block_m=sizes.get("BLOCK_M"),
                    block_n=sizes.get("BLOCK_N"),
                    dv_tile=sizes.get("DV_TILE"),
                    q_block=q_block,
                )
    if block_m is not None and not 1 <= block_m <= MOST_ROWS:
        raise UsageError(f"BLOCK_M is {block_m}; expected 1 to {MOST_ROWS}")
    table = PREFILL_VARIANTS
    # Of Hopper's variant: all columns in one pass, 128 query rows and keys.
    fits = {block_m, block_n} <= {None, 128} and dv_tile in (None, head_dim)
    if variant is None and not (fits and (q_block or 128) % 128 == 0):
        table = tuple(row for row in table if row.name != "hopper")
    # Of the nvidia variant: all columns in one pass; keys and values of a step in local memory, at least 48 KiB.
    nvidia_rows = 32 if kv_dtype == "float32" and head_dim <= 64 else 64
    nvidia_keys = (16, 32, 64) if kv_dtype != "float32" else (32, 64) if head_dim <= 64 else (32,)
    fits = block_m in (None, nvidia_rows) and block_n in (None, *nvidia_keys) and dv_tile in (None, head_dim)
    if variant is None and not (fits and (q_block or nvidia_rows) % nvidia_rows == 0):
        table = tuple(row for row in table if row.name != "nvidia")
    chosen = pick(table, device, kv_dtype, head_dim, variant)
    sums = PAIRED_SUMS[device.bf16_dot_form] if kv_dtype == PAIRED else CPU_SUMS
    if chosen.name == "hopper":
        block_m, block_n, dv_tile = block_m or 128, block_n or 128, dv_tile or head_dim
    elif chosen.name == "nvidia":
        block_m, block_n, dv_tile = block_m or nvidia_rows, block_n or nvidia_keys[-1], dv_tile or head_dim
    elif chosen.name == "cpu":
        # Blocks of 6 rows by 4 vectors where operands are widened, of 4 by 4 where not (docs/performance.md).
        rows, keys = 16 if kv_dtype in ("float32", PAIRED) else 12, 64 if head_dim <= 128 else 32
        if kv_dtype == PAIRED:
            keys = min(keys, PAIRED_BLOCK_N[device.bf16_dot_form])
        block_m, block_n = block_m or largest_divisor(q_block or rows, rows), block_n or keys
        dv_tile = dv_tile or dv_tile_for(head_dim, block_m, sums)
    else:
        # On a device with little local memory the default shrinks until it fits; a size that was asked for does not.
        fixed = block_m is not None or block_n is not None
        block_m = block_m or (8 if q_block is not None and q_block % 32 else 32)
        block_n, dv_tile = block_n or 32, dv_tile or largest_dv_tile(head_dim)
        limit = device.entry.local_mem_bytes
        while not fixed and prefill_local_bytes(head_dim, kv_dtype, block_m, block_n) > limit:
            if block_m > 8:
                block_m //= 2
            elif block_n > 16:
                block_n //= 2
            else:
                break
        check_prefill_tiles(device, head_dim, kv_dtype, block_m, block_n)
    if q_block is not None and q_block % block_m:
        raise UsageError(f"BLOCK_M is {block_m}; expected a divisor of the block mask's {q_block} queries a block")
    if chosen.name != "hopper" and block_n not in (16, 32, 64):
        raise UsageError(f"BLOCK_N is {block_n}; expected 16, 32 or 64")
    dv_tile = min(dv_tile, head_dim)
    if dv_tile < 16 or dv_tile % 16 or head_dim % dv_tile:
        options = [d for d in range(16, head_dim + 1, 16) if head_dim % d == 0]
        raise UsageError(f"DV_TILE is {dv_tile}; expected a divisor of head_dim {head_dim}: {options}")
    # Products of three parts take their time: more warps for the same rows.
    splits = block_n // 16 if chosen.name == "nvidia" and kv_dtype == "float32" else 1
    return PrefillTiles(chosen, block_m, block_n, dv_tile, splits, sums)


def leaves_narrow_rows(device: Device, shape: AttentionShape) -> bool:
    """Whether attention_prefill can leave its output as NarrowRows."""
    return prefill_tiles(device, shape.head_dim, shape.kv_dtype).variant.name == "hopper"


def attention_prefill(
    device: Device,
    shape: AttentionShape,
    qkv: Buffer,
    step: StepState,
    k_cache: Buffer,
    v_cache: Buffer,
    out: Buffer | NarrowRows,
    *,
    variant: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    dv_tile: int | None = None,
    mods: Mods = NO_MODS,
) -> list[Launch]:
    """Causal attention of every token of the step to the cache, which `rope_append` has filled.

    qkv float32 [n, n_q_heads + 2 n_kv_heads, head_dim]; out float32 [n, n_q_heads, head_dim].
    NarrowRows [n, n_q_heads * head_dim] only where `leaves_narrow_rows` says so.
    block_m query rows, block_n keys a step, dv_tile output columns a pass; None: chosen for the device.
    mods: further rules for scores and visible keys.
    """
    launches: list[Launch] = []
    work, met = shape.work(), prefill_dtype(device, shape, variant)
    if met == PAIRED:
        shape, k_cache, v_cache, launches = _pair_cache(device, shape, step, k_cache, v_cache)
    tiles = prefill_tiles(
        device,
        shape.head_dim,
        met,
        variant=variant,
        block_m=block_m,
        block_n=block_n,
        dv_tile=dv_tile,
    )
    constants = {
        **shape.constants(step),
        **tiles.constants(),
        "SCALE": shape.scale,
        "Q_STRIDE": (shape.n_q_heads + 2 * shape.n_kv_heads) * shape.head_dim,
        "HEADS_FIRST": False,
        "KEY_RUNS": False,
        "LSE": False,
    }
    if isinstance(out, NarrowRows):
        if tiles.variant.name != "hopper":
            raise TypeError(f"the {tiles.variant.name} variant of attention_prefill leaves float32 rows")
        constants |= {"NARROW_OUT": True, "OUT": kernel_name(out.dtype)}
        out = out.buffer
    if tiles.variant.name == "cpu":
        constants |= _dot_constant(device, shape)
    unused = out  # the kernel's arguments for lse and runs
    return [
        *launches,
        device.launch(
            tiles.variant.file,
            "attention_prefill",
            constants,
            [qkv, step.state, k_cache, v_cache, out, unused, unused, *mods.buffers],
            groups=lambda n: (shape.n_q_heads, -(-n // tiles.block_m), 1),
            local=tiles.local,
            prelude=mods.prelude,
            work=work,
        ),
    ]


def _pair_cache(
    device: Device, shape: AttentionShape, step: StepState, k_cache: Buffer, v_cache: Buffer
) -> tuple[AttentionShape, Buffer, Buffer, list[Launch]]:
    """The keys and values of the step's text, rounded and in pairs: their shape, themselves, and what makes them."""
    paged = shape.page_tokens * step.n_pages
    paired = replace(shape, capacity=paged or shape.capacity, kv_dtype=PAIRED, page_tokens=0)
    keys, values = step.paired_cache(shape.n_kv_heads * paired.capacity * shape.head_dim)
    launch = device.launch(
        "cpu/pair_cache.cl",
        "pair_cache",
        {**shape.constants(step), "PAIRED": step.capacity(step_state.PAIRED_CAPACITY, paired.capacity)},
        [step.state, k_cache, v_cache, keys, values],
        groups=(shape.n_kv_heads, 4 * device.compute_units),
        local=(1, 1),
        work=lambda n, position: Work(2.0 * shape.n_kv_heads * (shape.row_bytes + 2 * shape.head_dim) * (position + n)),
    )
    return paired, keys, values, [launch]


def _dot_constant(device: Device, shape: AttentionShape) -> dict[str, object]:
    """How queries meet keys on a CPU: see cpu/q8_0_tile.cl and cpu/paired_tile.cl."""
    if shape.kv_dtype == PAIRED:
        return {"DOT": device.bf16_dot_form}
    if shape.kv_dtype not in QUANTIZED:
        return {}
    return {"DOT": 0 if shape.exact_queries else device.dot_form}


def _nvidia_decode_warps(device: Device, shape: AttentionShape) -> int:
    """Warps of a work-group, as many as the local memory has room for (see nvidia/attention_decode.cl)."""
    own, shared = nvidia_decode_floats(shape)
    return min(4, power_of_two_at_most((device.entry.local_mem_bytes // 4 - shared) // own))


def nvidia_decode_floats(shape: AttentionShape) -> tuple[int, int]:
    """Local floats of nvidia/attend.cl: of each warp, and of a group beside them."""
    state = -(-shape.group_size * (shape.head_dim + 2) // 4) * 4
    queries = -(-shape.group_size // 4) * 4 * shape.head_dim
    return max(8 * shape.head_dim, state), queries + shape.head_dim // 2
