"""Attention in a step, by kind of row: one token per sequence, neighbouring tokens of a sequence, or both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from llmcl.architectures.families.blocks import Heads, Rotation
from llmcl.kernels.common.attention import AttentionShape
from llmcl.kernels.common.linear import ActivationLayout, ActivationOperand
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.ragged_step import RaggedStep
from llmcl.models.activations import Activations, Splits
from llmcl.models.step_context import StepContext
from llmcl.ops.attention import (
    attention_decode,
    attention_prefill,
    attention_supports_output,
    decode_supports_output,
    rope_append,
)
from llmcl.ops.gather_rows import gather_rows
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Buffer, Launch

A = TypeVar("A", bound="AttentionOps")


@dataclass(frozen=True)
class LayerAttention:
    """A layer's keys and values in the cache, and the rules of its attention."""

    k: Buffer
    v: Buffer
    mods: Mods
    rotation: Rotation
    sinks: Buffer | None = None
    shared_kv: bool = False  # only queries are new: another layer wrote the keys and values to the cache


@dataclass(frozen=True)
class AttentionOps(StepContext, ABC):
    """Builds the launches for act.qkv, the cache and act.attended. shape: the KV cache's. splits: KV splits for rows
    that decode.
    """

    shape: AttentionShape
    splits: Splits

    @property
    @abstractmethod
    def each_alone(self) -> bool:
        """Returns True if each row in a step belongs to a different sequence, False if rows are consecutive tokens of a
        sequence.
        """

    def keeping_last(self) -> AttentionOps:
        """Returns the ops for the last block that writes to the cache."""
        return self

    def for_heads(self: A, heads: Heads) -> A:
        """Returns the ops for a layer with `heads`."""
        if heads == self.heads:
            return self
        return replace(self, shape=replace(self.shape, n_kv_heads=heads.n_kv, head_dim=heads.size))

    @property
    def heads(self) -> Heads:
        return Heads(self.shape.n_kv_heads, self.shape.head_dim)

    @property
    def n_splits(self) -> int:
        return self.splits[self.heads]

    def adjust(
        self, bias: Buffer | None, head_norms: Buffer | None, *, value_norms: bool, rope: Buffer | None = None
    ) -> list[Launch]:
        """Adds the bias to queries, keys and values, and normalises query and key heads. value_norms: also normalises
        value heads. rope: rotates query and key heads before.
        """
        return self._adjust(self.shape.n_kv_heads, bias, head_norms, value_norms=value_norms, rope=rope)

    def adjust_queries(self, head_norms: Buffer | None) -> list[Launch]:
        """Runs `adjust` on queries alone, where act.qkv is float32 [n, n_q_heads, head_dim]."""
        return self._adjust(0, None, head_norms, value_norms=False)

    def _adjust(
        self,
        n_kv_heads: int,
        bias: Buffer | None,
        head_norms: Buffer | None,
        *,
        value_norms: bool,
        rope: Buffer | None = None,
    ) -> list[Launch]:
        return qkv_adjust(
            self.device,
            self.act.qkv,
            bias,
            head_norms,
            n_q_heads=self.shape.n_q_heads,
            n_kv_heads=n_kv_heads,
            head_dim=self.shape.head_dim,
            eps=self.config.rms_norm_eps,
            value_norms=value_norms,
            rope=rope,
        )

    def norm_rows(self, q_norm: Buffer | None, k_norm: Buffer | None) -> list[Launch]:
        """Normalises all query heads as one row, and all key heads as one row."""
        if q_norm is None or k_norm is None:
            return []
        qkv, eps, size = self.act.qkv, self.config.rms_norm_eps, self.shape.head_dim
        row = (self.shape.n_q_heads + 2 * self.shape.n_kv_heads) * size
        return [
            *rms_norm(self.device, qkv, q_norm, qkv, eps, row=row),
            *rms_norm(self.device, qkv, k_norm, qkv, eps, row=row, first=self.shape.n_q_heads * size),
        ]

    def append(self, layer: LayerAttention) -> list[Launch]:
        """Rotates queries and appends keys and values to the cache, unless `attend` does."""
        return []

    @abstractmethod
    def supports_output(self, layout: ActivationLayout) -> bool:
        """Tells whether `attend` can leave its output in `layout`."""

    @abstractmethod
    def attend(self, layer: LayerAttention, out: ActivationOperand) -> list[Launch]:
        """Attends every row to its own sequence in the cache."""


