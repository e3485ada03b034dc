"""Sampling: parameters, and the kernels that choose the next token on the device."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from llmcl.errors import UsageError, shown
from llmcl.kernels.common.cost import once
from llmcl.kernels.common.sizes import columns_a_work_item, rolls_loops, widest_group
from llmcl.kernels.common.step_state import StepState, for_rows
from llmcl.kernels.table import op_launches
from llmcl.ops.dry import Breakers, Dry
from llmcl.ops.logit_bias import MAX_BIASES, LogitBias
from llmcl.ops.logprobs import LogProbs, check_alternatives
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.runtime.staging import send
from llmcl.sampling_options import LEAST, PARAMETERS, SamplingOptions

WHOLE = (int, np.integer)
NUMBERS = (int, float, np.integer, np.floating)
MAX_BIAS = 10_000  # a sum with a logit stays finite, and outweighs every other logit

# Slots in the int32 buffer `sampling`: the table's parameters without the seed, then more. Floats are stored by their
# bits.
_IN_SLOTS = [parameter for name, parameter in PARAMETERS.items() if name != "seed"]
_MORE_SLOTS = (
    "SEED_LO",
    "SEED_HI",
    "THRESHOLD",  # written by sample_threshold_select
    "TRUNCATES",  # the kernels that choose the token: BEST_SCORE, ABOVE_THRESHOLD, LARGEST or FILTERED
    "CEILING",  # the largest surviving logit and the temperature, written by sample_threshold_select for FILTERED rows
    "HEAT",
    "MU",  # mirostat's state
)
CONSTANTS = {
    f"SAMPLING_{name.upper()}": slot
    for slot, name in enumerate([*(parameter.name for parameter in _IN_SLOTS), *_MORE_SLOTS])
}
N_SLOTS = len(CONSTANTS)
BINS = 2048  # BINS in sample_threshold.cl
BEST_SCORE, ABOVE_THRESHOLD, LARGEST, FILTERED = range(4)  # all scores, above a threshold, raw logits, survivors.cl


@dataclass(frozen=True)
class SamplingParams(SamplingOptions):
    """How tokens are chosen. The samplers run in llama.cpp's order: penalties, DRY, top-n-sigma, top-k, typical-p,
    top-p, min-p, XTC, temperature. Mirostat replaces all but the penalties, DRY and the temperature.

    Raises UsageError if a value is out of range, or would be 0 or infinite in float32.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added before all else
    dry_breakers: Breakers | None = None  # where DRY's repetitions end; None: nowhere
    logprobs: int | None = None  # alternatives per chosen token, 0 to MAX_TOP; None: no log-probabilities

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alternatives("logprobs", self.logprobs)
        self._check_bias()

    def _check_bias(self) -> None:
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or len(bias) > MAX_BIASES:
            raise UsageError(f"logit_bias is {shown(bias)}; expected a mapping from at most {MAX_BIASES} token ids")
        for token, value in bias.items():
            if not isinstance(token, WHOLE) or token < 0:
                raise UsageError(f"logit_bias has a bias for {shown(token)}; expected token ids, 0 or more")
            if not isinstance(value, NUMBERS) or not abs(value) <= MAX_BIAS:
                raise UsageError(f"logit_bias of token {token} is {shown(value)}; expected -{MAX_BIAS} to {MAX_BIAS}")

    @property
    def truncates(self) -> bool:
        """Tells whether sampling needs a threshold on the logits."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def filters(self) -> bool:
        """Tells whether sampling needs a sampler of survivors.cl."""
        dropped = self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0
        return self.temperature > 0 and (dropped or self.dynatemp_range > 0 or self.mirostat > 0)

    @property
    def repels(self) -> bool:
        """Tells whether sampling needs DRY."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def takes_drafts(self) -> bool:
        """Tells whether a step may verify a draft, whose rows know neither the text nor more than the logits."""
        return self.logprobs is None and not self.logit_bias and not self.mirostat and not self.repels

    @property
    def takes_largest(self) -> bool:
        """Tells whether sampling takes the token with the largest raw logit."""
        return self.temperature == 0 and self.repeat_penalty == 1 and not self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Tells whether sampling needs the token counts of the answer."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    def seeded(self) -> SamplingParams:
        """Returns the parameters with a seed, drawn if None."""
        if self.seed is not None:
            return self
        # everything else was checked; `copy` takes longer than the rest of a request
        seeded = object.__new__(SamplingParams)
        seeded.__dict__.update(self.__dict__, seed=secrets.randbits(32))
        return seeded


