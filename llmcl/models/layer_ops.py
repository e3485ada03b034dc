"""Layer ops as launches, in two layouts: for one token (decode) and for many tokens (prefill, batch, ragged).

attention_ops.py has attention by kind of row, expert_ops.py routed experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from llmcl.architectures.families.blocks import Heads, Rotation
from llmcl.kernels.common.linear import ActivationOperand, SplitNorm
from llmcl.kernels.common.weight import Weight
from llmcl.models.attention_ops import AttentionOps
from llmcl.models.expert_ops import RoutedExperts, experts_by_block, experts_by_token
from llmcl.models.step_context import StepContext
from llmcl.ops.add_bias import add_bias
from llmcl.ops.biased_gate import biased_gate
from llmcl.ops.embed import embed
from llmcl.ops.last_token import last_row, last_token
from llmcl.ops.layer_inputs import layer_inputs
from llmcl.ops.linear import input_layout, linear_decode, linear_prefill, linear_supports_output, split_norm
from llmcl.ops.rms_norm import rms_norm
from llmcl.ops.rope_table import rope_table
from llmcl.ops.sigmoid_gate import sigmoid_gate
from llmcl.runtime.device import Buffer, Launch


@dataclass(frozen=True)
class LayerOps(StepContext, ABC):
    """Builds the launches of each op."""

    attention: AttentionOps
    rotations: Mapping[Rotation, Buffer]  # see `ModelConfig.device_rotations`
    last_seen: Buffer  # int32 [vocab], see `Sampler`

    def before(self, norm: Buffer | None, weight: Weight | None) -> LayerOps:
        """Returns the ops for a block that is followed by `norm` and the product with `weight`. None: not followed by
        both.
        """
        return self

    def for_heads(self, heads: Heads) -> LayerOps:
        """Returns the ops for a layer with `heads`."""
        return replace(self, attention=self.attention.for_heads(heads))

    def keeping_last(self) -> LayerOps:
        """Returns the ops for the last block that writes to the cache."""
        return replace(self, attention=self.attention.keeping_last())

    def embed(self, table: Weight) -> list[Launch]:
        act, scale = self.act, self.config.stream_scale
        rotations = self.rotations
        rows = embed(
            self.device,
            table,
            self.step,
            rotations["main"],
            act.x,
            act.rope,
            self.last_seen,
            scale=scale,
            by_length=self.config.rope_by_length,
        )
        if act.local_rope is None:
            return rows
        return rows + rope_table(self.device, self.step, rotations["local"], act.local_rope)

    def layer_inputs(self, table: Weight, projection: Weight, norm: Buffer) -> list[Launch]:
        """act.layer_inputs = per-layer embeddings of the step's tokens. act.x holds the token embeddings."""
        inputs, n_layers = self.act.of("layer_inputs"), self.config.n_layers
        # The projection is divided by sqrt(hidden). The norm cancels the factor, except in eps.
        eps = self.config.rms_norm_eps * self.config.hidden_size
        product = self.product(self.act.x, None, projection, inputs)
        return product + layer_inputs(self.device, table, norm, self.step, inputs, n_layers=n_layers, eps=eps)

    @abstractmethod
    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        """out = W rms_norm(x). Without a norm: out = W x."""

    @abstractmethod
    def linear(self, x: ActivationOperand, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]: ...

    @abstractmethod
    def normed_rows(self, norm: Buffer | None) -> tuple[Buffer, Buffer | None, list[Launch]]:
        """Prepares rms_norm(x) for several products. Returns rows, the norm that `product` still has to apply, and
        launches.
        """

    @abstractmethod
    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        """out = W x, with x and norm from `normed_rows`."""

    def chosen_experts(self, x: Buffer, norm: Buffer | None, experts: RoutedExperts, out: Buffer) -> list[Launch]:
        """out += the output of the experts in act.expert_ids for x, token by token. x, norm: from `normed_rows`."""
        return experts_by_token(self, x, norm, experts, out)

    def add_linear(
        self, x: ActivationOperand, weight: Weight, post_norm: Buffer | None, bias: Buffer | None
    ) -> list[Launch]:
        """act.x += W x + bias. With a post norm: act.x += rms_norm(W x + bias)."""
        act, target = self.act, self.act.x if post_norm is None else self.act.normed
        launches = self.linear(x, weight, target, epilogue="add" if post_norm is None else "store")
        if bias is not None:
            launches += add_bias(self.device, target, bias)
        if post_norm is not None:
            config = self.config
            eps = config.rms_norm_eps if config.post_norm_eps is None else config.post_norm_eps
            launches += rms_norm(self.device, target, post_norm, act.x, eps, add=True)
        return launches

    def biased_gate(self, norm: Buffer | None, weight: Weight, bias: Buffer, gate: str) -> list[Launch]:
        """act.ffn = gate(W_gate rms_norm(x) + b_gate) (W_up rms_norm(x) + b_up)."""
        gate_up = self.act.gate_up
        assert gate_up is not None
        product = self.norm_linear(norm, weight, gate_up)
        return product + biased_gate(self.device, gate_up, bias, self.act.ffn, gate)

    def gate_attention(self, norm: Buffer | None, weight: Weight) -> list[Launch]:
        """act.attended *= sigmoid(W rms_norm(x))."""
        act, gate = self.act, self.act.of("attention_gate")
        x, norm, launches = self.normed_rows(norm)
        product = self.product(x, norm, weight, gate)
        return [*launches, *product, *sigmoid_gate(self.device, act.attended, gate, columns=weight.rows)]

    def attended(self, output: Weight) -> ActivationOperand:
        """Returns the output buffer for attention, in the layout that the product with `output` reads."""
        return self.act.attended

    def gated(self, gate_up: Weight, down: Weight) -> ActivationOperand:
        """Returns the output buffer for the gate-and-up product, in the layout that the product with `down` reads."""
        return self.act.ffn


