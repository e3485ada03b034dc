"""From a checkpoint's tensors to the weights on the device: what is fused, loaded, checked and forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from llmcl.checkpoint import Checkpoint, expected_tensors
from llmcl.config import ModelConfig
from llmcl.errors import CheckpointError
from llmcl.ops.weight import Weight, alloc_weight, fill_random, load_rows, weight_bytes
from llmcl.runtime.device import Buffer, Device

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LayerWeights:
    attention_norm: Buffer  # float32 [hidden]
    qkv: Weight  # [(n_q_heads + 2 n_kv_heads) head_dim, hidden]
    output: Weight  # [hidden, n_q_heads head_dim]
    mlp_norm: Buffer  # float32 [hidden]
    gate_up: Weight  # [2 intermediate, hidden], tiles alternate
    down: Weight  # [hidden, intermediate]
    # What only some families have.
    qkv_bias: Buffer | None  # float32 [(n_q_heads + 2 n_kv_heads) head_dim]
    head_norms: Buffer | None  # float32 [2, head_dim], of query heads and of key heads
    attention_post_norm: Buffer | None  # float32 [hidden]
    mlp_post_norm: Buffer | None  # float32 [hidden]


@dataclass(frozen=True)
class ModelWeights:
    embedding: Weight  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: Buffer  # float32 [hidden]
    head: Weight  # [vocab, hidden]; the embedding itself where they are tied

    def decode_bytes(self) -> int:
        """Bytes that one decode step reads: all but an embedding that is only looked up."""
        per_layer = (
            weight.nbytes for layer in self.layers for weight in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )
        return sum(per_layer) + self.head.nbytes


@dataclass(frozen=True)
class MatrixPlan:
    """One weight [rows, k] and the tensors it is made of, one below the other or tile by tile in turn."""

    name: str
    rows: int
    k: int
    tensors: tuple[str, ...]
    alternate: bool = False


def layer_plans(config: ModelConfig, i: int) -> dict[str, MatrixPlan]:
    hidden, ffn, layer = config.hidden_size, config.intermediate_size, f"model.layers.{i}."
    q, kv = config.n_q_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def tensors(prefix: str, *names: str) -> tuple[str, ...]:
        return tuple(f"{layer}{prefix}.{name}_proj.weight" for name in names)

    return {
        "qkv": MatrixPlan(f"layer {i} qkv", q + 2 * kv, hidden, tensors("self_attn", "q", "k", "v")),
        "output": MatrixPlan(f"layer {i} output", hidden, q, tensors("self_attn", "o")),
        "gate_up": MatrixPlan(f"layer {i} gate and up", 2 * ffn, hidden, tensors("mlp", "gate", "up"), alternate=True),
        "down": MatrixPlan(f"layer {i} down", hidden, ffn, tensors("mlp", "down")),
    }


def layer_vectors(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """The vectors of `LayerWeights` and the tensors that each is joined from; () for what the model does not have."""

    def norm(name: str, has: bool = True) -> tuple[str, ...]:
        return (f"{name}_layernorm.weight",) if has else ()

    has_posts = config.post_norms
    return {
        "attention_norm": norm("input"),
        "attention_post_norm": norm("post_attention", has_posts),
        "mlp_norm": norm("pre_feedforward" if has_posts else "post_attention"),
        "mlp_post_norm": norm("post_feedforward", has_posts),
        "qkv_bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv" if config.qkv_bias),
        "head_norms": tuple(f"self_attn.{name}_norm.weight" for name in "qk" if config.qk_norm),
    }


def embedding_plans(config: ModelConfig) -> dict[str, MatrixPlan]:
    vocab, hidden = config.vocab_size, config.hidden_size
    plans = {"embedding": MatrixPlan("embedding", vocab, hidden, ("model.embed_tokens.weight",))}
    if not config.tie_embeddings:
        plans["head"] = MatrixPlan("output head", vocab, hidden, ("lm_head.weight",))
    return plans


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    """Device memory that the matrices take in `dtype`."""
    plans = [*embedding_plans(config).values(), *layer_plans(config, 0).values()]
    counts = [1] * len(embedding_plans(config)) + [config.n_layers] * 4
    return sum(count * weight_bytes(p.rows, p.k, dtype) for p, count in zip(plans, counts, strict=True))


def build_weights(
    device: Device,
    config: ModelConfig,
    matrix: Callable[[MatrixPlan], Weight],
    vector: Callable[..., Buffer],
) -> ModelWeights:
    """Assembles the model's weights from two makers: of matrices, and of norms and biases (by tensor names)."""
    top = {name: matrix(plan) for name, plan in embedding_plans(config).items()}
    layers = []
    for i in range(config.n_layers):
        matrices = {name: matrix(plan) for name, plan in layer_plans(config, i).items()}
        vectors = {
            name: vector(*(f"model.layers.{i}.{tensor}" for tensor in tensors)) if tensors else None
            for name, tensors in layer_vectors(config).items()
        }
        layers.append(LayerWeights(**matrices, **vectors))  # type: ignore[arg-type]
    return ModelWeights(top["embedding"], layers, vector("model.norm.weight"), top.get("head", top["embedding"]))


