"""Probes: profiles of one rank with few blocks and few micro-batches, each made once, from which steps are composed."""
from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analyzer.api.profile import profile
from analyzer.distributed.world import world
from analyzer.errors import ProfileFormatError
from analyzer.hardware import ClusterSpec, DeviceSpec, list_unseen
from analyzer.on_use import rare_collections
from analyzer.output import write_output
from analyzer.record.failure import describe_defect, first_line
from analyzer.record.options import ProfileOptions
from analyzer.zoo.target import Target, load_target

from .figures import FigureReader, Figures
from .layout import Layout
from .rank import Loss, RankJob, causal_loss
from .stage import Piece, Template

if TYPE_CHECKING:
    from analyzer.tools.solver.block_plan import BlockPlan

#: Ranks of the short pipeline in which each kind of stage runs, its place there, how many of its micro-batches are in
#: flight at once in 1F1B, and how many there are: one more than that.
SHORT, LONG = 2, 3
_DEGREES = "replicate", "shard", "context", "expert", "tensor", "pipeline"  #: fields of a layout that its mesh has
PROBE_OPTIONS = ProfileOptions(keep_events=False, steps=2, unknown_value="placeholder")


@dataclass(frozen=True)
class Probe:
    """A rank to profile: of a ``layout`` whose pipeline and micro-batches are those that run, the one at ``place``,
    which holds ``part``. ``bare`` ones compute one micro-batch and no update, without any wrapper. Only of those
    ``with_spreads`` it is worked out how far measured seconds may be from those predicted.
    """

    layout: Layout
    part: Piece
    place: int = 0
    bare: bool = False
    with_spreads: bool = False

    @property
    def key(self) -> str:
        return json.dumps([asdict(self.layout), list(self.part), self.place, self.bare, self.with_spreads],
                          sort_keys=True)


@dataclass(frozen=True)
class Subject:
    """What all probes of a search have in common: the model, its sequence, and where it is trained."""

    target: Any                 #: a text, or a `Target`
    cluster: ClusterSpec
    sequence: int
    tensor_plan: tuple[tuple[str, str], ...] | None = None
    loss: Loss = causal_loss

    @property
    def device(self) -> DeviceSpec:
        return self.cluster.device


def find_template(subject: Subject) -> Template:
    return make_template(subject.target, subject.tensor_plan)


@lru_cache(maxsize=2)
def make_template(target: str | Target, tensor_plan: tuple[tuple[str, str], ...] | None) -> Template:
    """The model of a search, made once in each process."""
    return Template(load_target(target) if isinstance(target, str) else target,
                    None if tensor_plan is None else dict(tensor_plan))


@dataclass(frozen=True)
class ProbeJob:
    """A probe of a subject, to be run in any process."""

    subject: Subject
    probe: Probe


def run_probe(job: ProbeJob) -> dict[str, Any]:
    """The figures of a probe, or the ``error`` that its model raised."""
    return next(run_probes([job]))[1]


def run_probes(jobs: Iterable[ProbeJob]) -> Iterator[tuple[ProbeJob, dict[str, Any]]]:
    """The figures of each, in order, by this process. Neighbors of one place in a world share it, as what DTensors
    remember there takes long to find.
    """
    for _, group in groupby(jobs, key=_find_place):
        left = list(group)
        while left:
            with rare_collections():  # between the profiles in it and while their figures are read, too
                found = _run_in_one_world(left)
            yield from zip(left, found)
            left = left[len(found):]


def _find_place(job: ProbeJob) -> Any:
    """What is the same of probes that may share a world; of those that would gain nothing the probe's own key."""
    layout, probe = job.probe.layout, job.probe
    if layout.tensor == 1 or layout.checkpointing == "planned":
        return probe.key
    degrees = replace(Layout(), **{name: getattr(layout, name) for name in _DEGREES})
    return job.subject.cluster, degrees, probe.place


