"""What changes from step to step, kept on the device so that no kernel argument ever changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from llmcl.runtime.device import Buffer, Device

RING = 256

# Slots of the int32 buffer `state`, as the kernels know them.
CONSTANTS = {
    "STATE_POSITION": 0,  # tokens in the cache before this step
    "STATE_N_TOKENS": 1,  # tokens of this step
    "STATE_STEP": 2,  # tokens sampled since the generation began
    "STATE_RING": RING,  # not a slot: the length of `sampled`
}
CAPACITY, COPY_CAPACITY = 3, 4  # keys of a head: of the cache, of a copy that an implementation makes of it
N_SLOTS = 5


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
        self._scratch: dict[str, Buffer] = {}
        self._capacities: dict[int, int] = {}

    def write_tokens(self, token_ids: Sequence[int] | np.ndarray, position: int) -> None:
        """Makes `token_ids` (at most max_tokens) the next step's input, at `position` of the cache."""
        self._device.write(self.tokens, np.asarray(token_ids, np.int32))
        self._device.write(self.state, np.array([position, len(token_ids)], np.int32))

    def capacity(self, slot: int, keys: int) -> str:
        """What kernels know as the capacity of the KV cache, or of its copy: an expression, since with a build constant
        each length of the context would be compiled anew. slot: CAPACITY or COPY_CAPACITY, the same `keys` each time.
        """
        if slot not in self._capacities:
            self._capacities[slot] = keys
            self._device.write(self.state, np.array([keys], np.int32), 4 * slot)
        if self._capacities[slot] != keys:
            raise ValueError(f"a step state of {self._capacities[slot]} keys is used with {keys}")
        return f"state[{slot}]"

    def write_pages(self, pages: Sequence[int], first: int = 0) -> None:
        """Puts `pages` into the page table of the step's sequence, from entry `first` on."""
        offset = 4 * (N_SLOTS + first)
        if len(pages) == 1:  # as decode goes on: a write would wait for the steps that are under way
            self._device.fill(self.state, np.int32(pages[0]), offset, 4)
        else:
            self._device.write(self.state, np.asarray(pages, np.int32), offset)

    def scratch(self, name: str, nbytes: int) -> Buffer:
        """Working memory of a step by name, made when it is first asked for; the same size each time."""
        if name not in self._scratch:
            self._scratch[name] = self._device.alloc(nbytes, name)
        return self._scratch[name]

    @property
    def scratch_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._scratch.values())

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
