#!/usr/bin/env python
"""Measures as `llmcl bench` does."""

from __future__ import annotations

from llmcl.cli.bench import EPILOG, bench
from llmcl.cli.command import run_script

if __name__ == "__main__":
    run_script(bench, EPILOG)
