"""Llama and its relatives on the device: memory, weights, and the layer stack from token ids to logits."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcl.errors import ContextLengthError, KernelBuildError, UsageError
from llmcl.kernels import table
from llmcl.kernels.common.attention import NO_MODS, Mods
from llmcl.kernels.common.linear import Rows
from llmcl.kernels.common.persistent import BoundStep, DecodeLayer, DecodeLayers, PersistentLayers, PersistentStep
from llmcl.kernels.common.sizes import prefill_chunk
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.models.config import ModelConfig
from llmcl.models.kv_cache import KVCache
from llmcl.models.weights import LayerWeights, ModelWeights
from llmcl.ops.attention import attention_decode, attention_leaves, attention_prefill, decode_splits, rope_append
from llmcl.ops.embed import embed
from llmcl.ops.last_token import last_token
from llmcl.ops.linear import leaves_form, linear_decode, linear_prefill, passed_form
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.ops.rms_norm import rms_norm
from llmcl.ops.sample import Sampler
from llmcl.ops.soft_cap import soft_cap
from llmcl.progress import READING, Progress
from llmcl.runtime.device import Buffer, Device, Launch
from llmcl.runtime.driver_calls import named_errors

LOGITS_CHUNK = 64
PARTS = 8  # of a chunk of prefill, after which progress is reported

GATES = {"silu": "swiglu", "gelu_tanh": "geglu"}  # activation: epilogue of the product with gate and up


@dataclass(frozen=True)
class Activations:
    """Every intermediate result of a step, allocated once; n is the tokens of a chunk. All float32."""

    x: Buffer  # [n, hidden]
    normed: Buffer  # [n, hidden], input of a product in prefill; before a post norm, output of one
    rope: Buffer  # [n, head_dim]
    qkv: Buffer  # [n, n_q_heads + 2 n_kv_heads, head_dim]
    attended: Buffer  # [n, n_q_heads, head_dim]
    ffn: Buffer  # [n, intermediate]
    part_ml: Buffer  # [n_q_heads, n_splits, 2]
    part_acc: Buffer  # [n_q_heads, n_splits, head_dim]
    logits: Buffer  # [vocab], of the step's last token


def activation_shapes(config: ModelConfig, chunk: int, n_splits: int) -> dict[str, tuple[int, ...]]:
    heads = config.n_q_heads + 2 * config.n_kv_heads
    return {
        "x": (chunk, config.hidden_size),
        "normed": (chunk, config.hidden_size),
        "rope": (chunk, config.head_dim),
        "qkv": (chunk, heads, config.head_dim),
        "attended": (chunk, config.n_q_heads, config.head_dim),
        "ffn": (chunk, config.intermediate_size),
        "part_ml": (config.n_q_heads, n_splits, 2),
        "part_acc": (config.n_q_heads, n_splits, config.head_dim),
        "logits": (config.vocab_size,),
    }


class Model:
    """Bound launches of one model: `prefill` and `decode` fill the cache and leave the last token's logits."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        weights: ModelWeights,
        cache: KVCache,
        *,
        chunk: int | None = None,
        mods: Sequence[Mods] = (),
        persistent: bool = True,
        progress: Progress | None = None,
    ):
        """mods: what is added to the causal attention of each layer, by the model and the user; () for nothing.

        persistent: decode with a persistent kernel where the device has one, for all layers or for the whole step
        (kernels/common/persistent.py). progress: called while kernels are compiled.
        """
        self.device = device
        self.mods = tuple(mods) or (NO_MODS,) * config.n_layers
        self.config = config
        self.weights = weights
        self.cache = cache
        self.chunk = min(chunk or prefill_chunk(device), cache.max_context)
        self.n_splits = decode_splits(device, config.n_kv_heads, config.head_dim, cache.shape.kv_dtype)
        self.step = StepState(device, self.chunk, cache.table_entries)
        self.inv_freq = device.upload(config.inv_freq(), "rotation frequencies")
        self.act = Activations(
            **{
                name: device.alloc(4 * int(np.prod(shape)), name)
                for name, shape in activation_shapes(config, self.chunk, self.n_splits).items()
            }
        )
        self.step_position = 0  # of the first token that the launches enqueued last compute
        self.stand_ins: Mapping[str, Buffer] = {}  # for activations, where persistent layers have others in their place
        self.sampler = Sampler(device, self.act.logits, config.vocab_size, self.step)
        ops = PrefillOps(self)
        self._prefill, self._last_layer = prefill_stack(self, ops)
        self._last_token = ops.last_token()
        self._head = list(head(self, DecodeOps(self), self.act.logits))
        self._decode = [*(decode_stack(self) if persistent else stack(self, DecodeOps(self))), *self._head]
        self._persistent: BoundStep | None = None
        for row in table.implementations(PersistentStep) if persistent else ():
            if row.suits(device) and row.why_not(device, self._decode) is None:
                self._persistent = row.bind(device, self._decode, cache.max_context)
                break
        self._prepare(progress)
        self.decode_steps = 0  # enqueued since the model was loaded
        self._all_logits: tuple[Buffer, list[Launch]] | None = None

    def prefill(self, token_ids: Sequence[int], *, chunk: int | None = None, progress: Progress | None = None) -> None:
        """Appends token_ids to the cache; `act.logits` then holds the logits after the last of them.

        progress: called as the device gets on; without it the work is enqueued and not waited for.

        Raises ContextLengthError if they do not fit, UsageError if one is not in the vocabulary.
        """
        self._check_tokens(token_ids)
        for _ in self._prefill_chunks(token_ids, min(chunk or self.chunk, self.chunk), progress):
            pass
        # Of the last layer the others needed keys and values only.
        self.step_position = self.cache.position - 1
        self._run((*self._last_token, *self._last_layer, *self._head))
        if progress is not None:
            progress(READING, len(token_ids), len(token_ids))

    def decode(self) -> None:
        """One step with the input token that the device holds; sampling moves the device's position on."""
        self.cache.prepare(self.step, 1)
        self.step_position = self.cache.position
        self.decode_steps += 1
        self._run(self.decode_launches)

    def _prepare(self, progress: Progress | None) -> None:
        """Compiles all kernels and makes their objects, so that it is part of loading."""
        for launch in (*self._prefill, *self._last_layer):
            launch.share_seldom_used()
        others = *self._prefill, *self._last_token, *self._last_layer, *self._head, *self.sampler.launches
        with self.device.compile_progress((*self.decode_launches, *others), progress):
            if self._persistent:
                try:
                    self._persistent.parts[0].prepare()
                except KernelBuildError as error:
                    warnings.warn(f"decoding with a launch for each kernel, which is slower: {error}", stacklevel=3)
                    self._persistent = None
            for launch in (*others, *self.decode_launches):
                launch.prepare()

    @property
    def decode_launches(self) -> Sequence[Launch]:
        """What a decode step enqueues before sampling."""
        return self._decode if self._persistent is None else self._persistent.parts

    def decode_token(self, token_id: int) -> None:
        """One step through the decode kernels with a given token, for evaluation and tests."""
        self._check_tokens([token_id])
        self.step.write_tokens([token_id], self.cache.position)
        self.decode()
        self.cache.token_ids.append(token_id)

    def sample(self) -> None:
        """Chooses the next token from `act.logits` and makes it the device's next input."""
        self._run(self.sampler.launches)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position: float32 [n, vocab], for evaluation. The cache is left with these tokens."""
        vocab = self.config.vocab_size
        return np.concatenate(
            [self.device.read(buffer, np.float32, (n, vocab)) for buffer, n in self.logit_chunks(token_ids)]
        )

    def logit_chunks(self, token_ids: Sequence[int], *, skip: int = 0) -> Iterator[tuple[Buffer, int]]:
        """Appends token_ids to the cache; yields (logits float32 [n, vocab] on the device, n) of those after the first
        `skip`, at most LOGITS_CHUNK at a time. The buffer is the same each time: use it before the next step.
        """
        rows = min(LOGITS_CHUNK, self.chunk)
        if self._all_logits is None:
            buffer = self.device.alloc(4 * rows * self.config.vocab_size, "logits of a chunk")
            self._all_logits = (buffer, list(head(self, PrefillOps(self), buffer)))
        buffer, launches = self._all_logits
        self._check_tokens(token_ids)
        for _ in self._prefill_chunks(token_ids[:skip], self.chunk):
            pass
        for n in self._prefill_chunks(token_ids[skip:], rows):
            self._run((*self._last_layer, *launches), n)
            yield buffer, n

    def _prefill_chunks(self, token_ids: Sequence[int], chunk: int, progress: Progress | None = None) -> Iterator[int]:
        """Appends token_ids to the cache, and yields the tokens of each chunk when `_last_layer` can have its rows."""
        for start in range(0, len(token_ids), chunk):
            ids = token_ids[start : start + chunk]
            self.cache.prepare(self.step, len(ids))
            self.step_position = self.cache.position
            self.step.write_tokens(ids, self.step_position)
            if progress is None:
                self._run(self._prefill, len(ids))
            else:
                for share in self._run_in_parts(self._prefill, len(ids)):
                    if (done := start + int(share * len(ids))) < len(token_ids):
                        progress(READING, done, len(token_ids))
            self.cache.token_ids.extend(ids)
            yield len(ids)

    def _run_in_parts(self, launches: Sequence[Launch], n_tokens: int) -> Iterator[float]:
        """Yields the share that is done as the device gets on; a GPU has the next part while the host waits for one."""
        size = -(-len(launches) // PARTS)
        part_before: Callable[[], None] | None = None
        for start in range(0, len(launches), size):
            self._run(launches[start : start + size], n_tokens)
            if not self.device.runs_ahead:
                self.device.finish()
                yield min(1.0, (start + size) / len(launches))
            else:
                if part_before is not None:
                    part_before()
                part_before = self.device.marker()
                yield start / len(launches)

    def _run(self, launches: Iterable[Launch], n_tokens: int = 1) -> None:
        with named_errors("running the model"):
            for launch in launches:
                launch.enqueue(n_tokens)

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Raises UsageError for an id that the embedding does not have."""
        if min(token_ids) < 0 or max(token_ids) >= self.config.vocab_size:
            bad = next(i for i in token_ids if not 0 <= i < self.config.vocab_size)
            raise UsageError(f"token id {bad} is not in the vocabulary; expected 0 to {self.config.vocab_size - 1}")

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) == 0:
            raise UsageError("the prompt has no tokens; expected at least one")
        self.check_vocabulary(token_ids)
        if self.cache.position + len(token_ids) > self.cache.max_context:
            raise ContextLengthError(
                f"{len(token_ids)} tokens after {self.cache.position} in the cache exceed the context of "
                f"{self.cache.max_context} tokens; shorten the prompt or raise the context (--ctx-size, max_context)"
            )


