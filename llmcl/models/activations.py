"""Activations: a step's intermediate results on the device, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Attention, Experts, GatedMlp, Heads, Rotation
from llmcl.architectures.families.encoder import GeluMlp
from llmcl.architectures.families.latent import LatentAttention
from llmcl.architectures.families.parallel import ParallelAttention
from llmcl.architectures.families.plain_mlp import PlainMlp
from llmcl.architectures.families.recurrent import RecurrentBlock
from llmcl.kernels.common.experts import most_blocks
from llmcl.ops.attention import decode_splits
from llmcl.runtime.device import Buffer, Device

Splits = Mapping[Heads, int]  # KV splits per head kind in decode


@dataclass(frozen=True)
class Activations:
    """Every intermediate result of a step, allocated once. n: tokens per chunk. All buffers are float32 unless stated.
    None: no block in the model needs the buffer.
    """

    x: Buffer  # [n, hidden]
    normed: Buffer  # [n, hidden]: a product's input in prefill; before a post norm, its output
    rope: Buffer  # [n, head_dim]: the main rotation
    # [n, n_q_heads + 2 n_kv_heads, head_dim], sized for the largest layer. With latent attention both qkv and attended
    # are [n, n_q_heads, rank].
    qkv: Buffer
    attended: Buffer  # [n, n_q_heads, head_dim], sized like qkv
    ffn: Buffer  # [n, intermediate], for dense layers and shared experts
    part_ml: Buffer  # [n_q_heads, n_splits, 2], sized like qkv
    part_acc: Buffer  # [n_q_heads, n_splits, head_dim], sized like qkv
    logits: Buffer  # [logit_rows, vocab]: the step's last token, or a token per sequence
    local_rope: Buffer | None = None  # [n, head_dim]
    no_rope: Buffer | None = None  # [n, head_dim]: rotation by angle 0
    gate_up: Buffer | None = None  # [n, 2 intermediate], tiles alternate
    router_logits: Buffer | None = None  # [n, n_experts], or n_experts + 1 with a shared expert's gate
    expert_ids: Buffer | None = None  # int32 [n, top_k]
    expert_weights: Buffer | None = None  # [n, top_k]
    expert_rows: Buffer | None = None  # [n, top_k, expert size]
    expert_order: Buffer | None = None  # int32 [n top_k], in prefill
    expert_blocks: Buffer | None = None  # int32 [blocks, 4], in prefill
    expert_ones: Buffer | None = None  # [n, top_k]: ones, the shares in the first product of experts without a gate
    expert_outputs: Buffer | None = None  # [n, top_k, hidden], in prefill
    layer_inputs: Buffer | None = None  # [n, layers, size]: per-layer input embeddings
    layer_gate: Buffer | None = None  # [n, size]
    expert_sums: Buffer | None = None  # [n, hidden]: sum over experts before a norm
    attention_gate: Buffer | None = None  # [n, n_q_heads, head_dim]
    query_latents: Buffer | None = None  # [n, query_rank]
    latents: Buffer | None = None  # [n, rank + rope]: a token's latent projection
    head_rows: Buffer | None = None  # [n, n_q_heads, query or value]: queries, later the heads' values
    mixer_in: Buffer | None = None  # [n, values]: a recurrent block's projection
    mixer_qkv: Buffer | None = None  # [n, channels]: a delta net's queries, keys and values
    mixer_gates: Buffer | None = None  # [n, value heads, 2]: decays and rates
    mixed: Buffer | None = None  # [n, values]: input to the output projection

    @classmethod
    def alloc(cls, device: Device, config: ModelConfig, chunk: int, splits: Splits, logit_rows: int = 1) -> Activations:
        shapes = activation_shapes(config, chunk, splits, logit_rows)
        act = cls(**{name: device.alloc(4 * int(np.prod(shape)), name) for name, shape in shapes.items()})
        if act.no_rope is not None:
            cosines_then_sines = np.repeat(np.array([1.0, 0.0], np.float32), config.rotated_size("none") // 2)
            device.write(act.no_rope, np.tile(cosines_then_sines, chunk))
        if act.expert_ones is not None:
            device.write(act.expert_ones, np.ones(shapes["expert_ones"], np.float32))
        return act

    def of(self, name: str) -> Buffer:
        """Returns an activation that a block in the model needs."""
        buffer = getattr(self, name)
        assert isinstance(buffer, Buffer)
        return buffer

    def rope_of(self, rotation: Rotation) -> Buffer:
        """Returns cosines and sines for each token in the step."""
        rope = {"main": self.rope, "local": self.local_rope, "none": self.no_rope}[rotation]
        assert rope is not None
        return rope


def splits_of(device: Device, config: ModelConfig, kv_dtype: str, filling: int = 1) -> Splits:
    """Returns the KV splits for every head kind. filling: rows per step, whose work-groups also fill the device."""
    kinds = config.kinds_of_heads
    return {heads: decode_splits(device, filling * heads.n_kv, heads.size, kv_dtype) for heads in kinds}


def split_values(config: ModelConfig, splits: Splits) -> tuple[int, int]:
    """Returns the values per row of `part_ml` and `part_acc`."""
    most = max(n * heads.size for heads, n in splits.items())
    return 2 * config.n_q_heads * max(splits.values()), config.n_q_heads * most


def activation_shapes(
    config: ModelConfig, chunk: int, splits: Splits, logit_rows: int = 1
) -> dict[str, tuple[int, ...]]:
    part_ml, part_acc = split_values(config, splits)
    blocks = [block for layer in config.layers for block in layer]
    some: dict[str, tuple[int, ...]] = {}
    rotations: dict[Rotation, str] = {"local": "local_rope", "none": "no_rope"}
    used = {block.rotation for block in blocks if isinstance(block, Attention)}
    if any(isinstance(block, Attention) and block.norms_after_rotation for block in blocks):
        used.add("none")  # attention then finds rotated heads
    for rotation, name in rotations.items():
        if rotation in used:
            some[name] = chunk, config.rotated_size(rotation)
    if any(isinstance(block, GatedMlp) and block.bias for block in blocks):
        some["gate_up"] = chunk, 2 * config.intermediate_size
    if config.layer_input_size:
        some["layer_inputs"] = chunk, config.n_layers * config.layer_input_size
        some["layer_gate"] = chunk, config.layer_input_size
    mixtures = [block for block in blocks if isinstance(block, Experts)]
    experts = [block.settings for block in mixtures]
    if experts:
        top_k = max(settings.top_k for settings in experts)
        some["router_logits"] = chunk, max(block.settings.n_experts + block.has_shared_gate for block in mixtures)
        some["expert_ids"] = some["expert_weights"] = chunk, top_k
        some["expert_rows"] = chunk, top_k, max(settings.size for settings in experts)
        some["expert_order"] = (chunk * top_k,)
        some["expert_blocks"] = max(most_blocks(chunk, settings.n_experts, settings.top_k) for settings in experts), 4
        some["expert_outputs"] = chunk, top_k, config.hidden_size
    if any(block.gate is None for block in mixtures):
        some["expert_ones"] = chunk, max(settings.top_k for settings in experts)
    if any(block.own_norms for block in mixtures):
        some["expert_sums"] = chunk, config.hidden_size
    if any(isinstance(block, Attention) and (block.gated or block.gate_module) for block in blocks):
        some["attention_gate"] = chunk, config.query_values
    for block in blocks:
        if isinstance(block, LatentAttention):
            settings = block.settings
            some |= {"latents": (chunk, settings.width), "head_rows": (chunk, config.n_q_heads * settings.of_head)}
            some |= {"query_latents": (chunk, settings.query_rank)} if settings.query_rank else {}
        if isinstance(block, RecurrentBlock):
            for name, values in block.activations(config).items():
                some[name] = chunk, max(values, some.get(name, (0, 0))[1])
    ffn = max([settings.shared_size for settings in experts], default=0)
    ffn = max([ffn, *(block.rows(config) for block in blocks if isinstance(block, (GatedMlp, GeluMlp)))])
    if any(isinstance(block, (ParallelAttention, PlainMlp)) for block in blocks):
        ffn = max(ffn, config.intermediate_size)
    return some | {
        "x": (chunk, config.hidden_size),
        "normed": (chunk, config.hidden_size),
        "rope": (chunk, config.rotated_size("main")),
        "qkv": (chunk, config.qkv_values),
        "attended": (chunk, config.query_values),
        "ffn": (chunk, ffn),
        "part_ml": (part_ml,),
        "part_acc": (part_acc,),
        "logits": (logit_rows, config.vocab_size),
    }
