"""A link of a chain (nvidia/few_rows_chain.py), and the norm as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcl.kernels.common.functions import with_constants
from llmcl.runtime.device import Buffer, KernelArg, Launch
from llmcl.runtime.program import KernelSource

NORM = "nvidia/rms_norm_token.cl"
ROWS_NORM = "portable/rms_norm.cl"
MOST_ROWS = 32  # of a step. Of more it was not measured
WARP = 32
NORM_PARAMS = (
    *("__global float*", "__global const float*", "__global uint4*", "__global const int*"),
    *("__global const float*", "__global const float*", "__global float*"),
)
NORM_PARTS, NORM_ADDED, NORM_ROWS = 4, 5, 6  # which arguments of a norm these are


@dataclass(frozen=True)
class Link:
    """A launch as it is in a chain. args, params: its arguments and their types; n_groups: of a step of as many rows as
    there may be; call: what a group does, with {kind} and {args}; local: bytes of local memory; rows: whose scales are
    there; parts: of its results, each of which has a counter.
    """

    source: KernelSource
    args: Sequence[KernelArg]
    params: tuple[str, ...]
    n_groups: int
    call: str
    local: int
    rows: int
    parts: int = 1

    @property
    def key(self) -> str:
        """The same of links that are calls of one function, but for buffers."""
        numbers = [arg for arg in self.args if not isinstance(arg, Buffer)]
        return repr((self.source.file, self.source.prelude, sorted(self.source.constants.items()), numbers))


def is_of(launch: Launch, *files: str) -> bool:
    return isinstance(launch.source, KernelSource) and launch.source.file in files


def norm_link(source: KernelSource, args: Sequence[KernelArg], max_rows: int, warps: int) -> Link:
    """args: those of the launch. What is added to x and other rows that it leaves, it has by build constants, and by
    arguments in place of x.
    """
    call = "rms_norm_unit_{kind}(group, scales, before, count, {args});"
    own = with_constants(source, GROUP_ITEMS=WARP * warps)
    return Link(own, [*args, args[0], args[0], args[0]], NORM_PARAMS, max_rows, call, 0, warps)


def with_arg(args: Sequence[KernelArg], i: int, arg: KernelArg) -> list[KernelArg]:
    """These with another i-th one."""
    return [*args[:i], arg, *args[i + 1 :]]
