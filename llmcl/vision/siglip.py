"""The SigLIP tower: square tiles of pixels to rows, one for each square cell of patches."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader
from llmcl.checkpoint.tensors import StoredTensor
from llmcl.errors import UnsupportedModelError, shown
from llmcl.kernels.common.step_state import StepState
from llmcl.kernels.common.weight import Weight
from llmcl.models.encoder_blocks import ONE_TEXT
from llmcl.models.image_rows import ImageRows
from llmcl.ops.add_bias import add_bias
from llmcl.ops.add_positions import add_positions
from llmcl.ops.attention import attention_prefill, rope_append
from llmcl.ops.bias_gelu import bias_gelu
from llmcl.ops.layer_norm import layer_norm
from llmcl.ops.linear import linear_prefill
from llmcl.ops.mean_rows import mean_rows
from llmcl.ops.qkv_adjust import qkv_adjust
from llmcl.ops.rms_norm import rms_norm
from llmcl.runtime.device import Buffer, Launch
from llmcl.vision.attention import tower_attention
from llmcl.vision.tensors import VisionTensors, padded
from llmcl.vision.vision import Pixels

CHANNELS = 3
MAX_SIDE = 1 << 14  # pixels
_ACTIVATION = "gelu_pytorch_tanh"
_LAYER_MODULE = re.compile(r"v\.blk\.(0|[1-9][0-9]*)\.(.+)")
# Modules in mmproj files and in transformers.
MMPROJ_MODULES = {
    "v.patch_embd": "vision.embeddings.patch_embedding",
    "v.position_embd": "vision.embeddings.position_embedding",
    "v.post_ln": "vision.post_layernorm",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


@dataclass(frozen=True)
class SiglipSettings:
    hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    eps: float
    patch: int  # pixels per side
    trained_side: int  # patches per side of the learned positions
    tile: int  # pixels per side of the tiles that the tower reads
    cell: int  # patches per side that give a row

    def __post_init__(self) -> None:
        """Raises UnsupportedModelError for sizes that do not divide one another."""
        for size, parts, what in (
            (self.hidden, self.n_heads, "attention heads"),
            (self.tile, self.patch, "pixels a patch"),
            (self.side, self.cell, "patches a cell"),
        ):
            if size % parts:
                raise UnsupportedModelError(
                    f"the vision tower divides {size} by {parts} {what}; llmcl supports whole parts only."
                )
        for name, size in (("hidden size", self.hidden), ("intermediate size", self.intermediate)):
            if size % limits.SIZE_MULTIPLE:
                raise UnsupportedModelError(
                    f"the vision tower has the {name} {size}; llmcl supports multiples of {limits.SIZE_MULTIPLE}."
                )

    @property
    def side(self) -> int:
        """Returns the patches per side of a tile."""
        return self.tile // self.patch

    @property
    def n_rows(self) -> int:
        return (self.side // self.cell) ** 2

    @classmethod
    def from_hf(
        cls, read: Reader, tile: int | None = None, cell: int = 0, rows: int = 0, **sizes: int
    ) -> SiglipSettings:
        """Reads vision_config. tile: pixels per side, None: image_size. cell: 0 if `rows` gives it. sizes: defaults."""
        values = Reader({**sizes, "layer_norm_eps": 1e-6, "hidden_act": _ACTIVATION, **read.values}, read.source)
        if (activation := values.text("hidden_act")) != _ACTIVATION:
            raise UnsupportedModelError(
                f"the vision tower has the activation {shown(activation)}; llmcl supports {_ACTIVATION}."
            )
        if values.size("num_channels", 1024, default=CHANNELS) != CHANNELS:
            values.fail("num_channels", values.get("num_channels"), f"{CHANNELS}")
        image, patch = values.size("image_size", MAX_SIDE), values.size("patch_size", MAX_SIDE)
        if not cell:
            cell = max(1, image // patch // max(1, int(rows**0.5)))
        return cls(
            hidden=values.size("hidden_size", limits.MAX_HIDDEN),
            intermediate=values.size("intermediate_size", limits.MAX_INTERMEDIATE),
            n_layers=values.size("num_hidden_layers", limits.MAX_LAYERS),
            n_heads=values.size("num_attention_heads", limits.MAX_HEADS),
            eps=values.number("layer_norm_eps", 0.0, 1.0),
            patch=patch,
            trained_side=image // patch,
            tile=tile or image,
            cell=cell,
        )

    @classmethod
    def from_mmproj(cls, read: Reader, cell: int) -> SiglipSettings:
        """Reads an mmproj file's metadata. cell: patches per side if the file does not say."""
        prefix = "clip.vision."
        image, patch = read.size(f"{prefix}image_size", MAX_SIDE), read.size(f"{prefix}patch_size", MAX_SIDE)
        return cls(
            hidden=read.size(f"{prefix}embedding_length", limits.MAX_HIDDEN),
            intermediate=read.size(f"{prefix}feed_forward_length", limits.MAX_INTERMEDIATE),
            n_layers=read.size(f"{prefix}block_count", limits.MAX_LAYERS),
            n_heads=read.size(f"{prefix}attention.head_count", limits.MAX_HEADS),
            eps=read.number(f"{prefix}attention.layer_norm_epsilon", 0.0, 1.0),
            patch=patch,
            trained_side=image // patch,
            tile=image,
            cell=read.size(f"{prefix}projector.scale_factor", MAX_SIDE, default=cell),
        )


