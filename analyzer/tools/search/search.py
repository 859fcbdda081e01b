"""`search`: the best layouts of a training job, found by profiling as few ranks as the bounds allow."""
from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from analyzer.errors import InputError, UnknownDeviceError, is_count
from analyzer.hardware import ClusterSpec, cluster_of, find_cluster
from analyzer.record.options import count_tokens
from analyzer.results.build import package_version
from analyzer.tools.sweep.worker import ended_when_interrupted, interrupts_wait, start_worker
from analyzer.zoo.target import Target

from .advice import list_assumptions, list_changes, list_neighbors
from .bound import DOES_MORE, close_seconds, does_more, least_bytes, least_seconds, list_bare, list_close
from .compose import JobStep, ModelSizes, compose, list_probes
from .figures import Figures
from .layout import Layout, Question, Space, list_layouts
from .probe import Probe, ProbeJob, ProbeJournal, Subject, find_template, make_template, run_probe, run_probes
from .result import SearchResult
from .stage import LINEAR_WAYS, Template, find_way, list_experts

GLOBAL_BATCH = 1024       #: samples of a step where nothing says how many
LONGEST = 8192            #: tokens of a sample where nothing says how many, if the model takes so many
_SOON = 12                #: bare ranks to profile, of which more take a while: some step is composed before
_ROUND = 2                #: layouts whose steps are composed before bounds are looked at again, whatever the workers
_Key = TypeVar("_Key")
Progress = Callable[[float, str], None]
Run = Callable[[Sequence[ProbeJob]], Iterator[tuple[ProbeJob, dict[str, Any]]]]


