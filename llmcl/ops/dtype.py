"""Storage types of weights and KV cache, by their public names and as kernels name them."""

from __future__ import annotations

from llmcl.errors import UsageError

KERNEL_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def is_16_bit(dtype: str) -> bool:
    return dtype in ("float16", "bfloat16")


def check_dtype(dtype: str, option: str) -> str:
    if dtype not in KERNEL_NAMES:
        raise UsageError(f"{option} is {dtype!r}; expected auto, {', '.join(KERNEL_NAMES)}")
    return dtype
