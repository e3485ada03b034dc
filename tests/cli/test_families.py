"""The commands on models that are more than attention and dense layers: recurrent layers, experts, sinks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from family_files import WINDOW, save_gguf
from helpers import random_weights, save_folder, small_config
from late_kernels import compile_when_used
from programs import Run

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import ExpertSettings
from llmcl.architectures.families.family import LayerSettings
from llmcl.architectures.families.recurrent import DeltaSettings, MambaSettings, ShortConvSettings
from llmcl.runtime.device import Device

pytestmark = pytest.mark.usefixtures("separate_launches_in_module")
compiled_when_used = pytest.fixture(compile_when_used, scope="module", autouse=True)

DELTA = DeltaSettings(n_k=2, n_v=4, d_k=32, d_v=32, joined=("qkvz", "ba"))
MAMBA = MambaSettings(n_heads=4, d_head=32, n_groups=1, d_state=32)
EXPERTS, BESIDE = ExpertSettings(6, 2, 64), ExpertSettings(6, 2, 64, shared_size=32)
CONFIGS: dict[str, ModelConfig] = {
    "lfm2": small_config("lfm2", settings=[LayerSettings(recurrent=ShortConvSettings()), LayerSettings()]),
    "qwen3_next": small_config(
        "qwen3_next",
        settings=[LayerSettings(recurrent=DELTA, experts=BESIDE), LayerSettings(experts=BESIDE)],
        intermediate_size=64,
        rotary_dim=8,
        norm_offset=1.0,
    ),
    "granitemoehybrid": small_config(
        "granitemoehybrid",
        settings=[LayerSettings(recurrent=MAMBA, rotation="none"), LayerSettings(rotation="none")],
        attention_scale=0.25,
    ),
    "gpt_oss": small_config(
        "gpt_oss",
        settings=[LayerSettings(window, bias=True, output_bias=True, experts=EXPERTS) for window in (WINDOW, None)],
        intermediate_size=64,
    ),
}
TEMPLATE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
KERNELS = {
    "lfm2": "short_conv",
    "qwen3_next": "delta_rule",
    "gpt_oss": "choose_experts",
    "granitemoehybrid": "mamba_inputs",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "gpt_oss", "granitemoehybrid"])
def test_commands(name: str, run_here: Run, default_device: Device, tmp_path: Path) -> None:
    config, text = CONFIGS[name], tmp_path / "text.txt"
    weights = random_weights(config, seed=1)
    folder, file = save_folder(tmp_path / "model", config, weights), tmp_path / "model.gguf"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    save_gguf(file, config, weights)
    text.write_text("More words than a window of the measurement has.")
    device = ("-q", "--device", str(default_device.entry.index))

    def succeeds(*arguments: str, stdin: str = "") -> str:
        done = run_here("llmcl", *arguments, *device, stdin=stdin)
        assert done.returncode == 0, (arguments, done.stderr)
        return done.stdout

    assert succeeds("generate", "-m", str(folder), "-p", "Hello", "-n", "6", "--raw", "--ignore-eos").strip()
    assert len(succeeds("chat", "-m", str(folder), "-n", "6", stdin="Hello\nOnce more\n").splitlines()) >= 2
    scored = json.loads(succeeds("perplexity", "-m", str(folder), "-f", str(text), "-c", "32", "--format", "json"))
    assert scored["perplexity"] > 1.0
    profiled = succeeds("profile", "-m", str(folder), "-p", "40", "-n", "4", "-o", str(tmp_path))
    assert len(re.findall(rf"^{KERNELS[name]} ", profiled, re.MULTILINE)) == 2, "in prefill and in decode"

    quantised = tmp_path / "quantised.gguf"
    done = run_here("llmcl", "convert", str(file), str(quantised), "--quantize", "q8_0")
    assert done.returncode == 0, done.stderr
    succeeds("generate", "-m", str(quantised), "-p", "ab", "-n", "6", "--raw", "--ignore-eos")
    for target in (tmp_path / "other.gguf", tmp_path / "other"):
        refused = run_here("llmcl", "convert", str(folder), str(target), "--dtype", "bfloat16")
        assert refused.returncode == 7 and name in refused.stderr
