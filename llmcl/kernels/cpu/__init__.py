"""Kernels for CPUs: work-groups with a single work-item, explicit vectors of 16."""

from __future__ import annotations

from llmcl.kernels.cpu.attention import (
    CpuAttentionDecode,
    CpuAttentionPrefill,
    CpuPackKeys,
    CpuRopeAppend,
)
from llmcl.kernels.cpu.experts import CpuExpertsDown, CpuExpertsGateUp, CpuExpertsPrefill
from llmcl.kernels.cpu.latent import CpuLatentAttention, CpuLinearHeads
from llmcl.kernels.cpu.linear import (
    CpuLinearDecode,
    CpuLinearFewRows,
    CpuLinearPrefill,
)
from llmcl.kernels.cpu.persistent_step import CpuPersistentStep
from llmcl.kernels.implementation import Implementation

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    CpuLinearDecode(),
    CpuLinearPrefill(),
    CpuLinearFewRows(),
    CpuExpertsGateUp(),
    CpuExpertsDown(),
    CpuExpertsPrefill(),
    CpuAttentionDecode(),
    CpuAttentionPrefill(),
    CpuRopeAppend(),
    CpuPackKeys(),
    CpuLatentAttention(),
    CpuLinearHeads(),
    CpuPersistentStep(),
)
"""Of two that take the same, the first goes before."""