class DecodeOps(LayerOps):
    """Ops for one token: normalisation is fused into the products that need it."""

    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        assert isinstance(out, Buffer)
        eps = self.config.stream_eps
        return linear_decode(self.device, weight, self.act.x, out, self.step, norm=norm, eps=eps, epilogue=epilogue)

    def normed_rows(self, norm: Buffer | None) -> tuple[Buffer, Buffer | None, list[Launch]]:
        return self.act.x, norm, []

    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        eps = self.config.stream_eps
        return linear_decode(self.device, weight, x, out, self.step, norm=norm, eps=eps, epilogue=epilogue)

    def linear(self, x: ActivationOperand, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]:
        assert isinstance(x, Buffer)
        return linear_decode(self.device, weight, x, out, self.step, epilogue=epilogue)


@dataclass(frozen=True)
class PrefillOps(LayerOps):
    """Ops for many tokens: each op is its own kernel. A kernel writes packed rows for the next product if it can.

    max_rows: limit of tokens per step for few-row kernels (see `linear_prefill`). experts_for: the row limit that
    chooses expert kernels; 0 means max_rows. following: the norm and the weight after this block. split: norms begun by
    earlier products, keyed by the norm's identity and max_rows.
    """

    max_rows: int = 0
    experts_for: int = 0
    following: tuple[Buffer, Weight] | None = None
    split: dict[tuple[int, int], SplitNorm] = field(default_factory=dict)

    def before(self, norm: Buffer | None, weight: Weight | None) -> LayerOps:
        return self if norm is None or weight is None else replace(self, following=(norm, weight))

    def attended(self, output: Weight) -> ActivationOperand:
        layout = input_layout(self.device, output, self.max_rows)
        if layout is None or not self.attention.supports_output(layout):
            return self.act.attended
        return layout.packed(self.step, output.k)

    def gated(self, gate_up: Weight, down: Weight) -> ActivationOperand:
        layout = input_layout(self.device, down, self.max_rows)
        if layout is None or not linear_supports_output(self.device, gate_up, layout, self.max_rows):
            return self.act.ffn
        # Even if the product packs its rows itself, as few-row steps may, it uses the same memory.
        return layout.packed(self.step, down.k, "gated" if gate_up.k == down.k else "input")

    def norm_linear(
        self, norm: Buffer | None, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        return linear_prefill(
            self.device,
            weight,
            self.act.x,
            out,
            self.step,
            norm=norm,
            normed=self.act.normed,
            eps=self.config.stream_eps,
            epilogue=epilogue,
            max_rows=self.max_rows,
            ends=self.split.get((id(norm), self.max_rows)),
        )

    def normed_rows(self, norm: Buffer | None) -> tuple[Buffer, Buffer | None, list[Launch]]:
        if norm is None:
            return self.act.x, None, []
        normed = self.act.normed
        return normed, None, rms_norm(self.device, self.act.x, norm, normed, self.config.stream_eps)

    def product(
        self, x: Buffer, norm: Buffer | None, weight: Weight, out: Buffer, epilogue: str = "store"
    ) -> list[Launch]:
        return self.linear(x, weight, out, epilogue)

    def chosen_experts(self, x: Buffer, norm: Buffer | None, experts: RoutedExperts, out: Buffer) -> list[Launch]:
        assert norm is None
        most = self.max_rows
        return experts_by_block(self, x, experts, out, max_rows=most, chosen_for=self.experts_for or most)

    def add_linear(
        self, x: ActivationOperand, weight: Weight, post_norm: Buffer | None, bias: Buffer | None
    ) -> list[Launch]:
        if self.following is None or post_norm is not None or bias is not None:
            return super().add_linear(x, weight, post_norm, bias)
        norm, after = self.following
        eps, rows = self.config.stream_eps, self.max_rows
        begins = split_norm(self.device, weight, norm, after, self.step, eps=eps, max_rows=rows)
        if begins is not None:
            self.split[id(norm), rows] = begins
        target, step = self.act.x, self.step
        return linear_prefill(self.device, weight, x, target, step, epilogue="add", max_rows=rows, begins=begins)

    def linear(
        self, x: ActivationOperand, weight: Weight, out: ActivationOperand, epilogue: str = "store"
    ) -> list[Launch]:
        return linear_prefill(self.device, weight, x, out, self.step, epilogue=epilogue, max_rows=self.max_rows)

    def last_token(self, kept: Buffer, columns: int) -> list[Launch]:
        """Moves the step's last token to the front of x and kept float32 [n, columns], the inputs of the launches that
        follow.
        """
        act, config = self.act, self.config
        launches: list[Launch] = []
        if config.keeps_early:  # later layers need more than the residual stream
            for rows, size in (
                (act.rope, config.rotated_size("main")),
                (act.local_rope, config.rotated_size("local")),
                (act.layer_inputs, config.n_layers * config.layer_input_size),
            ):
                launches += [] if rows is None else last_row(self.device, self.step, rows, size)
        return launches + last_token(self.device, self.step, act.x, kept, hidden=config.hidden_size, columns=columns)
