"""A model on the device: bound launches, and passes that fill the cache and compute logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.errors import ContextLengthError, UsageError, counted, shown
from llmcl.kernels.common.mods import NO_MODS, Mods
from llmcl.kernels.common.persistent import ListedStep
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.kernels.common.step_state import StepState
from llmcl.models.activations import Activations, splits_of
from llmcl.models.adapted_model import ModelAdapters
from llmcl.models.adapters import AdapterSet
from llmcl.models.attention_ops import ChunkAttention, RowAttention
from llmcl.models.blocks import bind_block
from llmcl.models.bound_launches import BoundLaunches
from llmcl.models.image_rows import PlacedImage, on_device
from llmcl.models.image_steps import ImageSteps, placed_after, step_starts
from llmcl.models.kv_cache import KVCache
from llmcl.models.layer_ops import DecodeOps, PrefillOps
from llmcl.models.layer_span import LayerSpan, whole_span
from llmcl.models.prefill_launches import PrefillLaunches, prefill_sizes
from llmcl.models.sequence import SequenceState, Step
from llmcl.models.stack import decode_stack, head, last_token_launches, prefill_stack
from llmcl.models.weights import ModelWeights
from llmcl.ops.logprobs import LogProb
from llmcl.ops.sample import Sampler
from llmcl.progress import READING, Progress
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.runtime.driver_calls import named_errors
from llmcl.runtime.traffic import Traffic

_log = logging.getLogger(__name__)

LOGITS_CHUNK = 64
PARTS = 8  # per prefill chunk, for progress reports


class Model:
    """Bound launches of one model: `prefill` and `decode` fill the cache and compute the last token's logits."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        weights: ModelWeights,
        cache: KVCache,
        *,
        chunk: int | None = None,
        logit_rows: int = 1,
        step_rows: int = 0,
        mods: Sequence[Mods] = (),
        persistent: bool = True,
        prepared: bool = True,
        progress: Progress | None = None,
        span: LayerSpan | None = None,
    ):
        """mods: per layer, rules from the model and the user beside the causal mask; () for no rules.

        logit_rows, step_rows: rows in `act.logits` and in other activations for steps with several sequences
        (models/batch.py). With step_rows > 0 those steps read prompts and `prefill` has no launches. persistent: decode
        with a persistent kernel if the device has one, for all layers or the whole step (kernels/common/persistent.py),
        and read short prompts in few launches. prepared: False leaves `prepare` to the caller. progress: called while
        kernels compile. span: the layers in `weights`, if other devices have the others (stages.py).
        """
        self.device = device
        self.span = span or whole_span(config)
        self.mods = tuple(mods) or (NO_MODS,) * config.n_layers
        self.config = config
        self.weights = weights
        self.cache = cache
        self.chunk = min(chunk or prefill_chunk(device), cache.max_context)
        self._persistent = persistent
        self.splits = splits_of(device, config, cache.shape.kv_dtype)
        self.step = StepState(device, self.chunk, cache.table_entries)
        self.act = Activations.alloc(device, config, max(self.chunk, step_rows), self.splits, logit_rows)
        self.sampler = Sampler(device, self.act.logits, config.vocab_size, self.step, cache.max_context)
        self.step_position = 0  # position of the first token in the last enqueued launches
        self.decode_steps = 0  # enqueued since loading

        if self.span.is_last and (why := config.why_not_for_short_texts(cache.max_context)):
            _log.warning("%s", why)
        self.rotations = {
            name: device.upload(table, f"{name} rotation")
            for name, table in config.device_rotations(cache.max_context).items()
        }
        context, others = (device, config, self.step, self.act), (self.rotations, self.sampler.last_seen)
        self.decode_ops = DecodeOps(*context, RowAttention(*context, cache.shape, self.splits), *others)
        self.prefill_ops = PrefillOps(*context, ChunkAttention(*context, cache.shape, self.splits), *others)
        self.layers = [
            [
                bind_block(block, of_block, config, i, *cache.keys_and_values(i), self.mods[i], cache.states_of(i))
                for block, of_block in zip(config.layers[i], of_layer, strict=True)
            ]
            for i, of_layer in zip(self.span.layers, weights.layers, strict=True)
        ]
        self._unprepared: set[int] = set()  # prefill sizes whose kernels may not be compiled yet
        self.bind(prompts=not step_rows)
        if prepared:
            self.prepare(progress)
        self._all_logits: tuple[Buffer, list[Launch]] | None = None
        self._chunk_logits: Buffer | None = None  # shared by launches with and without adapters
        self.adapters = AdapterSet()
        self._adapted = ModelAdapters()

    def bind(self, *, prompts: bool) -> None:
        """Binds the launches to `decode_ops` and, with prompts, `prefill_ops`."""
        weights, persistent = self.weights, self._persistent
        self._prefill = list(self._bind_prefill(self.chunk)) if prompts else []
        self._last_token: list[Launch] = []
        if self.span.is_last and prompts:
            self._last_token = last_token_launches(self.layers, self.prefill_ops)
        self._image_steps = ImageSteps(self.prefill_ops, weights, self.layers, self.span)
        self._head = head(weights, self.decode_ops, self.act.logits)
        layers, self.persistent_intermediates = decode_stack(
            weights, self.layers, self.decode_ops, persistent=persistent
        )
        then = self.sampler.largest_launches if self.span == whole_span(self.config) else []
        listed = ListedStep([*layers, *self._head], self.step, self.cache.max_context, then=then)
        self._decode = BoundLaunches(self.device, listed, persistent=persistent)
        self._all_needed_from = max(launch.first_position for launch in self.decode_launches)

    def adapt(self, sequence: SequenceState) -> None:
        """Chooses the launches for the sequence's adapters, or those without adapters."""
        self._adapted.choose(self, sequence)

    def prefill(
        self,
        sequence: SequenceState,
        token_ids: Sequence[int],
        *,
        chunk: int | None = None,
        progress: Progress | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Appends token_ids to the sequence. Afterwards `act.logits` holds the last token's logits.

        images: their rows replace the embeddings of their tokens; `first` counts from the first of token_ids.
        progress: called as the device proceeds. Without it the work is enqueued and the call returns at once.

        Raises ContextLengthError if the tokens do not fit, UsageError if one is outside the vocabulary.
        """
        self.check_makes_text()
        self.check_tokens(sequence, token_ids)
        self.adapt(sequence)
        token_ids = self._to_read(sequence, token_ids, images)
        chunk = min(chunk or self.chunk, self.chunk)
        for _ in self._prefill_steps(sequence, token_ids, chunk, progress, is_last=True):
            pass
        self.step_position = sequence.position - 1
        self.run((*self._last_token, *self._prefill[0].rest, *self._head))
        if progress is not None:
            progress(READING, len(token_ids), len(token_ids))

    def extend(self, sequence: SequenceState, token_ids: Sequence[int], *, images: Sequence[PlacedImage] = ()) -> None:
        """Appends token_ids, the beginning of a prompt, to the sequence without computing logits. Raises the errors of
        `prefill`.
        """
        self.check_tokens(sequence, token_ids)
        self.adapt(sequence)
        for _ in self._prefill_steps(sequence, self._to_read(sequence, token_ids, images), self.chunk):
            pass

    def decode(self, sequence: SequenceState) -> None:
        """Runs one step with the input token on the device. Sampling advances the device's position."""
        self._decode_step(Step(sequence, None, sequence.position))

    def decode_token(self, sequence: SequenceState, token_id: int) -> None:
        """Runs one step through the decode kernels with a chosen token, for evaluation and tests."""
        self.check_tokens(sequence, [token_id])
        self._decode_step(Step(sequence, [token_id], sequence.position))
        sequence.token_ids.append(token_id)

    def steps_at_once(self, sequence: SequenceState) -> list[int]:
        """Returns how many tokens `decode_and_sample` can choose per launch with the sequence's parameters.

        [] if no such launch exists.
        """
        if self.sampler.launches != self.sampler.largest_launches:
            return []
        self.adapt(sequence)
        end = min(self.cache.max_context, self.cache.frequencies_end(sequence))
        most = 1 if self.cache.states is not None else end - sequence.position
        return [n for n in self._decode.whole_steps if n <= most]

    def decode_and_sample(self, sequence: SequenceState, n: int = 1) -> Callable[[], list[int]]:
        """Runs `decode` and `sample` n times. The returned function waits for the n ids. The caller appends the tokens
        now in the cache to the sequence: all but the last.

        n: 1, or a value in `steps_at_once`. Raises OutOfDeviceMemoryError, before any computation, if the cache has too
        few pages.
        """
        if n == 1:
            self.decode(sequence)
            wait = self.sample(sequence)
            return lambda: [wait()]
        self._begin(Step(sequence, None, sequence.position), n)
        self.decode_steps += n
        self.run([self._decode.whole_steps[n]])
        read = self.step.read_sampled(sequence.n_sampled, n)
        sequence.n_sampled += n
        self.device.flush()
        return read

    def _decode_step(self, step: Step) -> None:
        self.check_makes_text()
        self.adapt(step.sequence)
        self._reread(step.sequence)
        self._begin(step)
        self.decode_steps += 1
        self._compute_before(step, decodes=True)
        self.run(self.decode_launches_at(step.position))

    def _to_read(
        self, sequence: SequenceState, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()
    ) -> Sequence[int]:
        """Returns the tokens to read: token_ids, after the sequence's own if the whole text gets other frequencies.

        Adds the images to the sequence's.
        """
        self.check_images(images, len(token_ids))
        all_images = placed_after(sequence, token_ids, images)
        n_tokens = sequence.position + len(token_ids)
        if sequence.text_length is None or n_tokens > self.cache.frequencies_end(sequence):
            token_ids = [*sequence.token_ids, *token_ids]
            self.cache.choose_frequencies(sequence, n_tokens)
        sequence.images = all_images
        return token_ids

    def check_images(self, images: Sequence[PlacedImage], n_tokens: int) -> None:
        """Raises UsageError for images that the model cannot read, or not at their places in n_tokens tokens."""
        self._image_steps.check(images, n_tokens)

    def _reread(self, sequence: SequenceState) -> None:
        """Reads the sequence again if its next token, which the device holds, changes the rotary frequencies."""
        if sequence.position < self.cache.frequencies_end(sequence):
            return
        ids, images = [*sequence.token_ids], [*sequence.images]
        token = self.device.read(self.step.tokens, np.int32, (1,))
        self.cache.choose_frequencies(sequence, len(ids) + 1)
        sequence.images = images
        self.extend(sequence, ids)
        self.step.write_tokens(token, len(ids))

    def _begin(self, step: Step, n_steps: int = 1) -> None:
        """Sends the step's inputs to the device: pages, and tokens that the device does not hold yet.

        n_steps: the step plus the following one-token steps in the same launch.
        """
        n_tokens = step.n_tokens + n_steps - 1
        self.cache.prepare(self.step, step.sequence, n_tokens)
        self.cache.advance(step.sequence, n_tokens)
        if step.token_ids is not None:
            ids = on_device(step.token_ids, step.sequence.images, step.position)
            self.step.write_tokens(ids, step.position)
        self.step_position = step.position

    @property
    def stages(self) -> Sequence[Model]:
        """Returns the models of all spans, in the order of their layers (stages.py)."""
        return [self]

    def with_cache(self, cache: KVCache, **options: Any) -> Model:
        """Returns a model with the same weights and another cache. options: of the constructor."""
        options |= {"chunk": self.chunk, "mods": self.mods, "span": self.span}
        model = Model(self.device, self.config, self.weights, cache, **options)
        model.adapters = self.adapters
        return model

    @property
    def devices(self) -> list[Device]:
        return [*dict.fromkeys(stage.device for stage in self.stages)]

    @property
    def traffic(self) -> Traffic:
        """Returns a copy of the counters, summed over the devices."""
        return Traffic.total(device.traffic for device in self.devices)

    @property
    def seconds_before(self) -> Sequence[float]:
        """Returns the time that the host has waited for each earlier stage, since loading."""
        return []

    def _compute_before(self, step: Step, *, decodes: bool) -> None:
        """Computes the layers before `span`, if other devices have them (stages.py). decodes: with the decode
        kernels.
        """

    def start_sampling(self, sequence: SequenceState, last: Sequence[int] = ()) -> None:
        """Prepares `sample` to continue the sequence with the parameters in `sampling`.

        last: the answer's newest token, not yet in the cache.
        """
        self.sampler.remember(on_device(sequence.token_ids, sequence.images, 0))
        if sequence.sampling.counts_tokens:
            self.sampler.count(sequence.answer(last))
        self.sampler.configure(sequence.sampling, mu=sequence.mu)
        self.remember_text(sequence)
        self.step.restart_sampling(sequence.n_sampled)

    def remember_text(self, sequence: SequenceState) -> None:
        """Gives DRY the tokens in the cache. Call it when a prompt was read and before the answer begins."""
        if sequence.sampling.repels:
            self.sampler.dry.remember(on_device(sequence.token_ids, sequence.images, 0))

    def sample(self, sequence: SequenceState) -> Callable[[], int]:
        """Samples the next token from `act.logits` and makes it the device's next input.

        The returned function waits for the id. The host reads nothing else: 4 bytes.
        """
        self.run(self.sampler.launches)
        read = self.step.read_sampled(sequence.n_sampled)
        sequence.n_sampled += 1
        self.device.flush()
        return lambda: read()[0]

    def logprobs(self, sequence: SequenceState) -> Callable[[], list[LogProb | None]]:
        """Enqueues the read of the token's log-probabilities, right after `sample`. The returned function waits."""
        return self.sampler.logprobs.read(sequence.n_sampled - 1, [0])

    def prepare(self, progress: Progress | None) -> None:
        """Compiles the kernels and creates kernel objects during loading.

        If other processes can compile, kernels for prompts shorter than `chunk` tokens compile in the background. A
        prompt then waits only for kernels of the matching size.
        """
        for bound in self._prefill:
            for launch in (*bound.rest, *bound.every.separate, *bound.every.launches):
                launch.share_seldom_used()
        launches = self.launches_to_prepare
        sizes = list(reversed(self._prefill[:-1]))
        later = [launch for bound in sizes for launch in bound.to_prepare]
        with self.device.compile_progress(launches, progress, later):
            for of_step in (self._decode, *(bound.every for bound in self._prefill[-1:])):
                of_step.prepare()
            for launch in self._others_to_prepare():
                launch.prepare()
            for bound in sizes:
                if self.device.is_compiling(bound.to_prepare):
                    self._unprepared.add(bound.max_tokens)
                else:
                    bound.prepare()
        # A persistent kernel that failed to compile was replaced by separate launches.
        self._all_needed_from = max(launch.first_position for launch in self.decode_launches)

    @property
    def launches_to_prepare(self) -> list[Launch]:
        """Returns the launches whose kernels must compile before the model is loaded."""
        chunk = [launch for bound in self._prefill[-1:] for launch in bound.to_prepare]
        return [*self._decode.to_prepare, *chunk, *self._others_to_prepare()]

    def _others_to_prepare(self) -> list[Launch]:
        if not self.span.is_last:
            return []
        last = self._prefill[0].rest if self._prefill else []
        return [*last, *self._last_token, *self._head, *self.sampler.usual_launches]

    @property
    def decode_launches(self) -> Sequence[Launch]:
        """Returns the launches of a decode step before sampling."""
        return self._decode.launches

    def decode_launches_at(self, position: int) -> Sequence[Launch]:
        """Returns the launches that a decode step at this position needs."""
        launches = self.decode_launches
        if position < self._all_needed_from:
            launches = [launch for launch in launches if launch.first_position <= position]
        return launches

    def logits(
        self, sequence: SequenceState, token_ids: Sequence[int], *, images: Sequence[PlacedImage] = ()
    ) -> np.ndarray:
        """Returns every position's logits, float32 [n, vocab], for evaluation. Appends the tokens to the sequence.

        images: as in `prefill`.
        """
        chunks = self.logit_chunks(sequence, token_ids, images=images)
        vocab = self.config.vocab_size
        return np.concatenate([self.device.read(buffer, np.float32, (n, vocab)) for buffer, n in chunks])

    def logit_chunks(
        self,
        sequence: SequenceState,
        token_ids: Sequence[int],
        *,
        skip: int = 0,
        images: Sequence[PlacedImage] = (),
    ) -> Iterator[tuple[Buffer, int]]:
        """Appends token_ids to the sequence. Yields (logits float32 [n, vocab] on the device, n) for the tokens after
        the first `skip`, at most LOGITS_CHUNK at a time. Each step reuses the buffer, so read it before the next step.
        """
        self.check_makes_text()
        self.adapt(sequence)
        rows, (buffer, launches) = self.logit_rows, self._bound_for_all_logits()
        self.check_tokens(sequence, token_ids)
        ids = self._to_read(sequence, token_ids, images)
        skip += len(ids) - len(token_ids)
        for _ in self._prefill_steps(sequence, ids[:skip], self.chunk):
            pass
        for step in self._prefill_steps(sequence, ids[skip:], rows):
            bound = self._bound_for(step) if step.images else self._prefill_for(rows)
            self.run((*bound.rest, *launches), step.n_tokens)
            yield buffer, step.n_tokens

    def rows_of(self, sequence: SequenceState, token_ids: Sequence[int]) -> Iterator[int]:
        """Appends token_ids to the sequence. Yields the tokens of each step, whose rows after the last layer are then
        in `act.x`. Raises the errors of `prefill`.
        """
        self.check_tokens(sequence, token_ids)
        self.adapt(sequence)
        for step in self._prefill_steps(sequence, token_ids, self.chunk):
            self.run(self._bound_for(step).rest, step.n_tokens)
            yield step.n_tokens

    @property
    def logit_rows(self) -> int:
        """Returns the maximum rows per item from `logit_chunks`."""
        return min(LOGITS_CHUNK, self.chunk)

    @property
    def chunk_logits(self) -> Buffer:
        """Returns the buffer used by `logit_chunks`. Raises OutOfDeviceMemoryError if the buffer does not fit."""
        return self._bound_for_all_logits()[0]

    def _bound_for_all_logits(self) -> tuple[Buffer, list[Launch]]:
        """Returns a chunk's logits buffer and its launches, bound on first use."""
        if self._all_logits is None:
            rows = self.logit_rows
            if self._chunk_logits is None:
                self._chunk_logits = self.device.alloc(4 * rows * self.config.vocab_size, "logits of a chunk")
            buffer = self._chunk_logits
            self._all_logits = (buffer, head(self.weights, self._prefill_for(rows).ops, buffer))
        return self._all_logits

    def _prefill_steps(
        self,
        sequence: SequenceState,
        token_ids: Sequence[int],
        chunk: int,
        progress: Progress | None = None,
        *,
        is_last: bool = False,
    ) -> Iterator[Step]:
        """Appends token_ids to the sequence in chunks. Yields each chunk's step once its rows are ready for the rest.

        is_last: the tokens end a prompt.
        """
        borders = self.cache.borders(sequence, len(token_ids), is_last=is_last)
        # The step that crosses the last border takes the snapshot itself.
        starts = {*range(0, len(token_ids), chunk), *borders[:-1]}
        for start, end in pairwise([*step_starts(sequence, starts, len(token_ids)), len(token_ids)]):
            if start in borders:
                self.cache.snapshot(sequence)
            ids = token_ids[start:end]
            step = Step(sequence, ids, sequence.position)
            launches = self.launches_for(len(ids), progress)
            self._begin(step)
            passed = max((border - start for border in borders if start < border < end), default=0)
            kept = [*sequence.token_ids, *ids[:passed]]
            slot = self.cache.begin_snapshot(self.step, kept, passed)
            self._compute_before(step, decodes=False)
            launches = self.place_images(step, launches)
            if progress is None:
                self.run(launches, len(ids))
            else:
                for share in self._run_in_parts(launches, len(ids)):
                    if (done := start + int(share * len(ids))) < len(token_ids):
                        progress(READING, done, len(token_ids))
            self.cache.end_snapshot(kept, slot)
            sequence.token_ids.extend(ids)
            yield step

    def _bind_prefill(
        self, most: int, ops_for_all: PrefillOps | None = None, *, persistent: bool = True
    ) -> Iterator[PrefillLaunches]:
        """ops_for_all: None for `prefill_ops`."""
        for rows, few in prefill_sizes(self.device, self.weights, most):
            ops = replace(ops_for_all or self.prefill_ops, max_rows=few)
            every, rest = prefill_stack(self.weights, self.layers, ops)
            n_embed = len(ops.embed(self.weights.embedding))
            listed = ListedStep(every, self.step, self.cache.max_context, few)
            few_launches = bool(few) and self._persistent and persistent
            bound = BoundLaunches(self.device, listed, persistent=few_launches, for_few_rows=True)
            yield PrefillLaunches(rows, ops, bound, rest, n_embed)

    def launches_for(self, n_tokens: int, progress: Progress | None = None) -> Sequence[Launch]:
        """Returns the launches that every one of n_tokens prompt tokens needs."""
        return self._prefill_for(n_tokens, progress).every.launches

    def place_images(self, step: Step, launches: Sequence[Launch]) -> Sequence[Launch]:
        """Returns the launches still to run for the step's tokens: all of them without an image."""
        return self._image_steps.begin(step, self._bound_for(step), self.run) if step.images else launches

    def _bound_for(self, step: Step) -> PrefillLaunches:
        if any(placed.image.two_way for placed in step.images):
            return self._image_steps.bound_two_way(step, self._bind_prefill)
        return self._prefill_for(step.n_tokens)

    def _prefill_for(self, n_tokens: int, progress: Progress | None = None) -> PrefillLaunches:
        if not self._prefill or self._prefill[-1].max_tokens < n_tokens:
            # A batch's model: its prompts use other launches, except for a chunk's logits and for images.
            self._prefill = list(self._bind_prefill(self.logit_rows if n_tokens <= self.logit_rows else self.chunk))
            if self.span.is_last and not self._last_token:
                self._last_token = last_token_launches(self.layers, self.prefill_ops)
        bound = next(bound for bound in self._prefill if n_tokens <= bound.max_tokens)
        if bound.max_tokens in self._unprepared:
            self._prepare_sizes([bound], progress)
        return bound

    def prepare_all(self, progress: Progress | None) -> None:
        """Compiles kernels that `prepare` left to other processes, and kernels for rarely used sampling parameters."""
        self._prepare_sizes([bound for bound in self._prefill if bound.max_tokens in self._unprepared], progress)
        launches = [*self.sampler.every_launch, *self.sampler.filtered_launches] if self.span.is_last else []
        with self.device.compile_progress(launches, progress):
            for launch in launches:
                launch.prepare()

    def _prepare_sizes(self, sizes: Sequence[PrefillLaunches], progress: Progress | None) -> None:
        launches = [launch for bound in sizes for launch in bound.to_prepare]
        with self.device.compile_progress(launches, progress):
            for bound in sizes:
                bound.prepare()
                self._unprepared.remove(bound.max_tokens)

    def _run_in_parts(self, launches: Sequence[Launch], n_tokens: int) -> Iterator[float]:
        """Runs launches in parts and yields the finished share. A GPU gets a part while the host waits for one."""
        size = -(-len(launches) // PARTS)
        part_before: Callable[[], None] | None = None
        for start in range(0, len(launches), size):
            self.run(launches[start : start + size], n_tokens)
            if not self.device.runs_ahead:
                self.device.finish()
                yield min(1.0, (start + size) / len(launches))
            else:
                if part_before is not None:
                    part_before()
                part_before = self.device.marker()
                yield start / len(launches)

    def run(self, launches: Iterable[Launch], n_tokens: int = 1) -> None:
        """Enqueues launches for a step with n_tokens tokens."""
        with named_errors("running the model"):
            for launch in launches:
                launch.enqueue(n_tokens)

    def check_makes_text(self) -> None:
        """Raises UsageError for an encoder."""
        if self.config.bidirectional:
            raise UsageError(
                "the model is an encoder, which makes no text; take its embeddings (llmcl embed, LLM.embed, "
                "/v1/embeddings), or another model"
            )

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Raises UsageError for an id outside the embedding."""
        if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            bad = next(i for i in token_ids if not 0 <= i < self.config.vocab_size)
            raise UsageError(
                f"token id {shown(bad)} is not in the vocabulary; expected 0 to {self.config.vocab_size - 1}"
            )

    def check_tokens(self, sequence: SequenceState, token_ids: Sequence[int]) -> None:
        if len(token_ids) == 0:
            raise UsageError("the prompt has no tokens; expected at least one")
        self.check_vocabulary(on_device(token_ids, sequence.images, sequence.position))
        if sequence.position + len(token_ids) > self.cache.max_context:
            raise ContextLengthError(
                f"{counted(len(token_ids), 'token')} after {sequence.position} in the cache would exceed the context "
                f"of {self.cache.max_context} tokens; shorten the prompt or raise the context (--ctx-size, max_context)"
            )
