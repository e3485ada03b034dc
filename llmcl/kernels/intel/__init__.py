"""Kernels for Intel GPUs with matrix units. Intel GPUs without matrix units run the portable kernels."""

from __future__ import annotations

from llmcl.kernels.implementation import Implementation
from llmcl.kernels.intel.linear import IntelLinearPrefill

IMPLEMENTATIONS: tuple[Implementation, ...] = (IntelLinearPrefill(),)
