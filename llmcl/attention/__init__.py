"""Attention: the cache's kernels for one token (decode) and for many (prefill)."""

from llmcl.attention.kernels import AttentionShape, attention_decode, attention_prefill, decode_splits

__all__ = ["AttentionShape", "attention_decode", "attention_prefill", "decode_splits"]
