"""Loads checkpoint tensors into weights on the device: fusion, upload, checks and memory forecast."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

import numpy as np

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.config.model_config import FINAL_NORM, LAYER_INPUT_NORM
from llmcl.architectures.families.blocks import MatrixPlan, RowRuns, layer_name
from llmcl.architectures.families.encoder import EMBEDDING_NORM, POSITIONS, TYPES
from llmcl.checkpoint import Checkpoint
from llmcl.checkpoint.formats import dequantize, row_bytes
from llmcl.checkpoint.mixes import MIXES, mixed_format
from llmcl.checkpoint.quantize import EMBEDDINGS, is_convolution, is_router, quantize_rows, target_format
from llmcl.errors import CheckpointError, UsageError
from llmcl.kernels.common.dtype import NATIVE, QUANTIZED, TILE_ROWS, check_dtype
from llmcl.kernels.common.weight import Weight, WeightPart, alloc_weight, weight_bytes
from llmcl.models.blocks import weights_of
from llmcl.models.bound_block import BlockWeights
from llmcl.models.encoder_blocks import ONE_TEXT, EncoderTensors
from llmcl.models.layer_span import LayerSpan
from llmcl.ops.load_weight import load_weight
from llmcl.ops.random_weight import random_weight
from llmcl.progress import Progress
from llmcl.runtime.device import Buffer, Device

_log = logging.getLogger(__name__)

_SAMPLES, _SAMPLE_BYTES = 4, 256  # per array, to identify a model


@dataclass(frozen=True)
class LayerInputTensors:
    embedding: Weight  # [vocab, layers size]
    projection: Weight  # [layers size, hidden]
    norm: Buffer  # float32 [size]


@dataclass(frozen=True)
class ModelWeights:
    embedding: Weight  # [vocab, hidden]
    layers: list[list[BlockWeights]]  # per layer, per block
    final_norm: Buffer | None  # float32 [hidden]; None: an encoder
    head: Weight | None  # [vocab, hidden]; the embedding itself if tied; None: other layers follow on another device
    layer_inputs: LayerInputTensors | None = None
    encoder: EncoderTensors | None = None
    merged: bytes = b""  # identifies the adapters that were added to the matrices

    @property
    def matrices(self) -> list[Weight]:
        """Returns the weights of all products."""
        inputs = [] if self.layer_inputs is None else [self.layer_inputs.projection]
        head = [] if self.head is None else [self.head]
        return [*head, *inputs, *(matrix for layer in self.layers for block in layer for matrix in block.matrices)]

    def decode_bytes(self) -> int:
        """Returns the bytes that a decode step reads: everything except an embedding used only for lookup and the
        experts that are not chosen.
        """
        return sum(weight.token_bytes for weight in self.matrices)

    def samples(self, device: Device) -> Iterator[bytes]:
        """Yields a few bytes from each array on the device. Different weights or storage types give different
        samples.
        """
        weights = [self.embedding, *self.matrices, *([self.layer_inputs.embedding] if self.layer_inputs else [])]
        yield self.merged
        norms = [] if self.final_norm is None else [self.final_norm]
        buffers = [*norms, *(part.buffer for weight in weights for part in weight.parts)]
        for buffer in buffers:
            size = min(buffer.nbytes, _SAMPLE_BYTES)
            for at in sorted({(buffer.nbytes - size) * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                yield device.read(buffer, np.uint8, (size,), at).tobytes()


@dataclass(frozen=True)
class WeightTypes:
    """Storage type of each matrix on the device.

    dtype: one type for all, or "native": quantised and other tensors keep their stored type from `formats` (format by
    tensor name). exact_activations: see `ops.weight.Weight`.
    """

    dtype: str
    formats: Mapping[str, str] = field(default_factory=dict)
    exact_activations: bool = False

    def runs(self, plan: MatrixPlan) -> list[tuple[int, str]]:
        """Returns a matrix's rows grouped by type: [(rows, dtype)]."""
        if self.dtype != "native":
            return [(plan.rows, self.dtype)]
        dtypes = [NATIVE[self.formats[tensor]] for tensor in plan.tensors]
        if len(set(dtypes)) == 1:
            return [(plan.rows, dtypes[0])]
        if plan.alternate or any(rows % TILE_ROWS for rows in plan.tensor_rows[:-1]):
            return [(plan.rows, "float32")]  # tiles of two types cannot alternate or share rows; float32 is exact
        rows_of = groupby(zip(dtypes, plan.tensor_rows, strict=True), key=lambda run: run[0])
        return [(sum(rows for _, rows in runs), dtype) for dtype, runs in rows_of]

    def n_bytes(self, plan: MatrixPlan) -> int:
        return sum(weight_bytes(rows, plan.k, dtype) for rows, dtype in self.runs(plan))

    def name(self, config: ModelConfig) -> str:
        """Returns the type that holds most of the weights."""
        n_bytes: Counter[str] = Counter()
        for plan in all_plans(config):
            for rows, dtype in self.runs(plan):
                n_bytes[dtype] += rows * plan.k
        return n_bytes.most_common(1)[0][0]


