"""Lets a user's function change the logits on the host before a token is chosen.

Only a logits processor moves more than 4 bytes a token between device and host: the logits are read and written back,
4 bytes for every token in the vocabulary, both ways. `Device.traffic` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmcl.errors import UsageError, one_line, shown
from llmcl.models.model import Model

LogitsProcessor = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float32]], npt.NDArray[Any]]
"""(token_ids int64 [n], logits float32 [vocab]) -> logits [vocab]: a new array, or the argument changed in place.

token_ids: the text so far, prompt included. -inf rules a token out.
"""


def process_logits(model: Model, row: int, processor: LogitsProcessor, token_ids: Sequence[int]) -> None:
    """Lets the processor change a row of `act.logits` between a step and choosing the token.

    Raises UsageError if the processor fails or does not return logits.
    """
    device, vocab_size, logits = model.device, model.config.vocab_size, model.act.logits
    at = 4 * vocab_size * row
    before = device.read(logits, np.float32, (vocab_size,), at)
    device.write(logits, processed(processor, token_ids, before), at)


def processed(processor: LogitsProcessor, token_ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    """Returns the changed logits, float32 [vocab], after checks. Raises the errors of `process_logits`."""
    ids, n = np.array(token_ids, np.int64), logits.size
    try:
        changed = processor(ids, logits)
    except Exception as error:
        raise UsageError(
            f"logits_processor failed after token {ids.size} of the text: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not isinstance(changed, np.ndarray) or changed.shape != (n,) or changed.dtype.kind not in "fiu":
        what = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, np.ndarray) else shown(changed)
        raise UsageError(f"logits_processor returned {what}; expected an array of numbers [{n}]")
    with np.errstate(over="ignore"):
        out = np.ascontiguousarray(changed, np.float32)
    if not np.isfinite(best := out.max()):
        what = "nothing but -inf, so that no token is left" if best == -np.inf else f"a logit of {best}"
        raise UsageError(f"logits_processor returned {what}; expected finite numbers, or -inf for tokens to rule out")
    return out