@dataclass(frozen=True)
class _TensorRows:
    """One tensor of a checkpoint as `load_rows` wants it."""

    checkpoint: Checkpoint
    name: str
    format: str
    row_bytes: int
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> np.ndarray:
        return self.checkpoint.rows(self.name, start, stop)


def load_weights(device: Device, checkpoint: Checkpoint, dtype: str, progress: Progress | None = None) -> ModelWeights:
    """Reads, converts and uploads every tensor, one at a time.

    Raises CheckpointError, naming the tensors, if a weight is not finite (or not in `dtype`).
    """
    config = checkpoint.config
    names = list(checkpoint.tensors)
    flags = device.zeros(4 * len(names), "finite flags")
    total = sum(info.row_bytes * info.shape[0] for info in checkpoint.tensors.values() if len(info.shape) == 2)
    done = 0

    def fill(plan: MatrixPlan, weight: Weight) -> Iterator[int]:
        row = 0
        for offset, name in enumerate(plan.tensors):
            info = checkpoint.tensors[name]
            yield from load_rows(
                device,
                weight,
                _TensorRows(checkpoint, name, info.format, info.row_bytes, info.shape),
                flags,
                names.index(name),
                first_row=row,
                tile_step=len(plan.tensors) if plan.alternate else 1,
                tile_offset=offset if plan.alternate else 0,
                rope_head_dim=config.head_dim if info.rope_interleaved else 0,
            )
            row += 0 if plan.alternate else info.shape[0]

    def matrix(plan: MatrixPlan) -> Weight:
        nonlocal done
        weight = alloc_weight(device, plan.name, plan.rows, plan.k, dtype)
        for nbytes in fill(plan, weight):
            done += nbytes
            if progress:
                progress("loading weights", done, total)
        return weight

    def vector(*names: str) -> Buffer:
        parts = []
        for name in names:
            values = checkpoint.array(name).astype(np.float32)
            if not np.isfinite(values).all():
                raise CheckpointError(_not_finite([name], "float32"))
            parts.append(values if name.endswith(".bias") else values + np.float32(config.norm_offset))
        return device.upload(np.concatenate(parts), names[0])

    weights = build_weights(device, config, matrix, vector)
    bad = np.flatnonzero(device.read(flags, np.int32, (len(names),)))
    flags.release()
    if bad.size:
        raise CheckpointError(_not_finite([names[i] for i in bad], dtype))
    return weights


def _not_finite(names: list[str], dtype: str) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"{listed}: some weights are NaN or infinite as {dtype}; the checkpoint is damaged"
        + (" or its values need --dtype bfloat16 or float32" if dtype == "float16" else "")
        + ", expected finite numbers; download or convert it again"
    )


def random_weights(device: Device, config: ModelConfig, dtype: str, seed: int = 0) -> ModelWeights:
    """Weights of the real shapes with random values, made on the device; norms are ones, biases zeros."""
    count = 0

    def matrix(plan: MatrixPlan) -> Weight:
        nonlocal count
        count += 1
        weight = alloc_weight(device, plan.name, plan.rows, plan.k, dtype)
        # Uniform with the variance 1 / k keeps the activations of a deep stack of the order of one.
        fill_random(device, weight, (3.0 / plan.k) ** 0.5, seed * 1_000_003 + count)
        return weight

    shapes = expected_tensors(config)

    def vector(*names: str) -> Buffer:
        fills = [np.full(shapes[name], 0.0 if name.endswith(".bias") else 1.0, np.float32) for name in names]
        return device.upload(np.concatenate(fills), names[0])

    return build_weights(device, config, matrix, vector)
