"""`llmcl doctor`: checks which kernels are right on a device; wrong kernels are excluded from later runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcl.cli import options as opt
from llmcl.cli.loading import progress_bar
from llmcl.cli.text_files import check_writable, hand_over, write_text
from llmcl.errors import DeviceError, UsageError
from llmcl.progress import CHECKING
from llmcl.tools import json_text

if TYPE_CHECKING:
    from llmcl.runtime.device_cache import DeviceCache
    from llmcl.runtime.platforms import DeviceEntry
    from llmcl.tools.doctor import Outcome


def doctor(
    device: opt.Device = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            rich_help_panel=opt.DEVICE_PANEL,
            help="Also check kernel variants that this device never uses.",
        ),
    ] = False,
    reset: Annotated[
        bool,
        typer.Option("--reset", rich_help_panel=opt.DEVICE_PANEL, help="Forget earlier results, and check nothing."),
    ] = False,
    format: opt.Format = "text",
    report: Annotated[Path | None, opt.written("--report", "a report to send to others, as Markdown,")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Check every kernel on a device against NumPy, and leave out of later runs what is wrong there.

    The checks run in another process, so that a driver that crashes is reported and not fatal. A variant that is wrong,
    is refused or crashes is excluded for this device and driver: another of the kernel takes its place, and where
    there is none, models are refused with a message. The exit code is 3 if anything that was in use did not pass.
    """
    from llmcl.runtime.device_cache import DeviceCache
    from llmcl.runtime.selection import select_device

    if report is not None:
        if reset:
            raise UsageError("--reset checks nothing, so --report has nothing to report; give one of them")
        check_writable("--report", report)
    entry = select_device(device)
    cache = DeviceCache(entry)
    if reset:
        _store(cache, {})
        print(f"{entry.label}: nothing is excluded any more")
        return
    from llmcl.tools.doctor import checks, diagnose, excluded

    if not quiet:
        print(f"device: {entry.label}, driver {entry.driver_version}", file=sys.stderr)
    done, total = 0, len(checks())

    def note(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(CHECKING, done, total)
        if not quiet and outcome.failed:
            check = outcome.check
            print(f"{check.kernel} {check.variant_name} {check.dtype}: {outcome.status}", file=sys.stderr, flush=True)

    start = time.monotonic()
    with progress_bar(quiet) as progress:
        outcomes = diagnose(entry, everything=everything, note=note)
    took_s = time.monotonic() - start

    def keep() -> None:
        if (wrong := excluded(outcomes)) != cache.excluded:
            _store(cache, wrong)

    def show() -> None:
        if format == "json":
            print(json_text.dumps(_as_dict(entry, outcomes, cache)))
        else:
            _show(outcomes, cache)

    def write() -> None:
        if report is not None:
            from llmcl.tools.device_report import device_report

            write_text("--report", report, device_report(entry, outcomes, took_s))

    hand_over(keep, show, write)
    if any(o.failed and o.in_use for o in outcomes):
        raise typer.Exit(DeviceError.exit_code)


def _store(cache: DeviceCache, wrong: dict[str, str]) -> None:
    try:
        cache.store_excluded(wrong)
    except OSError as error:
        raise DeviceError(
            f"what was found cannot be stored in {cache.path} ({error.strerror}); make room there or the folder "
            "writable, or set LLMCL_CACHE_DIR"
        ) from error


def _as_dict(entry: DeviceEntry, outcomes: Sequence[Outcome], cache: DeviceCache) -> dict[str, Any]:
    return {
        "device": entry.name,
        "platform": entry.platform_name,
        "driver": entry.driver_version,
        "checks": [
            {
                "kernel": o.check.kernel,
                "variant": o.check.variant_name,
                "dtype": o.check.dtype,
                "status": o.status,
                "error": o.error,
                "detail": o.detail,
                "in_use": o.in_use,
                "excluded": o.check.key in cache.excluded,
            }
            for o in outcomes
        ],
        "findings": str(cache.path),  # programs read this name
    }


def _show(outcomes: Sequence[Outcome], cache: DeviceCache) -> None:
    from llmcl.cli.tables import console, new_table
    from llmcl.tools.doctor import DTYPES, PASS, QUANTIZED_DTYPES, UNUSED

    out = console()
    table = new_table()
    for name in ("kernel", "variant", *DTYPES, *QUANTIZED_DTYPES):
        table.add_column(name, no_wrap=True)
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for o in outcomes:
        shown = f"{o.error:.0e}" if o.status == PASS and o.error is not None else o.status
        cells.setdefault((o.check.kernel, o.check.variant_name), {})[o.check.dtype] = shown + ("*" if o.in_use else "")
    for (kernel, variant), by_dtype in cells.items():
        if set(by_dtype.values()) != {UNUSED}:
            table.add_row(kernel, variant, *(by_dtype.get(dtype, "") for dtype in (*DTYPES, *QUANTIZED_DTYPES)))
    out.print(table)
    out.print("a number: passed, with its largest error; *: in use when the check began", soft_wrap=True)
    failed = [o for o in outcomes if o.failed]
    for o in failed:
        check = o.check
        out.print(f"\n{check.kernel}, {check.variant_name} variant, {check.dtype}: {o.status}, excluded from now on")
        out.print(o.detail, soft_wrap=True, markup=False)
    if failed:
        out.print(f"\nexclusions are kept in {cache.path}; `llmcl doctor --reset` forgets them", soft_wrap=True)
        return
    ran = sum(o.status == PASS for o in outcomes)
    out.print(f"all {ran} checks passed; nothing is excluded", soft_wrap=True)
