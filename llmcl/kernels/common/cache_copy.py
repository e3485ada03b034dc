"""A copy of a layer's keys and values in another storage type, made for prefill attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmcl.kernels.common import step_state
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.ragged_step import Cut, RaggedStep
from llmcl.kernels.common.step_state import StepState
from llmcl.runtime.device import Buffer, Cost, Device, Launch


@dataclass(frozen=True)
class CacheCopy:
    """A kernel that copies the keys and values which a step sees, with two bytes per number."""

    file: str  # has an entry with the file's name
    dtype: str  # of the copy
    local: int  # work-items per group
    groups: int  # per head

    def bind(
        self, device: Device, shape: AttentionShape, step: StepState, k: Buffer, v: Buffer
    ) -> tuple[AttentionShape, Buffer, Buffer, dict[str, object], list[Launch]]:
        """Returns the result of `AttentionPrefill.prepare`. With several sequences, rows keep their places in the
        cache; otherwise the copy is contiguous.
        """
        runs = step.pieces(Cut(0)) if isinstance(step, RaggedStep) else None
        copied = replace(shape, kv_dtype=self.dtype)
        if runs is None:
            paged = shape.page_tokens * step.n_pages
            copied = replace(copied, capacity=paged or shape.capacity, page_tokens=0)
        nbytes = self.nbytes(copied) // 2
        keys, values = (step.scratch(f"{self.dtype} {name}, {nbytes} bytes", nbytes) for name in ("keys", "values"))
        constants = copied.constants(step, step_state.COPY_CAPACITY)
        launch = device.launch(
            self.file,
            self.file.rpartition("/")[2].removesuffix(".cl"),
            {**shape.constants(step), "COPY_ROWS": constants["CAPACITY"], **(runs.constants if runs else {})},
            [step.state, k, v, keys, values],
            groups=lambda n: (shape.n_kv_heads, self.groups, runs.n if runs else 1),
            local=(self.local, 1, 1),
            cost=lambda n, position: Cost(
                2.0 * shape.n_kv_heads * (shape.row_bytes + 2 * shape.head_dim) * (position + n)
            ),
        )
        return copied, keys, values, constants, [launch]

    def nbytes(self, shape: AttentionShape) -> int:
        """Returns the bytes of copied keys and values."""
        return 4 * shape.n_kv_heads * shape.head_dim * shape.capacity