def stack(model: Model, ops: DecodeOps | PrefillOps) -> Iterator[Launch]:
    """The forward pass, top to bottom: from the step's token ids to `x` after the last layer."""
    yield from ops.embed(model.weights.embedding, model.act.x, model.act.rope)
    for i in range(model.config.n_layers):
        yield from layer_keys(model, ops, i)
        yield from layer_rest(model, ops, i)


def layer_keys(model: Model, ops: DecodeOps | PrefillOps, i: int) -> Iterator[Launch]:
    """Queries, keys and values of layer i; prefill leaves keys and values in the cache."""
    layer, cache, act = model.weights.layers[i], model.cache, model.act
    yield from ops.norm_linear(act.x, layer.attention_norm, layer.qkv, act.qkv)
    yield from ops.adjust(act.qkv, layer)
    yield from ops.append(act.qkv, act.rope, cache.k[i], cache.v[i])


def layer_rest(model: Model, ops: DecodeOps | PrefillOps, i: int) -> Iterator[Launch]:
    """Attention and MLP of layer i, added to `x`."""
    layer, cache, act = model.weights.layers[i], model.cache, model.act
    attended = ops.attended(layer)
    yield from ops.attention(act.qkv, act.rope, cache.k[i], cache.v[i], attended, model.mods[i])
    yield from ops.add_linear(attended, layer.output, layer.attention_post_norm, act.x)
    gated = ops.gated(layer)
    yield from ops.norm_linear(act.x, layer.mlp_norm, layer.gate_up, gated, epilogue=GATES[model.config.activation])
    yield from ops.add_linear(gated, layer.down, layer.mlp_post_norm, act.x)


