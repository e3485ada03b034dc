"""Kernels for any device: work-groups and local memory, plain OpenCL C 1.2."""

from __future__ import annotations

from llmcl.kernels.implementation import Implementation
from llmcl.kernels.portable.attention import (
    PortableAttentionDecode,
    PortableAttentionPrefill,
    PortablePackKeys,
    PortableRopeAppend,
)
from llmcl.kernels.portable.experts import (
    PortableExpertsDown,
    PortableExpertsFewRows,
    PortableExpertsGateUp,
    PortableExpertsPrefill,
)
from llmcl.kernels.portable.int8_linear import Int8LinearDecode, Int8LinearFewRows
from llmcl.kernels.portable.latent import PortableLatentAttention, PortableLinearHeads
from llmcl.kernels.portable.linear import PortableLinearDecode, PortableLinearFewRows, PortableLinearPrefill

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    Int8LinearDecode(),
    PortableLinearDecode(),
    Int8LinearFewRows(),
    PortableLinearFewRows(),
    PortableLinearPrefill(),
    PortableExpertsGateUp(),
    PortableExpertsDown(),
    PortableExpertsFewRows(),
    PortableExpertsPrefill(),
    PortableAttentionDecode(),
    PortableAttentionPrefill(),
    PortableRopeAppend(),
    PortablePackKeys(),
    PortableLatentAttention(),
    PortableLinearHeads(),
)
"""Of two that take the same, the first goes before."""
