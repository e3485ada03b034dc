"""The forward pass as launches: embedding, the blocks of each layer, output head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from llmcl.kernels import table
from llmcl.kernels.common.persistent import DecodeLayer, DecodeLayers, PersistentLayers
from llmcl.models.blocks import AttentionBlock, MlpBlock
from llmcl.models.bound_block import BoundBlock
from llmcl.models.layer_ops import DecodeOps, LayerOps, PrefillOps
from llmcl.models.weights import ModelWeights
from llmcl.ops.soft_cap import soft_cap
from llmcl.runtime.device import Buffer, Launch

Layers = Sequence[Sequence[BoundBlock]]


def stack(weights: ModelWeights, layers: Layers, ops: LayerOps) -> Iterator[Launch]:
    """The forward pass, top to bottom: from the step's token ids to `x` after the last layer."""
    yield from ops.embed(weights.embedding)
    for block, of_block in in_turn(weights, layers, ops):
        yield from block.keep(of_block)
        yield from block.add(of_block)


def prefill_stack(weights: ModelWeights, layers: Layers, ops: PrefillOps) -> tuple[list[Launch], list[Launch]]:
    """stack() for many tokens in two: what every token needs, and what only a token whose logits are wanted needs.

    The second begins where the last block has left in the cache what it keeps.
    """
    blocks = in_turn(weights, layers, ops)
    last = max(i for i, (block, _) in enumerate(blocks) if block.keeps)
    every, rest = list(ops.embed(weights.embedding)), list[Launch]()
    for i, (block, of_block) in enumerate(blocks):
        every += block.keep(of_block) if i <= last else ()
        (every if i < last else rest).extend(block.add(of_block))
    return every, rest


def in_turn(weights: ModelWeights, layers: Layers, ops: LayerOps) -> list[tuple[BoundBlock, LayerOps]]:
    """Each block with ops that know the norm and the product which follow it."""
    blocks = [block for layer in layers for block in layer]
    following = [(block.weights.norm, block.first_product) for block in blocks[1:]]
    following.append((weights.final_norm, weights.head))
    return [(block, ops.before(*after)) for block, after in zip(blocks, following, strict=True)]


def decode_stack(
    weights: ModelWeights, layers: Layers, ops: DecodeOps, *, persistent: bool
) -> tuple[list[Launch], Mapping[str, Buffer]]:
    """stack() for one token, its layers as a persistent kernel if the device has one for them.

    And the activations, by name, in whose place that launch has others.
    """
    whole = decode_layers(layers, ops) if persistent else None
    if whole is not None and (kernel := table.persistent(PersistentLayers, ops.device, whole)) is not None:
        bound = kernel.bind(ops.device, whole)
        return [*ops.embed(weights.embedding), *bound.launches], bound.intermediates
    return list(stack(weights, layers, ops)), {}


def head(weights: ModelWeights, ops: LayerOps, logits: Buffer) -> list[Launch]:
    """From `x` after the last layer to logits."""
    product = ops.norm_linear(weights.final_norm, weights.head, logits)
    return [*product, *soft_cap(ops.device, logits, ops.config.vocab_size, ops.config.logit_soft_cap)]


def decode_layers(layers: Layers, ops: DecodeOps) -> DecodeLayers | None:
    """The layers of a decode step, for kernels that run all of them; None if they are not attention and MLP in turn."""
    found = []
    for blocks in layers:
        match blocks:
            case [AttentionBlock(weights=a) as attention, MlpBlock(weights=m, gate=gate)]:
                products = (a.norm, a.qkv, a.output, m.norm, m.gate_up, m.down)
                is_plain = all(block.is_plain for block in blocks)
                found.append(DecodeLayer(*products, attention.k, attention.v, attention.mods, gate, is_plain))
            case _:
                return None
    config, act = ops.config, ops.act
    return DecodeLayers(
        found,
        ops.shape,
        ops.step,
        config.hidden_size,
        config.intermediate_size,
        config.stream_eps,
        ops.n_splits,
        act.x,
        act.rope,
    )


def why_separate(layers: Layers, ops: DecodeOps) -> str | None:
    """Why the layers of a decode step are separate launches on a device that has a kernel for all of them.

    None: they are not, or the device has none.
    """
    kernel = next((row for row in table.implementations(PersistentLayers) if row.supports_device(ops.device)), None)
    if kernel is None:
        return None
    if (whole := decode_layers(layers, ops)) is None:
        return "a layer is more than attention and one gated MLP, such as a mixture of experts"
    return kernel.unsupported_reason(ops.device, whole)
