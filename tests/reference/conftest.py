"""The NumPy twins are judged by implementations that share nothing with them: PyTorch, transformers, gguf.

Deterministic throughout: the random numbers are seeded, so a statistical bound either always holds or never.
"""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError):
    import torch

    torch.set_num_threads(1)
