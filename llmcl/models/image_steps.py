"""Steps with tokens of images: rows in place of embeddings, positions on axes, two-way attention, rows for layers.

Such a step runs separate launches, as a persistent launch would embed the tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from llmcl.errors import UsageError, counted
from llmcl.kernels.common.step_state import StepState
from llmcl.models.encoder_blocks import ONE_TEXT
from llmcl.models.image_positions import N_AXES, on_one_axis, rotary_positions
from llmcl.models.image_rows import ImageRows, PlacedImage, not_inside
from llmcl.models.layer_ops import PrefillOps
from llmcl.models.layer_span import LayerSpan
from llmcl.models.prefill_launches import PrefillLaunches
from llmcl.models.sequence import SequenceState, Step
from llmcl.models.stack import Layers, embed_launches, in_turn, last_keeper
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


def _until_kept_by_layer(weights: ModelWeights, layers: Layers, ops: PrefillOps, n_layers: int) -> list[list[Launch]]:
    """Divides `until_kept` into the embedding, each of the first n_layers layers, and the rest. After each part `x`
    alone holds the result.
    """
    last, ends = last_keeper(layers), np.cumsum([len(blocks) for blocks in layers[:n_layers]]).tolist()
    parts = [list(embed_launches(weights, ops)), []]
    for i, (block, of_block) in enumerate(in_turn(weights, layers, ops)[: last + 1]):
        of_block = ops if i + 1 in ends else of_block
        parts[-1] += block.keep(of_block if i < last else of_block.keeping_last())
        parts[-1] += block.add(of_block) if i < last else ()
        if i + 1 in ends:
            parts.append([])
    return parts


def placed_after(sequence: SequenceState, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> list[PlacedImage]:
    """Returns the images of the sequence followed by token_ids with `images`, whose places count from token_ids."""
    n = sequence.position
    moved = (replace(each, first=each.first + n, token=token_ids[each.first]) for each in images)
    return [*sequence.images, *moved]


class ImageSteps:
    """The launches that only steps with image tokens need, bound on first use."""

    def __init__(self, ops: PrefillOps, weights: ModelWeights, layers: Layers, span: LayerSpan):
        self._ops, self._weights, self._layers, self._span = ops, weights, layers, span
        self._two_way: list[PrefillLaunches] = []
        self._by_layer: dict[tuple[int, int], list[list[Launch]]] = {}
        self._axes: list[Launch] = []
        self._inside: tuple[StepState, Buffer, Buffer] | None = None  # places in an image; inputs of add_positions

    def check(self, images: Sequence[PlacedImage], n_tokens: int) -> None:
        """Raises UsageError for images that the model cannot read, or not at their places in n_tokens tokens."""
        end = 0
        for placed in images:
            if not end <= placed.first < placed.end <= n_tokens:
                raise UsageError(
                    f"an image has the tokens {placed.first} to {placed.end - 1} of {n_tokens}; expected tokens from "
                    f"{end} on, inside the prompt and in order"
                )
            self._check_image(placed.image)
            end = placed.end

    def _check_image(self, image: ImageRows) -> None:
        config, n_layers, most = self._ops.config, len(self._layers), self._ops.step.max_tokens
        nbytes = 4 * config.hidden_size * (image.start + image.n)
        if image.rows.nbytes < nbytes:
            raise UsageError(
                f"an image's {counted(image.n, 'row')} fill {image.rows.nbytes} bytes; expected {nbytes}, "
                f"{config.hidden_size} float32 values each"
            )
        if len(image.deepstack) >= n_layers:
            raise UsageError(
                f"an image has rows for {counted(len(image.deepstack), 'layer')} (deepstack), the model "
                f"{counted(n_layers, 'layer')} on its first device; expected fewer"
            )
        if image.grid is not None and not config.rope_axes:
            raise UsageError("an image has positions on several axes; the model's configuration has none")
        if image.grid is not None and prod(image.grid) != image.n:
            raise UsageError(f"an image of {image.grid[0]} x {image.grid[1]} has {counted(image.n, 'row')}")
        if image.two_way and image.n > most:
            raise UsageError(f"an image has {counted(image.n, 'token')}; a step reads at most {most}")

    def bound_two_way(self, step: Step, bind: Bind) -> PrefillLaunches:
        """Returns the launches for an image whose tokens attend to each other. bind: binds prefill launches for a
        number of tokens and ops.
        """
        if not self._two_way:
            attention = self._ops.attention
            attention = replace(attention, shape=replace(attention.shape, bidirectional=True))
            ops = replace(self._ops, attention=attention)
            self._two_way = list(bind(self._ops.step.max_tokens, ops, persistent=False))
        return next(bound for bound in self._two_way if step.n_tokens <= bound.max_tokens)

    def begin(self, step: Step, bound: PrefillLaunches, run: Run) -> Sequence[Launch]:
        """Embeds the step's tokens and copies the images' rows over their embeddings. Returns the launches that are
        left. run: enqueues launches for a number of tokens.
        """
        images, act = step.images, self._ops.act
        embed, rest = bound.every.separate[: bound.n_embed], bound.every.separate[bound.n_embed :]
        run(embed, step.n_tokens)
        if self._ops.config.rope_axes and not on_one_axis(images, step.position, step.n_tokens):
            self._rotate_by_axes(step, run)
        if not self._span.is_first:
            return rest
        row_bytes, end = 4 * self._ops.config.hidden_size, step.position + step.n_tokens
        for placed in images:
            first = max(placed.first, step.position)
            nbytes = (min(placed.end, end) - first) * row_bytes
            at, into = (placed.image.start + first - placed.first) * row_bytes, (first - step.position) * row_bytes
            self._ops.device.copy(placed.image.rows, act.x, nbytes, at=at, into=into)
        if images[0].image.deepstack:
            return self._add_deepstack(step, bound, step.position - images[0].first, run)
        return rest

    def _add_deepstack(self, step: Step, bound: PrefillLaunches, first: int, run: Run) -> Sequence[Launch]:
        """Runs as many layers as the image has rows for, and adds these after each. Returns the launches of the other
        layers.

        first: index in the image of the step's first token; all its tokens belong to the image.
        """
        deepstack = step.images[0].image.deepstack
        device, hidden, key = self._ops.device, self._ops.config.hidden_size, (bound.max_tokens, len(deepstack))
        if self._inside is None:
            one = device.upload(np.array([ONE_TEXT], np.int32), "one type")
            self._inside = StepState(device, self._ops.step.max_tokens), device.zeros(4 * hidden, "no types"), one
        if key not in self._by_layer:
            ops = replace(bound.ops, split={})
            self._by_layer[key] = _until_kept_by_layer(self._weights, self._layers, ops, len(deepstack))
        state, no_types, one_type = self._inside
        state.write_tokens([0] * step.n_tokens, first)
        _, *layers, rest = self._by_layer[key]
        for launches, rows in zip(layers, deepstack, strict=True):
            more = add_positions(device, state, self._ops.act.x, rows, no_types, one_type, hidden)
            run([*launches, *more], step.n_tokens)
        return rest

    def _rotate_by_axes(self, step: Step, run: Run) -> None:
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
        run(self._axes, step.n_tokens)
