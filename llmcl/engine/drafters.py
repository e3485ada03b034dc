"""What drafts the next tokens of a text: earlier places of the text itself, or a smaller model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llmcl.models.kv_cache import common_prefix
from llmcl.models.model import Model
from llmcl.ops.sample import SamplingParams

NGRAMS = 5, 3  # tokens that must have occurred before, the longest first
FEW = 4  # tokens that decode reads as fast as prefill, which is made for many
UNREAD = -1  # a token that only the device knows yet


class Drafter(ABC):
    """is_free: a draft costs next to nothing, and can be of what follows a token that has not been read yet."""

    is_free = False

    def another(self) -> Drafter | None:
        """One for a further text beside this one's; None: it drafts for one text at a time."""
        return None

    @abstractmethod
    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        """A text whose next tokens are sampled as params say, which have a seed."""

    @abstractmethod
    def push(self, token: int) -> None:
        """The text goes on with this token."""

    def catch_up(self) -> None:  # noqa: B027  # most have nothing to do
        """Does what is due before a draft and is not part of each."""

    @abstractmethod
    def draft(self, unread: int, most: int) -> list[int]:
        """At most `most` tokens that may follow the text and `unread` tokens more; none where it has no idea."""


class PromptLookup(Drafter):
    """Prompt lookup decoding (Saxena 2023): where the last tokens of a text have occurred before, in prompt or answer,
    what followed them there is the draft.
    """

    is_free = True

    def another(self) -> PromptLookup:
        return PromptLookup()

    def begin(self, text: Sequence[int], params: SamplingParams) -> None:
        self._text: list[int] = []
        # Where the latest occurrence of an n-gram ends, and where the one before it did.
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
        # What is drafted may itself be repeated: then it is copied again, as far as is wanted.
        period = len(self._text) - start
        following = self._text[start : start + unread + most]
        while len(following) < unread + most:
            following.append(following[-period])
        return following[unread:]


class DraftModel(Drafter):
    """A smaller model with the same vocabulary. It samples with the noise that the large one will have, so that the two
    choose the same token as often as their probabilities allow.
    """

    def __init__(self, model: Model, vocab_size: int):
        """vocab_size: of the model that verifies. Either may have a few ids more, which tokens do not have."""
        self.model = model
        self._vocab_size = min(vocab_size, model.config.vocab_size)
        self._sequence = model.cache.sequence()
        self._read = 0  # tokens of the text that the cache surely holds

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
        """The tokens of the text that are not in the cache, at least one; what the cache has beside the text goes."""
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
        # The token's number in the answer gives it the large model's noise. (To the repetition penalty a rejected token
        # may hide an earlier occurrence here: what is drafted need not be exact.)
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
