"""Log-probabilities of chosen tokens and of the most likely alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmcl.errors import UsageError, shown
from llmcl.kernels.common.cost import once
from llmcl.kernels.common.sizes import widest_group
from llmcl.kernels.common.step_state import StepState, for_rows
from llmcl.kernels.table import op_launches
from llmcl.ops.logit_bias import MAX_BIASES, LogitBias
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.runtime.staging import send

MAX_TOP = 20
LINES = 64  # steps with kept results: the host reads a step's results while the device computes later steps


@dataclass(frozen=True)
class LogProb:
    """A token's log-probability (natural logarithm), and the most likely tokens as (token, log-probability), best
    first.

    Probabilities are softmax(logits) from the model, before temperature, penalty and bias.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def check_alternatives(name: str, n: object) -> None:
    """Raises UsageError unless n is a valid number of alternatives, or None for no log-probabilities. name: the
    option's name.
    """
    if n is not None and not (isinstance(n, (int, np.integer)) and 0 <= n <= MAX_TOP):
        raise UsageError(f"{name} is {shown(n)}; expected 0 to {MAX_TOP} alternatives, or None")


class LogProbs:
    """Computes log-probabilities from logits float32 [vocab], or [n_sequences, vocab] for several sequences.

    Enqueue `before` before anything changes the logits, and `after` when the tokens are chosen.
    """

    def __init__(self, device: Device, logits: Buffer, vocab_size: int, step: StepState, bias: LogitBias):
        n = max(1, step.n_sequences)
        width = widest_group(device)
        groups = min(max(2, device.compute_units), -(-vocab_size // width))
        self._device = device
        self._n_sequences = n
        self._wanted: dict[int, int] = {}
        wanted = device.alloc(4 * n, "numbers of alternatives")
        device.fill(wanted, np.int32(-1))
        self._wanted_on_device = wanted
        sums = device.alloc(8 * n * groups, "sums for log-probabilities")
        tops = device.alloc(8 * n * groups * MAX_TOP, "most likely tokens of each group")
        self._out = device.alloc(8 * LINES * n * (1 + MAX_TOP), "log-probabilities")
        constants: dict[str, object] = {
            **step.constants,
            "VOCAB": vocab_size,
            "MAX_TOP": MAX_TOP,
            "MAX_BIASES": MAX_BIASES,
            "LINES": LINES,
            "N_SEQUENCES": step.n_records,
            "N_GROUPS": groups,
            "LOCAL_SIZE": width,
        }

        def bind(stage: str, args: list[Buffer], n_groups: int, nbytes: int) -> list[Launch]:
            local = (width, 1) if step.n_sequences else (width,)
            sizes: dict[str, Any] = {"groups": for_rows(step, n_groups), "local": local, "cost": once(nbytes)}
            return op_launches(device, "logprobs", constants, args, stage=stage, **sizes)

        self.before = [
            *bind("partial", [logits, step.state, wanted, sums, tops], groups, 4 * vocab_size),
            *bind("merge", [step.state, wanted, sums, tops, self._out], 1, 8 * groups * MAX_TOP),
        ]
        chosen = [logits, step.state, wanted, bias.rules, bias.biases, step.sampled, self._out]
        self.after = bind("chosen", chosen, 1, 16)

    def configure(self, wanted: int | None, sequence: int = 0) -> None:
        """Sets the number of alternatives beside the chosen token, 0 to MAX_TOP; None: no log-probabilities."""
        if wanted == self._wanted.get(sequence):
            return
        send(self._device, self._wanted_on_device, np.array([-1 if wanted is None else wanted], np.int32), 4 * sequence)
        if wanted is None:
            self._wanted.pop(sequence, None)
        else:
            self._wanted[sequence] = wanted

    def are_wanted(self, sequence: int) -> bool:
        return sequence in self._wanted

    def read(self, step: int, sequences: Sequence[int]) -> Callable[[], list[LogProb | None]]:
        """Enqueues a read of the results of step number `step`, whose rows belong to `sequences`.

        Returns a function that waits for the results: None for a sequence without log-probabilities.
        """
        size = 1 + MAX_TOP
        pairs = np.empty((len(sequences), size, 2), np.float32)
        wait = self._device.read_async(self._out, pairs, 8 * (step % LINES) * self._n_sequences * size)
        wanted = [self._wanted.get(sequence) for sequence in sequences]

        def found() -> list[LogProb | None]:
            wait()
            tokens = pairs.view(np.int32)[..., 1]
            return [
                None
                if n is None
                else LogProb(
                    int(tokens[row, 0]),
                    float(pairs[row, 0, 0]),
                    tuple(
                        (int(tokens[row, k]), float(pairs[row, k, 0])) for k in range(1, n + 1) if tokens[row, k] >= 0
                    ),
                )
                for row, n in enumerate(wanted)
            ]

        return found
