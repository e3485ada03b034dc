"""The attention rules of each layer: those of the model (window, soft cap), then the user's, as one pair of mods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmcl.attention.block_mask import and_masks, check_mod
from llmcl.attention.masks import sliding_window, soft_cap
from llmcl.attention.mods import MaskMod, ScoreMod, bind_mods, trace_mods
from llmcl.attention.tracing.trace import TracedMod
from llmcl.kernels.common.attention import Mods
from llmcl.models.config import ModelConfig
from llmcl.runtime.device import Device

_Rules = tuple[int | None, float | None]  # window and soft cap
_Traced = tuple[TracedMod | None, TracedMod | None]


@dataclass(frozen=True)
class LayerMods:
    """Traced mods of every layer, shared between layers of the same rules."""

    traced: dict[_Rules, _Traced]
    rules: tuple[_Rules, ...]  # of each layer

    def check(self, n_q_heads: int, max_context: int) -> None:
        """Raises UsageError when a lookup could leave its array."""
        for mods in self.traced.values():
            for mod in filter(None, mods):
                check_mod(mod, 1, n_q_heads, max_context, max_context)

    def bind(self, device: Device) -> tuple[Mods, ...]:
        """One Mods for each layer; layers with the same rules have the same, and so one program."""
        bound = {rules: bind_mods(device, *mods) for rules, mods in self.traced.items()}
        return tuple(bound[rules] for rules in self.rules)


def trace_layer_mods(
    config: ModelConfig, max_context: int, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None
) -> LayerMods:
    """The mods of each layer: the user's score_mod is given what the model's soft cap leaves of a score, and a key is
    seen where both the layer's window and the user's mask_mod let it. A window that no text reaches is left out.

    Raises UsageError, with file and line, for a function of the user's that cannot be traced.
    """
    own = trace_mods(score_mod, mask_mod)  # alone first, so that an error names the user's function
    blocks = [config.attention(i) for i in range(config.n_layers)]
    rules = tuple((_reached(block.window, max_context), block.soft_cap) for block in blocks)
    traced: dict[_Rules, _Traced] = {}
    for window, cap in set(rules):
        if cap is None and window is None:
            traced[window, cap] = own
            continue
        score: Any = score_mod if cap is None else soft_cap(cap)
        if cap is not None and score_mod is not None:
            score = _then(soft_cap(cap), score_mod)
        mask: Any = mask_mod if window is None else sliding_window(window)
        if window is not None and mask_mod is not None:
            mask = and_masks(sliding_window(window), mask_mod)
        traced[window, cap] = trace_mods(score, mask)
    return LayerMods(traced, rules)


def _reached(window: int | None, max_context: int) -> int | None:
    return None if window is None or window >= max_context else window


def _then(first: Callable[..., Any], second: Callable[..., Any]) -> ScoreMod:
    def composed_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return second(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return composed_score
