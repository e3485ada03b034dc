"""Command R: Command A without windows. Command R+, whose heads have layer norms, is refused."""

from __future__ import annotations

from dataclasses import replace

from llmcl.architectures.families import cohere2

FAMILY = replace(
    cohere2.FAMILY,
    hf_class="CohereForCausalLM",
    gguf_name="command-r",
    windows="none",
    unrotated_full=False,
    defaults={key: value for key, value in cohere2.FAMILY.defaults.items() if key != "sliding_window"}
    | {"rope_theta": 500000.0},
    models="Command R, Aya 23, Aya Expanse",
)
