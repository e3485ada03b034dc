"""logit_bias: biases added to some logits before a token is chosen, and masks of allowed tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmcl.kernels.common.cost import once
from llmcl.kernels.common.sizes import widest_group
from llmcl.kernels.common.step_state import StepState, for_rows
from llmcl.kernels.table import op_launches
from llmcl.runtime.device import Buffer, Device
from llmcl.runtime.staging import send

MAX_BIASES = 1024


class LogitBias:
    """Changes logits float32 [vocab] in place, or [n_sequences, vocab] with a step state for several sequences.

    For rules int32 [n, 2], biases int32 [n, MAX_BIASES, 2] and allowed uint32 [n, ceil(vocab / 32)], see
    kernels/portable/logit_bias.cl.
    """

    def __init__(self, device: Device, logits: Buffer, vocab_size: int, step: StepState):
        n = max(1, step.n_sequences)
        self._device = device
        self._n = n
        self._words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._biased: set[int] = set()
        self._masked: set[int] = set()
        self.rules = device.zeros(8 * n, "numbers of logit biases")
        self.biases = device.alloc(8 * n * MAX_BIASES, "logit biases")
        self._allowed = device.alloc(4 * n * self._words, "allowed tokens")
        self._host_allowed: np.ndarray | None = None  # host copy, once there are masks
        self._written: list[object] = []
        width = widest_group(device)
        groups = min(max(2, device.compute_units), -(-vocab_size // width))
        self.launches = op_launches(
            device,
            "logit_bias",
            {
                **step.constants,
                "VOCAB": vocab_size,
                "MAX_BIASES": MAX_BIASES,
                "N_GROUPS": groups,
                "LOCAL_SIZE": width,
            },
            [logits, step.state, self.rules, self.biases, self._allowed],
            groups=for_rows(step, groups),
            local=(width, 1) if step.n_sequences else (width,),
            cost=once(8 * vocab_size),
        )

    def configure(self, bias: Mapping[int, float], sequence: int = 0) -> None:
        """Sets the biases for some tokens' logits, checked by SamplingParams, and allows every token."""
        if not bias and not self.applies_to(sequence):
            return
        pairs = np.zeros((len(bias), 2), np.int32)
        pairs[:, 0] = list(bias)
        pairs[:, 1] = np.array(list(bias.values()), np.float32).view(np.int32)
        if bias:
            send(self._device, self.biases, pairs, 8 * sequence * MAX_BIASES)
            self._biased.add(sequence)
        else:
            self._biased.discard(sequence)
        self._masked.discard(sequence)
        send(self._device, self.rules, np.array([len(bias), 0], np.int32), 8 * sequence)

    def allow(self, tokens: Mapping[int, np.ndarray | None]) -> None:
        """Restricts the next token of each given sequence to a mask: bits uint32 [ceil(vocab / 32)].

        Token 0 is the lowest bit of the first word. None allows all tokens. A mask applies until the next call for the
        sequence. Call again only after the mask's step has ended. Does not wait for the device.
        """
        masks = {sequence: mask for sequence, mask in sorted(tokens.items()) if mask is not None}
        for mask in masks.values():
            if mask.dtype != np.uint32 or mask.shape != (self._words,):
                raise ValueError(f"allowed tokens are {mask.dtype} {mask.shape}; expected uint32 ({self._words},)")
        if masks:
            self._write(masks)
        for sequence in tokens:
            if (sequence in masks) != (sequence in self._masked):
                self._device.fill(self.rules, np.int32(sequence in masks), 8 * sequence + 4, 4)
                (self._masked.add if sequence in masks else self._masked.discard)(sequence)

    def _write(self, masks: Mapping[int, np.ndarray]) -> None:
        """Enqueues copies of the masks, in ascending order. Neighbouring sequences share a copy."""
        self._written.clear()  # waits for the previous copies, made for an earlier step
        if self._host_allowed is None:
            self._host_allowed = self._device.pinned(self._n * self._words).reshape(self._n, self._words)
        pinned = self._host_allowed
        first = last = next(iter(masks))
        for sequence, mask in masks.items():
            if sequence > last + 1:
                self._copy(first, last)
                first = sequence
            pinned[sequence], last = mask.view(np.int32), sequence
        self._copy(first, last)

    def _copy(self, first: int, last: int) -> None:
        assert self._host_allowed is not None
        rows = self._host_allowed[first : last + 1]
        self._written.append(self._device.write_async(self._allowed, rows, 4 * first * self._words))

    def applies_to(self, sequence: int) -> bool:
        return sequence in self._biased or sequence in self._masked
