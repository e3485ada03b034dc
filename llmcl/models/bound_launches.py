"""Binds a step's launches once: a persistent kernel if the device supports it, otherwise separate launches."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from llmcl.errors import KernelBuildError
from llmcl.kernels import table
from llmcl.kernels.common.persistent import BoundStep, ListedStep, PersistentStep
from llmcl.runtime.device import Device, Launch


class BoundLaunches:
    """A step's launches. persistent: does the work of `separate` in few launches, or None if unsupported."""

    def __init__(
        self,
        device: Device,
        step: ListedStep,
        *,
        persistent: bool = True,
        same_bits: bool = False,
        for_few_rows: bool = False,
    ):
        """persistent: allows a persistent kernel. same_bits: only if its results equal `separate` bit for bit.
        for_few_rows: only kernels for steps with few rows, such as a short prompt.
        """
        self.separate = step.launches
        self.persistent: BoundStep | None = None
        rows = (row for row in table.implementations(PersistentStep) if row.few_rows or not for_few_rows)
        able = (row for row in rows if row.supports_device(device) and row.unsupported_reason(device, step) is None)
        kernel = next(able, None) if persistent else None
        if kernel is not None and not (same_bits and kernel.few_rows):
            self.persistent = kernel.bind(device, step)

    @property
    def launches(self) -> Sequence[Launch]:
        """Returns the launches that a step enqueues."""
        return self.separate if self.persistent is None else self.persistent.parts

    @property
    def whole_steps(self) -> Mapping[int, Launch]:
        """Returns launches for whole steps (see `BoundStep`)."""
        return {} if self.persistent is None else self.persistent.whole_steps

    def prepare(self) -> None:
        """Compiles the kernels and makes their objects. Separate launches if a persistent kernel does not compile."""
        try:
            self._prepare()
        except KernelBuildError as error:
            if self.persistent is None:
                raise
            warnings.warn(f"computing with a launch for each kernel, which is slower: {error}", stacklevel=4)
            self.persistent = None
            self._prepare()

    @property
    def to_prepare(self) -> list[Launch]:
        """Returns the launches whose kernels `prepare` compiles."""
        return [*self.launches, *self.whole_steps.values()]

    def _prepare(self) -> None:
        for launch in self.to_prepare:
            launch.prepare()
