"""A link in a chain (nvidia/few_rows_chain.py), and the norm as a link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmcl.kernels.common.functions import with_constants
from llmcl.runtime.device import Buffer, KernelArg, Launch
from llmcl.runtime.program import KernelSource

NORM = "nvidia/rms_norm_token.cl"
ROWS_NORM = "portable/rms_norm.cl"
MOST_ROWS = 32  # rows per step; longer steps were not measured
WARP = 32
NORM_PARAMS = (
    *("__global float*", "__global const float*", "__global uint4*", "__global const int*"),
    *("__global const float*", "__global const float*", "__global float*"),
)
NORM_PARTS, NORM_ADDED, NORM_ROWS = 4, 5, 6  # argument indices in a norm's argument list


@dataclass(frozen=True)
class Link:
    """A launch as a link in a chain."""

    source: KernelSource
    args: Sequence[KernelArg]
    params: tuple[str, ...]  # argument types
    n_groups: int  # work-groups for a step with the maximum row count
    call: str  # OpenCL statement for a work-group, with placeholders {kind} and {args}
    local: int  # bytes of local memory
    rows: int  # rows with scales in local memory
    parts: int = 1  # parts of the results, each with a counter

    @property
    def key(self) -> str:
        """Identifies the link's function: links with equal keys call the same function with different buffers."""
        numbers = [arg for arg in self.args if not isinstance(arg, Buffer)]
        return repr((self.source.file, self.source.prelude, sorted(self.source.constants.items()), numbers))


def is_of(launch: Launch, *files: str) -> bool:
    return isinstance(launch.source, KernelSource) and launch.source.file in files


def norm_link(source: KernelSource, args: Sequence[KernelArg], max_rows: int, warps: int) -> Link:
    """Makes a link from a norm's launch arguments.

    Build constants say whether the norm adds something to x or also leaves other rows. The three arguments for these
    cases default to x as a placeholder.
    """
    call = "rms_norm_unit_{kind}(group, scales, before, count, {args});"
    link_source = with_constants(source, GROUP_ITEMS=WARP * warps)
    return Link(link_source, [*args, args[0], args[0], args[0]], NORM_PARAMS, max_rows, call, 0, warps)


def with_arg(args: Sequence[KernelArg], i: int, arg: KernelArg) -> list[KernelArg]:
    """Returns a copy of `args` with argument i replaced."""
    return [*args[:i], arg, *args[i + 1 :]]
