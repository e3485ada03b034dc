"""A step's launches, bound once: a persistent kernel where the device has one for them, else one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from llmcl.errors import KernelBuildError
from llmcl.kernels import table
from llmcl.kernels.common.persistent import BoundStep, ListedStep, PersistentStep
from llmcl.runtime.device import Device, Launch


class BoundLaunches:
    """persistent: what does all of `separate` in few launches; None: the device has nothing of this kind."""

    def __init__(
        self,
        device: Device,
        step: ListedStep,
        *,
        persistent: bool = True,
        same_bits: bool = False,
        for_few_rows: bool = False,
    ):
        """persistent: whether that is allowed. same_bits: only where it leaves the bits of `separate`. for_few_rows:
        only kernels for steps of few rows, as for a short prompt.
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
        """What a step enqueues."""
        return self.separate if self.persistent is None else self.persistent.parts

    @property
    def whole_steps(self) -> Mapping[int, Launch]:
        """Launches that do steps as a whole: see `BoundStep`."""
        return {} if self.persistent is None else self.persistent.whole_steps

    def prepare(self) -> None:
        """Compiles the kernels and makes their objects; without a persistent kernel that does not compile."""
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
        """The launches whose kernels `prepare` compiles."""
        return [*self.launches, *self.whole_steps.values()]

    def _prepare(self) -> None:
        for launch in self.to_prepare:
            launch.prepare()
