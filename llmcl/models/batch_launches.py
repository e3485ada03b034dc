"""Binds launches for steps with one row for each of several sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from llmcl.kernels.common.linear import FEW_ROWS, few_rows
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.common.step_state import StepState
from llmcl.models.activations import Activations, split_values, splits_of
from llmcl.models.attention_ops import RowAttention
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.model import Model
from llmcl.models.stack import head, stack
from llmcl.ops.linear import rows_are_decoded
from llmcl.runtime.device import Buffer, Launch


class BatchLaunches:
    """Launches up to the logits, `bound` by row limit. invariant: rows have the same bits alone and beside others."""

    def __init__(
        self,
        model: Model,
        step: StepState,
        last_seen: Buffer,
        *,
        invariant: bool,
        adapt: Callable[[PrefillOps], PrefillOps] | None = None,
    ):
        """last_seen: see `Sampler`. adapt: adds adapters to ops (adapted_ops.py)."""
        self._model = model
        self._step = step
        self._last_seen = last_seen
        self._invariant = invariant
        self._adapt = adapt
        # A single row uses the one-token products if the bits stay the same.
        bounds = [1] if invariant and rows_are_decoded(model.device, model.weights.matrices) else []
        bounds += few_rows(step.n_sequences) if step.n_sequences > 1 or not bounds else []
        self.bound = {rows: self._bind(rows) for rows in bounds}

    def launches_for(self, n_rows: int) -> Sequence[Launch]:
        return next(bound.launches for rows, bound in self.bound.items() if n_rows <= rows)

    def ops(self, max_rows: int, act: Activations) -> PrefillOps:
        """Returns ops for up to max_rows rows, one per sequence."""
        model, shape = self._model, self._model.cache.shape
        # Each row adds work-groups, so more rows need fewer KV splits.
        filling = FEW_ROWS[0] if self._invariant else max_rows
        splits = splits_of(model.device, model.config, shape.kv_dtype, filling)
        states, sums = (4 * self._step.n_sequences * values for values in split_values(model.config, splits))
        part_ml = self._step.scratch(f"states of splits, {states} bytes", states)
        part_acc = self._step.scratch(f"sums of splits, {sums} bytes", sums)
        context = model.device, model.config, self._step, replace(act, part_ml=part_ml, part_acc=part_acc)
        attention = RowAttention(*context, shape, splits)
        ops = PrefillOps(*context, attention, model.rotations, self._last_seen, max_rows)
        ops = replace(ops, experts_for=FEW_ROWS[0]) if self._invariant else ops
        return ops if self._adapt is None else self._adapt(ops)

    def _bind(self, max_rows: int) -> BoundLaunches:
        model = self._model
        ops = self.ops(max_rows, model.act)
        launches = [*stack(model.weights, model.layers, ops), *head(model.weights, ops, model.act.logits)]
        listed = ListedStep(launches, self._step, model.cache.max_context, max_rows)
        persistent = self._adapt is None or model.device.is_cpu
        return BoundLaunches(model.device, listed, persistent=persistent, same_bits=self._invariant)
