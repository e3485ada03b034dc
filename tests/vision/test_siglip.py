"""SigLIP towers and their projectors against transformers, from folders and from mmproj files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import relative_error
from numpy.typing import NDArray
from parameters import slow_except
from PIL import Image
from vision_models import TEXT, TOWER, image_features, random_model, save_mmproj, save_vision

from llmcl.checkpoint import open_checkpoint
from llmcl.errors import CheckpointError, LlmclError, UnsupportedModelError, UsageError
from llmcl.runtime.device import Device
from llmcl.vision.load import load_vision
from llmcl.vision.siglip import position_ids
from llmcl.vision.vision import Vision

BOUND = 1e-4  # relative to the largest value
COSINE = 0.9999
# Four tiles and the whole picture in SmolVLM.
PICTURE = Image.fromarray(np.random.default_rng(3).integers(0, 256, (61, 70, 3), dtype=np.uint8))


def loaded(device: Device, folder: Path, mmproj: Path | None = None) -> Vision:
    with open_checkpoint(str(folder)) as checkpoint:
        vision = load_vision(device, checkpoint, mmproj)
    assert vision is not None
    return vision


def features(device: Device, vision: Vision) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The rows of PICTURE, and its pixels."""
    pixels = vision.processor.pixels(PICTURE)
    images = vision.tower.rows(pixels)
    rows = [device.read(image.rows, np.float32, (image.n, TEXT["hidden_size"])) for image in images]
    assert len({image.digest for image in images}) == len(images) == len(pixels.values)
    assert [rows * columns for rows, columns in pixels.grids] == [image.n for image in images]
    return np.concatenate(rows), pixels.values


def cosine(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    lengths = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected, axis=1)
    return float((np.sum(actual * expected, axis=1) / lengths).min())


@pytest.mark.parametrize("model_type", slow_except(["gemma3", "smolvlm", "idefics3"], "gemma3", "smolvlm"))
def test_a_folder(device: Device, tmp_path: Path, model_type: str) -> None:
    actual, pixels = features(device, loaded(device, save_vision(tmp_path, model_type)))
    assert relative_error(actual, image_features(random_model(model_type), pixels)) < BOUND


@pytest.mark.parametrize("dtype", slow_except(["float16", "bfloat16"], "float16"))
@pytest.mark.parametrize("model_type", slow_except(["gemma3", "smolvlm"], "smolvlm"))
def test_16_bit_weights(default_device: Device, tmp_path: Path, model_type: str, dtype: str) -> None:
    actual, pixels = features(default_device, loaded(default_device, save_vision(tmp_path, model_type, dtype)))
    assert cosine(actual, image_features(random_model(model_type), pixels)) > COSINE


@pytest.mark.parametrize("format", slow_except(["F32", "F16", "BF16", "Q8_0"], "F32", "Q8_0"))
@pytest.mark.parametrize("model_type", slow_except(["gemma3", "smolvlm"], "smolvlm"))
def test_an_mmproj_file(default_device: Device, tmp_path: Path, model_type: str, format: str) -> None:
    folder = save_vision(tmp_path / "model", model_type)
    file = save_mmproj(tmp_path / "mmproj.gguf", model_type, format)
    actual, pixels = features(default_device, loaded(default_device, folder, file))
    expected = image_features(random_model(model_type), pixels)
    if format == "F32":
        assert relative_error(actual, expected) < BOUND
    assert cosine(actual, expected) > (0.9995 if format == "Q8_0" else COSINE)


def test_an_mmproj_file_of_an_older_converter(default_device: Device, tmp_path: Path) -> None:
    folder = save_vision(tmp_path / "model", "gemma3")
    file = save_mmproj(tmp_path / "mmproj.gguf", "gemma3", old_names=True)
    actual, pixels = features(default_device, loaded(default_device, folder, file))
    assert relative_error(actual, image_features(random_model("gemma3"), pixels)) < BOUND


def test_both_sources_prepare_pictures_alike(default_device: Device, tmp_path: Path) -> None:
    for model_type in ("gemma3", "smolvlm"):
        folder = save_vision(tmp_path / model_type, model_type)
        file = save_mmproj(tmp_path / f"{model_type}.gguf", model_type)
        a, b = (loaded(default_device, folder, mmproj).processor.pixels(PICTURE) for mmproj in (None, file))
        assert (a.text, a.digest) == (b.text, b.digest)
        np.testing.assert_array_equal(a.values, b.values)


