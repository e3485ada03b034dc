"""The table of sampling parameters, read by every interface: Python, command line, server, request files and device.

docs/design/adding_a_sampler.md explains how to add a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Annotated, Any, get_type_hints

from llmcl.errors import UsageError, shown

MAX_INT = (1 << 31) - 1
DRY_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


@dataclass(frozen=True)
class Parameter:
    """The accepted values of a sampling parameter, and its names outside Python."""

    flags: tuple[str, ...]  # on the command line
    metavar: str
    low: float
    high: float
    help: str
    expected: str  # completes "temperature is -1; expected ..."
    typed: str  # likewise for a value on the command line
    off: float | None = None  # accepted as well, although outside the range
    above: bool = False  # `low` itself is excluded
    http_fields: tuple[str, ...] = ()  # names in requests of every API, the preferred name first; () for `name`
    http_range: tuple[float, float] | None = None  # None for the range above
    http_default: float | None = None  # None for `default`
    http_meanings: Mapping[Any, float | None] = field(default_factory=dict)  # -1 is often "off" in llama-server
    config_key: str | None = None  # in generation_config.json; None if models recommend no value
    gguf_key: str | None = None  # in GGUF metadata, after general.sampling.
    name: str = ""  # in Python and in request files; filled in below, like the default
    default: Any = None

    @property
    def kind(self) -> type[int] | type[float]:
        return float if isinstance(self.default, float) else int

    @property
    def setting(self) -> str:
        """The name in chat's /set."""
        return next(flag for flag in self.flags if flag.startswith("--"))[2:]

    @property
    def http_limits(self) -> tuple[Any, Any]:
        """The lowest and the highest value in a request, special values included."""
        low, high = self.http_range or (self.low, self.high)
        return min([low, *self.http_meanings, *([] if self.off is None else [self.off])]), high

    def accepts(self, value: float) -> bool:
        if value == self.off:
            return True
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def checked(self, value: Any) -> Any:
        """Returns the value as a Python number. Raises UsageError if it is out of range."""
        if value is self.default:
            return value
        numbers: Any = Integral if self.kind is int else Real
        if not isinstance(value, numbers) or (self.kind is float and not -math.inf < value < math.inf):
            raise self._wrong(value, self.expected if self.kind is int else "a number")
        if self.high == MAX_INT:  # a number of tokens, and more than the device's integers hold means all
            value = min(value, MAX_INT)
        if type(value) not in (int, float):  # NumPy's float16 has no room for the ranges
            value = self.kind(value)
        if not self.accepts(value):
            raise self._wrong(value, self.expected)
        return value

    def _wrong(self, value: Any, expected: str) -> UsageError:
        return UsageError(f"{self.name} is {shown(value)}; expected {expected}")