class Sampler:
    """The sampling kernels of a model, bound once, for logits float32 [vocab].

    With a step state for several sequences, logits is float32 [n_sequences, vocab] with a row per row of the step, each
    sequence has its own parameters, and the buffers below have a row per sequence.

    last_seen int32 [vocab]: latest positions, kept by the embedding kernel.
    counts int32 [vocab]: how often each token was chosen, kept by the sampling kernels if a penalty needs counts.
    params int32 [slots]: parameters written by `configure`.
    """

    def __init__(self, device: Device, logits: Buffer, vocab_size: int, step: StepState, context: int = 0):
        """context: tokens in the longest text, for DRY; 0 if no parameters ask for DRY."""
        self._device = device
        self._vocab_size = vocab_size
        n = max(1, step.n_sequences)
        self.last_seen = device.alloc(4 * n * vocab_size, "latest positions")
        self.counts = device.zeros(4 * n * vocab_size, "counts of tokens")
        self.params = device.zeros(4 * n * N_SLOTS, "sampling parameters")
        self._device.fill(self.last_seen, np.int32(-1))
        width = widest_group(device)
        groups = min(max(2, device.compute_units), -(-vocab_size // width))
        best = device.alloc(24 * n * groups, "best scores")
        bins = device.zeros(4 * n * (BINS + 1), "histogram of the logits")
        candidates = device.alloc(8 * n * vocab_size, "candidates for the next token")
        constants: dict[str, object] = {
            **CONSTANTS,
            **step.constants,
            "SAMPLING_SLOTS": N_SLOTS,
            "VOCAB": vocab_size,
            "N_GROUPS": groups,
            "BEST_SLOTS": 3 * groups,
            "N_SEQUENCES": step.n_records,
            "LOCAL_SIZE": width,
            "ROLL_LOOPS": rolls_loops(device),
        }
        local = (width, 1) if step.n_sequences else (width,)
        self.bias = LogitBias(device, logits, vocab_size, step)
        self.logprobs = LogProbs(device, logits, vocab_size, step, self.bias)
        self._choices: dict[int, int] = {}
        self._repelled: set[int] = set()  # sequences with DRY
        dry = logits, self.last_seen, self.params, step, context, vocab_size, constants
        self._bind_dry = partial(Dry, device, *dry)

        def bind(op: str, stage: str, args: list[Buffer], n_groups: int, n_bytes: int, **more: int) -> list[Launch]:
            at, cost = for_rows(step, n_groups), once(n_bytes)
            return op_launches(device, op, constants | more, args, stage=stage, groups=at, local=local, cost=cost)

        def bind_largest() -> list[Launch]:
            largest_constants = {"WIDTH": columns_a_work_item(device), "LARGEST": LARGEST}
            groups_own = ("N_GROUPS", "LOCAL_SIZE", "ROLL_LOOPS")
            return op_launches(
                device,
                "sample_largest",
                {name: value for name, value in constants.items() if name not in groups_own} | largest_constants,
                [logits, self.params, *outputs],
                groups=for_rows(step, 1),
                local=(1, 1) if step.n_sequences else (1,),
                cost=once(4 * vocab_size),
            )

        inputs = [logits, self.last_seen, self.counts, step.state, self.params]
        outputs = [step.state, step.tokens, step.sampled, self.counts]
        read = 8 * vocab_size  # logits and latest positions

        def bind_threshold(filters: int, choice: int) -> list[Launch]:
            op, more = "sample_threshold", {"FILTERS": filters, "CHOICE": choice}
            chosen = [candidates, best, bins, self.params, *outputs]
            return [
                *bind(op, "histogram", [*inputs, best, bins], groups, read, **more),
                *bind(op, "candidates", [*inputs, best, bins, candidates], groups, read, **more),
                *bind(op, "select", chosen, 1, 8 * groups, **more),
            ]

        self._choose = {
            BEST_SCORE: [
                *bind("sample", "partial", [*inputs, best], groups, read),
                *bind("sample", "finish", [best, self.params, *outputs], 1, 8 * groups),
            ],
            ABOVE_THRESHOLD: bind_threshold(0, ABOVE_THRESHOLD),
            FILTERED: bind_threshold(1, FILTERED),
        }
        if columns_a_work_item(device) > 1:  # with vectors, a single work-item is enough
            self._choose[LARGEST] = bind_largest()
        self._choices[0] = BEST_SCORE

    @cached_property
    def dry(self) -> Dry:
        """DRY's launches and buffers, bound when the first request asks for them."""
        return self._bind_dry()

    @property
    def launches(self) -> list[Launch]:
        """Returns the launches that choose the token of a single-sequence step."""
        return self.launches_for()

    @property
    def filtered_launches(self) -> list[Launch]:
        """Returns the launches for samplers of survivors.cl, which few requests need."""
        return self._choose[FILTERED]

    @property
    def every_launch(self) -> list[Launch]:
        """Returns the launches for all other samplers."""
        return self.launches_that_choose(self._choose.keys() - {FILTERED})

    @property
    def usual_launches(self) -> list[Launch]:
        """Returns the launches that choose without a threshold, for any parameters."""
        return self.launches_that_choose(self._choose.keys() - {ABOVE_THRESHOLD, FILTERED})

    @property
    def largest_launches(self) -> list[Launch]:
        """Returns the launches for steps whose rows all take the largest logit; [] if BEST_SCORE does the work."""
        return self._choose.get(LARGEST, [])

    def launches_for(self, sequences: Sequence[int] = (0,)) -> list[Launch]:
        """Returns the launches that choose tokens for a step with these sequences, as configured."""
        has_logprobs = any(self.logprobs.are_wanted(sequence) for sequence in sequences)
        return [
            *(self.logprobs.before if has_logprobs else ()),
            *(self.bias.launches if any(self.bias.applies_to(sequence) for sequence in sequences) else ()),
            *(self.dry.launches if any(sequence in self._repelled for sequence in sequences) else ()),
            *self.launches_that_choose({self._choices[sequence] for sequence in sequences}),
            *(self.logprobs.after if has_logprobs else ()),
        ]

    def launches_that_choose(self, choices: AbstractSet[int]) -> list[Launch]:
        """Returns the launches for the choice only. choices: the rows' results of `choice`."""
        return [launch for choice in sorted(choices) for launch in self._choose[choice]]

    def choice(self, params: SamplingParams) -> int:
        """Returns how the parameters choose tokens: BEST_SCORE, ABOVE_THRESHOLD, LARGEST or FILTERED."""
        if params.filters:
            return FILTERED
        if params.truncates:
            return ABOVE_THRESHOLD
        return LARGEST if params.takes_largest and LARGEST in self._choose else BEST_SCORE

    def configure(self, params: SamplingParams, sequence: int = 0, mu: float | None = None) -> None:
        """Sets a sequence's sampling parameters (writes its slots and the biases to the device).

        mu: mirostat's state, to go on with an answer (`read_mu`).
        """
        if params.logit_bias and max(params.logit_bias) >= self._vocab_size:
            raise UsageError(
                f"logit_bias has a bias for token {max(params.logit_bias)}; expected 0 to {self._vocab_size - 1}"
            )
        slots = np.zeros(N_SLOTS, np.int32)
        floats = slots.view(np.float32)
        for slot, parameter in enumerate(_IN_SLOTS):
            # 0.0 turns -0.0 into 0.0, which is off. LEAST is the smallest float32 above an excluded 0.
            value = getattr(params, parameter.name) + 0.0
            (floats if parameter.kind is float else slots)[slot] = max(value, LEAST) if parameter.above else value
        seed = CONSTANTS["SAMPLING_SEED_LO"]
        slots[seed : seed + 2] = np.array([params.seed or 0], np.uint64).view(np.int32)
        floats[CONSTANTS["SAMPLING_THRESHOLD"]] = -np.inf
        slots[CONSTANTS["SAMPLING_TRUNCATES"]] = self.choice(params)
        floats[CONSTANTS["SAMPLING_MU"]] = 2 * params.mirostat_tau if mu is None else mu
        send(self._device, self.params, slots, 4 * sequence * N_SLOTS)
        self.bias.configure(params.logit_bias, sequence)
        self.logprobs.configure(params.logprobs, sequence)
        self._choices[sequence] = self.choice(params)
        (self._repelled.add if params.repels else self._repelled.discard)(sequence)
        if params.repels:
            self.dry.configure(params.dry_breakers, sequence)

    def read_mu(self, sequence: int = 0) -> float:
        """Returns mirostat's state after the last token."""
        slot = sequence * N_SLOTS + CONSTANTS["SAMPLING_MU"]
        return float(self._device.read(self.params, np.float32, (1,), 4 * slot)[0])

    def write_mu(self, mu: float, sequence: int = 0) -> None:
        slot = sequence * N_SLOTS + CONSTANTS["SAMPLING_MU"]
        send(self._device, self.params, np.array([mu], np.float32), 4 * slot)

    def remember(self, token_ids: Sequence[int], sequence: int = 0) -> None:
        """Sets the tokens seen so far: the tokens in the sequence's cache, from position 0 on."""
        nbytes = 4 * self._vocab_size
        self._device.fill(self.last_seen, np.int32(-1), sequence * nbytes, nbytes)
        if token_ids:
            latest = np.full(self._vocab_size, -1, np.int32)
            latest[np.asarray(token_ids)] = np.arange(len(token_ids))
            self._device.write(self.last_seen, latest, sequence * nbytes)

    def count(self, token_ids: Sequence[int], sequence: int = 0) -> None:
        """Sets the tokens in the sequence's answer so far, for presence and frequency penalty."""
        nbytes = 4 * self._vocab_size
        if token_ids:
            counts = np.bincount(np.asarray(token_ids), minlength=self._vocab_size).astype(np.int32)
            self._device.write(self.counts, counts, sequence * nbytes)
        else:
            self._device.fill(self.counts, np.int32(0), sequence * nbytes, nbytes)
