"""The layers on other devices in steps with several sequences (stages.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llmcl.kernels.common.ragged_step import Run
from llmcl.kernels.common.step_state import StepState
from llmcl.models.batch_launches import BatchLaunches
from llmcl.models.model import Model
from llmcl.models.ragged_launches import RaggedLaunches, bind_ragged
from llmcl.models.stages import StagedModel


class BatchStage:
    """A stage before the last: step state and launches on the stage's device."""

    def __init__(self, stage: Model, max_sequences: int, max_rows: int, *, invariant: bool, ragged: bool):
        """ragged: steps may hold prompt chunks of several sequences."""
        device = stage.device
        self.stage = stage
        self.step = StepState(device, max_sequences, stage.cache.table_entries, max_sequences)
        last_seen = device.zeros(4 * max_sequences * stage.config.vocab_size, "latest positions")  # not read
        self.decoding = BatchLaunches(stage, self.step, last_seen, invariant=invariant)
        self.ragged: RaggedLaunches | None = bind_ragged(stage, max_rows, self.decoding.ops) if ragged else None

    def prepare(self) -> None:
        """Compiles the kernels."""
        bound, chunks = [*self.decoding.bound.values()], self.ragged.launches if self.ragged else []
        for launch in (*(launch for each in bound for launch in each.separate), *chunks):
            launch.share_seldom_used()
        launches = [*(launch for each in bound for launch in each.to_prepare), *chunks]
        with self.stage.device.compile_progress(launches, None):
            for each in bound:
                each.prepare()
            for launch in chunks:
                launch.prepare()


class BatchStages:
    """All stages before the last, for `Batch`. Without other devices every call does nothing."""

    def __init__(self, model: Model, lead: StepState, max_rows: int, *, invariant: bool, ragged: RaggedLaunches | None):
        """lead, ragged: the step states and launches of the last stage."""
        self._lead = lead
        self._stages: list[BatchStage] = []
        if isinstance(model, StagedModel):
            options = {"invariant": invariant, "ragged": ragged is not None}
            self._stages = [BatchStage(stage, lead.n_sequences, max_rows, **options) for stage in model.before]
            self._gaps = model.gaps
        if ragged is not None:
            ragged.step.mirrors = [each.ragged.step for each in self._stages if each.ragged is not None]

    def prepare(self) -> None:
        for each in self._stages:
            each.prepare()

    def decode(self, n_rows: int) -> None:
        """Computes a row for each of n_rows sequences, up to x of the last stage."""
        self._compute(n_rows, lambda each: each.stage.run(each.decoding.launches_for(n_rows), n_rows))

    def read(self, runs: Sequence[Run]) -> None:
        """Computes a step with prompt chunks, up to x of the last stage."""

        def rows_of(each: BatchStage) -> None:
            assert each.ragged is not None
            each.ragged.run(each.stage, runs, ())

        self._compute(sum(run.n_rows for run in runs), rows_of)

    def _compute(self, n_rows: int, run: Callable[[BatchStage], None]) -> None:
        if not self._stages:
            return
        self._lead.copy_to([each.step for each in self._stages])
        for each, gap in zip(self._stages, self._gaps, strict=True):
            gap.run(partial(run, each), n_rows)