# float32 on the device: a smaller temperature would be 0. A logit of 100 with the largest repetition penalty and the
# smallest temperature stays finite, and so does the largest presence penalty times a token count.
LEAST, MOST = 1e-30, 1e30


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters, a row each. Raises UsageError if a value is out of range."""

    # fmt: off
    temperature: Annotated[float, Parameter(
        ("--temp", "--temperature"), "T", LEAST, MOST, off=0, http_default=1.0,
        help="Sampling temperature, such as 0.8. 0 always takes the likeliest token (greedy).",
        expected=f"0 (the most likely token), or {LEAST} to {MOST}", typed="a number, 0 or more (1e30 at most)",
        config_key="temperature", gguf_key="temp",
    )] = 0.0
    top_k: Annotated[int, Parameter(
        ("--top-k",), "K", 0, MAX_INT, http_meanings={-1: 0}, config_key="top_k", gguf_key="top_k",
        help="Sample from the K likeliest tokens; 0: off.",
        expected="0 (off) to 2^31 - 1", typed="a whole number, 0 (off) to 2^31 - 1",
    )] = 0
    top_p: Annotated[float, Parameter(
        ("--top-p",), "P", 0, 1, above=True, http_meanings={0: LEAST}, config_key="top_p", gguf_key="top_p",
        help="Sample from the likeliest tokens that reach probability P together; 1: off.",
        expected="more than 0 and at most 1 (off)", typed="a number above 0 and at most 1 (1: off)",
    )] = 1.0
    min_p: Annotated[float, Parameter(
        ("--min-p",), "P", LEAST, 1, off=0, config_key="min_p", gguf_key="min_p",
        help="Drop tokens less likely than P times the likeliest; 0: off.",
        expected=f"0 (off), or {LEAST} to 1", typed="a number from 0 (off) to 1",
    )] = 0.0
    repeat_penalty: Annotated[float, Parameter(
        ("--repeat-penalty", "--repetition-penalty"), "R", 1e-6, 1e6,
        help="Penalty factor for tokens already in the text; 1: off.",
        expected=f"{1e-6} to {1e6}; 1 is off", typed="a number above 0 (1e-6 to 1e6; 1: off)",
        http_fields=("repeat_penalty", "repetition_penalty"),
        config_key="repetition_penalty", gguf_key="penalty_repeat",
    )] = 1.0
    repeat_window: Annotated[int, Parameter(
        ("--repeat-last-n",), "N", 0, MAX_INT, http_fields=("repeat_last_n",), http_meanings={-1: MAX_INT},
        gguf_key="penalty_last_n", help="Tokens that --repeat-penalty looks back at, prompt included; 0: off.",
        expected="0 (off) to 2^31 - 1", typed="a whole number, 0 (off) to 2^31 - 1",
    )] = 64
    presence_penalty: Annotated[float, Parameter(
        ("--presence-penalty",), "P", -100, 100, http_range=(-2, 2),
        help="Penalty for tokens already in the answer, usually 0.1 to 2; 0: off.",
        expected="-100 to 100; 0 is off", typed="a number from -100 to 100 (0: off)",
    )] = 0.0
    frequency_penalty: Annotated[float, Parameter(
        ("--frequency-penalty",), "P", -100, 100, http_range=(-2, 2),
        help="Penalty for each time that a token is already in the answer; 0: off.",
        expected="-100 to 100; 0 is off", typed="a number from -100 to 100 (0: off)",
    )] = 0.0
    dry_multiplier: Annotated[float, Parameter(
        ("--dry-multiplier",), "M", 0, 100,
        help="DRY: penalty for a token that would continue a repetition, such as 0.8; 0: off.",
        expected="0 (off) to 100", typed="a number from 0 (off) to 100",
    )] = 0.0
    dry_base: Annotated[float, Parameter(
        ("--dry-base",), "B", 1, 100,
        help="DRY's penalty grows by this factor with each further token that is repeated.",
        expected="1 to 100", typed="a number from 1 to 100",
    )] = 1.75
    dry_allowed_length: Annotated[int, Parameter(
        ("--dry-allowed-length",), "N", 0, MAX_INT,
        help="Tokens that may be repeated without DRY's penalty.",
        expected="0 to 2^31 - 1", typed="a whole number, 0 to 2^31 - 1",
    )] = 2
    dry_penalty_last_n: Annotated[int, Parameter(
        ("--dry-penalty-last-n",), "N", 0, MAX_INT, off=-1,
        help="Tokens that DRY looks back at, prompt included; 0: off; -1: all.",
        expected="0 (off) to 2^31 - 1, or -1 (all)", typed="a whole number, 0 (off) to 2^31 - 1, or -1 (all)",
    )] = -1
    typical_p: Annotated[float, Parameter(
        ("--typical", "--typical-p"), "P", 0, 1, above=True, http_meanings={0: LEAST}, config_key="typical_p",
        help="Sample from the tokens of the most typical surprise that reach probability P together; 1: off.",
        expected="more than 0 and at most 1 (off)", typed="a number above 0 and at most 1 (1: off)",
    )] = 1.0
    top_n_sigma: Annotated[float, Parameter(
        ("--top-nsigma", "--top-n-sigma"), "N", 0, 1e6, http_meanings={-1: 0},
        help="Drop tokens more than N standard deviations of the logits below the likeliest; 0: off.",
        expected="0 (off) to 1e6", typed="a number from 0 (off) to 1e6",
    )] = 0.0
    xtc_probability: Annotated[float, Parameter(
        ("--xtc-probability",), "P", 0, 1, gguf_key="xtc_probability",
        help="Chance that a token is sampled without the likeliest ones (XTC); 0: off.",
        expected="0 (off) to 1", typed="a number from 0 (off) to 1",
    )] = 0.0
    xtc_threshold: Annotated[float, Parameter(
        ("--xtc-threshold",), "P", 0, 1, gguf_key="xtc_threshold",
        help="XTC drops all tokens above this probability but the least likely one; above 0.5: off.",
        expected="0 to 1", typed="a number from 0 to 1",
    )] = 0.1
    dynatemp_range: Annotated[float, Parameter(
        ("--dynatemp-range",), "T", 0, 100,
        help="Temperatures from --temp minus T to --temp plus T, by the entropy of the tokens left; 0: off.",
        expected="0 (off) to 100", typed="a number from 0 (off) to 100",
    )] = 0.0
    dynatemp_exponent: Annotated[float, Parameter(
        ("--dynatemp-exp",), "E", 0, 100,
        help="Exponent of the entropy for --dynatemp-range.",
        expected="0 to 100", typed="a number from 0 to 100",
    )] = 1.0
    mirostat: Annotated[int, Parameter(
        ("--mirostat",), "2", 2, 2, off=0, gguf_key="mirostat",
        help="2: Mirostat 2.0, which aims at a surprise and replaces the samplers but the penalties; 0: off.",
        expected="0 (off) or 2", typed="0 (off) or 2",
    )] = 0
    mirostat_tau: Annotated[float, Parameter(
        ("--mirostat-ent",), "T", 0, 100, gguf_key="mirostat_tau",
        help="The surprise that Mirostat aims at, in bits a token.",
        expected="0 to 100", typed="a number from 0 to 100",
    )] = 5.0
    mirostat_eta: Annotated[float, Parameter(
        ("--mirostat-lr",), "R", 0, 100, gguf_key="mirostat_eta",
        help="Mirostat's learning rate.",
        expected="0 to 100", typed="a number from 0 to 100",
    )] = 0.1
    seed: Annotated[int | None, Parameter(
        ("-s", "--seed"), "S", 0, (1 << 64) - 1, http_meanings={-1: None},
        help="Seed of the sampling: repeats an answer on the same device.  [default: random, reported]",
        expected="a whole number, 0 to 2^64 - 1", typed="a whole number from 0 to 2^64 - 1",
    )] = None
    # fmt: on

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            if (checked := parameter.checked(value)) is not value:
                object.__setattr__(self, name, checked)


_HINTS = get_type_hints(SamplingOptions, include_extras=True)
PARAMETERS: dict[str, Parameter] = {
    each.name: replace(_HINTS[each.name].__metadata__[0], name=each.name, default=each.default)
    for each in fields(SamplingOptions)
}
