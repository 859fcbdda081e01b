"""`sweep`: the configurations of a grid, run as jobs by workers."""
from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle  # nosec B403 # written, to see whether jobs can be sent, and never read
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from analyzer.api.argument import build_model
from analyzer.api.device_run import profile_each
from analyzer.api.profile import ProfileOptions
from analyzer.api.result import Profile
from analyzer.errors import InputError
from analyzer.hardware import split_devices
from analyzer.output import print_error
from analyzer.recipe.recipe import Recipe
from analyzer.record.failure import describe_defect
from analyzer.report.page.document import check_page
from analyzer.report.progress_bar import ProgressBar
from analyzer.report.speed import RATES, read_rate
from analyzer.report.text_table import format_quantity, print_rows
from analyzer.results.build import package_version
from analyzer.zoo.command_option import make_inputs
from analyzer.zoo.input_spec import DTYPES, InputSpec
from analyzer.zoo.target import Target, load_target

from .configuration import AXES, Configuration, expand_grid, resolve_inputs
from .result import COLUMNS, Row, SweepResult, check_table
from .worker import connect, interrupts_wait, start_worker

TargetLike = str | Callable[[], nn.Module]


@dataclass(frozen=True)
class SweptJob:
    """A configuration of a target, and what the model is called with; with the ``others`` that differ in the device."""

    target: TargetLike
    name: str
    configuration: Configuration
    inputs: tuple[InputSpec, ...]
    others: tuple[SweptJob, ...] = ()

    def split(self) -> tuple[SweptJob, ...]:
        """Each of them alone."""
        return replace(self, others=()), *self.others

    def make_row(self, **figures: Any) -> Row:
        known = {**figures, "target": self.name, **self.configuration.describe(),
                 "inputs": " ".join(map(str, self.inputs)), "torch_version": str(torch.__version__),
                 "analyzer_version": package_version()}
        return {name: known.get(name) for name in COLUMNS}

    @property
    def model_key(self) -> tuple[TargetLike, Recipe]:
        return self.target, replace(self.configuration.recipe, optimizer=None, accumulate=1)


# A profile borrows its model and hooks into torch, so threads of a worker take turns.
_turn = threading.Lock()


def run_job(job: SweptJob) -> list[Row]:
    """Profile a configuration on each of its devices; what the model or the profiler raises becomes the row's error."""
    with _turn:
        start = time.perf_counter()
        jobs = job.split()
        try:
            rows = [one.make_row(**read_figures(found)) for one, found in zip(jobs, profile_job(job), strict=True)]
        except Exception as error:  # whatever a user's model raises; the sweep goes on
            find_model.cache_clear()
            rows = [job.make_row(error=describe_defect(error) or f"{type(error).__name__}: {error}")]
        seconds = time.perf_counter() - start
    if len(rows) < len(jobs):  # it may be for one of the devices alone
        return [row for one in jobs for row in run_job(one)]
    return [row | {"profile_seconds": seconds / len(jobs)} for row in rows]


def profile_job(job: SweptJob) -> list[Profile]:
    configuration = job.configuration
    model = find_model(*job.model_key).train(configuration.mode == "train")
    args, kwargs = make_inputs(job.inputs)
    found = dict(profile_each([one.configuration.device_spec for one in job.split()], model, args, kwargs,
                              autocast=None if configuration.autocast is None else DTYPES[configuration.autocast],
                              options=ProfileOptions(keep_events=False),
                              **configuration.recipe.profile_options(configuration.mode)))
    return [found[i].profile for i in range(len(found))]


@lru_cache(maxsize=2)  # jobs come sorted by model; the second serves two neighbours that alternate
def find_model(target: TargetLike, recipe: Recipe) -> nn.Module:
    """The model of all jobs with the same `SweptJob.model_key`."""
    factory = load_target(target).build if isinstance(target, str) else target
    return build_model(partial(recipe.build, factory))  # under the mode that holds no data, the recipe too


def read_figures(found: Profile) -> dict[str, Any]:
    fit = found.fits()
    return {**{name: getattr(found, name) for name in COLUMNS if name in Profile.__dataclass_fields__},
            **{f"{name}_peak_allocated_bytes": phase.peak_allocated_bytes for name, phase in found.phases.items()},
            **{name: read_rate(found, name) for name in RATES}, "fits": fit.fits, "free_bytes": fit.free_bytes,
            "uncounted_calls": sum(u.calls for u in found.uncounted),
            "assumptions": "; ".join(found.assumptions) or None}


Done = tuple[SweptJob, Row]


_DIED = ("the worker process died: killed, for example for memory; if every row says so, the script that calls sweep() "
         "lacks `if __name__ == '__main__':`")


def run_in_executor(jobs: Sequence[SweptJob], executor: Executor) -> Generator[Done, None, None]:
    """Rows as they come. What the executor itself raises for a job (a lost worker) becomes its row's error."""
    futures = {executor.submit(run_job, job): job for job in jobs}
    try:
        for future in as_completed(futures):
            yield from _take(future, futures[future])
    finally:
        for future in futures:
            future.cancel()


