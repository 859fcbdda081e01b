"""What a step costs beyond its nodes: communication, its place under the roofline, a run of many steps."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from analyzer.on_use import load
from analyzer.units import add_quantities

from .lane import Moment


@dataclass(frozen=True, slots=True)
class CommInfo:
    """One call that communicates, of the steady step. None is unknown."""

    #: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv, send_recv (a
    #: batch of both) or barrier
    kind: str | None
    group: str | None                     #: the name of its process group, as in `WorldInfo.groups`
    ranks: int | None                     #: how many the group has
    bytes: int | None  #: whole: the gathered output, the unscattered input, what is reduced, broadcast or sent
    wire_bytes: int | None                #: what this rank sends
    phase: str = "forward"                #: forward, backward, optimizer or zero_grad
    module_path: str = ""
    node: str | None = None               #: None outside the nodes, as in the optimizer's step
    operator: str = ""                    #: "c10d.allreduce_.default"
    peer: int | None = None               #: the global rank of the other end, or of the root
    #: from the beginning of the step until it begins, where the program uses several streams
    start_seconds: Moment | None = None
    seconds: float | None = None
    exposed_seconds: float | None = None  #: of these, those in which nothing is computed


@dataclass(frozen=True, slots=True)
class CommTotal:
    """The calls of one kind in one group and phase together; what is unknown of one is unknown of all."""

    kind: str | None
    group: str | None
    ranks: int | None
    phase: str | None                     #: None of all phases
    calls: int
    bytes: int | None
    wire_bytes: int | None
    seconds: float | None
    exposed_seconds: float | None


def sum_communication(rows: Iterable[CommInfo], *, by_phase: bool = True) -> tuple[CommTotal, ...]:
    """Totals by kind and group, and by phase or over all, in the order in which the first of each ran."""
    found: dict[tuple[str | None, str | None, int | None, str | None], list[CommInfo]] = {}
    for row in rows:
        found.setdefault((row.kind, row.group, row.ranks, row.phase if by_phase else None), []).append(row)
    return tuple([CommTotal(*key, len(same), add_quantities([row.bytes for row in same]),
                            add_quantities([row.wire_bytes for row in same]),
                            add_quantities([row.seconds for row in same]),
                            add_quantities([row.exposed_seconds for row in same])) for key, same in found.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineRow:
    """An operator in one part of the step, or a module with all below it. None is unknown."""

    name: str                              #: ATen operator, or the module's path, "" for the model
    kind: str                              #: "operator" or "module"
    part: str                              #: forward, backward, recompute, optimizer; of a module "step"
    type: str = ""                         #: class of the module
    flops: int | None = None
    bytes: int | None = None               #: read and written, each distinct element of a call once
    seconds: float | None = None           #: of its kernels
    ceiling: float | None = None           #: FLOP/s that arithmetic and bandwidth allow at its intensity
    bound: str | None = None               #: "memory" or "arithmetic": which of the two makes the ceiling

    @property
    def intensity(self) -> float | None:
        """FLOPs to a byte; None where no byte is moved."""
        return None if self.flops is None or not self.bytes else self.flops / self.bytes

    @property
    def flops_per_second(self) -> float | None:
        """The rate that it reaches; None where its time is unknown or nothing."""
        return None if self.flops is None or not self.seconds else self.flops / self.seconds


@dataclass(frozen=True, slots=True)
class RooflinePeak:
    """A flat part of the roof: a rate in FLOP/s, and what reaches it."""

    name: str
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """The roof of a device, and what stands under it; iterates over the rows."""

    device: str
    memory_bandwidth: float | None         #: bytes/s
    peaks: tuple[RooflinePeak, ...] = ()   #: highest first
    rows: tuple[RooflineRow, ...] = ()     #: operators, then modules, parents first
    seconds_method: str = ""

    def __iter__(self) -> Iterator[RooflineRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


SECONDS_PER_HOUR = 3600.0
Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """What one device takes in a step, without its host, network and cooling."""

    watts: float                             #: in the mean
    joules: float
    joules_range: Range | None = None        #: nine in ten measured steps lie between


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Steps, hours, dollars and kilowatt-hours of a run of many alike steps; `Profile.cost_of` makes it. None is
    unknown; ranges are as wide as that of a step, and None where that is.

    >>> cost = RunCost(steps=7200, devices=8, step_seconds=0.5, price=2.0, watts=700.0)
    >>> cost.hours, cost.device_hours, cost.dollars, round(cost.kwh, 3), cost.hours_range
    (1.0, 8.0, 16.0, 5.6, None)
    """

    steps: int | None
    devices: int
    tokens: int | None = None                #: of the run
    samples: int | None = None
    step_seconds: float | None = None
    step_seconds_range: Range | None = None
    price: float | None = None               #: dollars for one device for one hour
    watts: float | None = None               #: of one device
    carbon: float | None = None              #: grams of carbon dioxide of a kWh
    assumptions: tuple[str, ...] = ()        #: what the figures rest on

    @property
    def hours(self) -> float | None:
        """From the first step to the last."""
        return self._scale(self.step_seconds, 1, 1.0)

    @property
    def device_hours(self) -> float | None:
        """Hours of all devices together."""
        return self._scale(self.step_seconds, self.devices, 1.0)

    @property
    def dollars(self) -> float | None:
        """What the device-hours cost."""
        return self._scale(self.step_seconds, self.devices, self.price)

    @property
    def kwh(self) -> float | None:
        """Kilowatt-hours of the devices."""
        return self._scale(self.step_seconds, self.devices, self._kilowatts)

    @property
    def grams(self) -> float | None:
        """Of carbon dioxide, by the caller's factor."""
        return None if self.kwh is None or self.carbon is None else self.kwh * self.carbon

    @property
    def hours_range(self) -> Range | None:
        """Low and high of `hours`."""
        return self._range(1, 1.0)

    @property
    def device_hours_range(self) -> Range | None:
        """Low and high of `device_hours`."""
        return self._range(self.devices, 1.0)

    @property
    def dollars_range(self) -> Range | None:
        """Low and high of `dollars`."""
        return self._range(self.devices, self.price)

    @property
    def kwh_range(self) -> Range | None:
        """Low and high of `kwh`."""
        return self._range(self.devices, self._kilowatts)

    @property
    def _kilowatts(self) -> float | None:
        return None if self.watts is None else self.watts / 1e3

    def _scale(self, seconds: float | None, devices: int, rate: float | None) -> float | None:
        """A ``rate`` for each hour of each device, of steps that take so many seconds."""
        return None if self.steps is None or seconds is None or rate is None else (
            self.steps * seconds / SECONDS_PER_HOUR * devices * rate)

    def _range(self, devices: int, rate: float | None) -> Range | None:
        ends = [end for seconds in self.step_seconds_range or ()
                if (end := self._scale(seconds, devices, rate)) is not None]
        return (ends[0], ends[1]) if ends else None

    def __str__(self) -> str:
        return str(load("analyzer.report.run_cost:describe_cost")(self))
