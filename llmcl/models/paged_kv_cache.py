"""A KV cache in pages, in which several sequences live and share what they have in common.

    page tables (host)          pool (device, per layer and KV head)
    sequence A: 2 0 5           | page 0 | page 1 | page 2 | page 3 | page 4 | page 5 |
    fork of A:  2 0 3             A, fork  free     A, fork  fork     free     A

A free page keeps what it holds until it is given out again. A text that begins as an earlier one takes the full pages
that this left (prefix_pages.py).

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from weakref import WeakSet

import numpy as np

from llmcl.errors import OutOfDeviceMemoryError, UsageError, counted
from llmcl.kernels.common.attention import CAPACITY_MULTIPLE, AttentionShape
from llmcl.kernels.common.step_state import StepState
from llmcl.models.config import ModelConfig
from llmcl.models.kv_cache import KVCache, capacity_for, common_prefix
from llmcl.models.prefix_pages import PrefixPages
from llmcl.models.recurrent_states import KEPT_STATES
from llmcl.models.sequence import SequenceState
from llmcl.runtime.device import Buffer, Device


def pool_pages(max_context: int, page_tokens: int, n_pages: int | None = None) -> int:
    """Pages in the pool: n_pages, or where None enough for one sequence of max_context tokens.

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
    """A pool of n_pages pages of page_tokens tokens: k[layer], v[layer] as in KVCache, capacity being the whole pool.
    Each sequence has up to max_context tokens.

    A step reads the page table of its sequence from the step state. Pages are taken as tokens come. A page that several
    sequences share is copied before one of them appends to it. Which pages are free is looked up each time: nothing can
    be miscounted, and those of a sequence are free when nothing refers to it any more. Free pages are given out in the
    order in which they were last used, those that no text is found in first.
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
        n_sequences: int = 1,
    ):
        """n_sequences: that are extended at a time."""
        n_pages = pool_pages(max_context, page_tokens, n_pages)
        self.page_tokens = page_tokens
        self.sequences: WeakSet[SequenceState] = WeakSet()
        self.order = OrderedDict.fromkeys(range(n_pages))  # in which pages are given out: the least recently used first
        self._prefixes = PrefixPages(n_pages)
        self.has_prefixes = True  # False: what a page holds is not for other texts
        self._ever_shared: set[int] = set()  # pages that several sequences had since they were given out
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
        self._device = device

    def sequence(self) -> SequenceState:
        """An empty sequence."""
        return SequenceState(self._key)

    def forget_all(self) -> None:
        """Holds no text any more, neither of a sequence nor in pages that one left. Sequences made so far are void."""
        self._key = object()
        self.sequences = WeakSet()
        self.order = OrderedDict.fromkeys(range(len(self.order)))
        self._prefixes = PrefixPages(len(self.order))
        self._ever_shared.clear()
        if self.states is not None:
            self.states.forget_all()

    def fork(self, sequence: SequenceState) -> SequenceState:
        """A second sequence with the same tokens, in the same pages."""
        other = self.own(self.sequence())
        self._share(other, self.own(sequence).pages, sequence.token_ids)
        if self.states is not None and not self.states.fork(sequence, other, self._forget):
            self.truncate(other, other.position)
        return other

    def truncate(self, sequence: SequenceState, position: int) -> None:
        """Forgets everything from `position` on and gives the pages back that held nothing else.

        Other texts still find what these hold, until they are given out again. With recurrent layers it may forget
        more: see `kept`.
        """
        position = self._go_back(self.own(sequence), position)
        given_back = sequence.pages[self.pages_for(position) :]
        if given_back:
            self._keep(sequence)
            for page in given_back:
                if page not in self._prefixes:
                    self.order.move_to_end(page, last=False)
            self._used_last(page for page in given_back if page in self._prefixes)
        super().truncate(sequence, position)
        del sequence.pages[self.pages_for(len(sequence.token_ids)) :]

    def share_prefix(self, sequence: SequenceState, prompt: Sequence[int]) -> None:
        """Takes over the most that is held of the prompt's beginning: by a living sequence, or in full pages that one
        left. Their pages are shared. A prompt's last token is not looked for: its logits are not kept.
        """
        own = self.own(sequence)
        if self.states is not None:
            held = common_prefix(own.token_ids, prompt[:-1])
            self._take_left(own, prompt, more_than=self.kept(own, held))
            return
        best = max(self.sequences, key=lambda other: (common_prefix(other.token_ids, prompt), other is own))
        held = common_prefix(best.token_ids, prompt)
        if not self._take_left(own, prompt, more_than=held) and best is not own:
            self._share(own, best.pages, best.token_ids[:held])

    def share_pages(self, sequence: SequenceState, prompt: Sequence[int], multiple: int = 1) -> None:
        """Begins an empty sequence with the full pages that others hold or left of the prompt's beginning.

        Unlike share_prefix it leaves no page that must be copied before it is appended to. multiple: of so many tokens.
        """
        self.truncate(sequence, 0)
        self._take_left(sequence, prompt, more_than=0)
        step = math.lcm(multiple, self.page_tokens)
        if sequence.position % step:
            self.truncate(sequence, sequence.position // step * step)

    def free(self) -> list[int]:
        """Pages that no sequence has, in the order in which they are given out."""
        used = self._used()
        return [page for page in self.order if page not in used]

    @property
    def n_free(self) -> int:
        return len(self.order) - len(self._used())

    def missing_pages(self, sequence: SequenceState, n_tokens: int) -> int:
        """Free pages that `prepare` would take for the next n_tokens of the sequence."""
        needed = self.pages_for(sequence.position + n_tokens) - self.pages_for(sequence.position)
        return needed + self._must_copy(sequence)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_tokens)

    def prepare(self, step: StepState, sequence: SequenceState, n_tokens: int, place: int = 0) -> None:
        """Gives the sequence pages of its own for its next n_tokens, and the device its page table.

        Raises OutOfDeviceMemoryError, and changes nothing, if the pool has too few pages left.
        """
        self.own(sequence)
        first, filled = divmod(sequence.position, self.page_tokens)
        if not self._goes_on(sequence, first, filled, n_tokens):
            self._make_room(sequence, first, filled, n_tokens)
        step.write_pages(sequence.pages, place)
        self._prepare_state(step, sequence, place)

    def _goes_on(self, sequence: SequenceState, first: int, filled: int, n_tokens: int) -> bool:
        """Whether its last page, which is its own, has room: so it is in most steps of decode, and nothing is to do."""
        pages = sequence.pages
        return (
            0 < filled <= self.page_tokens - n_tokens
            and len(pages) == first + 1
            and pages[first] not in self._ever_shared
            and pages[first] not in self._prefixes
            and (first == 0 or pages[first - 1] in self._prefixes or first * self.page_tokens > _findable(sequence))
        )

    def _make_room(self, sequence: SequenceState, first: int, filled: int, n_tokens: int) -> None:
        """Gives the sequence, whose position is in page `first` behind `filled` tokens, pages of its own."""
        self._keep(sequence)
        self.truncate(sequence, sequence.position)  # pages too many, which may be shared
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
            self._prefixes.forget(sequence.pages[first])  # of a longer text that was cut

    # ---- pages that outlive the cache ---------------------------------------------------------------

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page: its keys and values in all layers."""
        return self.page_tokens * sum(shape.n_kv_heads * shape.row_bytes for _, shape in self.shaped_buffers())

    def findable(self) -> dict[int, tuple[bytes, bytes]]:
        """The pages that texts are found in, used last first, each behind the one before it: key and key before."""
        for sequence in self.sequences:
            self._keep(sequence)
        return self._prefixes.chains(reversed(self.order))

    def read_page(self, page: int) -> np.ndarray:
        """What a page holds: uint8 [page_nbytes], of each buffer the rows of each head."""
        data = np.empty(self.page_nbytes, np.uint8)
        parts = [self._device.read_async(buffer, part, at) for buffer, at, part in self._parts(page, data)]
        for wait in parts:
            wait()
        return data

    def write_page(self, page: int, data: np.ndarray) -> None:
        """Fills a free page, as `read_page` gives it. It is not found before `add_findable` says so."""
        self._prefixes.forget(page)
        self._ever_shared.discard(page)
        for buffer, at, part in self._parts(page, data):
            self._device.write(buffer, part, at)

    def add_findable(self, pages: Mapping[int, tuple[bytes, bytes]]) -> None:
        """Free pages that were filled are found from now on; in the form and order of `findable`."""
        for page, (key, before) in pages.items():
            self._prefixes.put(page, key, before)
        self._used_last(pages)

    def _parts(self, page: int, data: np.ndarray) -> Iterator[tuple[Buffer, int, np.ndarray]]:
        """Where in the buffers a page lies, and what of `data` it is there."""
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
        """Makes `sequence` the text token_ids, which the first of `pages` hold, in the very same pages."""
        pages = pages[: self.pages_for(len(token_ids))]
        self._ever_shared.update(pages)
        self.truncate(sequence, 0)
        sequence.pages = [*pages]
        sequence.token_ids = [*token_ids]
        self._used_last(pages)

    def _take_left(self, sequence: SequenceState, prompt: Sequence[int], *, more_than: int) -> bool:
        """Shares the full pages that are found of the prompt's beginning, if they hold more than so many tokens."""
        if not self.has_prefixes:
            return False
        for other in self.sequences:
            self._keep(other)
        found = self._prefixes.find(prompt[:-1], self.page_tokens)
        n_tokens = len(found) * self.page_tokens
        if n_tokens <= more_than:
            return False
        if self.states is not None:
            return self._take_state(sequence, prompt, found, more_than=more_than)
        self._share(sequence, found, prompt[:n_tokens])
        return True

    def _take_state(
        self, sequence: SequenceState, prompt: Sequence[int], found: Sequence[int], *, more_than: int
    ) -> bool:
        """As `_take_left`, with the pages found: as far as a snapshot of the recurrent layers' state goes."""
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
        """Has others find the full pages of what the sequence holds: the steps that write these are enqueued."""
        ids = sequence.token_ids
        n = _findable(sequence)
        self._prefixes.add(ids if n == len(ids) else ids[:n], sequence.pages, self.page_tokens)

    def _used_last(self, pages: Iterable[int]) -> None:
        """Nothing was used after these: of a text, the beginning, without which the rest is of no use."""
        for page in reversed([*pages]):
            self.order.move_to_end(page)

    def _must_copy(self, sequence: SequenceState) -> bool:
        """Whether the sequence appends to a page that another has, too: then that has it at the same index."""
        index, filled = divmod(sequence.position, self.page_tokens)
        page = sequence.pages[index : index + 1]
        if not filled or page[0] not in self._ever_shared:
            return False
        return any(page == other.pages[index : index + 1] for other in self.sequences if other is not sequence)

    def _copy_page(self, source: int, target: int) -> None:
        for buffer, shape in self.shaped_buffers():
            page_bytes = self.page_tokens * shape.row_bytes
            self._device.copy_rows(
                buffer,
                source * page_bytes,
                target * page_bytes,
                row_bytes=page_bytes,
                n_rows=shape.n_kv_heads,
                pitch_bytes=shape.capacity * shape.row_bytes,
            )


def _findable(sequence: SequenceState) -> int:
    """Tokens from the beginning on whose full pages other texts may share."""
    n = sequence.position
    return n if sequence.n_findable is None else min(n, sequence.n_findable)
