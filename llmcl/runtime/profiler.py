"""A device whose queue records the times of every kernel launch, and writers for the recorded times.

Only a `ProfilingDevice` pays for profiling: an ordinary device has a plain queue and launches that record nothing.
Times come from OpenCL events, in nanoseconds by the device's clock; nothing else leaves the device for them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyopencl as cl

from llmcl.errors import DeviceError
from llmcl.runtime.device import Cost, Device, Launch
from llmcl.runtime.driver_calls import named_errors
from llmcl.runtime.platforms import DeviceEntry

CSV_COLUMNS = (
    *("name", "queued", "submit", "start", "end", "duration", "global_size", "local_size"),
    *("phase", "position", "tokens"),
)


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel launch. queued, submit, start, end: ns by the device's clock. Sizes in work-items."""

    name: str
    queued: int
    submit: int
    start: int
    end: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    phase: str
    position: int  # tokens in the cache before the step
    n_tokens: int  # tokens in the step
    cost: Cost | None

    @property
    def duration(self) -> int:
        return self.end - self.start


class ProfiledLaunch(Launch):
    """A launch that hands its event to the device."""

    __slots__ = ()

    def enqueue(self, n_tokens: int = 1) -> cl.Event | None:
        event = super().enqueue(n_tokens)
        if event is not None and isinstance(self._device, ProfilingDevice):
            self._device.pending.append((self, event, n_tokens, self._device.phase, self._device.position()))
        return event


class ProfilingDevice(Device):
    """A device that records launches while `phase` has a name. `position` returns the text position of a step."""

    launch_type = ProfiledLaunch
    queue_properties = int(cl.command_queue_properties.PROFILING_ENABLE)

    def __init__(self, entry: DeviceEntry):
        """Raises DeviceError for a driver without profiling."""
        if not entry.device.queue_properties & cl.command_queue_properties.PROFILING_ENABLE:
            raise DeviceError(
                f"{entry.label} offers no profiling of its queues, so no kernel can be timed; choose another --device, "
                "or measure whole steps with llmcl bench"
            )
        super().__init__(entry)
        self.phase = ""
        self.position: Callable[[], int] = lambda: 0
        self.pending: list[tuple[Launch, cl.Event, int, str, int]] = []

    def records(self) -> list[LaunchRecord]:
        """Waits for the device. Returns the launches in named phases since the last call, in queue order.

        Raises DeviceError if the driver's times are contradictory.
        """
        self.finish()
        pending, self.pending = self.pending, []
        with named_errors("reading the times of kernel launches"):
            records = [_record(*launch) for launch in pending if launch[3]]
        broken = next((r for r in records if r.end < r.start or r.start == 0), None)
        if broken is not None:
            raise DeviceError(
                f"{self.name} reports that {broken.name} ran from {broken.start} to {broken.end} ns, which cannot be; "
                "its driver's profiling is not usable: choose another --device"
            )
        return records


def _record(launch: Launch, event: cl.Event, n_tokens: int, phase: str, position: int) -> LaunchRecord:
    times = event.profile
    return LaunchRecord(
        launch.name,
        times.queued,
        times.submit,
        times.start,
        times.end,
        launch.global_size(n_tokens),
        launch.local,
        phase,
        position,
        n_tokens,
        None if launch.cost is None else launch.cost(n_tokens, position),
    )


def write_csv(records: Sequence[LaunchRecord], path: Path) -> None:
    """Writes one row per launch, in queue order; times in ns, sizes as 64x8x1."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CSV_COLUMNS)
        for r in records:
            sizes = ("x".join(map(str, size)) for size in (r.global_size, r.local_size))
            times = (r.queued, r.submit, r.start, r.end, r.duration)
            writer.writerow([r.name, *times, *sizes, r.phase, r.position, r.n_tokens])


def write_trace(records: Sequence[LaunchRecord], path: Path, device: str) -> None:
    """Writes the trace event format of Perfetto and chrome://tracing: tracks for steps and kernels; times in us."""
    zero = min((r.start for r in records), default=0)

    def event(track: int, name: str, first: int, last: int, **args: object) -> dict[str, object]:
        times = {"ts": (first - zero) / 1e3, "dur": (last - first) / 1e3}
        return {"ph": "X", "pid": 1, "tid": track, "name": name, "cat": "llmcl", **times, "args": args}

    events: list[dict[str, object]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": device}}]
    for track, name in ((1, "steps"), (2, "kernels")):
        events.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}})
    for step in steps(records):
        first, last = step[0], step[-1]
        name = f"{first.phase} at {first.position}"
        events.append(event(1, name, first.start, last.end, tokens=first.n_tokens, launches=len(step)))
    for r in records:
        waited = {"queued_to_start_us": (r.start - r.queued) / 1e3}
        sizes = {"global_size": r.global_size, "local_size": r.local_size}
        events.append(event(2, r.name, r.start, r.end, **sizes, **waited, phase=r.phase))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
    path.write_text(text, encoding="utf-8")


def steps(records: Sequence[LaunchRecord]) -> Iterator[list[LaunchRecord]]:
    """Splits the launches into steps. All launches in a step share phase and position."""
    step: list[LaunchRecord] = []
    for record in records:
        if step and (record.phase, record.position) != (step[0].phase, step[0].position):
            yield step
            step = []
        step.append(record)
    if step:
        yield step
