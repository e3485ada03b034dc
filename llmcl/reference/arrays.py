"""The twins' array types, and conversion to float64 for computing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]
Scalar = float | np.float32


def wide(x: Array) -> Float64:
    return np.asarray(x, dtype=np.float64)
