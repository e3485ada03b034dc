"""PyTorch's flex_attention as it is for all tests of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def eager_flex_attention() -> Iterator[None]:
    """PyTorch's runs as it is written. Otherwise each call is traced by its compiler first, which takes 0.4 s."""
    from torch.nn.attention import flex_attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        yield