def test_names_in_older_folders(default_device: Device, tmp_path: Path) -> None:
    """Before transformers 4.52 the vision tower's names had another form, and newer ones begin with model."""
    forms: tuple[Callable[[str], str], ...] = (
        lambda name: name.replace("vision_tower.", "vision_tower.vision_model."),
        lambda name: f"model.{name}" if name.startswith(("vision_tower.", "multi_modal_projector.")) else name,
    )
    for i, form in enumerate(forms):
        folder = save_vision(tmp_path / str(i), "gemma3")
        changed(folder, lambda tensors, form=form: {form(name): values for name, values in tensors.items()})  # type: ignore[misc]
        actual, pixels = features(default_device, loaded(default_device, folder))
        assert relative_error(actual, image_features(random_model("gemma3"), pixels)) < BOUND


@pytest.mark.parametrize("trained_side", [1, 2, 3, 7, 14, 16, 18, 24, 26, 27, 32, 64])
def test_positions(trained_side: int) -> None:
    """Tiles of fewer, as many and more patches than the positions were trained for."""
    import torch
    from transformers import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    config = Idefics3VisionConfig(hidden_size=1, image_size=trained_side, patch_size=1, num_channels=1)
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(trained_side**2)[:, None])
        for side in {trained_side, max(1, trained_side // 2), 2 * trained_side}:
            mask = torch.ones(1, side, side, dtype=torch.bool)
            expected = embeddings(torch.zeros(1, 1, side, side), mask)[0, :, 0].numpy()
            np.testing.assert_array_equal(position_ids(side, trained_side), expected)


def changed(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    from safetensors.numpy import load_file, save_file

    file = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(x) for name, x in change(load_file(file)).items()}, file)
    return folder


NORM = "vision_tower.post_layernorm.weight"
MATRIX = "vision_tower.encoder.layers.1.mlp.fc1.weight"


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda x: x.pop(NORM), CheckpointError, "vision.post_layernorm.weight is missing"),
        (lambda x: x.update({NORM: x[NORM][:32]}), CheckpointError, r"has the shape \[32\], expected \[96\]"),
        (
            lambda x: x.update({NORM: x[NORM] * np.nan}),
            CheckpointError,
            "post_layernorm.weight has values that",
        ),
        (lambda x: x.update({MATRIX: x[MATRIX] * np.inf}), CheckpointError, "layers.1.mlp.fc1.weight has values that"),
        (lambda x: x.update({"vision_tower.pre.weight": x[NORM]}), UnsupportedModelError, "'vision.pre.weight' is not"),
    ],
)
def test_damaged_folders(
    default_device: Device,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    kind: type[LlmclError],
    message: str,
) -> None:
    def change_some(tensors: dict[str, Any]) -> dict[str, Any]:
        change(tensors)
        return tensors

    folder = changed(save_vision(tmp_path, "gemma3"), change_some)
    with pytest.raises(kind, match=message):
        loaded(default_device, folder)


def test_mmproj_files_of_other_models(default_device: Device, tmp_path: Path) -> None:
    import gguf

    gemma = save_vision(tmp_path / "gemma", "gemma3")
    with pytest.raises(UsageError, match=r"smol.gguf is for another model: its projector idefics3 gives rows of 48"):
        loaded(default_device, gemma, save_mmproj(tmp_path / "smol.gguf", "smolvlm"))
    for architecture, projector, kind, message in (
        ("llama", "gemma3", UsageError, "general.architecture 'llama'; expected clip, an mmproj file"),
        ("clip", "resampler", UnsupportedModelError, "has the projector 'resampler'; llmcl supports gemma3, idefics3"),
        ("clip", "gemma3", CheckpointError, "clip.vision.projection_dim is missing"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "other.gguf", architecture)
        writer.add_clip_projector_type(projector)
        writer.add_tensor("v.post_ln.weight", np.ones(TOWER["hidden_size"], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(kind, match=message):
            loaded(default_device, gemma, tmp_path / "other.gguf")


def test_models_without_a_vision_part(default_device: Device, tmp_path: Path) -> None:
    """A text model, and a multimodal model whose text part was saved alone."""
    text = {"language_model", "lm_head"}
    folder = changed(
        save_vision(tmp_path, "gemma3"),
        lambda tensors: {name: x for name, x in tensors.items() if name.split(".")[0] in text},
    )
    with open_checkpoint(str(folder)) as checkpoint:
        assert load_vision(default_device, checkpoint) is None
