#!/usr/bin/env python
"""`llmcl tune` as a script: the fastest tile sizes of attention on an OpenCL device."""

from __future__ import annotations

from llmcl.cli.command import run_script
from llmcl.cli.tune import EPILOG, tune

if __name__ == "__main__":
    run_script(tune, EPILOG)