def all_plans(config: ModelConfig, span: LayerSpan | None = None) -> list[MatrixPlan]:
    """Returns the matrices of the model, or of the part on the device that computes `span`."""
    plans = [*_top_plans(config, span).values()]
    for i in _layers(config, span):
        plans += [plan.of_layer(i) for block in config.layers[i] for plan in block.matrices(config).values()]
    return plans


def _layers(config: ModelConfig, span: LayerSpan | None) -> range:
    return range(config.n_layers) if span is None else span.layers


def _top_plans(config: ModelConfig, span: LayerSpan | None) -> dict[str, MatrixPlan]:
    """Returns the matrices outside the layers. A tied embedding is on the first and on the last device."""
    plans = config.top_matrices()
    if span is None or (span.is_first and span.is_last):
        return plans
    head = "head" if "head" in plans else "embedding"
    names = {*(plans.keys() - {"head"} if span.is_first else ()), *([head] if span.is_last else ())}
    return {name: plan for name, plan in plans.items() if name in names}


def weights_bytes(config: ModelConfig, types: WeightTypes, span: LayerSpan | None = None) -> int:
    """Returns the device memory for all matrices (of `span`), in bytes."""
    return sum(types.n_bytes(plan) for plan in all_plans(config, span))


def build_weights(
    config: ModelConfig,
    matrix: Callable[[MatrixPlan], Weight],
    vector: Callable[..., Buffer],
    device: Device,
    span: LayerSpan | None = None,
) -> ModelWeights:
    """Assembles the weights of the model, or of `span`, with two functions: one makes matrices, one makes norms and
    biases (by tensor names).
    """
    top = {name: matrix(plan) for name, plan in _top_plans(config, span).items()}
    layers: list[list[BlockWeights]] = []
    for i in _layers(config, span):
        layers.append([])
        for block in config.layers[i]:
            matrices = {name: matrix(plan.of_layer(i)) for name, plan in block.matrices(config).items()}
            vectors = {
                name: vector(*(layer_name(i, tensor) for tensor in tensors)) if tensors else None
                for name, tensors in block.vectors(config).items()
            }
            layers[-1].append(weights_of(block, **matrices, **vectors))
    inputs = None
    if config.layer_input_size:
        inputs = LayerInputTensors(top["layer_embedding"], top["layer_projection"], vector(LAYER_INPUT_NORM))
    encoder, final_norm = None, None
    if config.encoder is None:
        final_norm = vector(FINAL_NORM)
    else:
        second = device.upload(np.array([ONE_TEXT], np.int32), "second text")
        norms = (vector(f"{EMBEDDING_NORM}.{part}") for part in ("weight", "bias"))
        encoder = EncoderTensors(second, vector(POSITIONS), vector(TYPES), *norms)
    head = top.get("head") or top["embedding"] if span is None or span.is_last else None
    if span is None or span.is_first:
        embedding = top["embedding"]
    else:
        assert final_norm is not None, "an encoder is not divided"
        embedding = _no_embedding(config, final_norm)
    return ModelWeights(embedding, layers, final_norm, head, inputs, encoder)


