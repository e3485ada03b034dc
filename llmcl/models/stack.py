"""Builds the forward pass as launches: embedding, blocks of each layer, output head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmcl.kernels import table
from llmcl.kernels.common.persistent import DecodeLayer, DecodeLayers, PersistentLayers
from llmcl.kernels.common.weight import Weight
from llmcl.models.attention_block import AttentionBlock
from llmcl.models.blocks import MlpBlock
from llmcl.models.bound_block import BoundBlock
from llmcl.models.expert_block import ExpertsBlock
from llmcl.models.layer_ops import DecodeOps, LayerOps, PrefillOps
from llmcl.models.recurrent_blocks import MixerBlock
from llmcl.models.weights import ModelWeights
from llmcl.ops.soft_cap import soft_cap
from llmcl.runtime.device import Buffer, Launch

Layers = Sequence[Sequence[BoundBlock]]
NO_ATTENTION = "no layer beside it has attention"


def stack(weights: ModelWeights, layers: Layers, ops: LayerOps) -> Iterator[Launch]:
    """Yields the forward pass from the step's token ids to `x` after the last layer."""
    yield from embed_launches(weights, ops)
    for block, of_block in in_turn(weights, layers, ops):
        yield from block.keep(of_block)
        yield from block.add(of_block)


def prefill_stack(weights: ModelWeights, layers: Layers, ops: PrefillOps) -> tuple[list[Launch], list[Launch]]:
    """Splits stack() for many tokens into launches for every token and launches for tokens that need logits.

    The second list begins once the last cached block has written to the cache. It is empty if other layers follow on
    another device, which need every token.
    """
    return list(until_kept(weights, layers, ops)), list(after_kept(weights, layers, ops))


def until_kept(weights: ModelWeights, layers: Layers, ops: PrefillOps) -> Iterator[Launch]:
    """Yields the first list of `prefill_stack`: the launches that every token needs."""
    if weights.head is None:
        yield from stack(weights, layers, ops)
        return
    last = last_keeper(layers)
    yield from embed_launches(weights, ops)
    for i, (block, of_block) in enumerate(in_turn(weights, layers, ops)[: last + 1]):
        yield from block.keep(of_block if i < last else of_block.keeping_last())
        if i < last:
            yield from block.add(of_block)


def after_kept(weights: ModelWeights, layers: Layers, ops: LayerOps) -> Iterator[Launch]:
    """Yields the second list of `prefill_stack`: the launches after the last cached block's `keep`."""
    following = [] if weights.head is None else in_turn(weights, layers, ops)[last_keeper(layers) :]
    for block, of_block in following:
        yield from block.add(of_block)


def embed_launches(weights: ModelWeights, ops: LayerOps) -> Iterator[Launch]:
    yield from ops.embed(weights.embedding)
    if (inputs := weights.layer_inputs) is not None:
        yield from ops.layer_inputs(inputs.embedding, inputs.projection, inputs.norm)
    if weights.encoder is not None:
        yield from weights.encoder.add(ops)


def last_keeper(layers: Layers) -> int:
    """Returns the index of the last block that writes to the cache."""
    return max(i for i, block in enumerate(block for layer in layers for block in layer) if block.keeps)


def last_token_launches(layers: Layers, ops: PrefillOps) -> list[Launch]:
    """Returns the launches between the two lists of prefill_stack when only the last token needs logits."""
    return ops.last_token(*_last_that_keeps(layers).kept(ops))


def _last_that_keeps(layers: Layers) -> BoundBlock:
    return next(block for blocks in reversed(layers) for block in reversed(blocks) if block.keeps)


def in_turn(weights: ModelWeights, layers: Layers, ops: LayerOps) -> list[tuple[BoundBlock, LayerOps]]:
    """Pairs each block with ops that know the next norm and product."""
    blocks = [block for layer in layers for block in layer]
    following = [(block.weights.norm, block.first_product) for block in blocks[1:]]
    after_last: tuple[Buffer | None, Weight | None] = weights.final_norm, weights.head
    return [(block, ops.before(*after)) for block, after in zip(blocks, [*following, after_last], strict=True)]


def decode_stack(
    weights: ModelWeights, layers: Layers, ops: DecodeOps, *, persistent: bool
) -> tuple[list[Launch], Mapping[str, Buffer]]:
    """Builds stack() for one token, with as many layers as possible in persistent kernels.

    Also returns the activations, by name, that persistent launches replace with other buffers.
    """
    if not persistent:
        return list(stack(weights, layers, ops)), {}
    launches, intermediates = list(embed_launches(weights, ops)), dict[str, Buffer]()
    for run in layer_runs(layers, ops):
        if run.kernel is None:
            launches += [launch for block in run.blocks for part in (block.keep, block.add) for launch in part(ops)]
            continue
        assert run.whole is not None
        bound = run.kernel.bind(ops.device, run.whole)
        launches += bound.launches
        intermediates |= bound.intermediates
    return launches, intermediates