class RowAttention(AttentionOps):
    """Attention for one token, or for one token of each sequence: rotation and append are fused into the kernel."""

    @property
    def each_alone(self) -> bool:
        return True

    def supports_output(self, layout: ActivationLayout) -> bool:
        return decode_supports_output(self.device, self.shape, layout)

    def attend(
        self, layer: LayerAttention, out: ActivationOperand, n_rows: Callable[[], int] | None = None
    ) -> list[Launch]:
        """Attends every row. n_rows: returns how many of the first rows to handle; None: all."""
        act = self.act
        return attention_decode(
            self.device,
            self.shape,
            act.qkv,
            act.rope_of(layer.rotation),
            self.step,
            layer.k,
            layer.v,
            act.part_ml,
            act.part_acc,
            out,
            n_splits=self.n_splits,
            mods=layer.mods,
            n_rows=n_rows,
            sinks=layer.sinks,
            shared_kv=layer.shared_kv,
        )


class ChunkAttention(AttentionOps):
    """Attention for neighbouring tokens of one sequence: the cache holds all keys before any token attends."""

    @property
    def each_alone(self) -> bool:
        return False

    def append(self, layer: LayerAttention) -> list[Launch]:
        # Without KV heads the cache stays unchanged.
        shape = replace(self.shape, n_kv_heads=0) if layer.shared_kv else self.shape
        rope = self.act.rope_of(layer.rotation)
        return rope_append(self.device, shape, self.act.qkv, rope, self.step, layer.k, layer.v)

    def supports_output(self, layout: ActivationLayout) -> bool:
        return attention_supports_output(self.device, self.shape, layout)

    def attend(self, layer: LayerAttention, out: ActivationOperand) -> list[Launch]:
        return attention_prefill(
            self.device,
            self.shape,
            self.act.qkv,
            self.step,
            layer.k,
            layer.v,
            out,
            mods=layer.mods,
            sinks=layer.sinks,
            shared_kv=layer.shared_kv,
        )


@dataclass(frozen=True)
class RaggedAttention(ChunkAttention):
    """Attention for a RaggedStep: rows that decode attend as in RowAttention, chunks as in ChunkAttention."""

    decoding: Sequence[tuple[int, RowAttention]] = ()  # by limit of decoding rows (same activations)
    wanted: Activations | None = None  # receives the wanted rows before the last keys are rotated
    keeps_last: bool = False

    @property
    def runs(self) -> RaggedStep:
        assert isinstance(self.step, RaggedStep)
        return self.step

    def keeping_last(self) -> AttentionOps:
        return replace(self, keeps_last=True)

    def for_heads(self, heads: Heads) -> RaggedAttention:
        decoding = [(most, rows.for_heads(heads)) for most, rows in self.decoding]
        return replace(super().for_heads(heads), decoding=decoding)

    def append(self, layer: LayerAttention) -> list[Launch]:
        collected = self._collect(self.wanted) if self.keeps_last and self.wanted is not None else []
        return collected + super().append(layer)

    def supports_output(self, layout: ActivationLayout) -> bool:
        return super().supports_output(layout) and decode_supports_output(self.device, self.shape, layout)

    def attend(self, layer: LayerAttention, out: ActivationOperand) -> list[Launch]:
        runs, launches, fewer = self.runs, list[Launch](), 0
        for most, rows in self.decoding:

            def n_rows(most: int = most, fewer: int = fewer) -> int:
                return runs.n_decoding if fewer < runs.n_decoding <= most else 0

            launches += rows.attend(layer, out, n_rows)
            fewer = most
        return launches + super().attend(layer, out)

    def _collect(self, wanted: Activations) -> list[Launch]:
        """Gathers the rows that need logits, with everything that later layers read."""
        act, shape, config = self.act, self.shape, self.config
        heads = shape.n_q_heads + 2 * shape.n_kv_heads
        launches = []
        for rows, of_wanted, columns in (
            (act.x, wanted.x, config.hidden_size),
            (act.qkv, wanted.qkv, heads * shape.head_dim),
            (act.rope, wanted.rope, config.rotated_size("main")),
            (act.local_rope, wanted.local_rope, config.rotated_size("local")),
            (act.layer_inputs, wanted.layer_inputs, config.n_layers * config.layer_input_size),
        ):
            if rows is not None and of_wanted is not None:
                launches += gather_rows(self.device, self.runs, rows, of_wanted, columns)
        return launches
