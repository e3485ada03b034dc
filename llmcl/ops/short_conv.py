"""short_conv and conv_state: LFM2's short convolution between its projections, and the convolution's state."""

from __future__ import annotations

from llmcl.kernels.common.cost import once, per_token
from llmcl.kernels.common.sizes import columns_a_work_item, local_size
from llmcl.kernels.common.step_state import RECURRENT, SNAPSHOT, StepState
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch

CPU_RUN = 32  # pieces of 16 channels per work-group on a CPU: takes some microseconds


def short_conv(
    device: Device,
    rows: Buffer,
    weights: Buffer,
    step: StepState,
    states: Buffer,
    out: Buffer,
    *,
    channels: int,
    length: int,
    each_alone: bool,
    bias: bool = False,
) -> list[Launch]:
    """Computes out[t] = c[t] conv(b x)[t], and each sequence's new state.

    rows float32 [n, 3, channels]: b, c, x; weights float32 [length, channels], with a bias one row more; states float32
    [slots, length - 1, channels]: the last inputs b x, oldest first; out float32 [n, channels]; channels a multiple of
    16, length 2 or more. each_alone: each row is a sequence's only token; otherwise the rows are consecutive tokens of
    a single sequence.
    """
    assert each_alone or not step.n_sequences  # no kernel supports several tokens of several sequences
    sizes, run = _sizes(device)
    constants = {**step.constants, **sizes, "STATE_RECURRENT": RECURRENT, "CHANNELS": channels, "LENGTH": length}
    groups = -(-channels // run)
    launches = op_launches(
        device,
        "short_conv",
        {**constants, "EACH_ALONE": each_alone, "CONV_BIAS": bias},
        [rows, weights, step.state, states, out],
        groups=lambda n: (groups, n),
        local=(sizes["LOCAL_SIZE"], 1),
        cost=per_token(4 * channels * (4 + (2 * (length - 1) if each_alone else 0))),
    )
    if not each_alone:
        launches += conv_state(
            device, rows, step, states, row=3 * channels, channels=channels, length=length, gated=True
        )
    return launches


def conv_state(
    device: Device,
    rows: Buffer,
    step: StepState,
    states: Buffer,
    *,
    row: int,
    channels: int,
    length: int,
    gated: bool,
) -> list[Launch]:
    """Writes a sequence's state after a step of consecutive tokens, and a snapshot.

    rows float32 [n, row]; states float32 [slots, length - 1, channels]: the last inputs of the convolution. An input is
    the first `channels` values of a row; if gated, times the values from column 2 channels on.
    """
    sizes, run = _sizes(device)
    slots = {"STATE_RECURRENT": RECURRENT, "STATE_SNAPSHOT": SNAPSHOT}
    state_constants = {**slots, "ROW": row, "CHANNELS": channels, "LENGTH": length, "GATED": gated}
    return op_launches(
        device,
        "conv_state",
        {**step.constants, **sizes, **state_constants},
        [rows, step.state, states],
        groups=(-(-channels // run),),
        local=(sizes["LOCAL_SIZE"],),
        cost=once(8 * channels * (length - 1)),
    )


def _sizes(device: Device) -> tuple[dict[str, int], int]:
    """Returns build constants for dividing the channels, and the channels per work-group."""
    width, size = columns_a_work_item(device), local_size(device, 64)
    run = CPU_RUN if device.is_cpu else size
    return {"WIDTH": width, "RUN": run, "LOCAL_SIZE": size}, run * width