def _no_embedding(config: ModelConfig, memory: Buffer) -> Weight:
    """Returns an embedding with rows of length 0, for a device that gets x from another device: the launch computes
    rotations and the latest positions only. memory: any buffer, because nothing is read.
    """
    part = WeightPart(memory, 0, -(-config.vocab_size // TILE_ROWS), "float32")
    return Weight("no embedding", config.vocab_size, 0, (part,))


def _alloc(device: Device, plan: MatrixPlan, types: WeightTypes) -> Weight:
    return alloc_weight(
        device,
        plan.name,
        plan.rows,
        plan.k,
        types.runs(plan),
        exact_activations=types.exact_activations,
        n_experts=plan.n_experts,
        top_k=plan.top_k,
    )


@dataclass(frozen=True)
class _TensorRows:
    """Rows of a checkpoint tensor for `load_weight`, requantised if `format` differs from the stored format.

    Without `runs`: n_rows rows from row `first` on. With `runs`: the first n_rows rows in the runs.
    """

    checkpoint: Checkpoint
    name: str
    format: str
    first: int
    n_rows: int
    runs: RowRuns | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, self.checkpoint.tensors[self.name].shape[1]

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.name, self.format, self.shape[1])

    def rows(self, start: int, stop: int) -> np.ndarray:
        if self.runs is None:
            stored = self.checkpoint.rows(self.name, self.first + start, self.first + stop)
        else:
            at = self.runs.rows(start, stop)
            stored = self.checkpoint.rows(self.name, int(at[0]), int(at[-1]) + 1)[at - at[0]]
        format = self.checkpoint.tensors[self.name].format
        if format == self.format:
            return stored
        try:
            return quantize_rows(dequantize(format, stored), self.format)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {self.name}: {error}") from error


def stored_formats(checkpoint: Checkpoint, quantize: str | None = None) -> dict[str, str]:
    """Returns each tensor's format by name: as stored, or requantised with `quantize` (see
    `quantize.QUANTIZE_FORMATS`).

    Raises UsageError, with the tensor name, for rows that the format cannot hold.
    """
    return {
        name: (target_format(name, info.shape, quantize) if quantize else None) or info.format
        for name, info in checkpoint.tensors.items()
    }


def load_weights(
    device: Device,
    checkpoint: Checkpoint,
    types: WeightTypes,
    progress: Progress | None = None,
    span: LayerSpan | None = None,
) -> ModelWeights:
    """Reads, converts and uploads every tensor (of `span`), one at a time.

    Raises CheckpointError, with the tensor names, if a weight or a scale is not finite in its storage type.
    """
    config = checkpoint.config
    names = list(checkpoint.tensors)
    numbers = {name: i for i, name in enumerate(names)}
    flags = device.zeros(4 * len(names), "finite flags")
    formats = types.formats or stored_formats(checkpoint)
    sources = [
        _TensorRows(checkpoint, name, formats[name], 0, info.shape[0])
        for name, info in checkpoint.tensors.items()
        if len(info.shape) == 2
    ]
    needed = {name for plan in all_plans(config, span) for name in plan.tensors}
    total = sum(source.row_bytes * source.n_rows for source in sources if source.name in needed)
    done = 0
    is_quantizing = any(source.format != checkpoint.tensors[source.name].format for source in sources)
    doing = "quantising weights" if is_quantizing else "loading weights"

    def fill(plan: MatrixPlan, weight: Weight) -> Iterator[int]:
        row = 0
        parts = zip(plan.tensors, plan.first_rows(), plan.tensor_rows, plan.runs_of_tensors, strict=True)
        for i, (name, first, n_rows, runs) in enumerate(parts):
            is_up = plan.alternate and i % 2 == 1
            yield from load_weight(
                device,
                weight,
                _TensorRows(checkpoint, name, formats[name], first, n_rows, runs),
                flags,
                numbers[name],
                first_row=row,
                tile_step=2 if plan.alternate else 1,
                tile_offset=int(is_up),
                head_dim=config.head_dim if i < plan.n_rotated else 0,
                rotary_dim=config.rotary_dim or config.head_dim,
                rope_interleaved=checkpoint.tensors[name].rope_interleaved,
            )
            row += 0 if plan.alternate and not is_up else n_rows

    def matrix(plan: MatrixPlan) -> Weight:
        nonlocal done
        weight = _alloc(device, plan, types)
        for nbytes in fill(plan, weight):
            done += nbytes
            if progress:
                progress(doing, done, total)
        return weight

    def vector(*names: str) -> Buffer:
        parts = []
        for name in names:
            values = checkpoint.array(name).astype(np.float32)
            if not np.isfinite(values).all():
                raise CheckpointError(_not_finite([name], "float32"))
            parts.append(_device_vector(config, name, values))
        return device.upload(np.concatenate(parts), names[0])

    weights = build_weights(config, matrix, vector, device, span)
    bad = np.flatnonzero(device.read(flags, np.int32, (len(names),)))
    flags.release()
    if bad.size:
        raise CheckpointError(_not_finite([names[i] for i in bad], types.dtype))
    for name in ("model.embed_tokens.weight", FINAL_NORM, "lm_head.weight"):
        if name in checkpoint.tensors and _is_zero(checkpoint, name, config):
            _log.warning(
                "%s holds nothing but zeros, so all logits are equal and every answer is arbitrary; the checkpoint is "
                "damaged or not trained: download or convert it again",
                name,
            )
    return weights


def _device_vector(config: ModelConfig, name: str, values: np.ndarray) -> np.ndarray:
    """Converts a norm, a bias or a convolution to its device layout, float32 [n].

    The final norm includes the logit scale. Head norms follow the row order of queries and keys. A convolution
    [channels, length] is transposed, so neighbouring channels are adjacent.
    """
    if is_convolution(name):
        return values.T.ravel()
    if name.endswith(".A_log"):
        decays: np.ndarray = -np.exp(values)
        return decays
    if name.endswith((".act_fn.alpha_p", ".act_fn.alpha_n")):
        softplus: np.ndarray = np.logaddexp(np.float32(0.0), values)
        return softplus
    if name.endswith(".router.scale"):
        return values * np.float32(config.hidden_size**-0.5)
    if name.endswith((".q_proj.bias", ".k_proj.bias")) and config.rotary_dim is not None:
        return spread(values, config)
    if not name.endswith("norm.weight") or name.endswith(".linear_attn.norm.weight"):
        return values
    values = values + np.float32(config.norm_offset)
    if name.endswith((".q_norm.weight", ".k_norm.weight")) and config.rotary_dim is not None:
        return spread(values, config)
    return values * np.float32(config.logit_scale) if name == FINAL_NORM else values


def spread(values: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Reorders the dimensions of one or several heads, the first rotary_dim rotated, into the order of tile_row.cl."""
    rotary_dim = config.rotary_dim or config.head_dim
    first, second, rest = np.split(values.reshape(-1, config.head_dim), [rotary_dim // 2, rotary_dim], axis=1)
    halves = np.split(rest, 2, axis=1)
    return np.concatenate([first, halves[0], second, halves[1]], axis=1).ravel()


def _is_zero(checkpoint: Checkpoint, name: str, config: ModelConfig) -> bool:
    """Returns whether a tensor, or the norm that it encodes, is 0 everywhere. Fast if the first rows are not zero."""
    info = checkpoint.tensors[name]
    if len(info.shape) == 1:
        return not (checkpoint.array(name) + config.norm_offset).any()
    return not any(checkpoint.rows(name, i, min(i + 64, info.n_rows)).any() for i in range(0, info.n_rows, 64))


def _not_finite(names: list[str], dtype: str) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    where = "as stored" if dtype == "native" else f"as {dtype}"
    return (
        f"{listed}: some weights are NaN or infinite {where}; the checkpoint is damaged"
        + (" or its values need --dtype bfloat16 or float32" if dtype == "float16" else "")
        + ", expected finite numbers; download or convert it again"
    )


def random_types(config: ModelConfig, dtype: str, *, exact_activations: bool = False) -> WeightTypes:
    """Returns types for random weights: `dtype` for every matrix. With a quantised dtype the embedding and the head
    have 8 bits and a router float32. With mxfp4 experts everything else is bfloat16, as in gpt-oss. A name in MIXES
    follows the files of that mix.

    Raises UsageError for an unknown dtype, or if the model's row length is not a multiple of the dtype's block size.
    """
    if not isinstance(dtype, str) or (dtype not in QUANTIZED and dtype not in MIXES):
        return WeightTypes(check_dtype(dtype, "dtype", *QUANTIZED, *MIXES))
    formats = {}
    experts = {name for plan in all_plans(config) if plan.n_experts > 1 for name in plan.tensors}
    for name, shape in config.tensors().items():
        if dtype == "mxfp4" and experts and name not in experts:
            formats[name] = "BF16"
            continue
        if dtype in MIXES:
            kind = QUANTIZED[mixed_format(name, shape[-1], dtype, config.n_layers, tied=config.tie_embeddings).lower()]
        else:
            kind = QUANTIZED["q8_0" if name in EMBEDDINGS else dtype]
        if is_router(name) or is_convolution(name):
            formats[name] = "F32"
            continue
        if len(shape) == 2 and shape[1] % kind.block:
            raise UsageError(
                f"tensor {name} has rows of {shape[1]} values, which {dtype} cannot hold: it needs a multiple of "
                f"{kind.block}; use another dtype"
            )
        formats[name] = kind.format
    return WeightTypes("native", formats, exact_activations)


def _usual(name: str) -> float:
    """Returns the constant for a random model's norm, bias, convolution or decay."""
    if name.endswith(("bias", ".sinks")):
        return 0.0
    if name.endswith(".act_fn.eps"):
        return -1e-6
    return -1.0 if name.endswith((".A", ".A_log")) else 1.0


def random_weights(
    device: Device,
    config: ModelConfig,
    types: WeightTypes,
    seed: int = 0,
    progress: Progress | None = None,
    span: LayerSpan | None = None,
) -> ModelWeights:
    """Returns weights with the real shapes and random values, generated on the device. Norms are ones, biases zeros.

    A matrix has the same values whether `span` is the whole model or not.
    """
    done = 0
    total = weights_bytes(config, types, span)
    numbers = {plan: i for i, plan in enumerate(all_plans(config), 1)}

    def matrix(plan: MatrixPlan) -> Weight:
        nonlocal done
        count = numbers[plan]
        weight = _alloc(device, plan, types)
        # A uniform distribution with variance 1 / k keeps activations near magnitude 1 in a deep stack.
        random_weight(device, weight, (3.0 / plan.k) ** 0.5, seed * 1_000_003 + count)
        if progress:
            device.finish()
            done += sum(part.buffer.nbytes for part in weight.parts)
            progress("making random weights", done, total)
        return weight

    shapes = config.tensors()

    def vector(*names: str) -> Buffer:
        fills = [np.full(prod(shapes[name]), _usual(name), np.float32) for name in names]
        return device.upload(np.concatenate(fills), names[0])

    return build_weights(config, matrix, vector, device, span)
