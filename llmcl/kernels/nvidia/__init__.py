"""Kernels for NVIDIA GPUs whose driver takes inline PTX: warps, asynchronous copies, matrix units."""

from __future__ import annotations

from llmcl.kernels.implementation import Implementation
from llmcl.kernels.nvidia.attention import (
    HopperAttentionPrefill,
    NvidiaAttentionDecode,
    NvidiaAttentionPrefill,
    NvidiaRopeAppend,
)
from llmcl.kernels.nvidia.decode_layers import NvidiaDecodeLayers
from llmcl.kernels.nvidia.linear import (
    HopperLinearPrefill,
    NvidiaLinearDecode,
    NvidiaLinearDecodeQuantized,
    NvidiaLinearPrefill,
    NvidiaLinearPrefillQuantized,
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    HopperLinearPrefill(),
    HopperAttentionPrefill(),
    NvidiaLinearDecode(),
    NvidiaLinearDecodeQuantized(),
    NvidiaLinearPrefill(),
    NvidiaLinearPrefillQuantized(),
    NvidiaAttentionDecode(),
    NvidiaAttentionPrefill(),
    NvidiaRopeAppend(),
    NvidiaDecodeLayers(),
)
"""Of two that take the same, the first goes before."""

VARIANTS = tuple(dict.fromkeys(row.name for row in IMPLEMENTATIONS))