def _take(future: Future[list[Row]], job: SweptJob) -> Iterator[Done]:
    try:
        yield from zip(job.split(), future.result(), strict=True)
    except (Exception, CancelledError) as error:
        yield from ((one, one.make_row(error=f"{type(error).__name__}: {error}")) for one in job.split())


def run_in_processes(jobs: Sequence[SweptJob], workers: int) -> Generator[Done, None, None]:
    """Rows as they come, from fresh processes. Jobs of one that died run again alone; those that die again fail."""
    try:
        pickle.dumps(jobs)
    except Exception as error:  # pickle raises many kinds
        raise InputError(
            f"sweep: {jobs[0].name} cannot be sent to another process ({error}); give a TARGET text or a function at "
            f"the top level of a module, or pass an executor, or workers=0 to stay in this process") from error
    queue = deque(jobs)
    while queue:
        ended = yield from _run_until_death(queue, workers)
        suspects = [one for job in ended for one in job.split()]
        if len(suspects) == 1:
            yield suspects[0], suspects[0].make_row(error=_DIED)
        elif suspects:
            yield from run_in_processes(suspects, 1)


def _run_until_death(queue: deque[SweptJob], workers: int) -> Generator[Done, None, list[SweptJob]]:
    """Work ``queue`` off, one job a process; the result is the jobs that ran when a process died."""
    # spawn: a fork would copy the threads' locks of torch and of the caller
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=start_worker)
    running: dict[Future[list[Row]], SweptJob] = {}
    suspects: list[SweptJob] = []
    try:
        while (queue and not suspects) or running:
            while queue and not suspects and len(running) < workers:
                try:
                    with interrupts_wait():
                        running[pool.submit(run_job, queue[0])] = queue[0]
                except BrokenProcessPool:  # noticed before its futures say so
                    break
                queue.popleft()
            for future in wait(running, return_when="FIRST_COMPLETED").done:
                job = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    suspects.append(job)
                else:
                    yield from _take(future, job)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return suspects


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; ``result`` holds the rows that were done."""

    def __init__(self, result: SweepResult, total: int) -> None:
        super().__init__(f"{len(result.rows)} of {total} configurations were done")
        self.result = result


def sweep(target: TargetLike, grid: Mapping[str, Any], *, inputs: Sequence[str] = (), executor: Executor | None = None,
          workers: int | None = None, progress: Callable[[int, int, Row], None] | None = None) -> SweepResult:
    """Profile ``target`` in every combination of the values in ``grid``: one row each, in the order of the grid.
    ``progress`` is called with how many rows are there, how many there will be, and the newest.

    ``target`` is a TARGET text as on the command line, or a callable of no arguments that builds a module. ``grid``
    maps axes of `Configuration` (batch sequence dtype optimizer autocast checkpointing device mode quantize lora
    accumulate) to values.
    ``inputs`` are texts as `--input`, in which ``{batch}`` and ``{sequence}`` may stand for sizes; by default what the
    target is called with.

    Jobs run on ``executor`` (any of `concurrent.futures`; a Dask cluster's is ``distributed.Client.get_executor()``),
    else on ``workers`` processes (by default one a core; 0 stays in this process). A worker builds a model once for all
    jobs that can share it. A configuration that fails is a row with its ``error``, also one that kills its process.
    Workers of Dask must run with ``distributed.worker.profile.enabled: false``: its sampling profiler holds frames, and
    with them tensors that would be free, so that a step could be found to take a copy more.

    Raises InputError, TargetError, UnknownDeviceError or MissingExtraError before any work, SweepInterrupted on Ctrl-C.

    >>> result = sweep("resnet18", {"batch": [1, 2], "mode": "infer"}, inputs=["{batch}x3x64x64"], workers=0)
    >>> [(row["batch"], row["params"], row["fits"]) for row in result.rows]
    [(1, 11689512, True), (2, 11689512, True)]
    """
    if workers is not None and workers < 0:
        raise InputError(f"sweep(workers={workers!r}): must be 0 (this process) or a number of processes")
    jobs = list_jobs(target, grid, inputs)
    rows: dict[SweptJob, Row] = {}
    by_model = sorted(join_devices(jobs), key=lambda job: str(job.model_key[1:]))
    if executor is not None:
        ran = run_in_executor(by_model, executor)
    elif workers == 0:
        ran = (done for job in by_model for done in zip(job.split(), run_job(job), strict=True))
    else:
        ran = run_in_processes(by_model, min(workers or os.cpu_count() or 1, len(by_model)))
    with closing(ran) as done:
        try:
            for job, row in done:
                rows[job] = row
                if progress is not None:
                    progress(len(rows), len(jobs), row)
        except KeyboardInterrupt:
            raise SweepInterrupted(SweepResult(tuple(rows[job] for job in jobs if job in rows)), len(jobs)) from None
    return SweepResult(tuple(rows[job] for job in jobs))


def list_jobs(target: TargetLike, grid: Mapping[str, Any], inputs: Sequence[str] = ()) -> list[SweptJob]:
    if isinstance(target, str):
        found = load_target(target)
    elif callable(target):
        found = Target(f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', type(target).__name__)}",
                       target)
    else:
        raise InputError(
            f"sweep(target={target!r}): must be a TARGET text, or a callable of no arguments that builds a model")
    return [SweptJob(target, found.name, configuration, resolve_inputs(found, inputs, configuration))
            for configuration in expand_grid(grid)]


def join_devices(jobs: Sequence[SweptJob]) -> list[SweptJob]:
    """Those that differ in nothing but the device as one, for they may share a run."""
    groups: dict[Any, list[SweptJob]] = {}
    for job in jobs:
        key = job.inputs, *(getattr(job.configuration, axis) for axis in AXES if axis != "device")
        groups.setdefault(key, []).append(job)
    return [replace(first, others=tuple(others)) for first, *others in groups.values()]


_SIZES = ("batch", "sequence", "accumulate")
_SWITCH = {"no": False, "yes": True}


def run_sweep(arguments: argparse.Namespace) -> int:
    grid = {axis: _read_values(axis, getattr(arguments, axis)) for axis in AXES if getattr(arguments, axis) is not None}
    if not grid:
        raise InputError("sweep: nothing varies; give values, e.g. --batch 1,2,4")
    if arguments.out is not None:
        check_table(arguments.out)
    check_page(arguments.html)
    bar = ProgressBar(among_output=sys.stderr.isatty())  # in a log it tells of a long row, too
    interruption = ""
    try:
        with bar, connect(arguments.dask) as executor:
            found = sweep(arguments.target, grid, inputs=arguments.input, executor=executor, workers=arguments.workers,
                          progress=lambda done, total, row: bar(done / total, f"{done} of {total}"))
    except SweepInterrupted as stop:
        interruption, found = f"interrupted: {stop}", stop.result
    finally:
        bar.clear()
    if interruption:
        print_error(interruption)
        if not found.rows:
            return 130
    if arguments.html is not None:
        found.to_html(arguments.html)
    print(format_rows(found))
    if arguments.out is not None:
        found.write(arguments.out)
    if interruption:
        return 130  # as shells report SIGINT
    return 1 if len(found.failed) == len(found.rows) else 0


def _read_values(axis: str, text: str) -> list[Any]:
    words = split_devices(text) if axis == "device" else [word.strip() for word in text.split(",")]
    for word in words:
        if axis in _SIZES and not word.isdecimal():
            raise InputError(f"--{axis} {text}: {word!r} is not a whole number")
        if axis == "checkpointing" and word not in _SWITCH:
            raise InputError(f"--{axis} {text}: {word!r} is neither 'no' nor 'yes'")
    if axis in _SIZES:
        return list(map(int, words))
    return [_SWITCH[word] if axis == "checkpointing" else None if word == "none" else word for word in words]


_SHOWN = (("peak_reserved_bytes", "Peak reserved", "bytes"), ("free_bytes", "Free", "bytes"), ("fits", "Fits", "text"),
          ("fwd_flops", "Fwd FLOPs", "count"), ("bwd_flops", "Bwd FLOPs", "count"), ("step_seconds", "Step", "seconds"),
          ("mfu", "MFU", "share"))
_ERROR_WIDTH = 60  # of the table on the screen; files hold the whole text


def format_rows(result: SweepResult) -> str:
    """The rows as a table: what varies, and the chief figures.

    >>> rows = {"batch": 1, "fits": True, "free_bytes": 1024}, {"batch": 2, "error": "ValueError: no"}
    >>> print(format_rows(SweepResult(rows)))
    batch      Peak reserved      Free  Fits      Fwd FLOPs    Bwd FLOPs    Step    MFU  Error
    -------  ---------------  --------  ------  -----------  -----------  ------  -----  --------------
    1                      -  1.00 KiB  yes               -            -       -      -
    2                      -         -  -                 -            -       -      -  ValueError: no
    """
    rows = result.rows
    varying = [axis for axis in AXES if len({row.get(axis) for row in rows}) > 1]
    headers = [*varying, *(header for _, header, _ in _SHOWN), *(["Error"] if result.failed else [])]
    lines = [[*(_word(row.get(axis), "none") for axis in varying),
              *(_word(row.get(name), "-") if unit == "text" else format_quantity(row.get(name), unit)
                for name, _, unit in _SHOWN),
              *([(row.get("error") or "").split("\n")[0][:_ERROR_WIDTH]] if result.failed else [])] for row in rows]
    return print_rows(headers, lines, left=[i for i, name in enumerate(headers) if name in (*varying, "Fits", "Error")])


def _word(value: Any, unknown: str) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: unknown}[value]
    return format_quantity(value, "text")
