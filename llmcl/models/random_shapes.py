"""Model shapes, from published config.json files, for speed tests without a download."""

from __future__ import annotations

import json
import os
from os import PathLike
from pathlib import Path
from typing import Any

from llmcl.architectures.config.hf import config_from_hf
from llmcl.architectures.config.model_config import ModelConfig
from llmcl.errors import CheckpointError, UsageError, one_line, shown

# Contents of config.json by name. Phi's long factor lists of the rotary scaling are left out.
RANDOM_SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def random_shape_config(shape: str) -> ModelConfig:
    """Returns the configuration for a name in RANDOM_SHAPES or a path to a config.json. Raises UsageError for anything
    else.
    """
    return config_from_hf(random_shape_json(shape))


def random_shape_json(shape: str) -> dict[str, Any]:
    """Returns the JSON object from the shape's config.json."""
    if not isinstance(shape, (str, PathLike)):
        raise UsageError(f"shape is {shown(shape)}; expected the name of a shape, or the path of a config.json")
    if shape in RANDOM_SHAPES:
        return RANDOM_SHAPES[shape]
    from llmcl.checkpoint.files import read_json

    try:
        os.stat(shape)
        return read_json(Path(shape))
    except FileNotFoundError:
        reason = "there is no such file"
    except OSError as error:  # a name too long, or an unreadable folder
        reason = f"it cannot be read: {error.strerror}"
    except (CheckpointError, ValueError) as error:
        reason = one_line(error)
    raise UsageError(
        f"random shape {shown(shape)} is neither one of {', '.join(RANDOM_SHAPES)} nor a readable config.json "
        f"({reason})"
    )
