"""`profile_epoch`: a step profiled at a few sizes, then the allocator over the steps of an epoch."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from analyzer.api.profile import profile
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import DeviceSpec, find_device, list_unseen
from analyzer.memory.allocator import AllocatorOptions
from analyzer.on_use import rare_collections
from analyzer.profilers.annotation import Annotation
from analyzer.record.failure import describe_defect
from analyzer.record.log import Log
from analyzer.record.options import ProfileOptions
from analyzer.record.progress import progress_part

from .batching import Cell, Epoch
from .columns import Columns, read_columns
from .epoch_memory import EpochMemory
from .epoch_profile import Course, EpochProfile
from .inputs import call_maker
from .limit import find_limit, has_one_size
from .varied_step import ProbedStep, StepTime, VariedStep

STEPS = 2_000  #: steps over which the allocator runs, where it is not said how many
_LARGEST = 10  # steps of the others that come behind them
_TRIES = 3  # times that a limit is sought, each with one more profile
EMPTY_EVERY = 10  #: as peft's benchmark empties the cache (method_comparison/MetaMathQA/run.py)


def profile_epoch(model: torch.nn.Module | Callable[[], torch.nn.Module], make_inputs: Callable[..., Any],
                  epoch: Epoch, *, device: str | DeviceSpec = "h200", steps: int = STEPS,
                  empty_every: int | None = None, options: ProfileOptions | None = None, courses: bool = True,
                  assumptions: Sequence[str] = (), **profile_options: Any) -> EpochProfile:
    """Predict memory and time of an epoch whose batches differ in size.

    ``make_inputs(batch=..., sequence=...)`` gives the arguments of a step: a tensor, a tuple of positional ones, a
    dictionary of named ones, or a pair ``(tuple, dict)``; beside the batch it is given the dimensions of the epoch by
    their names. The step is profiled at some sizes; the memory of the others is exact where they make the same calls.
    The allocator then runs over as many as ``steps`` of the epoch, its cache emptied every so many where
    ``empty_every`` says so. With ``courses`` it also tells what emptying the cache, expandable segments and a first
    step with the largest batch give, and the limits. ``options`` and ``profile_options`` are those of
    `analyzer.profile`; ``options.capacity_bytes`` takes the place of the device's memory.

    Raises InputError for steps that leave behind what the next ones do not, and for what `profile` does.

    >>> import torch
    >>> from analyzer.tools.lengths import Batching, Lengths
    >>> model = torch.nn.Sequential(torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000))
    >>> make = lambda batch, sequence: torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    >>> epoch = Batching(rows=2).divide(Lengths.of([5, 9, 300, 120, 50, 70, 40, 200]))
    >>> found = profile_epoch(model, make, epoch, device="l4")
    >>> found.steps, found.fits, round(found.padding_share, 2)
    (4, True, 0.42)
    """
    spec = find_device(device)
    options = options or ProfileOptions()
    capacity = options.capacity_bytes
    if capacity is None and spec.memory_bytes is not None:
        capacity = spec.memory_bytes - sum(unseen.bytes or 0 for unseen in list_unseen(spec))
    plain = replace(options, capacity_bytes=None, limit_to_device=False, keep_events=True)

    settings: list[AllocatorOptions] = []  # which the environment may say

    def run(cell: Cell) -> ProbedStep:
        columns, logs = list[Columns](), list[Log]()

        def read(log: Log) -> Annotation:
            if not columns:  # then perhaps the log of a device that has too little memory
                columns.append(read_columns(log, spec))
                logs.append(log)
                assert log.memory_at_start is not None
                settings[:] = [log.memory_at_start.options]
            return Annotation()

        args, kwargs = call_maker(make_inputs, epoch.dims, cell.rows, cell.sizes)
        found = profile(model, args, kwargs, device=spec, options=plain, profilers={"columns": read},
                        **profile_options)
        return ProbedStep(cell, columns[0], found, logs[0])

    chosen, remarks = choose_steps(epoch, steps)
    with rare_collections():
        with progress_part(0, 0.3, "profiles"):
            varied = VariedStep(run, [epoch.cells[i] for i in chosen], epoch.dims, spec)
        return _tell(varied, epoch, chosen, EpochMemory(varied.at, settings[0], capacity),
                     [*assumptions, *epoch.assumptions, *remarks], courses, empty_every)


def choose_steps(epoch: Epoch, count: int) -> tuple[list[int], list[str]]:
    """The first steps of an epoch, then the largest of the others, and what is to be said of that."""
    if count < 1:
        raise InputError(f"steps={count!r}: must be at least 1")
    whole = len(epoch.cells)
    largest = sorted(range(min(count, whole), whole), key=lambda i: -epoch.cells[i].volume)[:_LARGEST]
    return [*range(min(count, whole)), *sorted(largest)], [
        f"memory is told of the first {count:,} of {whole:,} steps, then of the {len(largest)} largest others"
    ] if largest else []


def _tell(varied: VariedStep, epoch: Epoch, chosen: Sequence[int], memory: EpochMemory, remarks: Sequence[str],
          courses: bool, empty_every: int | None) -> EpochProfile:
    cells = [epoch.cells[i] for i in chosen]
    with progress_part(0.3, 0.5, "epoch"):
        run = memory.run(cells, empty_every=empty_every)
    found = [Course.of("as it is" if empty_every is None else _name_emptying(empty_every), run)]
    longest = None
    if courses:
        found += _list_courses(memory, varied, cells, empty_every)
        if memory.capacity_bytes is not None:
            with progress_part(0.9, 1.0, "limits"):
                longest, remark = _find_longest(memory, varied, cells)
                remarks = [*remarks, *remark]
    times = varied.time_all(epoch.cells)
    known = [time for time in times if time is not None]
    whole = StepTime(*map(sum, zip(*known))) if len(known) == len(times) else None
    one: Profile = next(iter(varied.probes.values())).profile
    return EpochProfile(
        one.name, one.device or "", one.optimizer and f"optimizer {one.optimizer}" or one.mode, epoch.dims,
        epoch.lengths, epoch.batching, epoch.samples, len(epoch.cells), epoch.padding_share, memory.capacity_bytes,
        tuple(cells), tuple(step.peak_allocated for step in run), tuple(step.reserved for step in run),
        tuple(step.failed for step in run), tuple(time and time.seconds for time in (times[i] for i in chosen)),
        whole and whole.seconds, whole and (whole.low, whole.high), sum(cell.volume for cell in epoch.cells),
        sum(epoch.used),
        tuple(found), longest, tuple(varied.tree.rules()), tuple(varied.probes), tuple(varied.checked),
        tuple(dict.fromkeys([*remarks, *varied.assumptions, *one.assumptions])))


def _find_longest(memory: EpochMemory, varied: VariedStep, cells: Sequence[Cell]) -> tuple[int | None, list[str]]:
    """The limit of `find_limit`, once a profile there has the memory that follows from others."""
    for _ in range(_TRIES):
        limit, largest = find_limit(memory, cells)
        if limit is None or largest is None:
            return None, []
        try:
            if varied.confirm(largest):
                return limit, []
        except Exception as error:  # of the model's own, which has a longest input
            if defect := describe_defect(error):
                return limit, [f"the limit of {limit:,} is not confirmed by a profile: {defect}"]
            said = str(error).partition("\n")[0]
            seen = max(cell.volume if not has_one_size(cells) else max(cell.sizes) for cell in cells)
            return min(limit, seen), [f"memory would hold up to {limit:,}, at which the model itself fails: {said}"]
        memory.forget()
    return limit, [f"the limit of {limit:,} is not confirmed by a profile"]


def _name_emptying(steps: int) -> str:
    return f"cache emptied every {steps:,} steps"


def _list_courses(memory: EpochMemory, varied: VariedStep, cells: Sequence[Cell], empty_every: int | None
                  ) -> list[Course]:
    """The epoch with each thing that may help."""
    largest, options = max(cells, key=lambda cell: cell.volume), memory.options
    found = []
    with progress_part(0.5, 0.6, "emptying the cache"):
        often = None if empty_every else EMPTY_EVERY
        found.append(Course.of(_name_emptying(often) if often else "cache never emptied",
                               memory.run(cells, empty_every=often)))
    with progress_part(0.6, 0.7, "largest batch first"):
        found.append(Course.of("one step with the largest batch first", memory.run(cells, first=largest)))
    if not options.expandable_segments:
        with progress_part(0.7, 0.9, "expandable segments"):
            growing = EpochMemory(varied.at, replace(options, expandable_segments=True), memory.capacity_bytes)
            growing.keep_from(memory)
            found.append(Course.of("expandable segments", growing.run(cells)))
    return found
