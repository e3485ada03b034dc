"""GPUs whose vendors' compilers run without them, as their drivers describe them."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcl.runtime.platforms import DeviceEntry

GB = 1 << 30
COMMON = ("cl_khr_global_int32_base_atomics", "cl_khr_local_int32_base_atomics", "cl_khr_byte_addressable_store")
INTEL = (*COMMON, "cl_khr_fp16", "cl_khr_subgroups", "cl_intel_subgroups", "cl_intel_required_subgroup_size")
DOT = ("cl_khr_integer_dot_product",)  # of GPUs that are fast at it
XMX = ("cl_intel_subgroups_short", "cl_intel_subgroup_matrix_multiply_accumulate")
AMD = (*COMMON, "cl_khr_fp16", "cl_khr_fp64", "cl_khr_subgroups", "cl_amd_media_ops")
MALI = (*COMMON, "cl_khr_fp16", "cl_khr_subgroups")  # its dot products are left out: the SPIR-V translator knows none
ADRENO = (*COMMON, "cl_khr_fp16", "cl_khr_subgroups", "cl_qcom_reqd_sub_group_size")


@dataclass(frozen=True)
class Gpu:
    """target: what the compiler calls it. vendor: whose compiler it is, a key of toolchains.TOOLCHAINS. board: what
    people call it.
    """

    target: str
    vendor: str
    entry: DeviceEntry = field(repr=False)
    board: str

    @property
    def label(self) -> str:
        return f"{self.board} ({self.target})" if self.target != self.board else self.target


def _gpu(
    target: str,
    vendor: str,
    name: str,
    platform: str,
    *,
    units: int,
    group: int,
    local_kb: int,
    memory: int,
    largest: int,
    unified: bool,
    extensions: tuple[str, ...],
    board: str = "",
) -> Gpu:
    entry = DeviceEntry(
        index=0,
        name=name,
        kind="gpu",
        vendor=platform,
        platform_name=platform,
        platform_version="OpenCL 3.0",
        platform_vendor=platform,
        driver_version="known by its description",
        opencl_version=(3, 0),
        opencl_c_version=(1, 2),
        compute_units=units,
        max_work_group_size=group,
        local_mem_bytes=local_kb << 10,
        global_mem_bytes=memory,
        max_alloc_bytes=largest,
        host_available_bytes=memory if unified else None,
        unified_memory=unified,
        has_fp16=True,
        has_subgroups=True,
        facts={},
        is_software=False,
        extensions=extensions,
        lacks=None,
        device=None,  # type: ignore[arg-type]
    )
    return Gpu(target, vendor, entry, board or name)


def _intel(
    target: str, name: str, units: int, group: int, memory: int, *, unified: bool, others: tuple[str, ...] = ()
) -> Gpu:
    return _gpu(
        *(target, "intel", name, "Intel(R) OpenCL Graphics"),
        units=units,
        group=group,
        local_kb=64,
        memory=memory,
        largest=4 * GB,
        unified=unified,
        extensions=(*INTEL, *others),
    )


def _amd(target: str, name: str, units: int, memory: int) -> Gpu:
    return _gpu(
        *(target, "amd", target, "AMD Accelerated Parallel Processing"),
        units=units,
        group=256,
        local_kb=64,
        memory=memory,
        largest=memory * 17 // 20,
        unified=False,
        extensions=AMD,
        board=name,
    )


GPUS = (
    _intel("gen9", "UHD Graphics 630", 24, 256, 12 * GB, unified=True),
    _intel("tgllp", "Iris Xe Graphics", 96, 512, 12 * GB, unified=True, others=DOT),
    _intel("dg2", "Arc A770", 512, 1024, 16 * GB, unified=False, others=(*DOT, *XMX)),
    _amd("gfx906", "Radeon VII", 60, 16 * GB),
    _amd("gfx1030", "Radeon RX 6800 XT", 36, 16 * GB),
    _amd("gfx1100", "Radeon RX 7900 XTX", 48, 24 * GB),
    _gpu(
        *("Mali-G78", "spirv", "Mali-G78", "ARM Platform"),
        units=24,
        group=1024,
        local_kb=32,
        memory=8 * GB,
        largest=4 * GB,
        unified=True,
        extensions=MALI,
    ),
    _gpu(
        *("Adreno 740", "spirv", "Adreno 740", "QUALCOMM Snapdragon(TM)"),
        units=12,
        group=1024,
        local_kb=32,
        memory=8 * GB,
        largest=1 * GB,
        unified=True,
        extensions=ADRENO,
    ),
)
"""Limits near those that drivers of such devices report; sizes of memory of a common board or phone."""
