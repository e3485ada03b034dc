"""Names and types of answer options, for type checkers. `LLM.stream` describes the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from llmcl.engine.generation import Begin
from llmcl.engine.logits_processor import LogitsProcessor
from llmcl.engine.message_parts import Picture
from llmcl.models.sequence import SequenceState
from llmcl.progress import Progress


class AnswerSettings(TypedDict, total=False):
    """The keyword arguments of `LLM.generate`; `LLM.stream` takes the same."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_window: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    seed: int | None
    stop: str | Sequence[str]
    ignore_eos: bool
    min_tokens: int
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    schema: Any
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    logits_processor: LogitsProcessor | None
    lora: str | Mapping[str, float] | None
    raw: bool
    system_prompt: str | None
    images: Sequence[Picture] | Sequence[Sequence[Picture]] | None
    progress: Progress | None
    wait: bool


class StreamSettings(AnswerSettings, total=False):
    """The keyword arguments of `LLM.stream`; sequence and begin are for conversations."""

    sequence: SequenceState | None
    begin: Begin | None
