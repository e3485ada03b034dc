"""How the next token is chosen: parameters, and the kernels that choose it on the device."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.errors import UsageError
from llmcl.ops import step_state
from llmcl.ops.step_state import StepState
from llmcl.ops.variant import power_of_two_at_most
from llmcl.ops.work import once
from llmcl.runtime.device import Buffer, Device, Launch

REPEAT_WINDOW = 64

# Slots of the int32 buffer `sampling`; floats by their bits.
CONSTANTS = {
    "SAMPLING_TEMPERATURE": 0,
    "SAMPLING_TOP_K": 1,
    "SAMPLING_TOP_P": 2,
    "SAMPLING_MIN_P": 3,
    "SAMPLING_PENALTY": 4,
    "SAMPLING_WINDOW": 5,
    "SAMPLING_SEED_LO": 6,
    "SAMPLING_SEED_HI": 7,
    "SAMPLING_THRESHOLD": 8,  # written by sample_threshold
}


@dataclass(frozen=True)
class SamplingParams:
    """What users of llama.cpp know, in its order: penalty, top-k, top-p, min-p, temperature.

    temperature 0 takes the most likely token. top_k 0, top_p 1, min_p 0 and repeat_penalty 1 are off. The penalty
    looks at the last repeat_window tokens, prompt included. seed None draws one (`seeded()`).

    Raises UsageError when a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_window: int = REPEAT_WINDOW
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, expected: str) -> None:
            if not holds:
                raise UsageError(f"{name} is {getattr(self, name)!r}; expected {expected}")

        for name in ("temperature", "top_p", "min_p", "repeat_penalty"):
            value = getattr(self, name)
            check(name, isinstance(value, (int, float)) and math.isfinite(value), "a number")
        check("temperature", self.temperature >= 0, "0 (the most likely token) or more")
        check("top_k", isinstance(self.top_k, int) and 0 <= self.top_k < 1 << 31, "0 (off) or more")
        check("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1 (off)")
        check("min_p", 0 <= self.min_p <= 1, "0 (off) to 1")
        check("repeat_penalty", self.repeat_penalty > 0, "more than 0; 1 is off")
        check("repeat_window", 0 <= self.repeat_window < 1 << 31, "0 or more tokens")
        check("seed", self.seed is None or 0 <= self.seed < 1 << 64, "0 to 2^64 - 1")

    @property
    def truncates(self) -> bool:
        """Whether a threshold on the logits is needed."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def seeded(self) -> SamplingParams:
        """These parameters with a seed, drawn if there is none."""
        if self.seed is not None:
            return self
        return SamplingParams(**{**self.__dict__, "seed": secrets.randbits(32)})


class Sampler:
    """The sampling kernels of one model, bound once. `last_seen` int32 [vocab] is kept by the embedding kernel."""

    def __init__(self, device: Device, logits: Buffer, vocab_size: int, step: StepState):
        self._device = device
        self._vocab_size = vocab_size
        self.last_seen = device.alloc(4 * vocab_size, "latest positions")
        self._params = device.zeros(4 * len(CONSTANTS), "sampling parameters")
        self._device.fill(self.last_seen, np.int32(-1))
        width = power_of_two_at_most(min(256, device.entry.max_work_group_size))
        # The threshold is one work-group's work: on a GPU the largest there is, on a CPU the one already compiled.
        whole = width if device.is_cpu else power_of_two_at_most(min(1024, device.entry.max_work_group_size))
        # Enough groups for a GPU, few enough for the one work-item that compares their best.
        groups = min(max(2, device.compute_units), 32, -(-vocab_size // width))
        best = device.alloc(8 * groups, "best scores")
        constants = {**CONSTANTS, **step_state.CONSTANTS, "VOCAB": vocab_size, "N_GROUPS": groups}

        def bind(name: str, args: list[Buffer], n_groups: int, local: int, built_for: int = width) -> Launch:
            built: dict[str, object] = {**constants, "LOCAL_SIZE": built_for}
            work = once(8 * groups if name == "sample_finish" else 8 * vocab_size)  # logits and latest positions
            return device.launch("sample.cl", name, built, args, groups=(n_groups,), local=(local,), work=work)

        inputs = [logits, self.last_seen, step.state, self._params]
        self._threshold = [bind("sample_threshold", inputs, 1, whole, built_for=whole)]
        self._choose = [
            bind("sample_partial", [*inputs, best], groups, width),
            bind("sample_finish", [best, step.state, step.tokens, step.sampled], 1, 1),
        ]
        self.launches: list[Launch] = self._choose

    def configure(self, params: SamplingParams) -> None:
        """Takes over the parameters of a generation (36 bytes to the device)."""
        floats = np.array(
            [params.temperature, params.top_p, params.min_p, params.repeat_penalty, -np.inf], np.float32
        ).view(np.int32)
        seed = np.array([params.seed or 0], np.uint64).view(np.int32)
        slots = np.zeros(len(CONSTANTS), np.int32)
        for name, value in (
            ("TEMPERATURE", floats[0]),
            ("TOP_K", params.top_k),
            ("TOP_P", floats[1]),
            ("MIN_P", floats[2]),
            ("PENALTY", floats[3]),
            ("WINDOW", params.repeat_window),
            ("SEED_LO", seed[0]),
            ("SEED_HI", seed[1]),
            ("THRESHOLD", floats[4]),
        ):
            slots[CONSTANTS["SAMPLING_" + name]] = value
        self._device.write(self._params, slots)
        self.launches = self._threshold + self._choose if params.truncates else self._choose

    def remember(self, token_ids: Sequence[int]) -> None:
        """The tokens that the cache holds from position 0 on are those seen so far."""
        self._device.fill(self.last_seen, np.int32(-1))
        if token_ids:
            latest = np.full(self._vocab_size, -1, np.int32)
            latest[np.asarray(token_ids)] = np.arange(len(token_ids))
            self._device.write(self.last_seen, latest)
