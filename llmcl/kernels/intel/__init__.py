"""Kernels for Intel's GPUs with matrix units; others of Intel's run the portable ones."""

from __future__ import annotations

from llmcl.kernels.implementation import Implementation
from llmcl.kernels.intel.linear import IntelLinearPrefill

IMPLEMENTATIONS: tuple[Implementation, ...] = (IntelLinearPrefill(),)