def patch_order(side: int, cell: int) -> np.ndarray:
    """Returns the patches (row * side + column) ordered by cell, row by row: a cell's patches are neighbours."""
    patches = np.arange(side * side).reshape(side // cell, cell, side // cell, cell)
    return patches.swapaxes(1, 2).reshape(-1)


def position_ids(side: int, trained_side: int) -> np.ndarray:
    """Returns the learned position for each patch of a square tile, row by row: its place as a fraction of the tile.

    Computed in float32 like `Idefics3VisionEmbeddings` in transformers, whose rounding counts. Its borders depend on
    the processor's vector length for a few sides from 19 on (not for 24, 26, 27 and 32, which are published).
    """
    step = 1 / trained_side
    borders = np.arange(step, 1.0, step).astype(np.float32)
    places = np.arange(side, dtype=np.float32) * (np.float32(1) / np.float32(side))
    buckets = np.searchsorted(borders, np.minimum(places, np.float32(1 - 1e-6)), side="right")
    ids: np.ndarray = buckets[:, None] * trained_side + buckets[None, :]
    return ids.reshape(-1)


@dataclass(frozen=True)
class Projector:
    """From the tower's rows to the text model's: cells averaged and normalised (Gemma 3), or joined to one long row."""

    weight: Weight  # [text hidden, hidden], or [text hidden, cell^2 hidden] without a norm
    norm: Buffer | None = None  # float32 [hidden]
    eps: float = 0.0


@dataclass(frozen=True)
class _Layer:
    norms: tuple[tuple[Buffer, Buffer], ...]  # weight and bias, before attention and before the MLP
    qkv: Weight
    qkv_bias: Buffer
    out: Weight
    out_bias: Buffer
    up: Weight
    up_bias: Buffer
    down: Weight
    down_bias: Buffer


class SiglipTower:
    """Computes a tile at a time; `rows` returns an ImageRows for each. The projector is part of it.

    Patches are ordered by cell (`patch_order`): attention sees no order, and a cell's rows lie side by side for the
    projector. Heads are padded with zeros to a multiple of 16 columns.
    """

    def __init__(
        self, settings: SiglipSettings, tensors: VisionTensors, projector: Projector, *, two_way: bool = False
    ):
        self.settings, self.device = settings, tensors.device
        self._two_way = two_way
        device, hidden, side = self.device, settings.hidden, settings.side
        self._order = patch_order(side, settings.cell)
        name = "vision.embeddings"
        values = CHANNELS * settings.patch**2
        patch = tensors.array(f"{name}.patch_embedding.weight", hidden, CHANNELS, settings.patch, settings.patch)
        self._patch = tensors.upload(f"{name}.patch_embedding.weight", patch.reshape(hidden, values))
        learned = tensors.array(f"{name}.position_embedding.weight", settings.trained_side**2, hidden)
        ids = position_ids(side, settings.trained_side)[self._order]
        self._positions = device.upload(learned[ids], "patch positions")
        self._patch_bias = tensors.vector(f"{name}.patch_embedding.bias", size=hidden)
        self._no_second = device.upload(np.array([ONE_TEXT], np.int32), "no second text")
        self._layers = [self._layer(tensors, f"vision.encoder.layers.{i}") for i in range(settings.n_layers)]
        self._post = self._norm(tensors, "vision.post_layernorm")
        self._projector = projector
        self._step, self._cell_step = StepState(device, side * side), StepState(device, settings.n_rows)
        self._step.write_tokens([0] * side * side, 0)
        self._cell_step.write_tokens([0] * settings.n_rows, 0)
        self._patches = device.zeros(4 * side * side * padded(values), "patches")
        self._out = device.alloc(4 * settings.n_rows * projector.weight.rows, "image rows")
        self._tower, self._ends = [*self._tower_launches()], [*self._projector_launches()]

    def rows(self, pixels: Pixels) -> list[ImageRows]:
        """Computes the rows for float32 tiles [n, 3, tile, tile]."""
        return [self._tile(tile) for tile in pixels.values]

    def _tile(self, tile: np.ndarray) -> ImageRows:
        settings, device = self.settings, self.device
        side, patch, n_rows = settings.side, settings.patch, settings.n_rows
        patches = tile.reshape(CHANNELS, side, patch, side, patch).transpose(1, 3, 0, 2, 4)
        patches = patches.reshape(side * side, -1)[self._order]
        device.write(self._patches, np.pad(patches, ((0, 0), (0, padded(patches.shape[1]) - patches.shape[1]))))
        for launch in self._tower:
            launch.enqueue(side * side)
        for launch in self._ends:
            launch.enqueue(n_rows)
        rows = device.alloc(self._out.nbytes, "image rows")
        device.copy(self._out, rows)
        return ImageRows(rows, n_rows, hashlib.sha256(tile.tobytes()).digest(), two_way=self._two_way)

    @property
    def _head_dim(self) -> int:
        return padded(self.settings.hidden // self.settings.n_heads)

    def _norm(self, tensors: VisionTensors, name: str) -> tuple[Buffer, Buffer]:
        weight, bias = (tensors.vector(f"{name}.{part}", size=self.settings.hidden) for part in ("weight", "bias"))
        return weight, bias

    def _layer(self, tensors: VisionTensors, name: str) -> _Layer:
        settings = self.settings
        hidden, intermediate = settings.hidden, settings.intermediate
        projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        out = f"{name}.self_attn.out_proj"
        size, columns = hidden // settings.n_heads, settings.n_heads * self._head_dim
        if size == self._head_dim:
            qkv = tensors.matrix(*(f"{part}.weight" for part in projections), rows=hidden, k=hidden)
            out_weight = tensors.matrix(f"{out}.weight", rows=hidden, k=hidden)
        else:
            zeros = ((0, 0), (0, self._head_dim - size), (0, 0))
            matrices = [tensors.array(f"{part}.weight", hidden, hidden) for part in projections]
            heads = [np.pad(matrix.reshape(settings.n_heads, size, hidden), zeros) for matrix in matrices]
            qkv = tensors.upload(f"{projections[0]}.weight", np.concatenate(heads).reshape(3 * columns, hidden))
            of_heads = tensors.array(f"{out}.weight", hidden, hidden).reshape(hidden * settings.n_heads, size, 1)
            out_weight = tensors.upload(f"{out}.weight", np.pad(of_heads, zeros).reshape(hidden, columns))
        biases = [tensors.array(f"{part}.bias", hidden).reshape(settings.n_heads, size) for part in projections]
        bias = np.pad(np.concatenate(biases), ((0, 0), (0, self._head_dim - size)))
        return _Layer(
            norms=(self._norm(tensors, f"{name}.layer_norm1"), self._norm(tensors, f"{name}.layer_norm2")),
            qkv=qkv,
            qkv_bias=self.device.upload(bias, projections[0]),
            out=out_weight,
            out_bias=tensors.vector(f"{out}.bias", size=hidden),
            up=tensors.matrix(f"{name}.mlp.fc1.weight", rows=intermediate, k=hidden),
            up_bias=tensors.vector(f"{name}.mlp.fc1.bias", size=intermediate),
            down=tensors.matrix(f"{name}.mlp.fc2.weight", rows=hidden, k=intermediate),
            down_bias=tensors.vector(f"{name}.mlp.fc2.bias", size=hidden),
        )

    def _tower_launches(self) -> Iterator[Launch]:
        """Yields the launches for all patches of a tile: self._patches to self._normed."""
        device, settings, step = self.device, self.settings, self._step
        n, hidden, size, heads = settings.side**2, settings.hidden, self._head_dim, settings.n_heads
        shape = tower_attention(n, heads, size, (hidden // heads) ** -0.5, self._layers[0].qkv.dtype)
        x, self._normed, attended = (
            device.alloc(4 * n * columns, name)
            for columns, name in ((hidden, "patch rows"), (hidden, "normed patches"), (heads * size, "attended"))
        )
        qkv, ffn = device.alloc(12 * n * heads * size, "qkv"), device.alloc(4 * n * settings.intermediate, "ffn")
        k, v = (device.zeros(heads * shape.capacity * shape.row_bytes, name) for name in ("tile keys", "tile values"))
        no_rotation = np.repeat(np.array([1.0, 0.0], np.float32), size // 2)
        rope = device.upload(np.tile(no_rotation, n), "no rotation")

        yield from linear_prefill(device, self._patch, self._patches, x, step)
        yield from add_positions(device, step, x, self._positions, self._patch_bias, self._no_second, hidden)
        for layer in self._layers:
            before_attention, before_mlp = layer.norms
            yield from layer_norm(device, x, *before_attention, settings.eps, self._normed)
            yield from linear_prefill(device, layer.qkv, self._normed, qkv, step)
            yield from qkv_adjust(
                device, qkv, layer.qkv_bias, None, n_q_heads=heads, n_kv_heads=heads, head_dim=size, eps=0.0
            )
            yield from rope_append(device, shape, qkv, rope, step, k, v)
            yield from attention_prefill(device, shape, qkv, step, k, v, attended)
            yield from linear_prefill(device, layer.out, attended, x, step, epilogue="add")
            yield from add_bias(device, x, layer.out_bias)
            yield from layer_norm(device, x, *before_mlp, settings.eps, self._normed)
            yield from linear_prefill(device, layer.up, self._normed, ffn, step)
            yield from bias_gelu(device, ffn, layer.up_bias, tanh=True)
            yield from linear_prefill(device, layer.down, ffn, x, step, epilogue="add")
            yield from add_bias(device, x, layer.down_bias)
        yield from layer_norm(device, x, *self._post, settings.eps, self._normed)

    def _projector_launches(self) -> Iterator[Launch]:
        """Yields the launches for the cells of a tile: self._normed to self._out."""
        device, settings, projector, cells = self.device, self.settings, self._projector, self._normed
        if projector.norm is not None:
            cells = device.alloc(4 * settings.n_rows * settings.hidden, "averaged patches")
            n_patches = settings.cell**2
            yield from mean_rows(device, self._normed, cells, n_rows=n_patches, columns=settings.hidden)
            yield from rms_norm(device, cells, projector.norm, cells, projector.eps)
        yield from linear_prefill(device, projector.weight, cells, self._out, self._cell_step)


def hf_tensors(stored: Mapping[str, StoredTensor], others: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Returns an mmproj file's tensors under their names in transformers. others: names of tensors beside the tower.

    In files of older converters ffn_up and ffn_down have each other's names: there ffn_down has more rows than columns.
    """
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    down = stored.get("v.blk.0.ffn_down.weight")
    is_swapped = down is not None and len(down.shape) == 2 and down.shape[0] > down.shape[1]
    tensors = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if match := _LAYER_MODULE.fullmatch(module):
            i, module = match.groups()
            module = swapped.get(module, module) if is_swapped else module
            tensors[f"vision.encoder.layers.{i}.{MMPROJ_MODULES.get(module, module)}.{part}"] = tensor
        else:
            tensors[others.get(name, f"{MMPROJ_MODULES.get(module, module)}.{part}")] = tensor
    return tensors
