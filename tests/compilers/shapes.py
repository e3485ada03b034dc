"""The real models whose kernels are compiled, and the storage types in which people have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from llmcl.architectures.config import ModelConfig
from llmcl.checkpoint.formats import FORMATS
from llmcl.checkpoint.quantize import EMBEDDINGS
from llmcl.models.random_shapes import random_shape_config

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
        return _config(self.model)

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


@cache
def _config(model: str) -> ModelConfig:
    """Its first layers, until there is one of each kind."""
    whole = random_shape_config(model)
    first = next(n for n in range(2, len(whole.layers) + 1) if {*whole.layers[:n]} == {*whole.layers})
    return replace(whole, layers=whole.layers[:first])


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
