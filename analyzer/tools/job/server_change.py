"""What to change in a server's command so that it starts: edits of the command, each read anew and tried."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from analyzer.errors import AnalyzerError, ModelError
from analyzer.tools.serving import ServedModel, ServedProfile

from .document import Edit
from .plan import ServingPlan
from .read import Job
from .serving import ServerStart, profile_serving, start_server

#: What may be changed, in the order in which changes are told and added up: what costs nothing but length first.
AXES = ("length", "memory", "cache", "weights", "devices")
_SHORTEST = 512      # tokens of a sequence, below which no length is proposed
_EIGHT_BITS = (8, 0) # the first compute capability that has kernels for fp8: vLLM docs, "Supported Hardware"
_MOST_DEVICES = 8    # that share a layer: those of one host
_MOST_SHARE = 0.95   # of a device's memory, which leaves 1 to 7 GiB to its context and to libraries


@dataclass(frozen=True)
class ServerJobChange:
    """Edits of a command, and the server with them; ``error`` where it would be refused."""

    axes: tuple[str, ...]
    edits: tuple[Edit, ...]
    start: ServerStart | None = None
    profile: ServedProfile | None = None
    error: str = ""

    @property
    def starts(self) -> bool:
        return self.profile is not None


class ServerChanges:
    """The search for what makes a server start. ``found`` are all changes that do, the least first."""

    def __init__(self, job: Job, start: ServerStart, device: str, models: dict[str, ServedModel],
                 price: float | None = None) -> None:
        self.job, self.start, self.device, self.models, self.price = job, start, device, models, price

    def find(self) -> list[ServerJobChange]:
        """Every change of one axis with which it starts; where there is none, the least of several together."""
        alone = [self._try([(axis, value)]) for axis in AXES for value in self._list_values(axis, self.start)[:1]]
        found = [change for change in alone if change.starts]
        if found:
            return found
        together = next((change for change in self._add_up() if change.starts), None)
        return [] if together is None else [together]

    def _add_up(self) -> Iterator[ServerJobChange]:
        """More devices, then fewer bits beside them, then a shorter length beside all."""
        chosen: list[tuple[str, object]] = []
        for axis in ("devices", "weights", "cache"):
            for value in self._list_values(axis, self.start):
                chosen = [*(pair for pair in chosen if pair[0] != axis), (axis, value)]
                change = self._try(chosen)
                yield change
                if change.error:
                    chosen = [pair for pair in chosen if pair[0] != axis]
                elif change.start is not None:
                    for length in self._list_values("length", change.start)[:1]:
                        yield self._try([*chosen, ("length", length)])

    def _list_values(self, axis: str, start: ServerStart) -> list[object]:
        """The values of an axis that need less memory, those nearest to the plan first."""
        plan = start.plan
        if axis == "length":
            most = start.most_tokens or 0
            step = 1024 if most >= 4096 else 16
            most -= most % step
            return [most] if _SHORTEST <= most < start.longest else []
        if axis == "memory":
            return [_MOST_SHARE] if (plan.memory_share or 1.0) < _MOST_SHARE else []
        if axis in ("cache", "weights") and (start.deployment.device.compute_capability or _EIGHT_BITS) < _EIGHT_BITS:
            return []
        if axis == "cache":
            return ["fp8"] if start.deployment.cache in ("bf16", "fp16") else []
        if axis == "weights":
            return ["fp8"] if start.deployment.weights in ("bf16", "fp16") and not start.deployment.experts else []
        return [times * plan.tp for times in (2, 4, 8) if times * plan.tp <= _MOST_DEVICES]

    def _try(self, values: list[tuple[str, object]]) -> ServerJobChange:
        edits: list[Edit] = []
        for axis, value in values:
            make = self.job.program.changes.get(axis)
            if make is None:
                return ServerJobChange((axis,), (), error="its program has no such option")
            edits += make(self.job.options, self.job.plan, value) or []
        axes = tuple(axis for axis, _ in values)
        start = None
        try:
            job = self.job.change(edits)
            assert isinstance(job.plan, ServingPlan)
            start = start_server(job.plan, self.device, files=job.files, models=self.models)
            if start.refusal:
                return ServerJobChange(axes, tuple(edits), start)
            profile = profile_serving(job.plan, self.device, start=start, price=self.price)
        except (AnalyzerError, ModelError) as error:
            return ServerJobChange(axes, tuple(edits), start, error=next(iter(str(error).splitlines()), ""))
        return ServerJobChange(axes, tuple(edits), start, profile)
