"""Scheduler: decides which sequences the next step extends, and by how many tokens.

A step is a list of rows. A decoding sequence has one row. A prompt adds a chunk of rows. Even with a long prompt, other
sequences get their next token after at most max_step_tokens rows. Jobs are served by rank: by priority, then first
come, first served. If the KV cache has too few pages, the job with the lowest rank gives up its pages and is read again
later, prompt and answer so far. The scheduler does not depend on a device.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (2024).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from llmcl.checkpoint.lora import NO_ADAPTERS, AdapterChoice
from llmcl.engine.logits_processor import LogitsProcessor
from llmcl.engine.matching import TokenMatcher
from llmcl.errors import UsageError, counted
from llmcl.models.image_rows import PlacedImage, not_inside
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState, StepCount
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import SamplingParams


@dataclass(eq=False)
class Job:
    """A prompt and its answer so far."""

    prompt: Sequence[int]
    params: SamplingParams  # seeded, so rereading gives the same answer
    max_tokens: int  # the answer fits into the scheduler's max_context
    priority: int = 0  # higher first
    matcher: TokenMatcher | None = None  # restricts the next token, after accepting `sampled`; None: no restriction
    sampled: list[int] = field(default_factory=list)  # ids known to the host
    n_given: int = 0  # tokens the caller has; those missing in `sampled` are computed again
    n_found: int = 0  # prompt tokens found in the cache at the start
    begun_ns: int | None = None  # start time on the host's clock
    n_enqueued: int = 0  # tokens whose sampling was enqueued, ids unknown to the host included
    sequence: SequenceState | None = None  # None while the job has no slot in the KV cache
    text: list[int] = field(default_factory=list)  # tokens to read before the next token is sampled
    verified: StepCount = field(default_factory=StepCount)  # steps that verified a draft
    rank: tuple[int, int] = (0, 0)
    done: bool = False  # gets no more tokens
    submitted_ns: int | None = None  # time of submission, same clock as begun_ns
    prompt_logprobs: int | None = None  # alternatives per prompt token; None: prompt log-probabilities are not wanted
    processor: LogitsProcessor | None = None  # changes the logits before each token is chosen
    adapters: AdapterChoice = NO_ADAPTERS
    images: Sequence[PlacedImage] = ()  # in the prompt, whose ids are keyed (`image_rows.keyed`)
    outgrown: bool = False  # to be read again with the rotary frequencies of longer texts
    preempted: SequenceState | None = None  # the sequence before a preemption, with mirostat's state
    scored: list[LogProb | None] = field(init=False)  # log-probabilities of the prompt's tokens

    def __post_init__(self) -> None:
        self.scored = [None] * len(self.prompt)  # the first token has no tokens before it

    @property
    def drafts(self) -> bool:
        """Whether a step may verify a draft: it has no masks, no processors, no adapters and no images."""
        plain = self.matcher is None and self.processor is None and not self.adapters and not self.images
        return plain and self.params.takes_drafts

    @property
    def n_scored(self) -> int:
        """Returns how many tokens at the start of the prompt need the next token's log-probability."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    def progress(self) -> tuple[int, int]:
        """Returns the prompt tokens found in the cache and the prompt tokens read so far. Any thread may call it."""
        sequence = self.sequence
        return self.n_found, 0 if sequence is None else min(sequence.position, len(self.prompt))

    @property
    def unread(self) -> int:
        """Returns how many tokens in `text` no step has read yet."""
        return 0 if self.sequence is None else max(0, len(self.text) - self.sequence.position)

    def restart(self) -> None:
        """Restarts the answer. Sampling yields the same tokens."""
        assert len(self.sampled) == self.n_enqueued  # no id is pending
        self.n_given = max(self.n_given, self.n_enqueued)
        self.sampled, self.n_enqueued = [], 0
        if self.matcher is not None:
            self.matcher.reset()

    def note_verified(self, n_rows: int, n_tokens: int) -> None:
        """Records a step that verified a draft: n_rows rows, n_tokens sampled tokens."""
        before = self.verified
        self.n_enqueued += n_tokens - 1
        self.verified = StepCount(before.steps + 1, before.rows + n_rows, before.tokens + n_tokens)

    def rows(self) -> int:
        """Returns how many tokens the sequence should be extended by next."""
        return self.unread or int(self.n_enqueued < self.max_tokens)


@dataclass(frozen=True)
class Chunk:
    """Prompt tokens that one step reads, from `position` on. is_last: the step samples a token after the chunk.
    following: the next token after each token, if log-probabilities are wanted; else None.
    """

    job: Job
    position: int
    token_ids: list[int]
    is_last: bool
    following: list[int] | None = None


