"""What a trace says of a step, beside a prediction."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from analyzer.api.result import Profile
from analyzer.units import add_quantities

from .trace import DeviceEvent, HostCall, Trace

# How NCCL and RCCL name their kernels (nccl/src/device/generate.py: ncclDevKernel_..., ncclKernel_... before 2.20).
_COMMUNICATION = ("nccl", "rccl", "msccl")


@dataclass(frozen=True)
class TimeRow:
    """Seconds of a step that something takes, and those that are predicted; None: it is not in the prediction."""

    name: str
    seconds: float | None
    calls: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class TraceReport:
    """A trace by what it is spent on, each list the longest first; of a step where steps are marked, else whole."""

    steps: int | None
    is_on_device: bool
    totals: list[TimeRow]
    operators: list[TimeRow]
    kernels: list[TimeRow]
    modules: list[TimeRow]


def describe_trace(trace: Trace, profile: Profile | None) -> TraceReport:
    """Sum a trace up. Where it has no kernels, times are those of operators on the host without what they call."""
    predicted: defaultdict[str, float] = defaultdict(float)
    for row in () if profile is None else profile.operators:
        predicted[_shorten(row.operator)] += row.seconds or 0.0
    operators, kernels, modules, by_class = (defaultdict[str, float](float) for _ in range(4))
    calls, launches = Counter[str](), Counter[str]()
    seen: set[int] = set()  # places of calls
    for seconds, call, kernel in _list_times(trace):
        name, place = (kernel, None) if call is None else _find_operator(trace.calls, call, predicted)
        operators[name] += seconds
        calls[name] += place not in seen  # a call may launch several kernels
        if place is not None:
            seen.add(place)
        if kernel:
            kernels[kernel] += seconds
            launches[kernel] += 1
        if call is not None and (module := trace.calls[call].module):
            modules[module] += seconds
    steps = trace.steps or 1
    for info in () if profile is None or profile.modules is None else profile.modules.walk():
        by_class[info.type] += info.own.fwd_seconds or 0.0
    return TraceReport(
        trace.steps, bool(trace.events), _list_totals(trace, profile, steps),
        _list_rows(operators, calls, steps, predicted), _list_rows(kernels, launches, steps, {}),
        _list_rows(modules, {}, steps, by_class))


def _list_rows(seconds: Mapping[str, float], calls: Mapping[str, int], steps: int,
               predicted: Mapping[str, float]) -> list[TimeRow]:
    rows = [TimeRow(name, seconds.get(name, 0.0) / steps, calls[name] / steps if name in calls else None,
                    predicted.get(name)) for name in {**seconds, **predicted}]
    return sorted(rows, key=lambda row: (-(row.seconds or 0.0), row.name))


def _list_times(trace: Trace) -> Iterator[tuple[float, int | None, str]]:
    if trace.events:
        yield from (((event.end - event.start) / 1e6, event.call, event.name) for event in trace.events)
    else:
        yield from ((call.own / 1e6, place, "") for place, call in enumerate(trace.calls))


def _find_operator(calls: list[HostCall], place: int, predicted: Collection[str]) -> tuple[str, int]:
    """The name and the place of the outermost caller that the prediction knows, for it has operators as autograd and
    users call them (``_to_copy``, not the ``copy_`` in it); else those of the operator itself.
    """
    at, best = place, (_shorten(calls[place].name), place)
    while (above := calls[at].caller) is not None:
        at = above
        if (name := _shorten(calls[at].name)) in predicted:
            best = name, at
    return best


def _shorten(operator: str) -> str:
    """An operator without its overload.

    >>> _shorten("aten::addmm"), _shorten("aten.addmm.default"), _shorten("autograd::engine::evaluate_function: A")
    ('aten::addmm', 'aten::addmm', 'autograd::engine::evaluate_function: A')
    """
    return operator if "::" in operator else "::".join(operator.split(".")[:2])


def _list_totals(trace: Trace, profile: Profile | None, steps: int) -> list[TimeRow]:
    """The step, what its device does, and what it waits for."""
    phases = [] if profile is None else list(profile.step_phases.values())

    def predict(name: str) -> float | None:
        return add_quantities([getattr(phase, name) for phase in phases]) if phases else None

    rows = [TimeRow("step, on the host", sum(trace.step_seconds) / len(trace.step_seconds) if trace.step_seconds
                    else None, None, None if profile is None or trace.events else profile.step_seconds)]
    if not trace.events:
        return rows
    first = trace.events[0].device  # of several devices in one process the first
    here = [event for event in trace.events if event.device == first]
    is_sent = [event.name.lower().startswith(_COMMUNICATION) for event in here]
    sent = [event for event, sends in zip(here, is_sent) if sends]
    computed = [event for event, sends in zip(here, is_sent) if not sends and event.kind == "kernel"]
    busy, computing, both = (_cover(events) for events in (here, computed, [*computed, *sent]))
    span = max(event.end for event in here) - here[0].start
    copies = [event for event in here if event.kind == "gpu_memcpy"]
    of_step = 1e-6 / steps
    # The host may run ahead, so a step is as long as the device takes for it.
    return [*rows, TimeRow("step, on the device", span * of_step, None, None if profile is None else
                           profile.step_seconds), TimeRow("device busy", busy * of_step, len(here) / steps,
                           None if profile is None or sent else profile.kernel_seconds),
            TimeRow("device waits for its host", (span - busy) * of_step, None, predict("launch_seconds")),
            TimeRow("communication", _cover(sent) * of_step, len(sent) / steps, predict("communication_seconds")),
            TimeRow("communication beside no computation", (both - computing) * of_step, None,
                    predict("exposed_comm_seconds")),
            TimeRow("copies", _cover(copies) * of_step, len(copies) / steps)]


def _cover(events: Iterable[DeviceEvent]) -> float:
    """The microseconds in which at least one of them runs."""
    found, last = 0.0, float("-inf")
    for start, end in sorted((event.start, event.end) for event in events):
        found += max(0.0, end - max(start, last))
        last = max(last, end)
    return found
