"""A step in few launches whose kernel does not compile: it is computed with a launch for each kernel."""

import json
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from programs import TINY_SHAPE

import llmcl
from llmcl.kernels import table
from llmcl.kernels.common.persistent import BoundChains, ListedStep, PersistentStep
from llmcl.kernels.implementation import Row
from llmcl.runtime.device import Device, Launch
from llmcl.runtime.program import KernelSource


class DoesNotCompile(PersistentStep):
    """The step, of which the second launch has a kernel that no compiler takes."""

    bound: ClassVar[int] = 0

    def __init__(self, *, few_rows: bool):
        self.few_rows = few_rows

    def supports_device(self, device: Device) -> bool:
        return True

    def unsupported_reason(self, device: Device, step: ListedStep) -> str | None:
        return None

    def bind(self, device: Device, step: ListedStep) -> BoundChains:
        type(self).bound += 1
        source = KernelSource("portable/embed.cl", "embed", {}, "#error of a test\n")
        return BoundChains([step.launches[0], Launch(device, source, [], (1,), (1,))])


@pytest.mark.parametrize("few_rows", [False, True], ids=["decode", "short-prompt"])
def test_the_answer_is_the_same(
    few_rows: bool, default_device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_SHAPE))
    row, found = DoesNotCompile(few_rows=few_rows), table.implementations
    logits: list[np.ndarray] = []

    def implementations(kind: type[Row]) -> tuple[Row, ...]:
        return (row,) if kind is PersistentStep else found(kind)  # type: ignore[return-value]

    def answer() -> None:
        device = default_device.entry.index
        with llmcl.load_random(str(tmp_path / "config.json"), device=device, dtype="float32", max_context=64) as llm:
            llm.model.prefill(llm.sequence, [5, 1, 7])
            llm.model.decode_token(llm.sequence, 2)
            logits.append(llm.device.read(llm.model.act.logits, np.float32, (TINY_SHAPE["vocab_size"],)))

    answer()
    before = DoesNotCompile.bound
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="a launch for each kernel, which is slower"):
        patch.setattr(table, "implementations", implementations)
        answer()
    assert DoesNotCompile.bound > before
    assert np.abs(logits[1] - logits[0]).max() < 1e-5 * np.abs(logits[0]).max()
