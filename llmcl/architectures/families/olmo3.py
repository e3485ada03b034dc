"""OLMo 3: OLMo 2 with a window and unscaled rotary frequencies in three layers out of four."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import olmo2

FAMILY = replace(
    olmo2.FAMILY,
    hf_class="Olmo3ForCausalLM",
    gguf_name=None,  # OLMo 2's name
    windows=4,
    local_rope=True,
    gguf_windowed=None,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    models="OLMo 3 7B, 32B",
)
