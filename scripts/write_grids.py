"""Writes llmcl/checkpoint/grids.py: the lookup grids of ggml's IQ3_*, IQ2_* and IQ1_* formats, from the package `gguf`.

python scripts/write_grids.py > llmcl/checkpoint/grids.py
"""

from __future__ import annotations

import base64
import textwrap

import gguf
import numpy as np

HEAD = '''"""Lookup grids of ggml's IQ3_*, IQ2_* and IQ1_* formats, written by scripts/write_grids.py.

An entry has the sizes of 4 numbers (IQ3_*, 3 bits each) or of 8 (2 bits each), the first number in the lowest bits.
"""
'''


def encoded(name: str) -> str:
    """Returns a grid's entries as little-endian 16-bit words in base64."""
    source = getattr(gguf.quants, name)
    source.init_grid()
    sizes = np.searchsorted(source.grid_map, source.grid.reshape(source.grid_shape)).astype(np.uint32)
    bits = 3 if len(source.grid_map) > 4 else 2
    words = (sizes << (bits * np.arange(sizes.shape[1], dtype=np.uint32))).sum(axis=1)
    return base64.b64encode(words.astype("<u2").tobytes()).decode()


def main() -> None:
    print(HEAD)
    print("GRIDS = {")
    for name in ("IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"):
        print(f'    "{name}": (')
        for line in textwrap.wrap(encoded(name), 108):
            print(f'        "{line}"')
        print("    ),")
    print("}")


if __name__ == "__main__":
    main()
