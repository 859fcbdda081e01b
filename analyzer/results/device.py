"""What each of several devices of a process holds and does, and what is copied between them."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from analyzer.profilers.held_memory import held_bytes, peak_by_category
from analyzer.record.device_log import find_copied
from analyzer.record.log import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One of several devices of the process that is profiled; its peaks are the maximum over all steps."""

    name: str                                #: "cuda:1"
    allocated_bytes: int | None = None       #: at the end of the last step
    reserved_bytes: int | None = None        #: at the end of the last step
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_phase: str | None = None            #: in which the most is allocated
    param_bytes: int | None = None
    buffer_bytes: int | None = None
    optimizer_bytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)  #: adds up to peak_allocated_bytes
    kernel_seconds: float | None = None      #: of a step: the sum of its kernels' own times


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """What a step copies from one device to another in a phase; one of the two may be the host, "cpu"."""

    source: str
    target: str
    phase: str
    copies: int
    bytes: int
    seconds: float | None = None             #: of all of them, one after the other

    @property
    def is_between_devices(self) -> bool:
        """Whether neither is the host."""
        return "cpu" not in (self.source, self.target)


def list_devices(log: Log, seconds: Mapping[str, float]) -> Iterator[DeviceInfo]:
    """The devices of a log, where there are several, with the ``seconds`` of their kernels by name."""
    for name in log.devices if log.others else ():
        with log.watching(name):
            last = next((record for record in reversed(log.phases) if record.step == log.steps - 1), None)
            top = max(log.phases, key=lambda record: record.peak_allocated_bytes, default=None)
            yield DeviceInfo(
                name=name, allocated_bytes=None if last is None else last.allocated_bytes,
                reserved_bytes=None if last is None else last.reserved_bytes, peak_allocated_bytes=log.peak_bytes,
                peak_reserved_bytes=max([record.peak_reserved_bytes or 0 for record in log.phases], default=0),
                peak_phase=None if top is None or not log.peak_bytes else top.phase,
                param_bytes=held_bytes(log, "parameter", name), buffer_bytes=held_bytes(log, "buffer", name),
                optimizer_bytes=held_bytes(log, "optimizer state", name), peak_by_category=peak_by_category(log),
                kernel_seconds=seconds.get(name))


def list_copies(log: Log, seconds: Mapping[tuple[str, str, str], float]) -> list[CopyInfo]:
    """What the last step of a log of several devices copies, those from one of them to another first, with the
    ``seconds`` by where from, where to and phase.
    """
    found: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for step, call, _, number in log.tallies() if log.others else ():
        ends = find_copied(call.signature) if step == log.steps - 1 else None
        if ends is not None:
            row = found[ends[0], ends[1], call.phase]
            row[0] += number
            row[1] += number * call.signature.outputs[0].nbytes
    return sorted([CopyInfo(*key, copies, nbytes, seconds.get(key)) for key, (copies, nbytes) in found.items()],
                  key=lambda row: (not row.is_between_devices, row.source, row.target, row.phase))
