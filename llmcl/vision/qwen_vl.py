"""Images in Qwen2.5-VL and Qwen3-VL: processor and tower."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader
from llmcl.errors import UnsupportedModelError, UsageError, shown
from llmcl.kernels.common.weight import Weight
from llmcl.vision.files import VisionFiles
from llmcl.vision.grid_tower import (
    GridLayer,
    GridSettings,
    GridTower,
    GridWeights,
    Merger,
    Norm,
    alternating,
    upload_head_biases,
    upload_heads,
    upload_out,
)
from llmcl.vision.normalize import Normalizer
from llmcl.vision.tensors import VisionTensors, padded
from llmcl.vision.vision import Pixels, Vision

CHANNELS = 3
MAX_PIXELS = 1 << 30
MAX_RATIO = 200  # of a picture's sides
_EPS = 1e-6  # fixed in transformers
_THETA = 10000.0
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def smart_size(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Returns the nearest width and height in multiples of `factor` whose product is between `least` and `most`.

    Raises UsageError for a picture much longer than wide. Source: smart_resize in transformers.
    """
    if max(width, height) > MAX_RATIO * min(width, height):
        raise UsageError(
            f"the image has {width} x {height} pixels; expected a longer side of at most {MAX_RATIO} times the shorter"
        )
    sides = [round(side / factor) * factor for side in (width, height)]
    if sides[0] * sides[1] > most:
        shrink = math.sqrt(height * width / most)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)]
    elif sides[0] * sides[1] < least:
        grow = math.sqrt(least / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (width, height)]
    return sides[0], sides[1]


def cut(values: np.ndarray, patch: int, cell: int) -> np.ndarray:
    """Cuts float32 [3, height, width] into patches [n, 3 patch^2], cell by cell."""
    _, height, width = values.shape
    pieces = values.reshape(CHANNELS, height // (patch * cell), cell, patch, width // (patch * cell), cell, patch)
    return np.ascontiguousarray(pieces.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, CHANNELS * patch * patch))


@dataclass(eq=False)
class QwenProcessor:
    """Resizes to whole cells of patches."""

    normalizer: Normalizer
    patch: int
    cell: int
    least: int  # pixels
    most: int
    marker: str = "<|image_pad|>"
    image_token: str = "<|image_pad|>"

    def pixels(self, picture: Image.Image) -> Pixels:
        factor = self.patch * self.cell
        width, height = smart_size(picture.width, picture.height, factor, self.least, self.most)
        values = cut(self.normalizer.values(self.normalizer.resized(picture, width, height)), self.patch, self.cell)
        grid = height // factor, width // factor
        digest = hashlib.sha256(repr(grid).encode() + values.tobytes()).digest()
        return Pixels(values, [grid], self.image_token * (grid[0] * grid[1]), digest)


