"""Figures of one rank's profile that add up to steps: bytes, seconds, and what the seconds are spent on."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from analyzer.api.result import Profile
from analyzer.errors import ProfileFormatError
from analyzer.hardware import DeviceSpec, list_unseen
from analyzer.parallel.rank_row import find_compute_spreads
from analyzer.profilers.annotation import Annotation
from analyzer.profilers.call_sequence import UnknownTimeError
from analyzer.profilers.collective import POINT_TO_POINT, SUMS
from analyzer.profilers.communication import find_message, find_purposes
from analyzer.profilers.latency import Latency
from analyzer.profilers.schedule import COMMUNICATION
from analyzer.record.log import Log
from analyzer.record.process_group import ProcessGroupSpec
from analyzer.results.info import bound_seconds

from .peaks import find_peaks

Figures = dict[str, float]


@dataclass(frozen=True)
class _RankMessage:
    """What a rank sent or received in the last step, and how long: ``exposed`` seconds while it computed nothing."""

    kind: str | None
    group: ProcessGroupSpec | None
    phase: str
    operator: str
    seconds: float
    spread: float
    exposed: float


class FigureReader:
    """Profilers of one run that work out what `read` reads, and no rows of nodes, modules and operators. Where a part
    stands for one of more ``blocks``, at that path, the peaks of `find_peaks` are among the figures.
    """

    def __init__(self, device: DeviceSpec, blocks: str | None = None) -> None:
        self.device, self.blocks = device, blocks
        self._messages: list[_RankMessage] = []
        self._peaks: dict[str, float] = {}
        self._parts: list[tuple[str, float]] = []

    @property
    def profilers(self) -> dict[str, Any]:
        """In the place of the usual ones; nothing here reads what kernels move, or how many bytes are sent."""
        return {"latency": self._time, "traffic": _say_nothing, "communication": _say_nothing}

    def _time(self, log: Log) -> Annotation:
        latency = Latency(log, self.device, tells=False)
        try:
            found = latency.annotate()
        except UnknownTimeError:
            return Annotation()
        self._messages, self._parts = _list_messages(latency), latency.parts
        if self.blocks is not None:
            self._peaks = find_peaks(log, self.blocks)
        return found

    def read(self, p: Profile, size: int, with_spreads: bool) -> Figures:
        """The figures of the profile of a run, of a rank of a world of ``size``; ``with_spreads`` also how far measured
        seconds may be from those predicted. Raises ProfileFormatError where a step's time or peak is not known.
        """
        if p.step_seconds is None or p.peak_allocated_bytes is None or p.out_of_memory is not None:
            raise ProfileFormatError("the time or the peak of a rank is not known")
        figures = {**_read_bytes(p), **self._peaks, **self._read_seconds(p),
                   **(self._read_spreads(p) if with_spreads else {}),
                   "unseen_bytes": float(sum(unseen.bytes or 0 for unseen in list_unseen(self.device, size)))}
        return {name: value for name, value in figures.items() if value is not None}

    def _read_seconds(self, p: Profile) -> dict[str, float | None]:
        def seconds_of(name: str) -> float:
            return (p.phases[name].seconds or 0.0) if name in p.phases else 0.0

        moved = [message for message in self._messages if message.kind in POINT_TO_POINT]
        waits = {phase: sum(message.exposed for message in moved if message.phase == phase)
                 for phase in ("forward", "backward")}
        exchange = sum(message.exposed for message in self._list_exchange())
        mfu, forward = p.mfu() if p.step_seconds else None, p.phases.get("forward")
        bounds: Counter[str] = Counter()
        for name, kind in (("forward", "bound_"), ("backward", "bound_"), ("optimizer", "update_bound_")):
            if name in p.phases:
                spent = {**bound_seconds(p.phases[name]), "exposed": p.phases[name].exposed_comm_seconds or 0.0}
                bounds.update({f"{kind}{bound}": seconds for bound, seconds in spent.items()})
        return {"forward_seconds": seconds_of("forward") - waits["forward"],
                "backward_seconds": seconds_of("backward") - waits["backward"] - exchange,
                "exchange_seconds": exchange,
                "forward_launch_seconds": None if forward is None else forward.launch_seconds,
                "optimizer_seconds": seconds_of("optimizer"), "step_seconds": p.step_seconds,
                "send_seconds": sum(message.seconds for message in moved) / len(moved) if moved else 0.0,
                "ideal_seconds": None if mfu is None else mfu * (p.step_seconds or 0.0),
                "last_pass_seconds": self._last_pass_seconds(), **bounds}

    def _last_pass_seconds(self) -> float | None:
        """Of the last of several micro-batches, both passes."""
        by_phase = [[seconds for name, seconds in self._parts if name == phase] for phase in ("forward", "backward")]
        return sum(parts[-1] for parts in by_phase) if all(len(parts) > 1 for parts in by_phase) else None

    def _list_exchange(self) -> list[_RankMessage]:
        """The exchange of gradients: sums over groups that the forward pass does not use."""
        used = {message.group for message in self._messages if message.phase == "forward"}
        return [message for message in self._messages
                if message.kind in SUMS and message.phase == "backward" and message.group not in used]

    def _read_spreads(self, p: Profile) -> dict[str, float | None]:
        above, below = find_compute_spreads(p)
        return {"above": above, "below": below, "transfer_spread": self._find_spread(POINT_TO_POINT),
                "group_spread": self._find_spread(SUMS)}

    def _find_spread(self, kinds: tuple[str, ...]) -> float:
        """As `analyzer.parallel.profile_ranks.find_spread`: of the operators of some kinds of messages."""
        names = {message.operator for message in self._messages if message.kind in kinds}
        found = [message for message in self._messages if message.operator in names]
        seconds = sum(message.seconds for message in found)
        return sum(message.seconds * message.spread for message in found) / seconds if seconds else 0.0


def _say_nothing(_log: Log) -> Annotation:
    return Annotation()


def _read_bytes(p: Profile) -> dict[str, float | None]:
    def peak_in(*names: str) -> int:
        return max([phases[name].peak_allocated_bytes or 0 for phases in (p.phases, p.first_step) for name in names
                    if name in phases], default=0)

    forward = p.phases.get("forward")
    return {"params": p.params, "param_bytes": p.param_bytes, "pass_peak_bytes": peak_in("forward", "backward"),
            "update_peak_bytes": peak_in("optimizer", "zero_grad"),
            "kept_bytes": None if forward is None else forward.allocated_bytes}


def _list_messages(latency: Latency) -> list[_RankMessage]:
    """What the last step sent and received, in the order of its calls."""
    runs = [run for run in latency.runs.values() if run.kind == COMMUNICATION]
    purposes = find_purposes(latency.log) if runs else {}
    found = []
    for run in sorted(runs):
        call = latency.log.calls[run.call]
        message, kernel = find_message(latency.log, call), latency.timer.time(call).kernel
        phase = purposes[run.call].phase if run.call in purposes else call.phase
        found.append(_RankMessage(None if message is None else message.kind, latency.log.group_of(call.signature),
                                  phase, str(call.signature.op), kernel.seconds, kernel.spread,
                                  latency.exposed_seconds(run.call)))
    return found
