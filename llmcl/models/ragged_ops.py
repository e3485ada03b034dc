"""Layer ops for a step with several runs: rows that decode, then prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmcl.architectures.families.blocks import Heads, Rotation
from llmcl.kernels.common.linear import ActivationOperand
from llmcl.kernels.common.mods import Mods
from llmcl.kernels.common.ragged_step import RaggedStep
from llmcl.kernels.common.weight import Weight
from llmcl.models.activations import Activations
from llmcl.models.layer_ops import LayerOps, PrefillOps
from llmcl.ops.attention import attention_prefill, attention_supports_output, decode_supports_output, rope_append
from llmcl.ops.gather_rows import gather_rows
from llmcl.ops.linear import input_layout
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class RaggedOps(PrefillOps):
    """Computes products for all rows at once. Decoding rows attend as in BatchOps, chunks as in PrefillOps."""

    decoding: Sequence[tuple[int, LayerOps]] = ()  # by limit of decoding rows, their ops (same activations)
    wanted: Activations | None = None  # receives the wanted rows before the last keys are rotated
    keeps_last: bool = False

    @property
    def runs(self) -> RaggedStep:
        assert isinstance(self.step, RaggedStep)
        return self.step

    def that_keeps_last(self) -> LayerOps:
        return replace(self, keeps_last=True)

    def of_heads(self, heads: Heads) -> LayerOps:
        if heads == self.heads:
            return self
        changed = super().of_heads(heads)
        assert isinstance(changed, RaggedOps)
        decoding = [(most, ops.of_heads(heads)) for most, ops in self.decoding]
        return replace(changed, decoding=decoding)

    def attended(self, output: Weight) -> ActivationOperand:
        layout = input_layout(self.device, output, self.max_rows)
        if layout is None or not (
            decode_supports_output(self.device, self.shape, layout)
            and attention_supports_output(self.device, self.shape, layout)
        ):
            return self.act.attended
        return layout.packed(self.step, output.k)

    def append(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        act = self.act
        launches = self._collect() if self.keeps_last else []
        return launches + rope_append(self.device, self.shape, act.qkv, act.rope_of(rotation), self.step, k, v)

    def collected(self, name: str, columns: int) -> list[Launch]:
        act, wanted = self.act, self.wanted
        if not self.keeps_last or wanted is None:
            return []
        rows = gather_rows(self.device, self.runs, act.x, wanted.x, self.config.hidden_size)
        return rows + gather_rows(self.device, self.runs, act.of(name), wanted.of(name), columns)

    def rotate_queries(self, k: Buffer, v: Buffer, rotation: Rotation) -> list[Launch]:
        alone, act = replace(self.shape, n_kv_heads=0), self.act  # without KV heads the cache stays unchanged
        return rope_append(self.device, alone, act.qkv, act.rope_of(rotation), self.step, k, v)

    def attention(
        self,
        k: Buffer,
        v: Buffer,
        out: ActivationOperand,
        mods: Mods,
        rotation: Rotation,
        sinks: Buffer | None,
        *,
        shared_kv: bool = False,
    ) -> list[Launch]:
        runs, launches, fewer = self.runs, list[Launch](), 0
        for most, ops in self.decoding:

            def n_rows(most: int = most, fewer: int = fewer) -> int:
                return runs.n_decoding if fewer < runs.n_decoding <= most else 0

            launches += ops.attend_cache(k, v, out, mods, rotation, sinks, n_rows, shared_kv=shared_kv)
            fewer = most
        how: dict[str, Any] = {"mods": mods, "sinks": sinks, "shared_kv": shared_kv}
        return launches + attention_prefill(self.device, self.shape, self.act.qkv, runs, k, v, out, **how)

    def _collect(self) -> list[Launch]:
        act, wanted, shape = self.act, self.wanted, self.shape
        assert wanted is not None
        heads = shape.n_q_heads + 2 * shape.n_kv_heads
        launches = []
        for rows, of_wanted, columns in (
            (act.x, wanted.x, self.config.hidden_size),
            (act.qkv, wanted.qkv, heads * shape.head_dim),
            (act.rope, wanted.rope, self.config.rotated_size("main")),
            (act.local_rope, wanted.local_rope, self.config.rotated_size("local")),
            (act.layer_inputs, wanted.layer_inputs, self.config.n_layers * self.config.layer_input_size),
        ):
            if rows is not None and of_wanted is not None:
                launches += gather_rows(self.device, self.runs, rows, of_wanted, columns)
        return launches
