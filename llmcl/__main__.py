"""`python -m llmcl`, and the program `llmcl`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from llmcl.cli import main as run  # here, where Ctrl-C is met: it imports for a tenth of a second

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