@dataclass(frozen=True)
class Plan:
    """A step. ended: sequences to remove from the batch first. started: jobs whose sequences get a slot."""

    ended: list[SequenceState]
    started: list[Job] = field(default_factory=list)
    decode: list[Job] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    @property
    def n_rows(self) -> int:
        return len(self.decode) + sum(len(chunk.token_ids) for chunk in self.prefill)

    @property
    def n_keys(self) -> int:
        """Returns the keys that the step attends to, counted once per chunk."""
        decode = sum(len(job.prompt) + job.n_enqueued - 1 for job in self.decode)
        return decode + sum(chunk.position + len(chunk.token_ids) for chunk in self.prefill)


class Scheduler:
    """Manages waiting and running jobs, each list by rank. At most max_sequences jobs run.

    The scheduler alone gives out the pages of `cache`, and `plan` never promises a page that is not free.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        max_sequences: int,
        max_step_tokens: int,
        cell_tokens: int = 0,
        *,
        max_prompt_tokens: int = 0,
        tokens_beside: Callable[[int], int] | None = None,
    ):
        """max_prompt_tokens: row limit for a step without decoding rows, at least max_step_tokens. tokens_beside: row
        limit for a step, given its decoding rows (included in the limit), if lower than max_step_tokens. None:
        max_step_tokens.

        cell_tokens: see `Batch.cell_tokens`. Chunks are then whole cells, and after a preemption only the prompt is
        read again, while the answer is decoded again by the same kernels. 0: chunks have any length.
        """
        if max_step_tokens < max_sequences + max(0, cell_tokens - 1):
            of_cells = f" and {cell_tokens - 1} more for a prompt (batch_invariant)" if cell_tokens else ""
            raise UsageError(
                f"max_step_tokens is {max_step_tokens} with {counted(max_sequences, 'sequence')} (max_sequences); "
                f"expected at least one token a step for each{of_cells}"
            )
        self.cache = cache
        self.max_sequences = max_sequences
        self.max_step_tokens = max_step_tokens
        self.max_prompt_tokens = max(max_prompt_tokens, max_step_tokens)
        self._tokens_beside = tokens_beside
        self.cell_tokens = cell_tokens
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.n_preempted = 0
        self._ended: list[SequenceState] = []
        self._arrivals = count()

    @property
    def max_context(self) -> int:
        """Returns the length of the longest sequence that can run, if necessary alone."""
        return min(self.cache.max_context, len(self.cache.order) * self.cache.page_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._ended)

    @property
    def has_room(self) -> bool:
        """Returns whether a step could read more prompts than the waiting ones. Only valid while nothing runs."""
        n_tokens = sum(len(job.prompt) for job in self.waiting)
        return len(self.waiting) < self.max_sequences and n_tokens < self.max_prompt_tokens

    def submit(self, job: Job) -> None:
        """Adds a job to the queue."""
        assert job.prompt and 1 <= job.max_tokens <= self.max_context - len(job.prompt) + 1
        job.rank = -job.priority, next(self._arrivals)
        insort(self.waiting, job, key=_rank)

    def end(self, job: Job) -> None:
        """Ends a job, finished or not. Its pages are free at once, its slot in the next step."""
        if not job.done:
            job.done = True
            if job.sequence is None:
                self.waiting.remove(job)
            else:
                self._take_from(job)

    def plan(self) -> Plan:
        """Plans the next step and counts its reads and samples as enqueued."""
        ended, self._ended = self._ended, []
        plan, n_preempted = Plan(ended), self.n_preempted
        outgrown = [job for job in self.running if not job.unread and job.rows() and self._is_outgrown(job)]
        for job in outgrown:
            job.outgrown = True
            self._requeue(job)
        extended = [(job, job.unread, job.rows()) for job in self.running]
        n_decoding = sum(not unread and n_rows for _, unread, n_rows in extended)
        most = self.max_step_tokens if n_decoding else self.max_prompt_tokens
        if n_decoding and self._tokens_beside is not None:
            most = min(most, self._tokens_beside(n_decoding))
        budget = most - n_decoding  # rows left for prompts
        promised = 0  # pages
        for job, unread, n_rows in extended:
            n_rows = self._chunk(job.sequence, unread, budget) if unread and job.sequence else n_rows
            if job.sequence is None or not n_rows:
                continue
            needed = self.cache.missing_pages(job.sequence, n_rows)
            while needed and needed > (free := self.cache.n_free - promised):
                youngest = self.running[-1]
                if unread and youngest is job:  # read as much as fits
                    room = -job.sequence.position % self.cache.page_tokens + free * self.cache.page_tokens
                    n_rows = self._chunk(job.sequence, unread, min(n_rows, room))
                    needed = self.cache.missing_pages(job.sequence, n_rows)
                    if needed > free:  # an image
                        n_rows = 0
                    break
                self._preempt(youngest)
                if youngest is job:
                    n_rows = 0
                    break
            if not n_rows:
                continue
            promised += needed
            if unread:
                budget -= n_rows
                self._read(job, n_rows, plan)
            else:
                plan.decode.append(job)
        if self.n_preempted == n_preempted and not outgrown:
            self._admit(plan, budget)
        for job in (*plan.decode, *(chunk.job for chunk in plan.prefill if chunk.is_last)):
            job.n_enqueued += 1
        return plan

    def _admit(self, plan: Plan, budget: int) -> None:
        """Starts waiting jobs in order, while all prompts fit and each running job can get one more page."""
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            job = self.waiting[0]
            sequence = self.cache.sequence()
            sequence.adapters = job.adapters
            text = [*job.prompt, *job.sampled]
            n_text = len(text)
            restarts = self.cell_tokens and not job.outgrown
            if restarts:
                text = [*job.prompt]
            self.cache.choose_frequencies(sequence, len(text), len(job.prompt))
            if self.cell_tokens:
                # Exclude the last token: its key is appended by a decode kernel.
                sequence.n_findable = (len(text) - 1) // self.cell_tokens * self.cell_tokens
            if not job.n_scored:  # otherwise all its rows must be computed
                self.cache.share_pages(sequence, text, self.cell_tokens or 1)
            elif self.cell_tokens:
                sequence.n_findable = 0  # read by different kernels than other prompts
            if job.images:
                self.cache.truncate(sequence, not_inside(job.images, sequence.position))
                sequence.images = [*job.images]
            n_rows = self._chunk(sequence, len(text) - sequence.position, budget)
            if not n_rows:
                self.cache.truncate(sequence, 0)
                return
            needed = self.cache.missing_pages(sequence, n_text - sequence.position)
            for other in self.running:
                if other.sequence is not None:
                    needed += self.cache.missing_pages(other.sequence, other.rows()) + 1
            if self.running and needed > self.cache.n_free:
                self.cache.truncate(sequence, 0)
                return
            del self.waiting[0]
            if not job.n_enqueued and not job.n_given:
                job.n_found = sequence.position
            if restarts:
                job.restart()
            job.outgrown = False
            assert len(job.sampled) == job.n_enqueued  # `text` includes every pending id
            job.sequence, job.text = sequence, text
            sequence.sampling, sequence.n_sampled, sequence.mu = job.params, len(job.sampled), None
            insort(self.running, job, key=_rank)
            plan.started.append(job)
            budget -= n_rows
            self._read(job, n_rows, plan)

    def _read(self, job: Job, n_rows: int, plan: Plan) -> None:
        assert job.sequence is not None
        start, n_scored = job.sequence.position, job.n_scored
        end = start + n_rows
        firsts = {*range(start, end, self.cell_tokens or n_rows), *([n_scored] if start < n_scored < end else ())}
        for first, last in pairwise([*sorted(firsts), end]):
            following = job.text[first + 1 : last + 1] if first < n_scored else None
            plan.prefill.append(Chunk(job, first, job.text[first:last], last == len(job.text), following))

    def _chunk(self, sequence: SequenceState, unread: int, most: int) -> int:
        """Returns how many prompt tokens a step reads: at most `most` of `unread`, and whole cells. An image with
        two-way attention is read whole, whatever its size.
        """
        n, first = min(unread, most), sequence.position
        if sequence.images and 0 < n < unread and (start := not_inside(sequence.images, first + n)) < first + n:
            end = next(placed.end for placed in sequence.images if placed.first == start)
            return start - first or end - first
        if self.cell_tokens and n < unread:
            n -= (sequence.position + n) % self.cell_tokens
        return max(0, n)

    def _preempt(self, job: Job) -> None:
        """Takes pages and slot from a job and queues it again by rank."""
        self.n_preempted += 1
        self._requeue(job)

    def _is_outgrown(self, job: Job) -> bool:
        """Whether the next token needs other rotary frequencies, so the whole text is read again."""
        sequence = job.sequence
        return sequence is not None and sequence.position >= self.cache.frequencies_end(sequence)

    def _requeue(self, job: Job) -> None:
        job.preempted = job.sequence
        self._take_from(job)
        insort(self.waiting, job, key=_rank)

    def _take_from(self, job: Job) -> None:
        assert job.sequence is not None
        self.running.remove(job)
        self.cache.truncate(job.sequence, 0)
        self._ended.append(job.sequence)
        job.sequence = None


def _rank(job: Job) -> tuple[int, int]:
    return job.rank