def axial_frequencies(head: int, theta: float) -> np.ndarray:
    """Returns float32 [head / 4], for rows and for columns alike."""
    return (1.0 / theta ** (np.arange(0, head // 2, 2, dtype=np.float32) / np.float32(head // 2))).astype(np.float32)


def from_folder(files: VisionFiles) -> Vision:
    read = files.config.table("vision_config") or Reader({}, "config.json: vision_config")
    deep = str(files.config.get("model_type")).startswith("qwen3")
    hidden, heads = read.size("hidden_size", limits.MAX_HIDDEN), read.size("num_heads", limits.MAX_HEADS)
    intermediate = read.size("intermediate_size", limits.MAX_INTERMEDIATE)
    patch, cell = read.size("patch_size", 1024), read.size("spatial_merge_size", 64, default=2)
    n_layers = read.size("depth", limits.MAX_LAYERS)
    activation = "gelu_pytorch_tanh" if deep else "silu"
    if (stored := read.text("hidden_act", activation)) != activation:
        raise UnsupportedModelError(
            f"the vision tower has the activation {shown(stored)}; llmcl supports {activation}."
        )
    if hidden % heads or hidden // heads % 4 or hidden % limits.SIZE_MULTIPLE:
        read.fail("hidden_size", hidden, f"a multiple of 16 and of 4 num_heads ({4 * heads})")
    if read.size("temporal_patch_size", 64, default=2) != 2:
        read.fail("temporal_patch_size", read.get("temporal_patch_size"), "2")
    frequencies = axial_frequencies(hidden // heads, _THETA)
    window = 0 if deep else read.size("window_size", MAX_PIXELS, default=112) // patch // cell * cell
    full = _layers(read, "fullatt_block_indexes", (7, 15, 23, 31)) if window else ()
    settings = GridSettings(
        hidden, intermediate, heads, _EPS, patch, cell, frequencies, frequencies, window, frozenset(full)
    )
    deepstack = _layers(read, "deepstack_visual_indexes", (8, 16, 24)) if deep else ()
    if any(i >= n_layers for i in deepstack):
        read.fail("deepstack_visual_indexes", list(deepstack), f"numbers below depth ({n_layers})")
    tensors = files.tensors
    weights = GridWeights(
        patch=_patch(tensors, settings),
        layers=[_layer(tensors, settings, f"vision.blocks.{i}", deep) for i in range(n_layers)],
        merger=_merger(files, settings, "vision.merger", deep),
        patch_bias=tensors.vector("vision.patch_embed.proj.bias", size=hidden) if deep else None,
        learned=_learned(tensors, hidden) if deep else None,
        deepstack=tuple(
            (layer, _merger(files, settings, f"vision.deepstack_merger_list.{i}", deep, after=True))
            for i, layer in enumerate(deepstack)
        ),
    )
    return Vision(_processor(files.preprocessing, patch, cell), GridTower(tensors.device, settings, weights))


def _processor(read: Reader, patch: int, cell: int) -> QwenProcessor:
    read = Reader({**CLIP, **read.values}, read.source)
    for key, value in (("patch_size", patch), ("merge_size", cell)):
        if read.size(key, 1024, default=value) != value:
            read.fail(key, read.get(key), f"{value}, like the vision tower")
    size = read.table("size") or Reader({}, f"{read.source}: size")
    least, most = (
        read.size(key, MAX_PIXELS, default=size.size(edge, MAX_PIXELS, default=default))
        for key, edge, default in (
            ("min_pixels", "shortest_edge", 56 * 56),
            ("max_pixels", "longest_edge", 28 * 28 * 1280),
        )
    )
    return QwenProcessor(Normalizer.from_hf(read, Image.Resampling.BICUBIC), patch, cell, least, most)


def _layers(read: Reader, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    layers = read.get(key, list(default))
    if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
        read.fail(key, layers, "a list of layers")
    return tuple(layers)


def _patch(tensors: VisionTensors, settings: GridSettings) -> Weight:
    """Uploads the patch embedding. Pictures are repeated as second frames, so both frames' weights add up."""
    name, patch = "vision.patch_embed.proj.weight", settings.patch
    frames = tensors.array(name, settings.hidden, CHANNELS, 2, patch, patch)
    return tensors.upload(name, frames.sum(axis=2).reshape(settings.hidden, -1))


def _learned(tensors: VisionTensors, hidden: int) -> np.ndarray:
    name = "vision.pos_embed.weight"
    n = tensors.shape(name)[0]
    if int(n**0.5) ** 2 != n:
        raise UnsupportedModelError(f"tensor {name} has {n} rows; expected a square number of positions")
    return tensors.array(name, n, hidden)


def _norm(tensors: VisionTensors, name: str, size: int, deep: bool) -> Norm:
    weight = tensors.vector(f"{name}.weight", size=size)
    return Norm(weight, tensors.vector(f"{name}.bias", size=size) if deep else None)


def _layer(tensors: VisionTensors, settings: GridSettings, name: str, deep: bool) -> GridLayer:
    hidden, intermediate = settings.hidden, settings.intermediate
    qkv, out = f"{name}.attn.qkv", f"{name}.attn.proj"
    up: np.ndarray
    if deep:
        first, last = f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2"
        up, bias = _columns(tensors, first, intermediate, hidden)
    else:
        first, last = f"{name}.mlp.gate_proj", f"{name}.mlp.down_proj"
        gate, gate_bias = _columns(tensors, first, intermediate, hidden)
        up, up_bias = _columns(tensors, f"{name}.mlp.up_proj", intermediate, hidden)
        up, bias = alternating(gate, up), np.concatenate([gate_bias, up_bias])
    return GridLayer(
        norms=(_norm(tensors, f"{name}.norm1", hidden, deep), _norm(tensors, f"{name}.norm2", hidden, deep)),
        qkv=upload_heads(settings, tensors, f"{qkv}.weight", tensors.array(f"{qkv}.weight", 3 * hidden, hidden)),
        qkv_bias=upload_head_biases(settings, tensors, f"{qkv}.bias", tensors.array(f"{qkv}.bias", 3 * hidden)),
        out=upload_out(settings, tensors, f"{out}.weight", tensors.array(f"{out}.weight", hidden, hidden)),
        out_bias=tensors.vector(f"{out}.bias", size=hidden),
        up=tensors.upload(f"{first}.weight", up),
        up_bias=tensors.device.upload(bias, f"{first}.bias"),
        gated=not deep,
        down=tensors.upload(f"{last}.weight", tensors.array(f"{last}.weight", hidden, intermediate)),
        down_bias=tensors.vector(f"{last}.bias", size=hidden),
    )


def _columns(tensors: VisionTensors, name: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns weight and bias, with rows of zeros up to a multiple of 16."""
    zeros = padded(rows) - rows
    weight, bias = tensors.array(f"{name}.weight", rows, k), tensors.array(f"{name}.bias", rows)
    return np.pad(weight, ((0, zeros), (0, 0))), np.pad(bias, (0, zeros))


def _merger(files: VisionFiles, settings: GridSettings, name: str, deep: bool, after: bool = False) -> Merger:
    tensors, long = files.tensors, settings.cell**2 * settings.hidden
    norm, first, second = ("norm", "linear_fc1", "linear_fc2") if deep else ("ln_q", "mlp.0", "mlp.2")
    return Merger(
        norm=_norm(tensors, f"{name}.{norm}", long if after else settings.hidden, deep),
        norm_after=after,
        eps=_EPS,
        first=tensors.matrix(f"{name}.{first}.weight", rows=long, k=long),
        first_bias=tensors.vector(f"{name}.{first}.bias", size=long),
        second=tensors.matrix(f"{name}.{second}.weight", rows=files.hidden_size, k=long),
        second_bias=tensors.vector(f"{name}.{second}.bias", size=files.hidden_size),
    )
