"""A vision part as stored in a folder or in an mmproj file."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.config.reader import Reader
from llmcl.vision.tensors import VisionTensors


@dataclass(frozen=True)
class VisionFiles:
    """Settings and tensors, under the names that the family reads (see `load.VisionFamily`)."""

    config: Reader  # config.json, or the mmproj file's metadata
    preprocessing: Reader  # preprocessor_config.json and processor_config.json; empty with an mmproj file
    tensors: VisionTensors
    hidden_size: int  # columns of the rows: the text part's hidden size
