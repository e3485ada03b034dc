"""Combines each layer's attention rules (the model's, then the user's) into one pair of mods."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from llmcl.architectures.config import ModelConfig
from llmcl.architectures.families.blocks import Attention, QueryScale
from llmcl.attention.block_mask import and_masks, check_mod
from llmcl.attention.functions import log
from llmcl.attention.masks import sliding_window, soft_cap, window_both_ways
from llmcl.attention.mods import MaskMod, ScoreMod, bind_mods, trace_mods
from llmcl.attention.tracing.trace import TracedMod
from llmcl.kernels.common.linear import FEW_ROWS
from llmcl.kernels.common.mods import Mods
from llmcl.runtime.device import Device

# window, chunk, query scale, soft cap
_Rules = tuple[int | None, int | None, QueryScale | None, float | None]
_NO_RULES: _Rules = (None, None, None, None)
_Traced = tuple[TracedMod | None, TracedMod | None]


@dataclass(frozen=True)
class LayerMods:
    """Traced mods of every layer, shared between layers with equal rules."""

    traced: dict[_Rules, _Traced]
    rules: tuple[_Rules, ...]  # per layer

    def check(self, n_q_heads: int, max_context: int) -> None:
        """Raises UsageError if a lookup could read outside its array at any batch index that a sequence may have."""
        for mods in self.traced.values():
            for mod in filter(None, mods):
                check_mod(mod, FEW_ROWS[-1], n_q_heads, max_context, max_context)

    def bind(self, device: Device) -> tuple[Mods, ...]:
        """Returns one Mods per layer. Layers with equal rules share a Mods, and therefore a program."""
        bound = {rules: bind_mods(device, *mods) for rules, mods in self.traced.items()}
        return tuple(bound[rules] for rules in self.rules)


def trace_layer_mods(
    config: ModelConfig, max_context: int, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None
) -> LayerMods:
    """Returns the mods of each layer. The user's score_mod receives the score after the model's own rules. A key is
    visible if the layer's window and the user's mask_mod both allow it. Windows and query scales that need a context
    longer than max_context are dropped.

    Raises UsageError, with file and line, if a user function cannot be traced.
    """
    user_mods = trace_mods(score_mod, mask_mod)  # traced alone first, to name the user's function in errors
    attends = config.attention_layers
    rules = tuple(
        _rules(config.attention(i), max_context) if i in attends else _NO_RULES for i in range(config.n_layers)
    )
    traced: dict[_Rules, _Traced] = {}
    for rule in set(rules):
        window, chunk, scale, cap = rule
        if rule == _NO_RULES:
            traced[rule] = user_mods
            continue
        of_model = [] if scale is None else [_scaled(scale)]
        of_model += [] if cap is None else [soft_cap(cap)]
        score_mods = [*of_model, *([] if score_mod is None else [score_mod])]
        score: Any = reduce(_then, score_mods) if score_mods else None
        see = window_both_ways if config.bidirectional else sliding_window
        masks = [*([] if window is None else [see(window)]), *([] if chunk is None else [_chunked(chunk)])]
        masks += [] if mask_mod is None else [mask_mod]
        mask: Any = and_masks(*masks) if len(masks) > 1 else next(iter(masks), None)
        traced[rule] = trace_mods(score, mask)
    return LayerMods(traced, rules)


def _rules(block: Attention, max_context: int) -> _Rules:
    """Returns the rules that can take effect within max_context tokens."""
    window, chunk, scale = block.window, block.chunk, block.query_scale
    if window is not None and window >= max_context:
        window = None
    if chunk is not None and chunk >= max_context:
        chunk = None
    if scale is not None and scale.length >= max_context + scale.offset:
        scale = None
    return window, chunk, scale, block.soft_cap


def _chunked(chunk: int) -> MaskMod:
    def chunked_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx // chunk == q_idx // chunk

    return chunked_mask


def _scaled(scale: QueryScale) -> ScoreMod:
    def scaled_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        position = q_idx + scale.offset if scale.offset else q_idx
        return score * (1.0 + scale.beta * log(1.0 + position // scale.length))

    return scaled_score


def _then(first: ScoreMod, second: ScoreMod) -> ScoreMod:
    def composed_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return second(first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return composed_score
