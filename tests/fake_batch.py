"""A batch without a device, for tests of what drives one: its model answers with a hash of all tokens so far.

Keys and values are the tokens themselves, in pages of a pool as the real cache gives them out. So a page that was given
out, found or shared wrongly changes the answer, and `answer_of` says what the answer should have been.

A batch with cell_tokens also remembers with how many others a token was read, 0 for one that was decoded: so do
the last bits of a real model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from math import log
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
from helpers import small_config

from llmcl.engine.generation import AnswerOptions
from llmcl.engine.leases import Leases
from llmcl.errors import UsageError
from llmcl.models.adapters import AdapterSet
from llmcl.models.batch import PromptChunk
from llmcl.models.paged_kv_cache import PagedKVCache
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import SamplingParams
from llmcl.tokenizer.text import Detokenizer

PAGE = 64
VOCAB = 131
NOTHING = -1
READ = 1000  # more than the vocabulary


def next_token(token_ids: Sequence[int], params: SamplingParams, n_sampled: int, mask: np.ndarray | None = None) -> int:
    """The same for the same tokens, parameters and number of the token in its answer. mask: of those that may come."""
    state = np.array([*token_ids, params.seed or 0, n_sampled], np.uint64)
    drawn = zlib.crc32(state.tobytes())
    if mask is None:
        return drawn % VOCAB
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])
    return int(allowed[drawn % len(allowed)])


class EveryOther:
    """A matcher: a token may come whose parity is not that of the number of tokens so far plus their sum.

    most: tokens with which it fails.
    """

    def __init__(self, most: int = 1 << 30) -> None:
        self.accepted: list[int] = []
        self.most = most

    def mask(self) -> np.ndarray:
        if len(self.accepted) >= self.most:
            raise UsageError(f"it fails after {self.most} tokens")
        bits = (np.arange(-(-VOCAB // 32) * 32) + len(self.accepted) + sum(self.accepted)) % 2
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def reset(self) -> None:
        self.accepted = []

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert self.mask()[token // 32] >> np.uint32(token % 32) & 1
            self.accepted.append(token)


def answer_of(
    prompt: Sequence[int],
    params: SamplingParams,
    n_tokens: int,
    cell_tokens: int = 0,
    matcher: EveryOther | None = None,
    *,
    scored: bool = False,
) -> list[int]:
    """The first n_tokens of an answer that nobody disturbs. scored: the prompt's last token is read by itself."""
    n_scored = len(prompt) - 1 if scored else 0
    parts = [*(cells(prompt[:n_scored], cell_tokens) if n_scored else ()), *cells(prompt[n_scored:], cell_tokens)]
    held = [token for first in parts for token in read(first, cell_tokens)]
    for n in range(n_tokens):
        held.append(next_token(held, params, n, None if matcher is None else matcher.mask()))
        if matcher is not None:
            matcher.accept(held[-1:])
    return held[len(prompt) :]


def cells(prompt: Sequence[int], cell_tokens: int) -> list[Sequence[int]]:
    step = cell_tokens or len(prompt)
    return [prompt[first : first + step] for first in range(0, len(prompt), step)]


def read(token_ids: Sequence[int], cell_tokens: int) -> list[int]:
    """What the cache holds of tokens that were read together."""
    return [token + (READ * len(token_ids) if cell_tokens else 0) for token in token_ids]


class FakeDevice:
    """Stands in for Device as far as a PagedKVCache needs one: one layer's keys, a token each."""

    def __init__(self) -> None:
        self.memory = np.zeros(0, np.int64)
        self.page_bytes = 0

    def alloc(self, nbytes: int, label: str) -> str:
        return label

    def copy_rows(self, buffer: str, source: int, target: int, **_: Any) -> None:
        if buffer.startswith("keys"):
            from_page, to_page = source // self.page_bytes, target // self.page_bytes
            self.memory[to_page * PAGE : (to_page + 1) * PAGE] = self.memory[from_page * PAGE : (from_page + 1) * PAGE]


