"""The real models whose kernels are compiled, and the storage types in which people have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from llmcl.checkpoint.formats import FORMATS
from llmcl.checkpoint.quantize import EMBEDDINGS
from llmcl.models.config import ModelConfig
from llmcl.models.config.hf import config_from_hf
from llmcl.models.random_shapes import RANDOM_SHAPES

# As their published config.json states them.
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        **RANDOM_SHAPES["qwen3-0.6b"],
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": False,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
        "torch_dtype": "bfloat16",
        "eos_token_id": 248044,
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "tie_word_embeddings": False,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 154820,
    },
}
# The first is what a quick run compiles of a kernel that all of them have.
MODELS = (
    *("llama-3.1-8b", "gemma-2-2b", "qwen3-4b", "qwen2.5-7b", "llama-3.2-1b", "smollm2-135m"),
    *("gpt-oss-20b", "qwen3-30b-a3b", "qwen3.5-9b", "glm-4.7-flash"),
)
DTYPES = ("bfloat16", "float16", "q8_0", "q4_0", "q4_k", "mxfp4")
KV_DTYPES = ("float16", "q8_0")
PAGE_TOKENS = (None, 64)
FLOATS = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Stored:
    """A model as a file of `dtype` holds it: a folder of safetensors, or GGUF where it is quantised."""

    model: str
    dtype: str

    @property
    def from_gguf(self) -> bool:
        return self.dtype not in FLOATS

    def config(self) -> ModelConfig:
        whole = config_from_hf(RANDOM_SHAPES[self.model] if self.model in RANDOM_SHAPES else OTHER_SHAPES[self.model])
        first = next(n for n in range(2, len(whole.layers) + 1) if {*whole.layers[:n]} == {*whole.layers})
        return replace(whole, layers=whole.layers[:first])

    def format(self, tensor: str) -> str:
        """Of a matrix. Beside 4-bit numbers the embedding has more, and with q4_k some values and down projections:
        as in the files that llama.cpp calls Q4_K_M. Of gpt-oss the experts alone have 4 bits.
        """
        if self.dtype in FLOATS:
            return FLOATS[self.dtype]
        if self.dtype == "mxfp4":
            return "MXFP4" if ".experts." in tensor else "Q8_0"
        if self.dtype == "q4_k" and (
            tensor in EMBEDDINGS or tensor.endswith(("0.self_attn.v_proj.weight", "0.mlp.down_proj.weight"))
        ):
            return "Q6_K"
        return "Q8_0" if tensor in EMBEDDINGS else self.dtype.upper()


def stored_models() -> Iterator[Stored]:
    """Every model in every type whose blocks fit its rows."""
    for model in MODELS:
        for dtype in DTYPES:
            stored = Stored(model, dtype)
            config = stored.config()
            block = FORMATS[FLOATS.get(dtype, dtype.upper())].block
            fits = config.hidden_size % block == 0 and config.intermediate_size % block == 0
            if fits and (dtype != "mxfp4" or model == "gpt-oss-20b"):
                yield stored
