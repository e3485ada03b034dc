"""delta_chunks: the gated delta rule for many tokens on a GPU, by products within chunks."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.kernels.common.sizes import power_of_two_at_most
from llmcl.kernels.common.step_state import RECURRENT, SNAPSHOT, StepState
from llmcl.kernels.table import op_launches
from llmcl.ops.delta_shape import DeltaShape
from llmcl.runtime.device import Buffer, Cost, Device, Launch

CHUNK = 32  # tokens per chunk; more need more products within a chunk, fewer need more steps between chunks
TERMS_LOCAL_SIZE = CHUNK * CHUNK // 8


@dataclass(frozen=True)
class ChunkSizes:
    """The sizes for delta_chunks.cl; see the kernel's head."""

    columns: int
    local_size: int
    slice: int
    key_tokens: int
    local_bytes: int


def chunk_sizes(device: Device, shape: DeltaShape) -> ChunkSizes | None:
    """Returns the sizes, or None if the device should go token by token: a CPU, or a GPU with too little
    local memory.
    """
    if device.is_cpu:
        return None
    columns = 32 if shape.d_v % 32 == 0 and shape.d_k <= 128 else 16
    slice = 32 if shape.d_k % 32 == 0 else 16
    local_size = 256 if columns == 32 or shape.d_k % 32 == 0 else 128
    staged = 2 * CHUNK * (slice + 4)
    key_tokens = min(CHUNK, power_of_two_at_most(staged // (shape.d_k + 4)))
    local_bytes = 4 * (shape.d_k * columns + CHUNK * columns + staged)
    if local_bytes > device.entry.local_mem_bytes or local_size > device.entry.max_work_group_size:
        return None
    return ChunkSizes(columns, local_size, slice, key_tokens, local_bytes)


def scratch_values(shape: DeltaShape) -> dict[str, int]:
    """Returns the scratch per token, in float32 values."""
    w = {"delta w": shape.n_v * shape.d_k} if shape.corrects else {}
    return {**w, "delta b": shape.n_v * CHUNK, "delta factors": shape.n_v * 2}


def delta_scratch_bytes(device: Device, shape: DeltaShape, max_tokens: int) -> int:
    """Returns the scratch bytes for steps of up to max_tokens tokens."""
    return 0 if chunk_sizes(device, shape) is None else 4 * max_tokens * sum(scratch_values(shape).values())


def delta_chunks(
    device: Device,
    shape: DeltaShape,
    sizes: ChunkSizes,
    qkv: Buffer,
    gates: Buffer,
    step: StepState,
    states: Buffer,
    out: Buffer,
    scalars: Buffer | None = None,
) -> list[Launch]:
    """Computes `delta_rule` for consecutive tokens of one sequence, with the same arguments. sizes: from
    `chunk_sizes`.
    """
    *w, b, factors = (
        step.scratch(name, 4 * step.max_tokens * values) for name, values in scratch_values(shape).items()
    )
    of_w = w[0] if w else b  # without a correction there is no w
    others = [] if scalars is None else [scalars]
    common: dict[str, object] = {
        **step.constants,
        **shape.constants,
        "CHUNK": CHUNK,
        "CORRECTS": shape.corrects,
        "HEADS_IN_TURN": shape.heads_in_turn,
        "STATE_RECURRENT": RECURRENT,
        "STATE_SNAPSHOT": SNAPSHOT,
    }
    chunk_constants = {"COLUMNS": sizes.columns, "SLICE": sizes.slice, "KEY_TOKENS": sizes.key_tokens}
    read = shape.channels + shape.n_v * (shape.d_k + CHUNK + 2)

    def terms_cost(n: int, position: int) -> Cost:
        products = 2.0 * n * shape.n_v * CHUNK * (2 * shape.d_k + (shape.d_k + shape.d_v) / 2)
        return Cost(4 * n * (read + shape.n_v * (shape.d_v + 2)), products)

    def chunks_cost(n: int, position: int) -> Cost:
        products = 2.0 * n * shape.n_v * shape.d_v * (3 * shape.d_k + CHUNK)
        return Cost(8 * shape.n_v * shape.d_k * shape.d_v + 4 * n * (read + 2 * shape.n_v * shape.d_v), products)

    return [
        *op_launches(
            device,
            "delta_terms",
            {**common, "SLICE": sizes.slice, "LOCAL_SIZE": TERMS_LOCAL_SIZE},
            [qkv, gates, step.state, of_w, out, b, factors],
            groups=lambda n: (-(-(n + CHUNK - 1) // CHUNK), shape.n_v),  # the first chunk may be shorter
            local=(TERMS_LOCAL_SIZE, 1),
            cost=terms_cost,
        ),
        *op_launches(
            device,
            "delta_chunks",
            {**common, **chunk_constants, "LOCAL_SIZE": sizes.local_size},
            [qkv, of_w, b, factors, step.state, states, out, *others],
            groups=(shape.d_v // sizes.columns, shape.n_v),
            local=(sizes.local_size, 1),
            cost=chunks_cost,
        ),
    ]
