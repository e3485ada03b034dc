"""dry: lowers the logits of tokens that would continue a repetition in the text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.errors import UsageError
from llmcl.kernels.common.cost import once
from llmcl.kernels.common.sizes import widest_group
from llmcl.kernels.common.step_state import StepState, for_rows
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.runtime.staging import send

MAX_RULES = 4096
MAX_TAIL = 20  # tokens of a breaker after its first, as in llama.cpp
MAX_PENALTY = 1e6  # finite, so a token that a grammar demands can be chosen nevertheless


@dataclass(frozen=True, eq=False)
class Breakers:
    """Sequences of tokens at which a repetition ends, as kernels/portable/dry.cl reads them.

    heads: int32 [vocab]. rules: int32 [at most MAX_RULES].
    """

    heads: np.ndarray
    rules: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]], vocab_size: int) -> Breakers:
        """Packs sequences of one token or more, cut after 1 + MAX_TAIL. Raises UsageError if they exceed MAX_RULES."""
        tails: dict[int, set[tuple[int, ...]]] = {}
        for head, *tail in sequences:
            tails.setdefault(head, set()).add(tuple(tail[:MAX_TAIL]))
        heads, rules, starts = np.zeros(vocab_size, np.int32), [0], dict[tuple[tuple[int, ...], ...], int]()
        for head, each in tails.items():
            ordered = tuple(sorted(each, key=len, reverse=True))
            if ordered not in starts:
                starts[ordered] = len(rules)
                rules += [len(ordered), *(value for tail in ordered for value in (len(tail), *tail))]
            heads[head] = -starts[ordered] if () in each else starts[ordered]
        if len(rules) > MAX_RULES:
            raise UsageError("dry_sequence_breakers need too much room as tokens; expected fewer or shorter strings")
        return cls(heads, np.array(rules, np.int32))


class Dry:
    """Changes logits float32 [vocab] in place, or [n_sequences, vocab] with a step state for several sequences.

    context: tokens in the longest text. constants: the sampling kernels'. The texts stay on the device: the host writes
    a text when a sequence comes to its place (`remember`), and the kernel appends each step's token.
    """

    def __init__(
        self,
        device: Device,
        logits: Buffer,
        last_seen: Buffer,
        params: Buffer,
        step: StepState,
        context: int,
        vocab_size: int,
        constants: Mapping[str, object],
    ):
        n = max(1, step.n_sequences)
        width = min(256, widest_group(device))  # PoCL 3.0's code for 1024 work-items crashes
        self._device = device
        self._context = context
        self._vocab_size = vocab_size
        self._breakers: dict[int, Breakers] = {}  # as written to the device
        self.text = device.alloc(4 * n * context, "texts for DRY")
        self._runs = device.alloc(4 * n * context, "repetitions for DRY")
        self._records = device.zeros(16 * n, "states of DRY")
        self._longest = device.zeros(4 * n * vocab_size, "longest repetitions by token")
        self._heads = device.zeros(4 * n * vocab_size, "first tokens of breakers")
        self._rules = device.zeros(4 * n * MAX_RULES, "breakers")
        texts = [self.text, self._runs, self._records, self._longest, self._heads, self._rules]
        self.launches: list[Launch] = op_launches(
            device,
            "dry",
            {
                **constants,
                "MAX_RULES": MAX_RULES,
                "MAX_TAIL": MAX_TAIL,
                "MAX_PENALTY": f"{MAX_PENALTY}f",
                "LOCAL_SIZE": width,
            },
            [logits, last_seen, step.state, params, step.tokens, *texts, np.int32(context)],
            groups=for_rows(step, 1),
            local=(width, 1) if step.n_sequences else (width,),
            cost=once(8 * context),
        )

    def configure(self, breakers: Breakers | None, sequence: int = 0) -> None:
        """Sets a sequence's breakers. `remember` follows."""
        if breakers is not None and self._breakers.get(sequence) is not breakers:
            heads = np.ascontiguousarray(breakers.heads[: self._vocab_size], np.int32)
            send(self._device, self._heads, heads, 4 * sequence * self._vocab_size)
            send(self._device, self._rules, np.ascontiguousarray(breakers.rules, np.int32), 4 * sequence * MAX_RULES)
            self._breakers[sequence] = breakers
        send(self._device, self._records, np.array([0, 0, breakers is not None, 0], np.int32), 16 * sequence)

    def remember(self, token_ids: Sequence[int], sequence: int = 0) -> None:
        """Sets a sequence's text: the tokens in its cache, from position 0 on."""
        if token_ids:
            send(self._device, self.text, np.asarray(token_ids, np.int32), 4 * sequence * self._context)
        send(self._device, self._records, np.array([len(token_ids), 0], np.int32), 16 * sequence)
