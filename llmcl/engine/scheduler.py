"""Scheduler: which sequences the next step extends, and by how much.

A step is a list of rows. A sequence that decodes has one row, a prompt that is read has a chunk of rows beside them:
however long it is, the others get their next token after max_step_tokens rows at the latest. Jobs go by rank: first
come, first served among those of one priority. Where the KV cache has too few pages, the lowest in rank gives its own
back and is read again later, prompt and answer so far. Nothing here knows a device.

Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (2024).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from llmcl.errors import UsageError, counted
from llmcl.grammar import Matcher
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState
from llmcl.models.verification import StepCount
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import SamplingParams


@dataclass(eq=False)
class Job:
    """A prompt and its answer so far.

    params: seeded, so that the answer is the same when its beginning is read again. max_tokens: the answer fits into
    the scheduler's max_context. priority: the higher goes first. sampled: ids that the host knows.
    n_given: tokens that the caller has, of which those that `sampled` lacks are computed once more.
    n_found: tokens of the prompt that the cache held when it began. begun_ns: when that was, on the host's clock.
    n_enqueued: tokens whose sampling was enqueued, those that the host does not know yet included. sequence: its place
    in the KV cache; None while it has none. text: what is read before the next token is sampled. verified: its steps
    that verified a draft. done: it gets no more. matcher: which tokens may come next; it has accepted `sampled`. None:
    all. submitted_ns: when it began to wait, on the same clock. prompt_logprobs: alternatives beside the
    log-probability of each token of the prompt, which `scored` then has; None: they are not wanted.
    """

    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    priority: int = 0
    matcher: Matcher | None = None
    sampled: list[int] = field(default_factory=list)
    n_given: int = 0
    n_found: int = 0
    begun_ns: int | None = None
    n_enqueued: int = 0
    sequence: SequenceState | None = None
    text: list[int] = field(default_factory=list)
    verified: StepCount = field(default_factory=StepCount)
    rank: tuple[int, int] = (0, 0)
    done: bool = False
    submitted_ns: int | None = None
    prompt_logprobs: int | None = None
    scored: list[LogProb | None] = field(init=False)

    def __post_init__(self) -> None:
        self.scored = [None] * len(self.prompt)  # nothing comes before the first

    @property
    def n_scored(self) -> int:
        """Tokens at the beginning of the prompt of which the log-probability of the next one is wanted."""
        return 0 if self.prompt_logprobs is None else len(self.prompt) - 1

    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that the cache held, and those that were read so far; for any thread."""
        sequence = self.sequence
        return self.n_found, 0 if sequence is None else min(sequence.position, len(self.prompt))

    @property
    def unread(self) -> int:
        """Tokens of `text` that no step has read yet."""
        return 0 if self.sequence is None else max(0, len(self.text) - self.sequence.position)

    def restart(self) -> None:
        """Begins the answer anew, with the same tokens."""
        assert len(self.sampled) == self.n_enqueued  # no id is under way
        self.n_given = max(self.n_given, self.n_enqueued)
        self.sampled, self.n_enqueued = [], 0
        if self.matcher is not None:
            self.matcher.reset()

    def note_verified(self, n_rows: int, n_tokens: int) -> None:
        """A step with so many rows of it, that verify a draft, has sampled so many tokens."""
        before = self.verified
        self.n_enqueued += n_tokens - 1
        self.verified = StepCount(before.steps + 1, before.rows + n_rows, before.tokens + n_tokens)

    def rows(self) -> int:
        """Tokens that the sequence is to be extended by, as soon as may be."""
        return self.unread or int(self.n_enqueued < self.max_tokens)


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt that a step reads, from `position` on; after the last of them a token is sampled.

    following: the token behind each of them, if the log-probabilities of these are wanted; else None.
    """

    job: Job
    position: int
    token_ids: list[int]
    is_last: bool
    following: list[int] | None = None


@dataclass(frozen=True)
class Plan:
    """A step. ended: sequences that give their places back first. started: jobs whose sequences get one."""

    ended: list[SequenceState]
    started: list[Job] = field(default_factory=list)
    decode: list[Job] = field(default_factory=list)
    prefill: list[Chunk] = field(default_factory=list)

    @property
    def n_rows(self) -> int:
        return len(self.decode) + sum(len(chunk.token_ids) for chunk in self.prefill)

    @property
    def n_keys(self) -> int:
        """Keys that the step attends to, those of a chunk counted once."""
        decode = sum(len(job.prompt) + job.n_enqueued - 1 for job in self.decode)
        return decode + sum(chunk.position + len(chunk.token_ids) for chunk in self.prefill)


class Scheduler:
    """Jobs that wait and jobs that run, each list by rank; at most max_sequences run.

    It alone gives out the pages of `cache`, and `plan` promises none that is not free.
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
        """max_prompt_tokens: of a step in which nobody decodes; at least max_step_tokens. tokens_beside: of a step in
        which so many decode, these included, if that is less; None: max_step_tokens.

        cell_tokens: see `Batch.cell_tokens`; chunks are such cells. What is read again after a preemption is the
        prompt alone; the answer so far is decoded again, by the same kernels as before. 0: chunks are of any length.
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
        """Tokens of the longest text that can run, alone if need be."""
        return min(self.cache.max_context, len(self.cache.order) * self.cache.page_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._ended)

    @property
    def has_room(self) -> bool:
        """Where nothing runs: whether a step could read more prompts than those that wait."""
        n_tokens = sum(len(job.prompt) for job in self.waiting)
        return len(self.waiting) < self.max_sequences and n_tokens < self.max_prompt_tokens

    def submit(self, job: Job) -> None:
        """Has the job wait for its turn."""
        assert job.prompt and 1 <= job.max_tokens <= self.max_context - len(job.prompt) + 1
        job.rank = -job.priority, next(self._arrivals)
        insort(self.waiting, job, key=_rank)

    def end(self, job: Job) -> None:
        """The job is over, whether it has all its tokens or not: its pages are free now, its place in the next step."""
        if not job.done:
            job.done = True
            if job.sequence is None:
                self.waiting.remove(job)
            else:
                self._take_from(job)

    def plan(self) -> Plan:
        """The next step. What it reads and samples counts as enqueued from now on."""
        ended, self._ended = self._ended, []
        plan, n_preempted = Plan(ended), self.n_preempted
        extended = [(job, job.unread, job.rows()) for job in self.running]
        n_decoding = sum(not unread and n_rows for _, unread, n_rows in extended)
        most = self.max_step_tokens if n_decoding else self.max_prompt_tokens
        if n_decoding and self._tokens_beside is not None:
            most = min(most, self._tokens_beside(n_decoding))
        budget = most - n_decoding  # for prompts
        promised = 0  # pages
        for job, unread, n_rows in extended:
            n_rows = self._chunk(job.sequence, unread, budget) if unread and job.sequence else n_rows
            if job.sequence is None or not n_rows:
                continue
            needed = self.cache.missing_pages(job.sequence, n_rows)
            while needed and needed > (free := self.cache.n_free - promised):
                youngest = self.running[-1]
                if unread and youngest is job:  # as much as there is room for
                    room = -job.sequence.position % self.cache.page_tokens + free * self.cache.page_tokens
                    n_rows = self._chunk(job.sequence, unread, min(n_rows, room))
                    needed = self.cache.missing_pages(job.sequence, n_rows)
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
        if self.n_preempted == n_preempted:
            self._admit(plan, budget)
        for job in (*plan.decode, *(chunk.job for chunk in plan.prefill if chunk.is_last)):
            job.n_enqueued += 1
        return plan

    def _admit(self, plan: Plan, budget: int) -> None:
        """Starts jobs that wait, in order, while the prompts of all fit and each that runs can have one page more."""
        while self.waiting and budget > 0 and len(self.running) < self.max_sequences:
            job = self.waiting[0]
            sequence = self.cache.sequence()
            text = [*job.prompt, *job.sampled]
            n_text = len(text)
            if self.cell_tokens:
                text = [*job.prompt]
                # Without the last token, whose key is appended as those of decoded tokens are.
                sequence.n_findable = (len(text) - 1) // self.cell_tokens * self.cell_tokens
            if not job.n_scored:  # else all its rows are to be computed
                self.cache.share_pages(sequence, text, self.cell_tokens or 1)
            elif self.cell_tokens:
                sequence.n_findable = 0  # read by other kernels than the prompts of others
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
            if self.cell_tokens:
                job.restart()
            assert len(job.sampled) == job.n_enqueued  # no id is under way that `text` lacks
            job.sequence, job.text = sequence, text
            sequence.sampling, sequence.n_sampled = job.params, len(job.sampled)
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
        """Tokens of a prompt, of which so many are unread, that a step reads: at most `most`, and whole cells."""
        n = min(unread, most)
        if self.cell_tokens and n < unread:
            n -= (sequence.position + n) % self.cell_tokens
        return max(0, n)

    def _preempt(self, job: Job) -> None:
        """The job gives up pages and place, and is the first of its rank to get new ones."""
        self.n_preempted += 1
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
