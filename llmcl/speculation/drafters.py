"""Drafters guess a text's next tokens: by lookup in the text itself, or with a smaller model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llmcl.models.kv_cache import common_prefix
from llmcl.models.model import Model
from llmcl.ops.sample import SamplingParams

NGRAMS = 5, 3  # lengths of matched n-grams, longest first
FEW = 4  # decode reads up to FEW tokens as fast as prefill, which suits many tokens
UNREAD = -1  # placeholder for a token that only the device knows yet


class Drafter(ABC):
    """Guesses a text's next tokens. is_free: drafts cost almost nothing, and may skip a token that has not been read
    yet.
    """

    is_free = False

    def another(self) -> Drafter | None:
        """Returns a drafter for another concurrent text. None: the drafter handles one text at a time."""
        return None

    @abstractmethod
    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        """Starts a text whose next tokens are sampled with params, seed included."""

    @abstractmethod
    def push(self, token: int) -> None:
        """Appends a token to the text."""

    def catch_up(self) -> None:  # noqa: B027  # most drafters do nothing
        """Does pending work that is needed before a draft, but not for every draft."""

    @abstractmethod
    def draft(self, unread: int, most: int) -> list[int]:
        """Returns at most `most` tokens that may follow the text plus `unread` further tokens. Empty: no guess."""


class PromptLookup(Drafter):
    """Prompt lookup decoding (Saxena 2023): if the text's last tokens occurred earlier, in prompt or answer, the draft
    is the continuation found there.
    """

    is_free = True

    def another(self) -> PromptLookup:
        return PromptLookup()

    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        self._text: list[int] = []
        # Per n-gram, the end of its latest occurrence, and for the current one the end of the occurrence before.
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in NGRAMS]
        self._before: list[int | None] = [None for _ in NGRAMS]
        for token in text:
            self.push(token)

    def push(self, token: int) -> None:
        text = self._text
        text.append(token)
        for i, n in enumerate(NGRAMS):
            if len(text) >= n:
                ngram = tuple(text[-n:])
                self._before[i] = self._ends[i].get(ngram)
                self._ends[i][ngram] = len(text)

    def draft(self, unread: int, most: int) -> list[int]:
        start = next((end for end in self._before if end is not None), None)
        if start is None:
            return []
        # If the continuation reaches the end of the text, repeat it as a period.
        period = len(self._text) - start
        following = self._text[start : start + unread + most]
        while len(following) < unread + most:
            following.append(following[-period])
        return following[unread:]


class DraftModel(Drafter):
    """Drafts with a smaller model and the same vocabulary. Both models sample with the same noise, so they choose the
    same token as often as the probabilities allow.
    """

    def __init__(self, model: Model, vocab_size: int):
        """vocab_size: the verifying model's. Either model may have a few padding ids without tokens."""
        self.model = model
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self._sequence = model.cache.sequence()
        self._read = 0  # tokens of the text known to be in the cache

    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        self._text = [*text]
        self._n_prompt = len(text)
        self._known = max(text) < self._vocab_size
        self._read = min(len(text) - 1, common_prefix(self._sequence.token_ids, text))
        self.model.cache.truncate(self._sequence, self._read)
        self._sequence.sampling, self._sequence.n_sampled = params, 0
        self.model.start_sampling(self._sequence)

    def push(self, token: int) -> None:
        self._text.append(token)
        self._known = self._known and token < self._vocab_size

    def catch_up(self) -> None:
        if self._known and len(self._text) <= self.model.cache.max_context and len(self._missing()) > FEW:
            self.model.extend(self._sequence, self._missing()[:-1])
            self.model.device.finish()

    def _missing(self) -> list[int]:
        """Returns the tokens missing in the cache, at least one. Removes cached tokens that differ from the text."""
        text, held = self._text, self._sequence.token_ids
        while self._read < min(len(text) - 1, len(held)) and text[self._read] == held[self._read]:
            self._read += 1
        self.model.cache.truncate(self._sequence, self._read)
        return text[self._read :]

    def draft(self, unread: int, most: int) -> list[int]:
        model, sequence = self.model, self._sequence
        most = min(most, model.cache.max_context - len(self._text) + 1)
        if unread or not self._known or most < 1:
            return []
        for token in self._missing():
            model.decode_token(sequence, token)
        most = min(most, model.cache.frequencies_end(sequence) - sequence.position + 1)
        # The token's index in the answer selects the large model's noise. (A rejected token may hide an earlier
        # occurrence from the repetition penalty here. A draft need not be exact.)
        sequence.n_sampled = len(self._text) - self._n_prompt
        if sequence.sampling.counts_tokens:
            model.sampler.count(self._text[self._n_prompt :])
        model.step.restart_sampling(sequence.n_sampled)
        waiting = [model.sample(sequence)]
        for _ in range(most - 1):
            model.decode(sequence)
            sequence.token_ids.append(UNREAD)
            waiting.append(model.sample(sequence))
        tokens = [wait() for wait in waiting]
        sequence.token_ids[len(sequence.token_ids) - most + 1 :] = tokens[:-1]
        return tokens[: next((i for i, token in enumerate(tokens) if not 0 <= token < self._vocab_size), most)]
