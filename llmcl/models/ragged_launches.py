"""Binds launches for steps with prompt chunks: work for every row, and work only for rows with logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmcl.architectures.config import ModelConfig
from llmcl.kernels.common.linear import few_rows
from llmcl.kernels.common.ragged_step import RaggedStep, Run
from llmcl.models.activations import Activations
from llmcl.models.attention_ops import RaggedAttention, RowAttention
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.model import Model
from llmcl.models.prefill_launches import prefill_sizes
from llmcl.models.stack import after_kept, head, until_kept
from llmcl.runtime.device import Buffer, Device, Launch


@dataclass(frozen=True)
class RaggedLaunches:
    """Launches for a step in two stages, keyed by row limit."""

    step: RaggedStep
    every: dict[int, list[Launch]]  # by row limit, up to the last block that fills the cache
    rest: dict[int, list[Launch]]  # by limit of wanted rows, from there to the logits

    @property
    def max_rows(self) -> int:
        return max(self.every)

    @property
    def launches(self) -> list[Launch]:
        return [launch for bound in (self.every, self.rest) for launches in bound.values() for launch in launches]

    def run(self, model: Model, runs: Sequence[Run], wanted: Sequence[int]) -> None:
        """Enqueues a step for `runs`. Afterwards `act.logits` holds the wanted rows in order."""
        self.step.write(runs, wanted)
        model.run(_for(self.every, self.step.n_rows), self.step.n_rows)
        if wanted:
            model.run(_for(self.rest, len(wanted)), len(wanted))


def bind_ragged(
    model: Model,
    max_rows: int,
    batch_ops: Callable[[int, Activations], PrefillOps],
    *,
    step: RaggedStep | None = None,
    adapt: Callable[[PrefillOps], PrefillOps] | None = None,
) -> RaggedLaunches:
    """Binds launches for steps with up to max_rows rows. The wanted rows are limited by the rows in `act.logits`.

    batch_ops: makes ops for steps with one row per sequence, from a row limit and activations. step: shared with other
    launches. adapt: adds adapters to ops (adapted_ops.py).
    """
    device, shape = model.device, model.cache.shape
    slots = model.act.logits.nbytes // (4 * model.config.vocab_size)
    wanted = wanted_rows(device, model.act, slots, model.config)
    few = few_rows(slots)
    decoding = rows_that_decode(model, slots, batch_ops)
    of_batch = batch_ops(few[-1], model.act)
    step = step or RaggedStep(device, max_rows, of_batch.step)
    context = device, model.config, step, model.act
    attention = RaggedAttention(*context, shape, of_batch.attention.splits, decoding, wanted)
    every = {}
    for rows, max_few in prefill_sizes(device, model.weights, max_rows):
        ops = PrefillOps(*context, attention, model.rotations, of_batch.last_seen, max_few)
        ops = ops if adapt is None else adapt(ops)
        every[rows] = list(until_kept(model.weights, model.layers, ops))
    rest = {}
    for rows in few:
        of_wanted = batch_ops(rows, wanted)
        launches = [*after_kept(model.weights, model.layers, of_wanted)]
        rest[rows] = [*launches, *head(model.weights, of_wanted, model.act.logits)]
    return RaggedLaunches(step, every, rest)


def rows_that_decode(
    model: Model, slots: int, batch_ops: Callable[[int, Activations], PrefillOps]
) -> list[tuple[int, RowAttention]]:
    """Returns the attention of decoding rows by row limit. A few rows split their keys into more parts than many rows,
    as in pure decode steps.
    """
    few, rows = few_rows(slots), list[tuple[int, RowAttention]]()
    for most in sorted({few[0], few[-1]}):
        attention = batch_ops(most, model.act).attention
        assert isinstance(attention, RowAttention)
        rows.append((most, attention))
    return rows


def wanted_rows(device: Device, act: Activations, n: int, config: ModelConfig) -> Activations:
    """Returns activations with separate buffers for n wanted rows, for a step's second stage."""

    def rows_of(name: str, columns: int) -> Buffer:
        return device.alloc(4 * n * columns, f"{name} of wanted rows")

    layer_inputs = config.n_layers * config.layer_input_size
    return replace(
        act,
        layer_inputs=rows_of("inputs of layers", layer_inputs) if layer_inputs else None,
        x=rows_of("x", config.hidden_size),
        qkv=rows_of("qkv", config.qkv_values),
        rope=rows_of("rotation", config.rotated_size("main")),
        local_rope=None if act.local_rope is None else rows_of("local rotation", config.rotated_size("local")),
    )


def _for(bound: dict[int, list[Launch]], n: int) -> list[Launch]:
    return next(launches for most, launches in bound.items() if n <= most)
