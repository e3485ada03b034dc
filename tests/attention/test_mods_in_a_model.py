"""A user's score_mod and mask_mod in a model's attention, against transformers given the same rule as a bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import model_configs, random_weights, relative_error, save_folder, transformers_model

import llmcl
from llmcl.attention import masks, maximum
from llmcl.errors import UsageError
from llmcl.runtime.platforms import find_devices

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")

N_TOKENS = 90  # past the window, over several tiles of keys
WINDOW = 20
N_DECODED = 6
distance_penalty = np.array([0.0, 0.5, 1.0, 2.0], np.float32)


def far_keys_count_less(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    far = maximum(q_idx - kv_idx, 0)  # keys behind the causal mask get a score, too
    return score - 0.05 * far * distance_penalty[far // 32]


# For "gpu" a device that gets the portable kernels, or the same as if it were one: Mesa compiles them in a sixth of the
# time that Intel's runtime takes.
@pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rule", ["window", "score"])
def test_prefill_and_decode_follow_the_rule(
    tmp_path: Path, default_device: Any, monkeypatch: pytest.MonkeyPatch, rule: str, kind: str
) -> None:
    import dataclasses

    from llmcl.runtime import device as device_module

    entry = dataclasses.replace(default_device.entry, kind=kind)
    if kind == "gpu":
        entry = next((other for other in find_devices() if other.usable and other.is_software), entry)
    monkeypatch.setattr(device_module, "select_device", lambda request: entry)
    config = next(iter(model_configs().values()))
    weights = random_weights(config, seed=3)
    folder = save_folder(tmp_path / "model", config, weights)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, N_TOKENS).tolist()
    far = np.arange(N_TOKENS)[:, None] - np.arange(N_TOKENS)[None, :]
    bias = np.where(far < 0, -np.inf, 0.0)
    options: dict[str, Any]
    if rule == "window":
        options, bias = {"mask_mod": masks.sliding_window(WINDOW)}, np.where(far >= WINDOW, -np.inf, bias)
    else:
        options = {"score_mod": far_keys_count_less}
        bias = bias - np.where(far >= 0, 0.05 * far * distance_penalty[np.clip(far, 0, None) // 32], 0.0)
    model = transformers_model(config, weights)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        mask = torch.from_numpy(bias[None, None].astype(np.float32))
        expected = model(torch.tensor([ids]), attention_mask=mask).logits[0].numpy()
    with llmcl.load(str(folder), dtype="float32", max_context=128, **options) as llm:
        assert relative_error(llm.logits(ids), expected) < 1e-4
        llm.model.cache.truncate(llm.sequence, 0)
        llm.model.prefill(llm.sequence, ids[:-N_DECODED])
        for token in ids[-N_DECODED:]:
            llm.model.decode_token(llm.sequence, token)
        decoded = llm.device.read(llm.model.act.logits, np.float32, (config.vocab_size,))
        assert relative_error(decoded, expected[-1]) < 1e-4


def test_a_window_in_chunks_is_the_window_in_one_piece(tmp_path: Path) -> None:
    config = next(iter(model_configs().values()))
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=3))
    ids = np.random.default_rng(1).integers(0, config.vocab_size, N_TOKENS).tolist()
    window = masks.sliding_window(WINDOW)
    with llmcl.load(str(folder), dtype="float32", max_context=128, mask_mod=window) as llm:
        logits = {}
        for chunk in (N_TOKENS, 1, 7, 16, 33, 64):
            llm.model.cache.truncate(llm.sequence, 0)
            llm.model.prefill(llm.sequence, ids, chunk=chunk)
            logits[chunk] = llm.device.read(llm.model.act.logits, np.float32, (config.vocab_size,))
            assert relative_error(logits[chunk], logits[N_TOKENS]) < 1e-5, chunk


def test_a_lookup_out_of_bounds_is_refused_when_loading(tmp_path: Path) -> None:
    config = next(iter(model_configs().values()))
    folder = save_folder(tmp_path / "model", config, random_weights(config, seed=3))
    short = np.zeros(16, np.float32)

    def reads_too_far(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + short[kv_idx]

    with pytest.raises(UsageError, match="short"):
        llmcl.load(str(folder), dtype="float32", max_context=128, score_mod=reads_too_far)
