"""Images in Mistral Small 3.x and Ministral 3: Pixtral's tower with Mistral 3's patch merger, and its processor."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from llmcl.architectures.config import limits
from llmcl.architectures.config.reader import Reader
from llmcl.errors import UnsupportedModelError, shown
from llmcl.vision.files import VisionFiles
from llmcl.vision.grid_tower import (
    GridLayer,
    GridSettings,
    GridTower,
    GridWeights,
    Merger,
    Norm,
    alternating,
    upload_heads,
    upload_out,
)
from llmcl.vision.normalize import Normalizer
from llmcl.vision.qwen_vl import CHANNELS, CLIP, cut
from llmcl.vision.tensors import VisionTensors, padded
from llmcl.vision.vision import Pixels, Vision

MAX_SIDE = 1 << 14  # pixels
_EPS = 1e-5  # fixed in transformers
_MAX_THETA = 1e12


@dataclass(eq=False)
class PixtralProcessor:
    """Shrinks a picture to the longest side allowed, then stretches it to whole cells of patches."""

    normalizer: Normalizer
    patch: int
    cell: int
    longest: int  # pixels
    marker: str = "[IMG]"
    image_token: str = "[IMG]"

    def pixels(self, picture: Image.Image) -> Pixels:
        factor = self.patch * self.cell
        width, height = picture.size
        if (ratio := max(width, height) / self.longest) > 1:
            width, height = (max(1, math.floor(side / ratio)) for side in (width, height))
        grid = -(-height // factor), -(-width // factor)
        resized = self.normalizer.resized(picture, grid[1] * factor, grid[0] * factor)
        values = cut(self.normalizer.values(resized), self.patch, self.cell)
        digest = hashlib.sha256(repr(grid).encode() + values.tobytes()).digest()
        text = "[IMG_BREAK]".join([self.image_token * grid[1]] * grid[0]) + "[IMG_END]"
        return Pixels(values, [(1, grid[1])] * grid[0], text, digest)


def from_folder(files: VisionFiles) -> Vision:
    config, tensors = files.config, files.tensors
    read = config.table("vision_config") or Reader({}, "config.json: vision_config")
    hidden = read.size("hidden_size", limits.MAX_HIDDEN, default=1024)
    heads = read.size("num_attention_heads", limits.MAX_HEADS, default=16)
    if hidden % heads or hidden // heads % 4 or hidden % limits.SIZE_MULTIPLE:
        read.fail("hidden_size", hidden, f"a multiple of 16 and of 4 num_attention_heads ({4 * heads})")
    for reader, key, default, only in (
        (read, "hidden_act", "gelu", "silu"),
        (config, "projector_hidden_act", "gelu", "gelu"),
    ):
        if (stored := reader.text(key, default)) != only:
            raise UnsupportedModelError(f"{reader.source}: {key} is {shown(stored)}; llmcl supports {only}.")
    if (layer := config.get("vision_feature_layer", -1)) not in (-1, [-1]):
        config.fail("vision_feature_layer", layer, "-1, the last layer")
    rope = read.table("rope_parameters") or read
    theta = rope.number("rope_theta", 0.0, _MAX_THETA, default=10000.0)
    head = hidden // heads
    frequencies = (1.0 / theta ** (np.arange(0, head, 2, dtype=np.float32) / np.float32(head))).astype(np.float32)
    settings = GridSettings(
        hidden,
        read.size("intermediate_size", limits.MAX_INTERMEDIATE, default=4096),
        heads,
        _EPS,
        patch=read.size("patch_size", 1024, default=16),
        cell=config.size("spatial_merge_size", 64, default=2),
        row_frequencies=frequencies[0::2],
        column_frequencies=frequencies[1::2],
        by_line=True,
    )
    name = "vision.patch_conv.weight"
    patch = tensors.array(name, hidden, CHANNELS, settings.patch, settings.patch)
    n_layers = read.size("num_hidden_layers", limits.MAX_LAYERS, default=24)
    weights = GridWeights(
        patch=tensors.upload(name, patch.reshape(hidden, -1)),
        layers=[_layer(tensors, settings, f"vision.transformer.layers.{i}") for i in range(n_layers)],
        merger=_merger(files, settings),
        pre=Norm(tensors.vector("vision.ln_pre.weight", size=hidden)),
    )
    return Vision(_processor(files.preprocessing, settings), GridTower(tensors.device, settings, weights))


def _processor(read: Reader, settings: GridSettings) -> PixtralProcessor:
    size = read.table("size") or Reader({}, f"{read.source}: size")
    longest = size.size("longest_edge", MAX_SIDE, default=1024)
    normalizer = Normalizer.from_hf(Reader({**CLIP, **read.values}, read.source), Image.Resampling.BICUBIC)
    return PixtralProcessor(normalizer, settings.patch, settings.cell, longest)


def _layer(tensors: VisionTensors, settings: GridSettings, name: str) -> GridLayer:
    hidden, intermediate = settings.hidden, settings.intermediate
    zeros = ((0, padded(intermediate) - intermediate), (0, 0))
    heads = [tensors.array(f"{name}.attention.{part}_proj.weight", hidden, hidden) for part in "qkv"]
    gate, up = (
        np.pad(tensors.array(f"{name}.feed_forward.{part}_proj.weight", intermediate, hidden), zeros)
        for part in ("gate", "up")
    )
    q, out = (f"{name}.attention.{part}_proj.weight" for part in "qo")
    first, down = (f"{name}.feed_forward.{part}_proj.weight" for part in ("gate", "down"))
    return GridLayer(
        norms=(
            Norm(tensors.vector(f"{name}.attention_norm.weight", size=hidden)),
            Norm(tensors.vector(f"{name}.ffn_norm.weight", size=hidden)),
        ),
        qkv=upload_heads(settings, tensors, q, np.concatenate(heads)),
        qkv_bias=None,
        out=upload_out(settings, tensors, out, tensors.array(out, hidden, hidden)),
        out_bias=None,
        up=tensors.upload(first, alternating(gate, up)),
        up_bias=tensors.device.zeros(8 * len(gate), "no bias"),
        gated=True,
        down=tensors.upload(down, tensors.array(down, hidden, intermediate)),
        down_bias=None,
    )


def _merger(files: VisionFiles, settings: GridSettings) -> Merger:
    tensors, hidden, text = files.tensors, settings.hidden, files.hidden_size
    join, n = "projector.patch_merger.merging_layer.weight", settings.cell**2
    # Columns are stored channel by channel; a cell's patches lie one behind the other on the device.
    columns = tensors.array(join, hidden, n * hidden).reshape(hidden, hidden, n).swapaxes(1, 2)
    has_bias = files.config.flag("multimodal_projector_bias", default=False)
    first, second = "projector.linear_1", "projector.linear_2"
    no_bias = tensors.device.zeros(4 * text, "no bias")
    return Merger(
        norm=Norm(tensors.vector("projector.norm.weight", size=hidden)),
        norm_after=False,
        eps=(files.config.table("text_config") or files.config).number("rms_norm_eps", 0.0, 1.0, default=1e-5),
        join=tensors.upload(join, columns.reshape(hidden, -1)),
        first=tensors.matrix(f"{first}.weight", rows=text, k=hidden),
        first_bias=tensors.vector(f"{first}.bias", size=text) if has_bias else no_bias,
        second=tensors.matrix(f"{second}.weight", rows=text, k=text),
        second_bias=tensors.vector(f"{second}.bias", size=text) if has_bias else None,
    )
