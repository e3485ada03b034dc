"""A KV cache in pages, in which several sequences live and share what they have in common.

    page tables (host)          pool (device, per layer and KV head)
    sequence A: 2 0 5           | page 0 | page 1 | page 2 | page 3 | page 4 | page 5 |
    fork of A:  2 0 3             A, fork  free     A, fork  fork     free     A

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from llmcl.errors import OutOfDeviceMemoryError, UsageError
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.models.config import ModelConfig
from llmcl.models.kv_cache import KVCache, capacity_for, common_prefix
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Device


def pool_pages(max_context: int, page_tokens: int, n_pages: int | None = None) -> int:
    """Pages in the pool: n_pages, or where None enough for one sequence of max_context tokens.

    Raises UsageError for sizes that no pool can have.
    """
    if page_tokens < 1 or page_tokens % CAPACITY_MULTIPLE:
        raise UsageError(
            f"{page_tokens} tokens a page of the KV cache (--kv-page-size, kv_page_tokens); expected a multiple of "
            f"{CAPACITY_MULTIPLE}"
        )
    if n_pages is not None and n_pages < 1:
        raise UsageError(f"{n_pages} pages of the KV cache (kv_pages); expected 1 or more")
    return -(-capacity_for(max_context) // page_tokens) if n_pages is None else n_pages


class PagedKVCache(KVCache):
    """A pool of n_pages pages of page_tokens tokens: k[layer], v[layer] as in KVCache, capacity being the whole pool.
    Each sequence has up to max_context tokens.

    A step reads the page table of its sequence from the step state. Pages are taken as tokens come. A page that several
    sequences share is copied before one of them appends to it. Which pages are free is looked up each time: nothing can
    be miscounted, and those of a sequence are free when nothing refers to it any more.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        max_context: int,
        kv_dtype: str,
        page_tokens: int,
        n_pages: int | None = None,
        *,
        exact_queries: bool = False,
    ):
        n_pages = pool_pages(max_context, page_tokens, n_pages)
        self.page_tokens = page_tokens
        self.sequences: WeakSet[SequenceState] = WeakSet()
        self.order = list(range(n_pages))  # in which pages are given out
        self.table_entries = self.pages_for(max_context)
        self._allocate(
            device,
            config,
            max_context,
            AttentionShape(
                config.n_q_heads,
                config.n_kv_heads,
                config.head_dim,
                n_pages * page_tokens,
                kv_dtype,
                page_tokens,
                config.attention_scale,
                exact_queries,
            ),
        )
        self._device = device

    def sequence(self) -> SequenceState:
        """An empty sequence."""
        return SequenceState(self._key)

    def fork(self, sequence: SequenceState) -> SequenceState:
        """A second sequence with the same tokens, in the same pages."""
        other = self.own(self.sequence())
        self._share(other, self.own(sequence), len(sequence.token_ids))
        return other

    def truncate(self, sequence: SequenceState, position: int) -> None:
        """Forgets everything from `position` on and gives the pages back that held nothing else."""
        super().truncate(sequence, position)
        del sequence.pages[self.pages_for(len(sequence.token_ids)) :]

    def share_prefix(self, sequence: SequenceState, prompt: Sequence[int]) -> None:
        """Where another sequence holds more of the prompt's beginning, its pages are shared."""
        own = self.own(sequence)
        best = max(self.sequences, key=lambda other: (common_prefix(other.token_ids, prompt), other is own))
        if best is not own:
            self._share(own, best, common_prefix(best.token_ids, prompt))

    def free(self) -> list[int]:
        """Pages that no sequence has, in the order in which they are given out."""
        used = {page for sequence in self.sequences for page in sequence.pages}
        return [page for page in self.order if page not in used]

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def prepare(self, step: StepState, sequence: SequenceState, n_tokens: int, place: int = 0) -> None:
        """Gives the sequence pages of its own for its next n_tokens, and the device its page table.

        Raises OutOfDeviceMemoryError, and changes nothing, if the pool has too few pages left.
        """
        self.truncate(sequence, sequence.position)  # pages too many, which may be shared
        first, filled = divmod(sequence.position, self.page_tokens)
        copies = filled > 0 and self._is_shared(sequence, first)
        missing = max(0, self.pages_for(sequence.position + n_tokens) - len(sequence.pages))
        if missing or copies:
            free = self.free()
            if missing + copies > len(free):
                raise OutOfDeviceMemoryError(
                    f"{n_tokens} more tokens after {sequence.position} need {missing + copies} pages of "
                    f"{self.page_tokens} tokens, but {len(free)} of the KV cache's {len(self.order)} are free "
                    f"({sum(1 for other in self.sequences if other.pages)} sequences hold the others): drop or reset a "
                    "conversation, or load with more pages (kv_pages)"
                )
            if copies:
                self._copy_page(sequence.pages[first], free[missing])
                sequence.pages[first] = free[missing]
            sequence.pages += free[:missing]
        step.write_pages(sequence.pages, place)

    def own(self, sequence: SequenceState) -> SequenceState:
        self.sequences.add(super().own(sequence))
        return sequence

    def _share(self, sequence: SequenceState, other: SequenceState, n_tokens: int) -> None:
        """Makes `sequence` the first n_tokens tokens of `other`, in the very same pages."""
        self.truncate(sequence, 0)
        sequence.pages = other.pages[: self.pages_for(n_tokens)]
        sequence.token_ids = other.token_ids[:n_tokens]

    def _is_shared(self, sequence: SequenceState, index: int) -> bool:
        """Whether another sequence has the page of this index, too: then it has it at the same index."""
        page = sequence.pages[index : index + 1]
        return any(page == other.pages[index : index + 1] for other in self.sequences if other is not sequence)

    def _copy_page(self, source: int, target: int) -> None:
        shape = self.shape
        page_bytes = self.page_tokens * shape.row_bytes
        for buffer in self.buffers():
            self._device.copy_rows(
                buffer,
                source * page_bytes,
                target * page_bytes,
                row_bytes=page_bytes,
                n_rows=shape.n_kv_heads,
                pitch_bytes=shape.capacity * shape.row_bytes,
            )