def prefill_stack(model: Model, ops: PrefillOps) -> tuple[list[Launch], list[Launch]]:
    """stack() for many tokens in two: up to the keys and values of the last layer, and what is left of that layer."""
    last = model.config.n_layers - 1
    first = list(ops.embed(model.weights.embedding, model.act.x, model.act.rope))
    for i in range(last):
        first += [*layer_keys(model, ops, i), *layer_rest(model, ops, i)]
    return [*first, *layer_keys(model, ops, last)], list(layer_rest(model, ops, last))


def decode_stack(model: Model) -> Iterator[Launch]:
    """stack() for one token, its layers in one launch if the device can run them so."""
    ops, act, device = DecodeOps(model), model.act, model.device
    layers = decode_layers(model)
    for row in table.implementations(PersistentLayers):
        if row.suits(device) and row.why_not(device, layers) is None:
            bound = row.bind(device, layers)
            model.stand_ins = bound.intermediates
            yield from ops.embed(model.weights.embedding, act.x, act.rope)
            yield from bound.launches
            return
    yield from stack(model, ops)


def decode_layers(model: Model) -> DecodeLayers:
    """The layers of a decode step, for kernels that run all of them."""
    config, cache, act = model.config, model.cache, model.act
    layers = []
    for i, layer in enumerate(model.weights.layers):
        extras = (layer.qkv_bias, layer.head_norms, layer.attention_post_norm, layer.mlp_post_norm)
        rest = (layer.qkv, layer.output, layer.mlp_norm, layer.gate_up, layer.down, cache.k[i], cache.v[i])
        is_plain = all(extra is None for extra in extras)
        layers.append(DecodeLayer(layer.attention_norm, *rest, model.mods[i], is_plain))
    return DecodeLayers(
        layers,
        cache.shape,
        model.step,
        config.hidden_size,
        config.intermediate_size,
        config.rms_norm_eps,
        GATES[config.activation],
        model.n_splits,
        act.x,
        act.rope,
    )


