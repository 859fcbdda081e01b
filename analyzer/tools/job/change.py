"""What to change in a configuration so that its step fits: edits of the very file, each read anew and profiled."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from analyzer.errors import AnalyzerError, ModelError
from analyzer.record.progress import progress_part

from .document import Edit
from .layout import LaidOutJob
from .plan import TrainingPlan
from .read import Job
from .training import TrainedJob

#: What may be changed, in the order in which changes are tried and added up: what keeps the result first.
AXES = ("rollout", "batch", "checkpoints", "loss", "cache", "swap", "precision", "optimizer", "quantize", "length")
_KEEPING = ("rollout", "batch", "checkpoints", "loss", "cache", "swap")
_SHORTEST = 256  # tokens of a sequence, below which no length is proposed
_SMALLEST = 512  # pixels of an image, each side
_OF_PHASE = {"rollout": ("rollout",), "backward": ("checkpoints", "batch"),  # what is less in it
             "optimizer": ("optimizer", "batch")}


@dataclass(frozen=True)
class JobChange:
    """Edits of a configuration, and what its step is with them; ``error`` where its program would refuse it."""

    axes: tuple[str, ...]
    edits: tuple[Edit, ...]
    job: Job | None
    result: TrainedJob | LaidOutJob | None
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.result is not None and bool(self.result.verdict)

    @property
    def keeps_result(self) -> bool:
        """Whether the same model is trained in the same way, but for rounding."""
        return set(self.axes) <= set(_KEEPING)


class Changes:
    """The search for what makes a job fit. ``found`` is what it costs as it is; ``tried`` are all that were profiled,
    in order.
    """

    def __init__(self, job: Job, profile: Callable[[Job], TrainedJob | LaidOutJob],
                 found: TrainedJob | LaidOutJob | None = None) -> None:
        self.job, self._profile, self._found = job, profile, found
        self.tried: list[JobChange] = []

    def find(self) -> JobChange | None:
        """The least change with which the step fits: one that keeps the result, else another one, else several added
        up until they do; None where no change that was tried is enough.
        """
        with progress_part(0.0, 0.5, "changes"):
            for axis in AXES[:-1]:
                found = self._find_alone(axis)
                if found is not None and found.fits:
                    return found
        with progress_part(0.5, 1.0, "changes together"):
            return self._add_up()

    def _find_alone(self, axis: str) -> JobChange | None:
        """The change of one axis; of batches the largest that fits, sought only where the smallest does."""
        values = list(_list_values(axis, self._plan))
        if not values or not self._can_suffice(axis):
            return None
        found = self._try([(axis, values[-1])])
        if found is None or not found.fits:
            return found
        return next((tried for value in values[:-1] if (tried := self._try([(axis, value)])) and tried.fits), found)

    def _can_suffice(self, axis: str) -> bool:
        """Whether what an axis makes smaller is as large as what is missing."""
        if not isinstance(self._found, TrainedJob) or self._found.verdict is None:
            return True
        whole, profile = self._found.verdict.free_bytes, self._found.profile
        size = {"optimizer": profile.optimizer_bytes, "quantize": profile.param_bytes}.get(axis)
        return whole is None or size is None or size >= -whole

    def _add_up(self) -> JobChange | None:
        chosen: list[tuple[str, object]] = []
        for axis in AXES:
            for value in list(_list_values(axis, self._plan))[slice(None) if axis == "length" else slice(-1, None)]:
                more = [*(pair for pair in chosen if pair[0] != axis), (axis, value)]
                found = self._try(more)
                if found is None or found.error:
                    continue
                chosen = more
                if found.fits:
                    return found
        return None

    @property
    def _plan(self) -> TrainingPlan:
        assert isinstance(self.job.plan, TrainingPlan)
        return self.job.plan

    def _try(self, values: list[tuple[str, object]]) -> JobChange | None:
        edits: list[Edit] = []
        for axis, value in values:
            make = self.job.program.changes.get(axis)
            made = None if make is None else make(self.job.options, self._plan, value)
            if not made:
                return None
            edits += made
        axes = tuple(axis for axis, _ in values)
        known = next((change for change in self.tried if change.edits == tuple(edits)), None)
        if known is not None:
            return known
        try:
            job = self.job.change(edits)
            change = JobChange(axes, tuple(edits), job, self._profile(job))
        except (AnalyzerError, ModelError) as error:
            change = JobChange(axes, tuple(edits), None, None, next(iter(str(error).splitlines()), ""))
        self.tried.append(change)
        return change


def list_smaller(job: Job, phase: str | None) -> list[str]:
    """The changes of a job's own options that make a phase need less, as text; none is profiled."""
    plan = job.plan
    assert isinstance(plan, TrainingPlan)
    found = []
    for axis in _OF_PHASE.get(phase or "", ("batch",)):
        make, value = job.program.changes.get(axis), next(_list_values(axis, plan), None)
        edits = make(job.options, plan, value) if make is not None and value is not None else None
        if edits:
            found.append(", ".join(map(str, edits)))
    return found


def _list_values(axis: str, plan: TrainingPlan) -> Iterator[object]:
    """The values of an axis that need less memory than the plan's, those nearest to it first."""
    if axis == "batch":
        size = plan.micro_batch
        while size % 2 == 0:
            size //= 2
            yield size
        if size > 1:
            yield 1
    elif axis == "rollout" and plan.rollout is not None and plan.rollout.server.memory_share is not None:
        yield from (round(plan.rollout.server.memory_share * part, 2) for part in (0.75, 0.5, 0.25))
    elif axis == "length" and plan.picture is not None:
        yield from range(plan.picture.height - _SMALLEST // 2, _SMALLEST - 1, -_SMALLEST // 2)
    elif axis == "cache":
        yield from [True] * (plan.picture is not None and (plan.picture.encodes_images or plan.picture.texts == "all"))
    elif axis == "swap":
        yield from (8, 16, 24, 34) if plan.picture is not None and not plan.picture.swapped else ()
    elif axis == "precision":
        yield from ["bf16"] * (plan.picture is not None and plan.autocast is None)
    elif axis == "length":
        length = plan.length // 2
        while length >= _SHORTEST:
            yield length
            length //= 2
    elif axis == "checkpoints":
        yield from [True] * (plan.checkpoints == "none")
    elif axis == "loss":
        yield from [True] * (plan.loss_chunks is None and plan.task == "sft")
    elif axis == "optimizer":
        yield from ["adamw8bit"] * (plan.optimizer in ("adamw", "adamw_fused", "adam"))
    elif axis == "quantize":
        yield from ["nf4"] * (plan.adapter is not None and plan.quantize != "nf4")


