"""What changes from step to step, kept on the device so that no kernel argument ever changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmcl.runtime.device import Buffer, Device

RING = 256
EXPANDED_BYTES = 128 << 20
# Kernels read rounded activations in blocks of tokens whose last may reach beyond the step's.
CPU_ROWS_MULTIPLE = 96
NVIDIA_ROWS_MULTIPLE = 128

# Slots of the int32 buffer `state`, as the kernels know them.
CONSTANTS = {
    "STATE_POSITION": 0,  # tokens in the cache before this step
    "STATE_N_TOKENS": 1,  # tokens of this step
    "STATE_STEP": 2,  # tokens sampled since the generation began
    "STATE_RING": RING,  # not a slot: the length of `sampled`
}
CAPACITY, PAIRED_CAPACITY = 3, 4  # keys of a head: of the cache, of its copy in bfloat16 (kernels/cpu/pair_cache.cl)
N_SLOTS = 5


def quantized_rows_bytes(max_tokens: int, k: int) -> int:
    """Of `StepState.quantized_rows`."""
    return _rows_of(max_tokens, CPU_ROWS_MULTIPLE) * (k // 32) * 48


def narrowed_rows_bytes(max_tokens: int, k: int) -> int:
    """Of `StepState.narrowed_rows`."""
    return 2 * max(_rows_of(max_tokens, CPU_ROWS_MULTIPLE), _rows_of(max_tokens, NVIDIA_ROWS_MULTIPLE)) * k


def _rows_of(max_tokens: int, multiple: int) -> int:
    """Rows for max_tokens that are a whole number of `multiple`."""
    return -(-max_tokens // multiple) * multiple


class StepState:
    """Position, length and input tokens of the next step, and the ring of sampled tokens.

    state int32 [N_SLOTS + n_pages], tokens int32 [max_tokens], sampled int32 [RING], all on the device;
    host_sampled int32 [RING]. n_pages: entries of the page table, 0 with a contiguous KV cache.
    """

    def __init__(self, device: Device, max_tokens: int, n_pages: int = 0):
        self._device = device
        self.max_tokens = max_tokens
        self.n_pages = n_pages
        self.state = device.zeros(4 * (N_SLOTS + n_pages), "step state")
        self.tokens = device.zeros(4 * max_tokens, "step tokens")
        self.sampled = device.zeros(4 * RING, "sampled tokens")
        self.host_sampled = device.pinned(RING)
        self._quantized: dict[int, Buffer] = {}
        self._narrowed: dict[tuple[int, str], Buffer] = {}
        self._expanded: Buffer | None = None
        self._paired: dict[int, tuple[Buffer, Buffer]] = {}
        self._capacities: dict[int, int] = {}

    def write_tokens(self, token_ids: Sequence[int] | np.ndarray, position: int) -> None:
        """Makes `token_ids` (at most max_tokens) the next step's input, at `position` of the cache."""
        self._device.write(self.tokens, np.asarray(token_ids, np.int32))
        self._device.write(self.state, np.array([position, len(token_ids)], np.int32))

    def capacity(self, slot: int, keys: int) -> str:
        """What kernels know as the capacity of the KV cache, or of its copy: an expression, since with a build constant
        each length of the context would be compiled anew. slot: CAPACITY or PAIRED_CAPACITY, the same `keys` each time.
        """
        if slot not in self._capacities:
            self._capacities[slot] = keys
            self._device.write(self.state, np.array([keys], np.int32), 4 * slot)
        if self._capacities[slot] != keys:
            raise ValueError(f"a step state of {self._capacities[slot]} keys is used with {keys}")
        return f"state[{slot}]"

    def write_pages(self, pages: Sequence[int], first: int = 0) -> None:
        """Puts `pages` into the page table of the active sequence, from entry `first` on."""
        offset = 4 * (N_SLOTS + first)
        if len(pages) == 1:  # as decode goes on: a write would wait for the steps that are under way
            self._device.fill(self.state, np.int32(pages[0]), offset, 4)
        else:
            self._device.write(self.state, np.asarray(pages, np.int32), offset)

    def quantized_rows(self, k: int) -> Buffer:
        """Working memory for a step's activations of k columns, rounded to 8 bits: see kernels/cpu/rounded_rows.cl."""
        if k not in self._quantized:
            self._quantized[k] = self._device.alloc(quantized_rows_bytes(self.max_tokens, k), "rounded activations")
        return self._quantized[k]

    def narrowed_rows(self, k: int, use: str = "input") -> Buffer:
        """Working memory for a step's activations of k columns in 16 bits: see kernels/*/narrow_rows.cl and, on a
        CPU, kernels/cpu/rounded_rows.cl.

        use: a name for what is needed at the same time as other activations of k columns.
        """
        if (k, use) not in self._narrowed:
            nbytes = narrowed_rows_bytes(self.max_tokens, k)
            self._narrowed[k, use] = self._device.alloc(nbytes, "activations in 16 bits")
        return self._narrowed[k, use]

    def rounded_bytes(self) -> int:
        """Of all activations in 8 or 16 bits so far."""
        return sum(buffer.nbytes for buffer in (*self._quantized.values(), *self._narrowed.values()))

    def expanded_weight(self) -> Buffer:
        """Working memory for tiles of a quantised weight in float16: see kernels/nvidia/expand_weight.cl."""
        if self._expanded is None:
            self._expanded = self._device.alloc(EXPANDED_BYTES, "tiles in 16 bits")
        return self._expanded

    def paired_cache(self, values: int) -> tuple[Buffer, Buffer]:
        """Working memory for as many keys' and values' numbers in bfloat16: see kernels/cpu/pair_cache.cl."""
        if values not in self._paired:
            keys = self._device.alloc(2 * values, "paired keys")
            self._paired[values] = keys, self._device.alloc(2 * values, "paired values")
        return self._paired[values]

    def read_sampled(self, i: int) -> Callable[[], int]:
        """Enqueues the reading of the i-th token sampled (4 bytes); the function returned waits for it."""
        slot = i % RING
        target = self.host_sampled[slot : slot + 1]
        wait = self._device.read_async(self.sampled, target, 4 * slot)

        def token() -> int:
            wait()
            return int(target[0])

        return token

    def restart_sampling(self, i: int = 0) -> None:
        """The next sampled token is number i of its generation."""
        self._device.write(self.state, np.array([i], np.int32), 4 * CONSTANTS["STATE_STEP"])