class FakeStep:
    """Stands in for StepState."""

    def write_pages(self, pages: Sequence[int], sequence: int = 0) -> None:
        pass

    def write_text_length(self, length: int, sequence: int = 0) -> None:
        pass

    def write_rotary_offset(self, offset: int, sequence: int = 0) -> None:
        pass


class FakeBatch:
    """What models/batch.py offers. It checks what it is asked for, and computes in the order of the calls.

    before: called with what is about to be enqueued, "prefill" or "decode"; what it raises, the device raises.
    log: what was enqueued and waited for, in order.
    """

    def __init__(
        self,
        n_pages: int,
        max_sequences: int,
        max_context: int = 1024,
        *,
        runs_ahead: bool = False,
        cell_tokens: int = 0,
    ):
        self.max_sequences = max_sequences
        self.max_context = max_context
        self.max_rows = max_sequences * max_context
        self.reads_together = True
        self.runs_ahead = runs_ahead
        self.cell_tokens = cell_tokens
        self.device = FakeDevice()
        config = small_config(n_layers=1, max_position=max_context)
        device: Any = self.device
        self.cache = PagedKVCache(device, config, max_context, "float32", PAGE, n_pages)
        self.device.memory = np.full(n_pages * PAGE, NOTHING, np.int64)
        self.device.page_bytes = PAGE * self.cache.shape.row_bytes
        self.places: dict[SequenceState, SamplingParams] = {}
        self.sampled_last: dict[SequenceState, int] = {}
        self.before: Callable[[str], None] = lambda what: None
        self.n_prefilled = 0
        self.log: list[str] = []
        self.allowed: dict[SequenceState, np.ndarray | None] = {}
        self.scored: WeakSet[SequenceState] = WeakSet()
        self._step: Any = FakeStep()

    def start(self, sequence: SequenceState, params: SamplingParams) -> None:
        assert sequence not in self.places and len(self.places) < self.max_sequences
        assert params.seed is not None
        self.places[sequence] = params

    def step(
        self,
        decode: Sequence[SequenceState],
        chunks: Sequence[PromptChunk],
        before_sampling: Callable[[], None] | None = None,
    ) -> Callable[[], list[int]]:
        sequences = [*decode, *(chunk.sequence for chunk in chunks)]
        assert 0 < len(set(sequences)) == len(sequences) <= self.max_sequences
        assert all(sequence in self.places for sequence in sequences)
        if decode:
            self.before("decode")
        sampled = [*decode]
        for sequence in decode:
            self._write(sequence, [self.sampled_last[sequence]])
        n_held = [sequence.position + 1 for sequence in decode]
        assert not self.cell_tokens or len(chunks) + bool(decode) == 1
        for chunk in chunks:
            self.before("prefill")
            assert len(chunk.token_ids)
            first = chunk.sequence.position
            assert not self.cell_tokens or first % self.cell_tokens == 0 or chunk.sequence in self.scored
            assert not self.cell_tokens or len(chunk.token_ids) <= self.cell_tokens
            self._write(chunk.sequence, read(chunk.token_ids, self.cell_tokens))
            chunk.sequence.token_ids.extend(chunk.token_ids)
            self.n_prefilled += len(chunk.token_ids)
            if chunk.is_last:
                sampled.append(chunk.sequence)
                n_held.append(chunk.sequence.position)
        self.log.append("decode" if decode else "prefill")
        if before_sampling is not None:
            before_sampling()
        return self._sample(sampled, n_held) if sampled else list

    def allow(self, tokens: Mapping[SequenceState, np.ndarray | None]) -> None:
        assert set(tokens) <= set(self.places)
        self.log.append("allow")
        self.allowed.update(tokens)

    def logprobs(self, sequences: Sequence[SequenceState]) -> Callable[[], list[LogProb | None]]:
        """Of each token the logarithm of 1/2, and as many alternatives as are wanted."""
        found: list[LogProb | None] = []
        for sequence in sequences:
            wanted, token = self.places[sequence].logprobs, self.sampled_last[sequence]
            found.append(None if wanted is None else LogProb(token, log(0.5), ((token, log(0.5)),) * wanted))
        return lambda: found

    def prepare_scores(self) -> None:
        self.before("prepare scores")

    def score(
        self, sequence: SequenceState, token_ids: Sequence[int], following: Sequence[int], top: int
    ) -> Callable[[], list[LogProb]]:
        """Of each token minus the number of those before it, and as many alternatives as are wanted."""
        assert sequence in self.places and len(token_ids) == len(following) > 0
        self.before("score")
        assert not self.cell_tokens or sequence.position % self.cell_tokens == 0
        self.scored.add(sequence)
        self._write(sequence, read(token_ids, self.cell_tokens))
        sequence.token_ids.extend(token_ids)
        self.n_prefilled += len(token_ids)
        first = sequence.position - len(token_ids) + 1
        self.log.append("score")
        found = [LogProb(token, -float(first + i), ((token, 0.0),) * top) for i, token in enumerate(following)]

        def wait() -> list[LogProb]:
            self.log.append("read scores")
            return found

        return wait

    def end(self, sequence: SequenceState) -> None:
        del self.places[sequence]
        self.allowed.pop(sequence, None)

    def _write(self, sequence: SequenceState, token_ids: Sequence[int]) -> None:
        assert sequence.position + len(token_ids) <= self.max_context
        self.cache.prepare(self._step, sequence, len(token_ids))
        at = np.arange(sequence.position, sequence.position + len(token_ids))
        self.device.memory[np.asarray(sequence.pages)[at // PAGE] * PAGE + at % PAGE] = token_ids

    def _sample(self, sequences: Sequence[SequenceState], n_held: list[int]) -> Callable[[], list[int]]:
        ids = []
        for sequence, n in zip(sequences, n_held, strict=True):
            at = np.arange(n)
            held = self.device.memory[np.asarray(sequence.pages)[at // PAGE] * PAGE + at % PAGE].tolist()
            token = next_token(held, self.places[sequence], sequence.n_sampled, self.allowed.get(sequence))
            sequence.n_sampled += 1
            self.sampled_last[sequence] = token
            ids.append(token)

        def wait() -> list[int]:
            self.log.append("read")
            return ids

        return wait


class FakeLLM:
    """Stands in for LLM: a token is a letter, 'a' for 0 and so on round the alphabet."""

    model_name = "fake"
    load_ms = 5.0
    has_tokenizer = True

    def __init__(self) -> None:
        self.leases = Leases(self.model_name)
        self.device = SimpleNamespace(compile_s=0.0, peak_bytes=7, is_cpu=True)
        self.model = SimpleNamespace(
            config=SimpleNamespace(vocab_size=VOCAB), check_vocabulary=lambda token_ids: None, adapters=AdapterSet()
        )
        self.tokenizer = SimpleNamespace(
            detokenizer=lambda as_it_is=False: Detokenizer(lambda token: bytes([97 + token % 26])),
            eos_token_ids=frozenset({VOCAB - 1}),
            chat_template=None,
        )

    def encode(
        self,
        prompt: Any,
        *,
        raw: bool = False,
        system_prompt: str | None = None,
        images: Any = None,
        most: int | None = None,
    ) -> list[int]:
        """Text as letters, messages as those of their contents."""
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            prompt = "".join(message["content"] for message in prompt)
        return [ord(letter) % VOCAB for letter in prompt] if isinstance(prompt, str) else list(prompt)

    def compiled(self, options: AnswerOptions) -> Any:
        """For the expression "every other" a matcher; with a number behind it, one that fails after so many tokens."""
        if options.regex is None:
            return None
        return SimpleNamespace(matcher=lambda: EveryOther(*map(int, options.regex.split()[2:])))

    def check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise UsageError("the prompt has no tokens; expected at least one")
