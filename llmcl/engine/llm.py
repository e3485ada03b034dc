"""LLM, the object for Python users: streaming, conversations, logits, measuring."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from llmcl.architectures.embedding import NO_SETTINGS, EmbeddingSettings, JudgingHead, Pooling
from llmcl.engine.chat import Chat
from llmcl.engine.embedding import Embedder, TextReader, check_dimensions, chosen_pooling, shortened
from llmcl.engine.engine import MAX_ANSWERS, MAX_SEQUENCES, PAGE_TOKENS, Engine, Question
from llmcl.engine.generation import AnswerOptions, Begin, Generation, Piece, answer_options, collect, is_last, pieces
from llmcl.engine.images import images_of
from llmcl.engine.kept_batch import BatchSizes, KeptBatch, ReadyBatch
from llmcl.engine.leases import Lease, Leases
from llmcl.engine.lora_adapters import LoraAdapters
from llmcl.engine.matching import Compiled, grammars_for
from llmcl.engine.message_parts import Picture
from llmcl.engine.prompts import Prompt, PromptReader, Texts, are_ids, are_prompts, check_answers, has_parts, is_chat
from llmcl.engine.reranking import Pair, pairs_to_read, relevance
from llmcl.engine.speculation import NO_SPECULATION, MakeDrafts, NoDrafts, Speculation
from llmcl.engine.speed_tests import SpeedTests
from llmcl.engine.text_scores import TextScores
from llmcl.errors import (
    ContextLengthError,
    UsageError,
    check_flags,
    check_function,
    check_whole,
    counted,
    shown,
)
from llmcl.models.batch import Batch, make_batch
from llmcl.models.image_rows import keyed
from llmcl.models.model import Model
from llmcl.models.no_token import check_logits
from llmcl.models.sequence import SequenceState
from llmcl.ops.logprobs import LogProb, check_alternatives
from llmcl.progress import Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llmcl.engine.answer_settings import AnswerSettings, StreamSettings
    from llmcl.engine.matching import Grammars


class LLM(PromptReader, SpeedTests, LoraAdapters):
    """A model on a device, ready to generate. Use it as a context manager, or call `close()`.

    config, tokenizer (`has_tokenizer`: not with random weights), device, model_name, dtype, kv_dtype, max_context
    (tokens), load_ms.
    A model runs a single call at a time. If a thread is reading an answer, the thread's next call ends the answer. For
    other threads the model is busy until the answer ends, is closed or is collected: they get UsageError, or wait with
    wait=True.
    """

    def __init__(self, name: str, model: Model, dtype: str, kv_dtype: str):
        super().__init__(name)
        self._model: Model | None = model
        self.config = model.config
        self.device = model.device  # the one that chooses tokens
        self.devices = model.devices
        self.dtype = dtype
        self.kv_dtype = kv_dtype
        self.max_context = model.cache.max_context
        self.load_ms = 0.0
        self.sampling_defaults: dict[str, float] = {}  # the checkpoint's recommendation; used by `llmcl chat`
        self.speculation: Speculation = NO_SPECULATION  # how an answer's tokens are computed; `load` sets it
        self.leases = Leases(name)
        self._grammars: Grammars | None = None
        self._scores: TextScores | None = None
        self.embedding: EmbeddingSettings = NO_SETTINGS  # what the checkpoint says about embeddings; `load` sets it
        self._embedders: dict[Pooling, Embedder] = {}
        self._kept = KeptBatch()
        for device in self.devices:
            device.spares.add(self._kept)
        self.sequence = model.cache.sequence()  # for all texts outside conversations

    def __repr__(self) -> str:
        place = "closed" if self._model is None else f"on {self.place}"
        return (
            f"<LLM {self.model_name} {place}: weights {self.dtype}, KV cache {self.kv_dtype}, "
            f"context {self.max_context} tokens>"
        )

    @property
    def place(self) -> str:
        """The names of the devices."""
        return " + ".join(device.name for device in self.devices)

    @property
    def model(self) -> Model:
        """The weights, the KV cache and the kernels. Raises UsageError after `close`."""
        if (model := self._model) is None:
            raise self.leases.closed_error()
        return model

    @model.setter
    def model(self, model: Model) -> None:
        self._model = model

    @overload
    def stream(  # type: ignore[overload-overlap]
        self, prompt: Texts, **options: Unpack[StreamSettings]
    ) -> Generator[tuple[int, Piece], None, None]: ...
    @overload
    def stream(self, prompt: Prompt, **options: Unpack[StreamSettings]) -> Lease[Piece]: ...  # type: ignore[overload-overlap]
    @overload
    def stream(
        self, prompt: Prompt, *, n: int, **options: Unpack[StreamSettings]
    ) -> Generator[tuple[int, Piece], None, None]: ...
    @overload
    def stream(
        self, prompt: Sequence[Prompt], **options: Unpack[StreamSettings]
    ) -> Generator[tuple[int, Piece], None, None]: ...

    def stream(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        n: int | None = None,
        raw: bool = False,
        system_prompt: str | None = None,
        images: Sequence[Picture] | Sequence[Sequence[Picture]] | None = None,
        sequence: SequenceState | None = None,
        progress: Progress | None = None,
        wait: bool = False,
        begin: Begin | None = None,
        **settings: Any,
    ) -> Lease[Piece] | Generator[tuple[int, Piece], None, None]:
        """Yields a Piece for each token as soon as it is there; closing the generator stops the work.

        prompt: text, messages [{"role": ..., "content": ...}], content parts [{"type": "image", "path": ...}, "text"],
        or token ids. For a list of prompts, an `engine` generates the answers at the same time and yields (prompt
        index, piece); sequence and begin are for a single prompt. images: paths, bytes or Pillow pictures before a
        text, or for image parts without one; with a list of prompts a list for each (docs/guide/images.md). Sampling
        parameters, logit_bias and logprobs: see SamplingParams; with logprobs each piece has its `logprob`. stop:
        strings that end the answer and are not part of the answer. stop_token_ids: further tokens that end the answer.
        min_tokens: in the first min_tokens tokens, no stop token or end-of-text token ends the answer. ignore_eos: no
        end-of-text token ever ends the answer. dry_sequence_breakers: strings at which a repetition ends for DRY;
        without a tokenizer they have no effect. schema, regex, grammar, choices: a constraint for the answer, at most
        one (`llmcl.grammar.Grammar.of`); max_tokens may cut the answer before it matches. lora: a loaded adapter's
        name, or names with scales; None: the adapters of `load`. logits_processor(token_ids,
        logits) -> logits: a function that changes the logits before each token is chosen (engine/logits_processor.py);
        the logits are read from the device and written back. n: number of answers to the prompt; they yield like a
        list's answers, with seed, seed + 1, and so on. raw: no chat template. sequence: a conversation's sequence in
        the KV cache, to be continued; None: an empty context. progress(what, done, total): called while the prompt is
        read, with token counts; reading then waits for the device a few times more. wait: waits until no other thread
        generates. begin: for conversations, called with the function that generates the answer, once no other call is
        under way.

        Raises (before the first token) ContextLengthError for a prompt longer than the context, UsageError for a value
        out of range, or if another thread generates.
        """
        options = answer_options(**settings)  # raises errors now, not at the first token
        check_function("progress", progress)
        check_function("begin", begin)
        if not isinstance(sequence, SequenceState | None):
            raise UsageError(f"sequence is {shown(sequence)}; expected a conversation's place in the KV cache, or None")
        if n is not None or are_prompts(prompt):
            each = {field.name: getattr(options, field.name) for field in fields(options)}
            each |= {"raw": raw, "system_prompt": system_prompt, "images": images}
            return self._stream_each(prompt, n, each, wait, progress)[1]
        encoding: dict[str, Any] = {"raw": raw, "system_prompt": system_prompt, "images": images, "progress": progress}
        ids = self.encode(cast(Prompt, prompt), **encoding, most=self.max_context)
        self.check_prompt(ids)
        if options.logit_bias:
            self.model.check_vocabulary(list(options.logit_bias))
        compiled, adapters = self.compiled(options), self.model.adapters.choice(options.lora)

        def answer(asked: list[int], sequence: SequenceState | None) -> Generator[Piece, None, None]:
            if asked is not ids:
                self.check_prompt(asked)
            self.model.cache.adapt(sequence or self.sequence, adapters)
            text, images = keyed(asked, images_of(asked))
            if sequence is None:
                self.clear()
            else:
                self.model.cache.share_prefix(sequence, text)
            return pieces(
                self.model,
                self._tokenizer,
                sequence or self.sequence,
                text,
                options,
                images=images,
                load_ms=self.load_ms,
                progress=progress,
                speculation=NO_SPECULATION if adapters or images else self.speculation,
                matcher=None if compiled is None else compiled.matcher(),
                shown=begin is not None or is_chat(prompt, raw=raw),
            )

        return self.leases.begin(lambda: begin(answer) if begin else answer(ids, sequence), is_last, wait=wait)

    @property
    def grammars(self) -> Grammars:
        """The compiler for schemas, expressions and grammars for this model. It keeps compiled grammars."""
        if self._grammars is None:
            self._grammars = grammars_for(self._tokenizer, self.config.vocab_size)
        return self._grammars

    def compiled(self, options: AnswerOptions) -> Compiled | None:
        """Returns the compiled grammar for the answer, or None. Raises UsageError for a refused grammar."""
        grammar = options.to_match
        return None if grammar is None else self.grammars.compile(grammar)

    def check_prompt(self, ids: list[int]) -> None:
        """Raises UsageError or ContextLengthError if the token ids cannot be a prompt."""
        self.model.check_makes_text()
        self.model.check_images(images_of(ids), len(ids))
        if not ids:
            raise UsageError("the prompt has no tokens; expected at least one")
        if len(ids) > self.max_context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the context {self.max_context}; shorten the prompt or raise the "
                "context (--ctx-size, max_context)"
            )
        self.model.check_vocabulary(ids)

    @overload
    def generate(self, prompt: Texts, **options: Unpack[AnswerSettings]) -> list[Generation]: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[AnswerSettings]) -> Generation: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Prompt, *, n: int, **options: Unpack[AnswerSettings]) -> list[Generation]: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[AnswerSettings]) -> list[Generation]: ...

    def generate(self, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generation | list[Generation]:
        """Returns the whole answer, or a list of answers with n or a list of prompts; arguments as in `stream`."""
        n = options.pop("n", None)
        if n is not None or are_prompts(prompt):
            wait, progress = options.pop("wait", False), options.pop("progress", None)
            questions, stream = self._stream_each(prompt, n, options, wait, progress)
            parts: list[list[Piece]] = [[] for _ in questions]
            for i, piece in stream:
                parts[i].append(piece)
            return [collect(asked.prompt_token_ids, part) for asked, part in zip(questions, parts, strict=True)]
        encoding = {name: options.pop(name) for name in ("images", "raw", "system_prompt") if name in options}
        progress = options.get("progress")
        ids = self.encode(cast(Prompt, prompt), **encoding, most=self.max_context, progress=progress)
        return collect(ids, self.stream(ids, **options))

    def engine(
        self,
        *,
        max_sequences: int = MAX_SEQUENCES,
        max_step_tokens: int | None = None,
        max_context: int | None = None,
        kv_page_tokens: int = PAGE_TOKENS,
        kv_pages: int | None = None,
        batch_invariant: bool = False,
        wait: bool = False,
        progress: Progress | None = None,
    ) -> Engine:
        """Opens an engine, which answers many requests at the same time with the weights of this model.

        max_sequences: most texts in a step. max_step_tokens: most tokens in a step, prompt tokens included: few tokens
        disturb running answers less, many tokens read prompts faster; None: a choice for the device. max_context:
        tokens in prompt and answer; None: the model's context. kv_page_tokens, kv_pages: as in `load`; all texts share
        the pages, None: enough for max_sequences texts with max_context tokens. batch_invariant: a request gets the
        same ids alone and beside other requests, with any chunks of the prompt and any number of preemptions; slower.
        Without batch_invariant, a model loaded with prompt_lookup or draft_model drafts for a text alone in its step,
        and with prompt_lookup for several texts, too. progress: called while kernels are compiled. wait: as in
        `stream`.

        Raises UsageError for sizes out of range, or if another thread generates; OutOfDeviceMemoryError.
        """
        sizes = {"max_sequences": max_sequences, "kv_page_tokens": kv_page_tokens}
        optional = {"max_step_tokens": max_step_tokens, "max_context": max_context, "kv_pages": kv_pages}
        for name, size in {**sizes, **{name: size for name, size in optional.items() if size is not None}}.items():
            check_whole(name, size)
        check_flags(batch_invariant=batch_invariant)
        check_function("progress", progress)
        context = self.max_context if max_context is None else max_context
        if context > self.max_context:
            raise UsageError(
                f"max_context is {context}; expected at most the model's {self.max_context} (max_context of load)"
            )
        batch = BatchSizes(max_sequences, context, kv_page_tokens, kv_pages, batch_invariant, max_step_tokens)
        return self._open(batch, wait, progress)

    def _open(self, sizes: BatchSizes, wait: bool, progress: Progress | None, *, keep: bool = False) -> Engine:
        """Opens an engine on a kept batch or a new batch.

        keep: the batch may have more slots than asked for, and stays with the model once the engine is closed.
        Otherwise a batch kept before goes back to the model, and a new batch is freed.
        """
        self.model.check_makes_text()
        ready: ReadyBatch | None = None

        def make() -> Batch:
            nonlocal ready
            ready = self._kept.take(sizes, exact=not keep)
            if ready is not None:
                return ready.batch
            return make_batch(
                self.model,
                sizes.max_sequences,
                sizes.max_context,
                sizes.page_tokens,
                sizes.n_pages,
                progress,
                invariant=sizes.invariant,
                max_rows=sizes.max_rows,
            )

        def drafts_on(batch: Batch) -> MakeDrafts:
            if ready is not None:
                return ready.make_drafts
            return NoDrafts if sizes.invariant else self.speculation.on(batch, progress)

        def leave(batch: Batch, make_drafts: MakeDrafts) -> None:
            nonlocal ready
            if keep or ready is not None:
                self._kept.keep(ready or ReadyBatch(sizes, batch, make_drafts))
            ready = None

        return Engine(self, make, sizes.max_rows, wait=wait, drafts_on=drafts_on, leave=leave)

    def _stream_each(
        self, prompt: Any, n: int | None, options: dict[str, Any], wait: bool, progress: Progress | None
    ) -> tuple[list[Question], Generator[tuple[int, Piece], None, None]]:
        """Opens an engine for a list of prompts, or for n answers to a single prompt, and checks the request."""
        check_function("progress", progress)
        if n is not None:
            check_whole("n", n)
            if n > MAX_ANSWERS or are_prompts(prompt):
                value = f"{shown(n)} with a list of prompts" if n <= MAX_ANSWERS else shown(n)
                raise UsageError(f"n is {value}; expected 1 to {MAX_ANSWERS} answers to one prompt")
        n_places = min(n or len(prompt), MAX_SEQUENCES)
        sizes = BatchSizes(n_places, self.max_context, PAGE_TOKENS, None, invariant=False, max_rows=None)
        engine = self._open(sizes, wait, progress, keep=True)
        try:
            if n is None:
                questions = engine.questions(prompt, **options)
            else:
                question = engine.question(prompt, **options)
                questions = [question.again(i) for i in range(n)]
        except BaseException:
            engine.close()
            raise

        def pieces() -> Generator[tuple[int, Piece], None, None]:
            with engine:
                yield from engine.stream_questions(questions, are_same=n is not None)

        return questions, pieces()

    def chat(self, *, on_full: str = "error") -> Chat:
        """Opens a conversation, which keeps a KV cache from turn to turn.

        on_full: for a full context, "error" raises ContextLengthError, "drop" drops the oldest turns and keeps the
        system prompt.
        """
        return Chat(self, on_full=on_full)

    def logits(self, token_ids: Sequence[int], *, wait: bool = False) -> np.ndarray:
        """Returns the logits after each token: token_ids int [n_tokens] -> float32 [n_tokens, vocab], for evaluation.

        Raises UsageError for no ids or ids outside the vocabulary, ContextLengthError for more ids than the context,
        DeviceError for logits without probabilities (NaN or infinite). wait: as in `stream`.
        """
        if not are_ids(token_ids):
            raise UsageError(f"token_ids is {shown(token_ids)}; expected token ids, as `encode` gives them")
        self.model.check_images(images_of(token_ids), len(token_ids))
        ids, images = keyed(token_ids, images_of(token_ids))

        def work() -> np.ndarray:
            self.adapt_to_defaults()
            self.clear()
            self.sequence.images = images
            logits = self.model.logits(self.sequence, ids)
            check_logits(self.model, self.sequence, logits)
            return logits

        return self.leases.call(work, wait=wait)

    def logprobs(self, token_ids: Sequence[int], *, top: int = 0, wait: bool = False) -> list[LogProb]:
        """Returns the log-probability of each token in a text except the first, after the tokens before it, together
        with the `top` (0 to 20) most likely tokens. The logits stay on the device. Errors and wait: as in `logits`.
        """
        if not are_ids(token_ids):
            raise UsageError(f"token_ids is {shown(token_ids)}; expected token ids, as `encode` gives them")
        if top is None:
            raise UsageError("top is None; expected 0 to 20 alternatives")
        check_alternatives("top", top)
        ids = [int(token) for token in token_ids]
        self.check_prompt(ids)
        return self.leases.call(lambda: self._text_scores().logprobs(ids, top), wait=wait)

    def score(
        self,
        prompt: Prompt,
        answers: Sequence[str | Sequence[int]],
        *,
        raw: bool = False,
        system_prompt: str | None = None,
        wait: bool = False,
    ) -> list[float]:
        """Returns the log-probability of each answer after the prompt: the sum over the answer's tokens. The largest is
        the most likely answer. To compare answers with different lengths, divide by the token count.

        prompt, raw, system_prompt, wait: as in `stream`. answers: texts or token ids; an end-of-text token counts if
        the answer has one. The prompt is read once for all answers.

        Raises UsageError for an answer without tokens, ContextLengthError for an answer too long after the prompt.
        """
        check_answers(answers)
        if has_parts(prompt):
            raise UsageError("a score is for answers to text; leave the images out of the prompt")
        ids = self.encode(prompt, raw=raw, system_prompt=system_prompt, most=self.max_context)
        self.check_prompt(ids)
        texts = self.encode_answers(prompt, answers, raw=raw, system_prompt=system_prompt)
        for i, text in enumerate(texts):
            self.model.check_vocabulary(text)
            if len(ids) + len(text) - 1 > self.max_context:
                raise ContextLengthError(
                    f"answers[{i}] has {counted(len(text), 'token')} after {len(ids)} of the prompt, the context "
                    f"{self.max_context}; shorten them or raise the context (max_context)"
                )
        return self.leases.call(lambda: self._text_scores().answers(ids, texts), wait=wait)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate: bool = False,
        wait: bool = False,
    ) -> np.ndarray:
        """Returns a vector for each text: float32 [texts, dimensions].

        texts: texts or token ids, special tokens included. pooling: "mean", "cls" or "last" row of a text after the
        final norm; None: the checkpoint's. prompt_name: a prompt of the checkpoint, put before each text; None: its
        default prompt, if any. dimensions: keep only the first values of each vector. normalize: vectors of length 1.
        truncate: cut texts longer than the model takes. wait: as in `stream`.

        Raises UsageError for a model without a pooling, an unknown prompt or a text without tokens,
        ContextLengthError for a text too long.
        """
        check_flags(normalize=normalize)
        chosen = chosen_pooling(self.embedding, pooling, self.model_name)
        ids = self.ids_to_embed(texts, prompt_name=prompt_name, truncate=truncate)

        def work() -> np.ndarray:
            embedder = self._embedder(chosen)
            check_dimensions(dimensions, embedder.dimensions)
            vectors = np.concatenate([*embedder.vectors(ids, normalize=normalize)])
            return shortened(vectors, dimensions, normalize=normalize)

        return self.leases.call(work, wait=wait)

    def rerank(self, query: str, documents: Sequence[str], *, truncate: bool = True, wait: bool = False) -> np.ndarray:
        """Returns how relevant each document is for the query: float32 [documents], from 0 to 1, by a reranker.

        truncate: cut documents that are too long together with the query; False: raise ContextLengthError. wait: as in
        `stream`. Raises UsageError for a model that is no reranker.
        """
        if (head := self.embedding.ranking) is None:
            raise UsageError(
                f"{self.model_name} is no reranker; give a Qwen3-Reranker, or a cross-encoder "
                "(BertForSequenceClassification with one label)"
            )
        pooling: Pooling = "last" if isinstance(head, JudgingHead) else "cls"
        pairs = self.pairs_to_rank(query, documents, truncate=truncate)
        return self.leases.call(lambda: relevance(self._embedder(pooling), head, pairs), wait=wait)

    def pairs_to_rank(self, query: str, documents: Sequence[str], *, truncate: bool) -> list[Pair]:
        """Returns the tokens that `rerank` reads for each document. Arguments and errors as for `rerank`."""
        assert self.embedding.ranking is not None
        most = self.max_context
        return pairs_to_read(self.tokenizer, self.embedding.ranking, query, documents, most, truncate=truncate)

    def _embedder(self, pooling: Pooling) -> Embedder:
        self.adapt_to_defaults()
        if (embedder := self._embedders.get(pooling)) is None:
            embedder = Embedder(self.model, self.sequence, self.embedding.dense, pooling)
            self._embedders[pooling] = embedder
        return embedder

    def ids_to_embed(
        self, texts: Sequence[str | Sequence[int]], *, prompt_name: str | None = None, truncate: bool = False
    ) -> list[list[int]]:
        """Returns the token ids that `embed` reads for each text. Arguments and errors as for `embed`."""
        most = min(self.max_context, self.embedding.max_tokens or self.max_context)
        return TextReader(self.embedding, self._tokenizer, most, prompt_name, truncate).ids(texts)

    def _text_scores(self) -> TextScores:
        self.adapt_to_defaults()
        if self._scores is None:
            self._scores = TextScores(self.model, self.sequence)
        return self._scores

    def reset(self, *, wait: bool = False) -> None:
        """Ends this thread's answer; the next answer starts with an empty context. wait: as in `stream`."""
        self.leases.call(self.clear, wait=wait)

    def close(self) -> None:
        """Ends all answers after the current step, and frees the device's memory. No call can generate afterwards.

        A thread still reading an answer gets UsageError.
        """
        self.leases.close()
        self._kept.close()
        for device in self.devices:
            device.close()
        self.images.close()
        self._model, self._scores, self.speculation = None, None, NO_SPECULATION
        self._embedders.clear()

    def __reduce_ex__(self, protocol: object) -> str:
        raise UsageError(
            f"{self.model_name} is loaded on a device, so it can be neither copied nor pickled; share it between "
            "threads, and load it in each process that needs it (llmcl.load)"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
