"""A KV cache in pages: several sequences share pages for a common prefix.

    page tables (host)          pool (device, per layer and KV head)
    sequence A: 2 0 5           | page 0 | page 1 | page 2 | page 3 | page 4 | page 5 |
    fork of A:  2 0 3             A, fork  free     A, fork  fork     free     A

A free page keeps its content until reuse. A new text with the same beginning takes over the full pages
(prefix_pages.py).

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from weakref import WeakSet

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.errors import OutOfDeviceMemoryError, UsageError, counted
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.models.kv_cache import KVCache, capacity_for, common_prefix
from llmcl.models.prefix_pages import PrefixPages
from llmcl.models.recurrent_states import KEPT_STATES
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device


def pool_pages(max_context: int, page_tokens: int, n_pages: int | None = None) -> int:
    """Returns the pages in the pool: n_pages, or if None enough pages for one sequence of max_context tokens.

    Raises UsageError for sizes that no pool can have.
    """
    if page_tokens < 1 or page_tokens % CAPACITY_MULTIPLE:
        raise UsageError(
            f"{counted(page_tokens, 'token')} a page of the KV cache (--kv-page-size, kv_page_tokens); expected a "
            f"multiple of {CAPACITY_MULTIPLE}"
        )
    if n_pages is not None and n_pages < 1:
        raise UsageError(f"{n_pages} pages of the KV cache (kv_pages); expected 1 or more")
    return -(-capacity_for(max_context) // page_tokens) if n_pages is None else n_pages


class PagedKVCache(KVCache):
    """A pool with n_pages pages of page_tokens tokens. k[layer] and v[layer] are as in KVCache, with the whole pool as
    capacity. Each sequence has up to max_context tokens.

    A step reads the sequence's page table from the step state. Pages are taken as tokens arrive. A page shared by
    several sequences is copied before a sequence appends to it. Free pages are computed at each lookup instead of
    counted, so an interrupt cannot leave a wrong count. A sequence's pages become free when nothing refers to the
    sequence any more. Free pages are reused in order of last use, pages that no text can be found in first.
    """

    def __init__(
        self,
        device: Device | Sequence[Device],
        config: ModelConfig,
        max_context: int,
        kv_dtype: str,
        page_tokens: int,
        n_pages: int | None = None,
        *,
        exact_queries: bool = False,
        n_sequences: int = 1,
    ):
        """n_sequences: sequences extended at a time."""
        n_pages = pool_pages(max_context, page_tokens, n_pages)
        self.page_tokens = page_tokens
        self.sequences: WeakSet[SequenceState] = WeakSet()
        self.order = OrderedDict.fromkeys(range(n_pages))  # reuse order: least recently used first
        self._prefixes = PrefixPages(n_pages)
        self.has_prefixes = True  # False: pages are never shared with other texts
        self._ever_shared: set[int] = set()  # pages that several sequences have held since the last reuse
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
            max(n_sequences, KEPT_STATES),
            page_tokens,
        )

    def sequence(self) -> SequenceState:
        """Returns an empty sequence."""
        return SequenceState(self._key)

    def forget_all(self) -> None:
        """Forgets every text, in sequences and in pages left behind. All existing sequences become void."""
        self._key = object()
        self.sequences = WeakSet()
        self.order = OrderedDict.fromkeys(range(len(self.order)))
        self._prefixes = PrefixPages(len(self.order))
        self._ever_shared.clear()
        if self.states is not None:
            self.states.forget_all()

    def fork(self, sequence: SequenceState) -> SequenceState:
        """Returns a second sequence with the same tokens in the same pages."""
        other = self.own(self.sequence())
        other.text_length, other.adapters = sequence.text_length, sequence.adapters
        self._share(other, self.own(sequence).pages, sequence.token_ids)
        other.images = [*sequence.images]
        if self.states is not None and not self.states.fork(sequence, other, self._forget):
            self.truncate(other, other.position)
        return other

    def truncate(self, sequence: SequenceState, position: int) -> None:
        """Forgets everything from `position` on and frees pages that held nothing else.

        Other texts can still find the freed pages until reuse. With recurrent layers it may forget more: see `kept`.
        """
        super().truncate(sequence, position)

    def _cut(self, sequence: SequenceState, position: int) -> None:
        position = self._go_back(self.own(sequence), position)
        given_back = sequence.pages[self.pages_for(position) :]
        if given_back:
            self._keep(sequence)
            for page in given_back:
                if page not in self._prefixes:
                    self.order.move_to_end(page, last=False)
            self._used_last(page for page in given_back if page in self._prefixes)
        super()._cut(sequence, position)
        del sequence.pages[self.pages_for(len(sequence.token_ids)) :]

    def share_prefix(self, sequence: SequenceState, prompt: Sequence[int]) -> None:
        """Takes over the longest cached beginning of the prompt, from a living sequence or from full pages left behind,
        by sharing pages. The prompt's last token is never taken, because the logits after it are not stored.
        """
        receiver = self.own(sequence)
        self.choose_frequencies(receiver, len(prompt))
        if self.states is not None:
            held = common_prefix(receiver.token_ids, prompt[:-1])
            self._take_left(receiver, prompt, more_than=self.kept(receiver, held))
            return
        same = [other for other in self.sequences if _root(other) == _root(receiver)]
        best = max(same, key=lambda other: (common_prefix(other.token_ids, prompt), other is receiver))
        held = common_prefix(best.token_ids, prompt)
        if not self._take_left(receiver, prompt, more_than=held) and best is not receiver:
            self._share(receiver, best.pages, best.token_ids[:held])

    def share_pages(self, sequence: SequenceState, prompt: Sequence[int], multiple: int = 1) -> None:
        """Starts an empty sequence with cached full pages for the beginning of the prompt, as its rotary frequencies
        have them.

        Unlike share_prefix it leaves no page that needs a copy before an append. multiple: the shared length is a
        multiple of `multiple` tokens.
        """
        self._cut(sequence, 0)
        self._take_left(sequence, prompt, more_than=0)
        step = math.lcm(multiple, self.page_tokens)
        if sequence.position % step:
            self._cut(sequence, sequence.position // step * step)

    def free(self) -> list[int]:
        """Returns the pages that no sequence holds, in reuse order."""
        used = self._used()
        return [page for page in self.order if page not in used]

    @property
    def n_free(self) -> int:
        return len(self.order) - len(self._used())

    def missing_pages(self, sequence: SequenceState, n_tokens: int) -> int:
        """Returns how many free pages `prepare` would take for the sequence's next n_tokens."""
        needed = self.pages_for(sequence.position + n_tokens) - self.pages_for(sequence.position)
        return needed + self._must_copy(sequence)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def prepare(self, step: StepState, sequence: SequenceState, n_tokens: int, slot: int = 0) -> None:
        """Gives the sequence exclusive pages for its next n_tokens, and sends its page table to the device.

        Raises OutOfDeviceMemoryError, and changes nothing, if the pool has too few free pages.
        """
        self.own(sequence)
        first, filled = divmod(sequence.position, self.page_tokens)
        if not self._goes_on(sequence, first, filled, n_tokens):
            self._make_room(sequence, first, filled, n_tokens)
        step.write_pages(sequence.pages, slot)
        self._prepare_state(step, sequence, slot)

    def _goes_on(self, sequence: SequenceState, first: int, filled: int, n_tokens: int) -> bool:
        """Returns whether the last page is exclusive and has room: true in most decode steps."""
        pages = sequence.pages
        return (
            0 < filled <= self.page_tokens - n_tokens
            and len(pages) == first + 1
            and pages[first] not in self._ever_shared
            and pages[first] not in self._prefixes
            and (first == 0 or pages[first - 1] in self._prefixes or first * self.page_tokens > _findable(sequence))
        )

    def _make_room(self, sequence: SequenceState, first: int, filled: int, n_tokens: int) -> None:
        """Gives the sequence exclusive pages. The sequence ends in page `first` after `filled` tokens."""
        self._keep(sequence)
        self._cut(sequence, sequence.position)  # drop surplus pages, which may be shared
        copies = self._must_copy(sequence)
        if missing := self.missing_pages(sequence, n_tokens):
            if missing > (n_free := self.n_free):
                raise OutOfDeviceMemoryError(
                    f"{n_tokens} more after {counted(sequence.position, 'token')} would need "
                    f"{counted(missing, 'page')} of {self.page_tokens} tokens, but {n_free} of the KV cache's "
                    f"{len(self.order)} are free (others are held by "
                    f"{counted(sum(1 for other in self.sequences if other.pages), 'sequence')}): drop or reset "
                    "a conversation, or load with more pages (kv_pages)"
                )
            used = self._used()
            taken = list(islice((page for page in self.order if page not in used), missing))
            for page in taken:
                self._prefixes.forget(page)
                self._ever_shared.discard(page)
            if copies:
                copy = taken.pop()
                self._copy_page(sequence.pages[first], copy)
                sequence.pages[first] = copy
            sequence.pages += taken
            self._used_last(sequence.pages)
        if filled:
            self._prefixes.forget(sequence.pages[first])  # the page was found by a longer text, now truncated

    # ---- pages that outlive the cache ---------------------------------------------------------------

    @property
    def page_nbytes(self) -> int:
        """Returns the bytes per page: keys and values in all layers."""
        return self.page_tokens * sum(shape.n_kv_heads * shape.row_bytes for _, shape in self.shaped_buffers())

    def findable(self) -> dict[int, tuple[bytes, bytes]]:
        """Returns findable pages with key and previous key: latest used first, each after its predecessor."""
        for sequence in self.sequences:
            self._keep(sequence)
        return self._prefixes.chains(reversed(self.order))

    def read_page(self, page: int) -> np.ndarray:
        """Reads a page: uint8 [page_nbytes], per buffer the rows of each head."""
        data = np.empty(self.page_nbytes, np.uint8)
        parts = [self._devices[id(buffer)].read_async(buffer, part, at) for buffer, at, part in self._parts(page, data)]
        for wait in parts:
            wait()
        return data

    def write_page(self, page: int, data: np.ndarray) -> None:
        """Fills a free page with data from `read_page`. The page becomes findable with `add_findable`."""
        self._prefixes.forget(page)
        self._ever_shared.discard(page)
        for buffer, at, part in self._parts(page, data):
            self._devices[id(buffer)].write(buffer, part, at)

    def add_findable(self, pages: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Makes filled free pages findable, in the form and order of `findable`."""
        for page, (key, before) in pages.items():
            self._prefixes.put(page, key, before)
        self._used_last(pages)

    def _parts(self, page: int, data: np.ndarray) -> Iterator[tuple[Buffer, int, np.ndarray]]:
        """Yields per buffer and head: buffer, byte offset of the page, and the matching slice of `data`."""
        first = 0
        for buffer, shape in self.shaped_buffers():
            n_bytes = self.page_tokens * shape.row_bytes
            for head in range(shape.n_kv_heads):
                at = head * shape.capacity * shape.row_bytes + page * n_bytes
                yield buffer, at, data[first : first + n_bytes]
                first += n_bytes

    def own(self, sequence: SequenceState) -> SequenceState:
        self.sequences.add(super().own(sequence))
        return sequence

    def _share(self, sequence: SequenceState, pages: Sequence[int], token_ids: Sequence[int]) -> None:
        """Sets `sequence` to the text token_ids by sharing the first of `pages`, which hold it."""
        pages = pages[: self.pages_for(len(token_ids))]
        self._ever_shared.update(pages)
        self._cut(sequence, 0)
        sequence.pages = [*pages]
        sequence.token_ids = [*token_ids]
        self._used_last(pages)

    def _take_left(self, sequence: SequenceState, prompt: Sequence[int], *, more_than: int) -> bool:
        """Shares full pages that hold the beginning of the prompt, if they hold more than `more_than` tokens."""
        if not self.has_prefixes:
            return False
        for other in self.sequences:
            self._keep(other)
        prefix_pages = self._prefixes.find(prompt[:-1], self.page_tokens, _root(sequence))
        n_tokens = len(prefix_pages) * self.page_tokens
        if n_tokens <= more_than:
            return False
        if self.states is not None:
            return self._take_state(sequence, prompt, prefix_pages, more_than=more_than)
        self._share(sequence, prefix_pages, prompt[:n_tokens])
        return True

    def _take_state(
        self, sequence: SequenceState, prompt: Sequence[int], found: Sequence[int], *, more_than: int
    ) -> bool:
        """Does the work of `_take_left` with pages already found, up to the last snapshot of the recurrent states."""
        assert self.states is not None
        n_tokens = len(found) * self.page_tokens
        n_taken = self.states.found(prompt[:n_tokens])
        if n_taken > more_than:
            self._share(sequence, found, prompt[:n_taken])
            self.states.restore(sequence, prompt[:n_taken], self._forget)
        self.states.note_branch(sequence, n_tokens)
        return n_taken > more_than

    def _used(self) -> set[int]:
        return set().union(*(sequence.pages for sequence in self.sequences))

    def _keep(self, sequence: SequenceState) -> None:
        """Makes the sequence's full pages findable. The steps that write the pages are already enqueued."""
        ids = sequence.token_ids
        n = _findable(sequence)
        self._prefixes.add(ids if n == len(ids) else ids[:n], sequence.pages, self.page_tokens, _root(sequence))

    def _used_last(self, pages: Iterable[int]) -> None:
        """Marks pages as most recently used, a text's first page last, because later pages are useless without it."""
        for page in reversed([*pages]):
            self.order.move_to_end(page)

    def _must_copy(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence appends to a page that another sequence also holds, always at the same index."""
        index, filled = divmod(sequence.position, self.page_tokens)
        page = sequence.pages[index : index + 1]
        if not filled or page[0] not in self._ever_shared:
            return False
        return any(page == other.pages[index : index + 1] for other in self.sequences if other is not sequence)

    def _copy_page(self, source: int, target: int) -> None:
        for buffer, shape in self.shaped_buffers():
            page_bytes = self.page_tokens * shape.row_bytes
            self._devices[id(buffer)].copy_rows(
                buffer,
                source * page_bytes,
                target * page_bytes,
                row_bytes=page_bytes,
                n_rows=shape.n_kv_heads,
                pitch_bytes=shape.capacity * shape.row_bytes,
            )


def _root(sequence: SequenceState) -> bytes:
    """Returns the root for the keys of the sequence's pages: keys with other rotary frequencies or adapters are not
    shared.
    """
    length = sequence.text_length.to_bytes(4, "little") if sequence.text_length else b""
    return length + sequence.adapters.key


def _findable(sequence: SequenceState) -> int:
    """Returns the prefix length whose full pages other texts may share."""
    n = sequence.position
    return n if sequence.n_findable is None else min(n, sequence.n_findable)
