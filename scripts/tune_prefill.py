#!/usr/bin/env python
"""`llmcl tune` as a script: the fastest tile sizes of attention on an OpenCL device."""

from __future__ import annotations

import typer

from llmcl.cli.command import TYPER_SETTINGS, Command, run
from llmcl.cli.tune import EPILOG, tune

if __name__ == "__main__":
    app = typer.Typer(**TYPER_SETTINGS)
    app.command(cls=Command, epilog=EPILOG)(tune)
    run(app)
