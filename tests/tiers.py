"""The two tiers of tests: `make test`, and with LLMCL_TEST_FULL=1 all cases on all devices."""

from __future__ import annotations

import os

FULL = "LLMCL_TEST_FULL"


def is_full() -> bool:
    return os.environ.get(FULL, "0") not in ("", "0")
