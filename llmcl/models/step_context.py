"""The context in which a step's launches are bound: device, model description, step state and buffers."""

from __future__ import annotations

from dataclasses import dataclass

from llmcl.architectures.config import ModelConfig
from llmcl.kernels.common.step_state import StepState
from llmcl.models.activations import Activations
from llmcl.runtime.device import Device


@dataclass(frozen=True)
class StepContext:
    """Base class of everything that binds a step's launches."""

    device: Device
    config: ModelConfig
    step: StepState
    act: Activations
