"""How many examples Hypothesis tries: with `--quick` a quarter of what a test asks for."""

from __future__ import annotations

share = 1.0


def examples(n: int) -> int:
    return max(int(n * share), 1)