def _run_in_one_world(jobs: Sequence[ProbeJob]) -> list[dict[str, Any]]:
    """The figures of the first jobs, in a world that those have in common: to the first that fails, or to the end."""
    found: list[dict[str, Any]] = []
    subject, first = jobs[0].subject, jobs[0].probe
    rank = first.place * (first.layout.devices // first.layout.pipeline)
    meshes: dict[Any, Any] = {}
    with warnings.catch_warnings(), world(first.layout.devices, rank, cluster=subject.cluster):
        warnings.filterwarnings("ignore", module="torch.distributed")
        for job in jobs:
            try:
                found.append(dict(measure(job.subject, job.probe, meshes)))
            except Exception as error:  # a layout that this model, or torch, does not take; or a defect, which is told
                return [*found, {"error": describe_defect(error) or first_line(error)}]
    return found


def measure(subject: Subject, probe: Probe, meshes: dict[Any, Any] | None = None) -> Figures:
    """What the profile of a probe says, which `analyzer.profile` makes in the `world` around; ``meshes`` are those of
    the probes before it there, to which its own is added.
    """
    layout, template = probe.layout, find_template(subject)
    stands_in = layout.pipeline == 1 and 0 < probe.part.blocks < len(template.blocks) and not probe.bare
    reader = FigureReader(subject.device, template.path if stands_in else None)
    job = RankJob(template, layout, [probe.part], [probe.place], subject.sequence, probe.bare, subject.loss, meshes)
    build: Any = job.build
    if layout.checkpointing == "planned":  # blocks keep, run again or send to the host what one micro-batch needs
        plan = plan_rank(subject, replace(layout, micro_batches=1), probe.part)
        build = partial(_build_planned, plan, job)
    options = replace(PROBE_OPTIONS, steps=1) if probe.bare else PROBE_OPTIONS
    # a step is composed of what is allocated: of a probe that would reserve more than the device has, profile() makes
    # another one within its memory, which may end before its figures are there
    boundless = replace(subject.device, memory_bytes=None)
    found = profile(build, job.inputs(), device=boundless, step=job.step, profilers=reader.profilers,
                    reuse=not stands_in, options=options, optimizer=None if probe.bare else job.make_optimizer())
    return reader.read(found, layout.devices, probe.with_spreads)


def _build_planned(plan: BlockPlan, job: RankJob) -> Any:
    return plan.apply(job.build())


@lru_cache(maxsize=1)
def plan_rank(subject: Subject, layout: Layout, part: Piece) -> BlockPlan:
    """The plan of a rank's blocks within the device's memory, in the world that there is. Gradients of micro-batches
    before have their place there.
    """
    from analyzer.tools.solver.block_plan import BlockPlanner  # of few searches

    job = RankJob(find_template(subject), layout, [part], [0], subject.sequence, loss=subject.loss)
    inner = "0.module" if layout.replicate > 1 and not layout.is_sharded else "0"
    planner = BlockPlanner(job.build, job.inputs(), device=subject.device, step=job.step, budget_of="allocated",
                           optimizer=job.make_optimizer(), options=PROBE_OPTIONS,
                           blocks=[f"{inner}.model.{job.template.path}.{i}" for i in range(part.blocks)])
    room = (subject.device.memory_bytes or 0) - sum(unseen.bytes or 0 for unseen in list_unseen(
        subject.device, layout.devices))
    return planner.plan(room - (planner.profile_ends()[0].param_bytes or 0) * layout.is_sharded)


class ProbeJournal:
    """Figures of probes that were made, also kept in a file, so that a search that was stopped goes on."""

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        self.path, self.known = path, dict[str, dict[str, Any]]()
        self.made = 0
        first = json.dumps({"format": "analyzer.search", "version": 4, **head}, sort_keys=True)
        if path is None:
            return
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            if not lines or lines[0] != first:
                raise ProfileFormatError(f"{path}: was written by another search or version; give another file, or "
                                         "remove it")
            for line in lines[1:]:
                with suppress(ValueError):  # the line that was being written
                    key, figures = json.loads(line)
                    self.known[key] = figures
            if not text.endswith("\n"):
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")
        else:
            write_output(path, first + "\n")

    def add(self, probe: Probe, figures: dict[str, Any]) -> None:
        """Of what failed the file has nothing: a package that was missing may be there the next time."""
        self.made += 1
        self.known[probe.key] = figures
        if self.path is not None and "error" not in figures:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([probe.key, figures]) + "\n")


def bare_probe(layout: Layout, part: Piece) -> Probe:
    """One micro-batch of a part without wrappers and update: what a rank of the layout computes at least. Experts are
    those of the rank, and others of its host have the rest.
    """
    precision = "float8" if layout.precision == "float8" else "bf16"
    checkpointing = "none" if layout.checkpointing == "planned" else layout.checkpointing
    return Probe(replace(layout, replicate=1, shard=layout.expert, pipeline=1, virtual=1, schedule="1F1B",
                         micro_batches=1, sharding="ddp", precision=precision, checkpointing=checkpointing,
                         optimizer=None, offload=False), part, 0, True)
