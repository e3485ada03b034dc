"""Steps with tokens of images: rows in place of embeddings, positions on axes, two-way attention, rows for layers.

Such a step runs separate launches, as a persistent launch would embed the tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from llmcl.kernels.common.step_state import StepState
from llmcl.models.encoder_blocks import ONE_TEXT
from llmcl.models.image_positions import N_AXES, on_one_axis, rotary_positions
from llmcl.models.image_rows import not_inside
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.layer_span import LayerSpan
from llmcl.models.prefill_launches import PrefillLaunches
from llmcl.models.sequence import SequenceState, Step
from llmcl.models.stack import Layers, until_kept_by_layer
from llmcl.models.weights import ModelWeights
from llmcl.ops.add_positions import add_positions
from llmcl.ops.rope_axes import rope_axes
from llmcl.runtime.device import Buffer, Launch
from llmcl.runtime.staging import send

Bind = Callable[..., Iterator[PrefillLaunches]]
Run = Callable[[Iterable[Launch], int], None]


def step_starts(sequence: SequenceState, starts: Iterable[int], n_tokens: int) -> list[int]:
    """Adds the borders of images with two-way attention, each of which is a step, and of images with rows for layers.

    starts: where steps begin otherwise, from the sequence's position on.
    """
    at = sequence.position
    images = [placed for placed in sequence.images if placed.end > at]
    alone = [placed for placed in images if placed.image.two_way or placed.image.deepstack]
    borders = {border - at for placed in alone for border in (placed.first, placed.end)}
    return sorted(
        {start for start in starts if not_inside(images, at + start) == at + start}
        | {border for border in borders if 0 <= border < n_tokens}
    )


class ImageSteps:
    """The launches that only steps with image tokens need, bound on first use.

    bind: binds prefill launches for a number of tokens and ops. run: enqueues launches for a number of tokens.
    """

    def __init__(self, ops: PrefillOps, weights: ModelWeights, layers: Layers, span: LayerSpan, bind: Bind, run: Run):
        self._ops, self._weights, self._layers, self._span = ops, weights, layers, span
        self._bind, self._run = bind, run
        self._two_way: list[PrefillLaunches] = []
        self._by_layer: dict[tuple[int, int], list[list[Launch]]] = {}
        self._axes: list[Launch] = []
        self._inside: tuple[StepState, Buffer, Buffer] | None = None  # places in an image; inputs of add_positions

    def bound_two_way(self, step: Step) -> PrefillLaunches:
        """Returns the launches for an image whose tokens attend to each other."""
        if not self._two_way:
            attention = self._ops.attention
            attention = replace(attention, shape=replace(attention.shape, bidirectional=True))
            ops = replace(self._ops, attention=attention)
            self._two_way = list(self._bind(self._ops.step.max_tokens, ops, persistent=False))
        return next(bound for bound in self._two_way if step.n_tokens <= bound.max_tokens)

    def begin(self, step: Step, bound: PrefillLaunches) -> Sequence[Launch]:
        """Embeds the step's tokens and copies the images' rows over their embeddings. Returns the launches that are
        left.
        """
        images, act = step.images, self._ops.act
        embed, rest = bound.every.separate[: bound.n_embed], bound.every.separate[bound.n_embed :]
        self._run(embed, step.n_tokens)
        if self._ops.config.rope_axes and not on_one_axis(images, step.position, step.n_tokens):
            self._rotate_by_axes(step)
        if not self._span.is_first:
            return rest
        row_bytes, end = 4 * self._ops.config.hidden_size, step.position + step.n_tokens
        for placed in images:
            first = max(placed.first, step.position)
            nbytes = (min(placed.end, end) - first) * row_bytes
            at, into = (placed.image.start + first - placed.first) * row_bytes, (first - step.position) * row_bytes
            self._ops.device.copy_part(placed.image.rows, act.x, nbytes, at=at, into=into)
        if deepstack := images[0].image.deepstack:
            return self._add_deepstack(step, bound, step.position - images[0].first, deepstack)
        return rest

    def _add_deepstack(
        self, step: Step, bound: PrefillLaunches, first: int, deepstack: Sequence[Buffer]
    ) -> Sequence[Launch]:
        """Runs as many layers as `deepstack` has buffers, and adds the rows of one after each. Returns the launches of
        the other layers.

        first: index in the image of the step's first token; all its tokens belong to the image.
        """
        device, hidden, key = self._ops.device, self._ops.config.hidden_size, (bound.max_tokens, len(deepstack))
        if self._inside is None:
            one = device.upload(np.array([ONE_TEXT], np.int32), "one type")
            self._inside = StepState(device, self._ops.step.max_tokens), device.zeros(4 * hidden, "no types"), one
        if key not in self._by_layer:
            ops = replace(bound.ops, split={})
            self._by_layer[key] = until_kept_by_layer(self._weights, self._layers, ops, len(deepstack))
        state, no_types, one_type = self._inside
        state.write_tokens([0] * step.n_tokens, first)
        _, *layers, rest = self._by_layer[key]
        for launches, rows in zip(layers, deepstack, strict=True):
            more = add_positions(device, state, self._ops.act.x, rows, no_types, one_type, hidden)
            self._run([*launches, *more], step.n_tokens)
        return rest

    def _rotate_by_axes(self, step: Step) -> None:
        """Replaces the rotations of a step that has tokens of an image."""
        ops = self._ops
        axes, rotation = ops.config.rope_axes, ops.rotations["main"]
        buffer = ops.step.scratch("rotary positions", 4 * N_AXES * ops.step.max_tokens)
        if not self._axes:
            unrotated = rotation.nbytes // 8 - len(axes)
            of_pairs = ops.device.upload(np.array([*axes, *[0] * unrotated], np.int32), "rotary axes")
            self._axes = rope_axes(ops.device, buffer, of_pairs, rotation, ops.act.rope, n_axes=N_AXES)
        positions = rotary_positions(step.sequence.images, step.position, step.n_tokens)
        send(ops.device, buffer, positions.ravel())
        self._run(self._axes, step.n_tokens)