def head(model: Model, ops: DecodeOps | PrefillOps, logits: Buffer) -> Iterator[Launch]:
    """From `x` after the last layer to logits."""
    weights, config = model.weights, model.config
    yield from ops.norm_linear(model.act.x, weights.final_norm, weights.head, logits)
    yield from soft_cap(model.device, logits, config.vocab_size, config.logit_soft_cap)


class _Ops(ABC):
    def __init__(self, model: Model):
        self._model = model
        self._device = model.device
        self._step = model.step
        self._eps = model.config.rms_norm_eps

    def embed(self, table: Weight, x: Buffer, rope: Buffer) -> list[Launch]:
        model = self._model
        scale = model.config.embedding_scale
        return embed(self._device, table, self._step, model.inv_freq, x, rope, model.sampler.last_seen, scale=scale)

    def adjust(self, qkv: Buffer, layer: LayerWeights) -> list[Launch]:
        shape = self._model.cache.shape
        return qkv_adjust(
            self._device,
            qkv,
            layer.qkv_bias,
            layer.head_norms,
            n_q_heads=shape.n_q_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=shape.head_dim,
            eps=self._eps,
        )

    def attended(self, layer: LayerWeights) -> Rows:
        """Where attention leaves its output, in the form that the layer's next product takes."""
        return self._model.act.attended

    def gated(self, layer: LayerWeights) -> Rows:
        """The same of the product with gate and up."""
        return self._model.act.ffn

    def append(self, qkv: Buffer, rope: Buffer, k: Buffer, v: Buffer) -> list[Launch]:
        """What leaves keys and values in the cache before attention."""
        return []

    @abstractmethod
    def linear(self, x: Rows, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]: ...

    def add_linear(self, x: Rows, weight: Weight, post_norm: Buffer | None, residual: Buffer) -> list[Launch]:
        """residual += W x, or with a post norm += rms_norm(W x)."""
        if post_norm is None:
            return self.linear(x, weight, residual, epilogue="add")
        normed = self._model.act.normed
        return self.linear(x, weight, normed) + rms_norm(self._device, normed, post_norm, residual, self._eps, add=True)