def read_cluster(text: str | ClusterSpec) -> tuple[int, ClusterSpec]:
    """How many devices, and of which cluster: ``"64xh100"``, ``"512xdgx_h100"``. Raises InputError.

    >>> devices, cluster = read_cluster("64xh100")
    >>> devices, cluster.device.name, cluster.devices_per_host
    (64, 'h100_sxm', 8)
    """
    match = re.fullmatch(r"([1-9][0-9_,]*) ?x ?(.+)", text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InputError(f"cluster {text!r}: write how many devices of which kind, as in 64xh100 or 512xdgx_h100")
    name = match[2]
    try:
        found = cluster_of(name)
    except UnknownDeviceError:
        found = find_cluster(name)
    return int(re.sub("[_,]", "", match[1])), found


def model_sizes(template: Template, sequence: int) -> ModelSizes:
    """The sizes of a model that bounds are made of."""
    def count(modules: Sequence[nn.Module]) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    def find(paths: Sequence[str]) -> list[Any]:
        return [template.model.get_submodule(path) for path in paths]

    blocks, one = len(template.blocks), template.blocks[:1]
    divided = count([module for block in one for path, module in block.named_modules()
                     if find_way(template.plan, f"{template.path}.0.{path}") in LINEAR_WAYS])
    experts = count([module for block in one for _, module in list_experts(block)])
    if template.facts.no_pipeline:  # what is shared counts once
        outside = count([template.model]) - count(template.blocks)
        return ModelSizes(blocks, count(one), outside, 0, (divided, outside, 0), 0, False, sequence, experts)
    before, behind = find(template.before), find(template.behind)
    return ModelSizes(blocks, count(one), count(before), count(behind), (divided, count(before), count(behind[-1:])),
                      int(before[0].weight.shape[-1]), True, sequence, experts)


def _usual(layout: Layout) -> tuple[Any, ...]:
    """Orders layouts by how usual they are: data alone is divided; blocks are run again, so that most models fit."""
    return (layout.pipeline, layout.tensor, layout.context, layout.sharding != "fsdp", layout.replicate,
            layout.checkpointing != "blocks", layout.micro_batch, layout)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search; `result` is what was found until then, None where no step was known that fits."""

    def __init__(self, result: SearchResult | None, made: int) -> None:
        super().__init__(f"{made} ranks were profiled" + (
            "" if result is None else f"; best so far: {result.best.layout}"))
        self.result = result


class Searcher:
    """One search: what is asked, what is known, and who profiles."""

    def __init__(self, subject: Subject, question: Question, journal: ProbeJournal, run: Run,
                 progress: Progress | None = None) -> None:
        self.subject, self.question, self.journal, self._run, self._progress = subject, question, journal, run, progress
        self.template = find_template(subject)
        self.facts = self.template.facts
        self.sizes = model_sizes(self.template, question.sequence)
        self.capacity = subject.device.memory_bytes
        self.steps: dict[Layout, JobStep] = {}
        self.counts: Counter[str] = Counter()
        self.failed: dict[Layout, str] = {}
        self.bounds: dict[Layout, float] = {}  #: of the steps of layouts that may fit, the fastest first
        #: layouts whose bounds are those without checkpoints, until they are looked at
        self.rough: set[Layout] = set()
        self.close: set[Layout] = set()  #: layouts whose bounds are those of some of the probes of their steps
        self.short: list[tuple[float, Layout]] = []  #: layouts that do not fit, with the bytes that they need at least
        self.span = 0.0, 1.0  #: of all work, the part that is being done

    @property
    def best(self) -> JobStep | None:
        return next(iter(self.ranked), None)

    @property
    def ranked(self) -> list[JobStep]:
        """Steps that fit, the fastest first."""
        return sorted((step for step in self.steps.values() if self.fits(step)), key=lambda s: (
            s.step_seconds, s.needed_bytes, s.layout))

    def fits(self, step: JobStep) -> bool:
        return self.capacity is None or step.needed_bytes <= self.capacity

    def measure(self, probes: Sequence[Probe]) -> None:
        """Profile those that are not known yet; each is written down as it comes."""
        new = list({probe.key: probe for probe in probes if probe.key not in self.journal.known}.values())
        start, stop = self.span
        for i, (job, figures) in enumerate(self._run([ProbeJob(self.subject, probe) for probe in new]), 1):
            self.journal.add(job.probe, figures)
            if self._progress is not None:
                best = self.best
                self._progress(start + (stop - start) * i / len(new), "ranks profiled" if best is None else
                               f"best so far: {best.step_seconds:.4g} s, {best.layout}")

    def _measure_each(self, probes: Mapping[Layout, Mapping[_Key, Probe]]) -> Iterator[
            tuple[Layout, dict[_Key, Figures]]]:
        """The figures of the probes of layouts, without those layouts of which one failed."""
        self.measure([probe for found in probes.values() for probe in found.values()])
        for layout, wanted in probes.items():
            figures = {name: self.journal.known[probe.key] for name, probe in wanted.items()}
            error = next((found["error"] for found in figures.values() if "error" in found), None)
            if error is None:
                yield layout, figures
            else:
                self.failed[layout] = error

    def bound(self) -> None:
        """Bounds of all layouts; those that cannot fit are dropped before and after what they compute is known."""
        layouts = list(list_layouts(self.question, self.facts))
        self.counts["layouts"] = len(layouts)
        room = float("inf") if self.capacity is None else float(self.capacity)
        left = [layout for layout in layouts if least_bytes(layout, self.sizes, None) <= room]
        self.counts["states do not fit"] = len(layouts) - len(left)
        if not left and layouts:  # the least short ones, to say by how much
            left = sorted(layouts, key=lambda one: (least_bytes(one, self.sizes, None), one))[:_ROUND]
            room = float("inf")
        probes = {layout: list_bare(self._find_plain(layout), self.sizes) for layout in left}
        unknown = {probe.key for found in probes.values() for probe in found.values()} - self.journal.known.keys()
        if len(unknown) > _SOON:
            start, stop = self.span
            self.span = start, start + (stop - start) / 10
            # an answer before all bounds are known, and before there are other processes, which take seconds to begin
            run, self._run = self._run, run_probes
            try:
                self.evaluate([min(left, key=_usual)])
            finally:
                self._run = run
            self.span = self.span[1], stop
        self.room = room
        self._bound_each(probes)
        if not self.bounds:
            self._take_least_short()

    def _find_plain(self, layout: Layout) -> Layout:
        """A layout that computes no more, and whose bare ranks other layouts have, too: that without checkpoints."""
        has_plain = "none" in self.question.space.checkpointing and not layout.compile
        return replace(layout, checkpointing="none") if has_plain and layout.checkpointing != "planned" else layout

    def _bound_each(self, probes: Mapping[Layout, Mapping[str, Probe]]) -> None:
        """The bounds of layouts; those are dropped that cannot fit."""
        for layout, bare in self._measure_each(probes):
            seconds = least_seconds(layout, self.sizes, bare, self.subject.cluster)
            if probes[layout] != list_bare(layout, self.sizes):
                self.rough.add(layout)
            elif (needed := least_bytes(layout, self.sizes, bare)) > self.room:
                self.short.append((needed, layout))
                self.bounds.pop(layout, None)
                continue
            self.bounds[layout] = max(seconds, self.bounds.get(layout, 0.0))
        self.counts["activations do not fit"] = len(self.short)

    def _take_least_short(self) -> None:
        """Where nothing can fit, look at the layouts that lack least, to say by how much."""
        self.bounds = {layout: 0.0 for _, layout in sorted(self.short)[:_ROUND]}

    def _refine(self, layouts: Sequence[Layout]) -> None:
        """Bounds of the layouts themselves, where they are those of others."""
        self.rough.difference_update(layouts)
        self._bound_each({layout: list_bare(layout, self.sizes) for layout in layouts})
        for layout in self.failed.keys() & set(layouts):
            self.bounds.pop(layout, None)

    def _close_in(self, layouts: Sequence[Layout]) -> None:
        """Raise the bounds of layouts by what some of the probes tell of which their steps are composed."""
        self.close.update(layouts)
        for layout, known in self._measure_each({layout: list_close(layout, self.sizes) for layout in layouts}):
            if known:
                bare = {name: self.journal.known[probe.key] for name, probe in list_bare(layout, self.sizes).items()}
                self.bounds[layout] = max(self.bounds[layout], close_seconds(layout, self.sizes, bare, known))
        for layout in self.failed.keys() & set(layouts):
            self.bounds.pop(layout, None)

    def evaluate(self, layouts: Sequence[Layout]) -> None:
        """Compose the steps of layouts, profiling what is not known."""
        for layout, figures in self._measure_each({layout: list_probes(layout, self.sizes) for layout in layouts}):
            self.steps[layout] = compose(layout, self.sizes, figures)

    def rank(self, wanted: int) -> None:
        """Compose steps in the order of their bounds until no other can be among the ``wanted`` best."""
        left = [layout for layout in self.bounds if layout not in self.steps]
        (start, stop), composed = self.span, 0
        while left:
            ranked = self.ranked
            limit = ranked[wanted - 1].step_seconds if len(ranked) >= wanted else float("inf")
            # of layouts with one bound those first that do less
            left = sorted([layout for layout in left if layout in self.bounds and self.bounds[layout] <= limit],
                          key=lambda layout: (self.bounds[layout], layout.sharding == "fsdp", layout))
            here = left[:_ROUND]
            self.span = start, start + (stop - start) * len(here) / max(1, len(left))
            if rough := [layout for layout in here if layout in self.rough]:
                self._refine(rough)
            elif loose := [layout for layout in here if layout not in self.close]:
                self._close_in(loose)
            else:
                self.evaluate(here)
                left, composed = left[_ROUND:], composed + len(here)
                self._raise_bounds(here, left)
            start = self.span[1]
            if not left and not composed and self.short:
                self._take_least_short()
                left = [*self.bounds]
        self.counts["bounds are too slow"] = self.count_left()

    def _raise_bounds(self, known: Sequence[Layout], others: Sequence[Layout]) -> None:
        """Layouts that do more than one whose step is known take about as long at least."""
        for step in [self.steps[layout] for layout in known if layout in self.steps]:
            for layout in [layout for layout in others if does_more(layout, step.layout)]:
                self.bounds[layout] = max(self.bounds[layout], DOES_MORE * step.step_seconds)

    def count_left(self) -> int:
        """How many layouts whose bounds are known were not looked at."""
        return sum(layout not in self.steps and layout not in self.failed for layout in self.bounds)


def search(target: str | Callable[[], nn.Module], cluster: str, *, tokens: float | None = None,
           global_batch: int | None = None, sequence: int | None = None, price: float | None = None, count: int = 10,
           advice: bool = True, workers: int | None = 0, executor: Executor | None = None,
           resume: str | Path | None = None, progress: Progress | None = None,
           tensor_plan: Mapping[str, str] | None = None, **choices: Any) -> SearchResult:
    """The ``count`` fastest ways to train ``target`` on a ``cluster`` (``"64xh100"``), that fit, with their reasons.

    A step takes ``global_batch`` samples of ``sequence`` tokens, a run ``tokens`` of them; ``price`` is dollars for an
    hour of one device. ``choices`` narrow or widen what is chosen from: fields of `Layout` with a value or several
    (``tensor=8``, ``checkpointing=["none", "blocks"]``, ``compile=[False, True]``). ``tensor_plan`` says how tensor
    parallel ranks divide modules, as transformers' ``tp_plan`` does, which is the default. With ``advice``, changes
    that would help are looked for too, and the best layouts of half and of twice as many devices.

    Ranks are profiled by ``executor`` (any of `concurrent.futures`), else by ``workers`` processes (0: this one; None:
    one a core); who does it changes no answer. ``resume`` is a file of what was profiled, from which a search that was
    stopped goes on. ``progress`` is called with a share and a text.

    Raises InputError where nothing can be chosen, for an argument or choice that cannot be, and where a process that
    profiles is lost; TargetError, UnknownDeviceError, `Interrupted` on Ctrl-C.

    >>> from analyzer.parallel import search
    >>> found = search("llama_1b", "8xh100", global_batch=64, sequence=2048, count=1, advice=False,
    ...                sharding="fsdp", micro_batch=4, checkpointing="none", tensor=1)
    >>> str(found.best.layout), found.best.layout.global_batch
    ('fsdp 8, 2 x 4', 64)
    """
    devices, spec = read_cluster(cluster)
    for name, value in (("count", count), ("global_batch", global_batch), ("sequence", sequence)):
        if value is not None and not is_count(value, 1):
            raise InputError(f"search({name}={value!r}): must be a whole number of at least 1")
    for name, amount in (("tokens", tokens), ("price", price)):
        if amount is not None and not amount > 0:
            raise InputError(f"search({name}={amount!r}): must be a positive number")
    model: Any = target if isinstance(target, str) else Target(getattr(target, "__qualname__", "model"), target)
    plan = None if tensor_plan is None else tuple(sorted(tensor_plan.items()))
    sequence = sequence or _find_length(make_template(model, plan))
    subject = Subject(model, spec, sequence, plan)
    question = Question(devices, spec.devices_per_host, global_batch or max(GLOBAL_BATCH, devices), sequence,
                        Space.of(choices))
    journal = ProbeJournal(None if resume is None else Path(resume), {
        "target": getattr(model, "name", model), "cluster": spec.to_dict(), "sequence": sequence, "plan": plan,
        "torch": str(torch.__version__), "analyzer": package_version()})
    with _running(workers, executor) as run:
        searcher = Searcher(subject, question, journal, run, progress)
        found: SearchResult | None = None
        try:
            searcher.span = 0.0, 0.3
            searcher.bound()
            if not searcher.counts["layouts"]:
                raise InputError(
                    f"search: no layout of {searcher.template.name} on {devices} devices makes a step of "
                    f"{question.global_batch} samples: give --global-batch a number that the ranks divide, or other "
                    f"choices; choices were {asdict(question.space)}")
            searcher.span = 0.3, 0.7 if advice else 1.0
            searcher.rank(count)
            if not searcher.steps:
                raise InputError(f"search: no layout of {searcher.template.name} can be run: "
                                 + "; ".join(dict.fromkeys(searcher.failed.values())))
            found = conclude(searcher, count, tokens, price)
            if advice:  # which is of other layouts: what fails there is not told
                searcher.span = 0.7, 0.8
                changes, neighbors = list_changes(searcher), list_neighbors(searcher)
                found = replace(found, changes=changes, neighbors=neighbors, profiles=len(journal.known))
        except KeyboardInterrupt:
            if found is None and searcher.best is not None:
                searcher.counts["not looked at"] = searcher.count_left()
                found = conclude(searcher, count, tokens, price)
            raise Interrupted(found, journal.made) from None
    return found


def conclude(searcher: Searcher, count: int, tokens: float | None, price: float | None) -> SearchResult:
    """The best steps that are known."""
    question, subject, steps = searcher.question, searcher.subject, tuple(searcher.steps.values())
    ranked = searcher.ranked[:count]
    chosen = ranked or sorted(steps, key=lambda step: (step.needed_bytes, step.layout))[:count]
    return SearchResult(
        searcher.template.name, question.devices, question.devices_per_host, subject.cluster.name, subject.device.name,
        subject.device.memory_bytes, question.global_batch, question.sequence, None if tokens is None else int(tokens),
        price, tuple(chosen), steps, bool(ranked), (), (), {**searcher.counts, "composed": len(steps)},
        dict(Counter(searcher.failed.values())), len(searcher.journal.known), list_assumptions(searcher, ranked))


def _find_length(template: Template) -> int:
    longest = getattr(getattr(template.model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and template.takes_tokens:
        return min(longest, LONGEST)
    tokens = count_tokens((spec.name or "", spec) for spec in template.inputs)
    return 1 if tokens is None else tokens // template.inputs[0].shape[0]


@contextmanager
def _running(workers: int | None, executor: Executor | None) -> Iterator[Run]:
    if workers is not None and workers < 0:
        raise InputError(f"search(workers={workers!r}): must be 0 (this process) or a number of processes")
    with ExitStack() as stack:
        if executor is None and workers != 0:
            # spawn: a fork would copy the threads' locks of torch and of the caller
            executor = stack.enter_context(ProcessPoolExecutor(
                workers or os.cpu_count() or 1, multiprocessing.get_context("spawn"), initializer=start_worker))
            stack.enter_context(ended_when_interrupted())
        yield run_probes if executor is None else partial(_run_in, executor)


def _run_in(executor: Executor, jobs: Sequence[ProbeJob]) -> Iterator[tuple[ProbeJob, dict[str, Any]]]:
    """Figures as they come. What the executor itself raises says nothing of a layout, and ends the search."""
    futures: dict[Future[dict[str, Any]], ProbeJob] = {}
    try:
        with interrupts_wait():
            futures.update((executor.submit(run_probe, job), job) for job in jobs)
        for future in as_completed(futures):
            yield futures[future], future.result()
    except Exception as error:
        raise InputError(
            f"search: another process could not profile a rank: {type(error).__name__}: {error}; give a TARGET text or "
            "a function at the top level of a module, call search() under `if __name__ == '__main__':`, and give fewer "
            "workers where memory ran out; resume= keeps what was profiled") from error
    finally:
        for future in futures:
            future.cancel()
