"""Kernels for NVIDIA GPUs whose driver takes inline PTX: warps, asynchronous copies, matrix units."""

from __future__ import annotations

from llmcl.kernels.implementation import Implementation
from llmcl.kernels.nvidia.attention import (
    HopperAttentionPrefill,
    NvidiaAttentionDecode,
    NvidiaAttentionFewQueries,
    NvidiaAttentionPrefill,
    NvidiaRopeAppend,
)
from llmcl.kernels.nvidia.experts import HopperExpertsPrefill, NvidiaExpertsFewRows
from llmcl.kernels.nvidia.few_rows_chain import NvidiaFewRowsChain
from llmcl.kernels.nvidia.linear import (
    HopperLinearPrefill,
    NvidiaLinearDecode,
    NvidiaLinearDecodeQuantized,
    NvidiaLinearPrefill,
    NvidiaLinearPrefillQuantized,
)
from llmcl.kernels.nvidia.linear_few_rows import NvidiaLinearFewRows
from llmcl.kernels.nvidia.persistent_layers import NvidiaPersistentLayers

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    HopperLinearPrefill(),
    HopperAttentionPrefill(),
    HopperExpertsPrefill(),
    NvidiaExpertsFewRows(),
    NvidiaLinearDecode(),
    NvidiaLinearDecodeQuantized(),
    NvidiaLinearFewRows(),
    NvidiaLinearPrefill(),
    NvidiaLinearPrefillQuantized(),
    NvidiaAttentionDecode(),
    NvidiaAttentionPrefill(),
    NvidiaAttentionFewQueries(),
    NvidiaRopeAppend(),
    NvidiaPersistentLayers(),
    NvidiaFewRowsChain(),
)
"""If two implementations support the same operands, the first is preferred."""

VARIANTS = tuple(dict.fromkeys(row.name for row in IMPLEMENTATIONS))
