"""How many examples Hypothesis tries: in `make test` a quarter of what a test asks for."""

from __future__ import annotations

from tiers import is_full


def examples(n: int) -> int:
    return n if is_full() else max(n // 4, 1)