def head(weights: ModelWeights, ops: LayerOps, logits: Buffer) -> list[Launch]:
    """Builds the launches from `x` after the last layer to logits. None if other layers follow on another device."""
    if weights.head is None:
        return []
    product = ops.norm_linear(weights.final_norm, weights.head, logits)
    return [*product, *soft_cap(ops.device, logits, ops.config.vocab_size, ops.config.logit_soft_cap)]


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers in a decode step, from `first` on. kernel: runs all layers as one launch, `whole`. None: the
    layers run as separate launches because of `why`.
    """

    first: int
    layers: Layers
    kernel: PersistentLayers | None = None
    whole: DecodeLayers | None = None
    why: str | None = None

    @property
    def blocks(self) -> list[BoundBlock]:
        return [block for layer in self.layers for block in layer]


def layer_runs(layers: Layers, ops: DecodeOps) -> list[LayerRun]:
    """Groups a decode step's layers into as few runs as possible."""
    kernel = next((row for row in table.implementations(PersistentLayers) if row.supports_device(ops.device)), None)
    if kernel is None:
        return [LayerRun(0, layers)]
    runs: list[LayerRun] = []
    first = 0
    while first < len(layers):
        run = _first_run(kernel, layers, first, ops)
        if runs and run.kernel is None and run.why == runs[-1].why:
            run = LayerRun(runs[-1].first, [*runs.pop().layers, *run.layers], why=run.why)
        runs.append(run)
        first = run.first + len(run.layers)
    return runs


def _first_run(kernel: PersistentLayers, layers: Layers, first: int, ops: DecodeOps) -> LayerRun:
    """Returns the longest run from `first` on that fits into one launch, or one layer that cannot be fused."""

    def launch_of(count: int) -> DecodeLayers | str:
        whole = decode_layers(layers[first : first + count], ops)
        return whole if isinstance(whole, str) else kernel.unsupported_reason(ops.device, whole) or whole

    fused = launch_of(len(layers) - first)
    if isinstance(fused, str):
        for count in range(1, len(layers) - first):
            longer = launch_of(count)
            if isinstance(longer, str):
                fused = longer if count == 1 and longer != NO_ATTENTION else fused
                break
            fused = longer
    if isinstance(fused, str):
        return LayerRun(first, layers[first : first + 1], why=fused)
    return LayerRun(first, layers[first : first + len(fused.layers)], kernel, fused)


def decode_layers(layers: Layers, ops: DecodeOps) -> DecodeLayers | str:
    """Describes a decode step's layers for kernels that run all layers, or says why no kernel can."""
    described = []
    for blocks in layers:
        why = next(filter(None, (block.why_separate for block in blocks)), None)
        match blocks:
            case [(AttentionBlock() | MixerBlock()) as mixer, (MlpBlock() | ExpertsBlock()) as mlp] if why is None:
                described.append(_decode_layer(mixer, mlp, ops))
            case _:
                return why or "it is more than attention and a gated MLP"
    config = ops.config
    attentions = [block for blocks in layers for block in blocks if isinstance(block, AttentionBlock)]
    if len({block.heads for block in attentions}) > 1:
        return "the layers differ in their heads"
    if not attentions:
        return NO_ATTENTION
    attention = ops.attention.for_heads(attentions[0].heads)
    return DecodeLayers(
        described,
        attention.shape,
        ops.step,
        config.hidden_size,
        config.stream_eps,
        config.rms_norm_eps,
        attention.n_splits,
        ops.act.x,
    )


def _decode_layer(block: AttentionBlock | MixerBlock, mlp: MlpBlock | ExpertsBlock, ops: DecodeOps) -> DecodeLayer:
    m, experts = mlp.weights, mlp.weights if isinstance(mlp, ExpertsBlock) else None
    vectors = {
        "attention_norm": block.weights.norm,
        "attention_post_norm": block.weights.post_norm,
        "mlp_norm": m.norm,
        "mlp_post_norm": m.post_norm,
        "gate_up_bias": m.gate_up_bias,
        "down_bias": m.down_bias,
        "router_bias": None if experts is None else experts.router_bias,
    }
    mixer_fields: dict[str, Any]
    if isinstance(block, AttentionBlock):
        a = block.weights
        vectors |= {"bias": a.bias, "output_bias": a.output_bias, "sinks": a.sinks}
        vectors |= {"head_norms": a.head_norms, "q_norm": a.q_norm, "k_norm": a.k_norm}
        mixer_fields = {"qkv": a.qkv, "k": block.k, "v": block.v, "mods": block.mods, "attention_gate": a.gate}
        mixer_fields["rope"] = ops.act.rope_of(block.rotation)
    else:
        mixer_fields = {"qkv": block.weights.projection, "mixer": block.mixer}
    return DecodeLayer(
        output=block.weights.output,
        gate_up=m.gate_up,
        down=m.down,
        vectors={name: vector for name, vector in vectors.items() if vector is not None},
        gate=mlp.gate,
        router=None if experts is None else experts.router,
        renormalize=not isinstance(mlp, ExpertsBlock) or mlp.renormalize,
        **mixer_fields,
    )


def why_separate(layers: Layers, ops: DecodeOps) -> str | None:
    """Says which decode layers run as separate launches on a device with a kernel for all layers, and why.

    None: no layer does, or the device has no such kernel.
    """
    runs: dict[str, list[LayerRun]] = {}
    for run in layer_runs(layers, ops):
        if run.why is not None:
            runs.setdefault(run.why, []).append(run)
    return "; ".join(f"{_numbers(those)}: {why}" for why, those in runs.items()) or None


def _numbers(runs: Sequence[LayerRun]) -> str:
    lasts = [run.first + len(run.layers) - 1 for run in runs]
    each = [str(last) if last == run.first else f"{run.first} to {last}" for run, last in zip(runs, lasts, strict=True)]
    return f"layer{'' if each == [str(lasts[0])] else 's'} {', '.join(each)}"