class DecodeOps(_Ops):
    """One token: normalisation, rotation and cache append are part of the kernels that need them."""

    def norm_linear(self, x: Buffer, norm: Buffer, weight: Weight, out: Rows, epilogue: str = "store") -> list[Launch]:
        assert isinstance(out, Buffer)
        return linear_decode(self._device, weight, x, out, self._step, norm=norm, eps=self._eps, epilogue=epilogue)

    def linear(self, x: Rows, weight: Weight, out: Buffer, epilogue: str = "store") -> list[Launch]:
        assert isinstance(x, Buffer)
        return linear_decode(self._device, weight, x, out, self._step, epilogue=epilogue)

    def attention(self, qkv: Buffer, rope: Buffer, k: Buffer, v: Buffer, out: Rows, mods: Mods) -> list[Launch]:
        act = self._model.act
        assert isinstance(out, Buffer)
        return attention_decode(
            self._device,
            self._model.cache.shape,
            qkv,
            rope,
            self._step,
            k,
            v,
            act.part_ml,
            act.part_acc,
            out,
            n_splits=self._model.n_splits,
            mods=mods,
        )


class PrefillOps(_Ops):
    """Many tokens: each op is a kernel of its own. What a product packs is left so where a kernel can."""

    def attended(self, layer: LayerWeights) -> Rows:
        model = self._model
        form = passed_form(self._device, layer.output)
        if form is None or not attention_leaves(self._device, model.cache.shape, form):
            return model.act.attended
        return form.rows(self._step, layer.output.k)

    def gated(self, layer: LayerWeights) -> Rows:
        form = passed_form(self._device, layer.down)
        if form is None or not leaves_form(self._device, layer.gate_up, form):
            return self._model.act.ffn
        return form.rows(self._step, layer.down.k, "gated")

    def norm_linear(self, x: Buffer, norm: Buffer, weight: Weight, out: Rows, epilogue: str = "store") -> list[Launch]:
        return linear_prefill(
            self._device,
            weight,
            x,
            out,
            self._step,
            norm=norm,
            normed=self._model.act.normed,
            eps=self._eps,
            epilogue=epilogue,
        )

    def linear(self, x: Rows, weight: Weight, out: Rows, epilogue: str = "store") -> list[Launch]:
        return linear_prefill(self._device, weight, x, out, self._step, epilogue=epilogue)

    def attention(self, qkv: Buffer, rope: Buffer, k: Buffer, v: Buffer, out: Rows, mods: Mods) -> list[Launch]:
        return attention_prefill(self._device, self._model.cache.shape, qkv, self._step, k, v, out, mods=mods)

    def append(self, qkv: Buffer, rope: Buffer, k: Buffer, v: Buffer) -> list[Launch]:
        return rope_append(self._device, self._model.cache.shape, qkv, rope, self._step, k, v)

    def last_token(self) -> list[Launch]:
        """Leaves the last of the step's tokens alone for what follows."""
        act, shape, hidden = self._model.act, self._model.cache.shape, self._model.config.hidden_size
        columns = (shape.n_q_heads + 2 * shape.n_kv_heads) * shape.head_dim
        return last_token(self._device, self._step, act.x, act.qkv, hidden=hidden, columns=columns)
