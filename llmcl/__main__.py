"""`python -m llmcl`, and the program `llmcl`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    try:
        from llmcl.cli import main as run  # here, where Ctrl-C is met: it imports for a tenth of a second

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    # `python -m` puts the current folder first. A random.py there would stand in for the standard library's.
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        here = ""
    if sys.path[0] in ("", here):
        del sys.path[0]
    main()
