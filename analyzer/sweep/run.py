"""`sweep`: profiles every configuration of a grid, and goes on from a file of the rows that are there."""
from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from analyzer.errors import InputError
from analyzer.json_text import decode_json
from analyzer.zoo.target import Target, load_target

from .configuration import expand_grid, resolve_inputs
from .job import Job, TargetLike, run_job
from .result import Row, SweepResult, check_row, identify
from .workers import Done, run_in_executor, run_in_processes

Watcher = Callable[[int, int, Row], None]
"""Called with how many rows are there, how many there will be, and the newest."""


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep; ``result`` holds the rows that were done, ``total`` says how many were asked for."""

    def __init__(self, result: SweepResult, total: int) -> None:
        super().__init__(f"{len(result.rows)} of {total} configurations were done")
        self.result, self.total = result, total


def sweep(target: TargetLike, grid: Mapping[str, Any], *, inputs: Sequence[str] = (), executor: Executor | None = None,
          workers: int | None = None, resume: str | Path | None = None, retry_failed: bool = False,
          progress: Watcher | None = None) -> SweepResult:
    """Profile ``target`` in every combination of the values in ``grid``: one row each, in the order of the grid.

    ``target`` is a TARGET text as on the command line, or a callable of no arguments that builds a module. ``grid``
    maps axes of `Configuration` (batch sequence dtype optimizer autocast checkpointing device mode quantize lora
    accumulate) to values.
    ``inputs`` are texts as `--input`, in which ``{batch}`` and ``{sequence}`` may stand for sizes; by default what the
    target is called with.

    Jobs run on ``executor`` (any of `concurrent.futures`; a Dask cluster's is ``distributed.Client.get_executor()``),
    else on ``workers`` processes (by default one a core; 0 stays in this process). A worker builds a model once for all
    jobs that can share it. A configuration that fails is a row with its ``error``, also one that kills its process.
    Workers of Dask must run with ``distributed.worker.profile.enabled: false``: its sampling profiler holds frames, and
    with them tensors that would be free, so that a step could be found to take a copy more. With ``resume``, rows are
    appended to that JSONL file as they come, and those it holds are not run again (failed ones with ``retry_failed``).

    Raises InputError, TargetError, UnknownDeviceError or MissingExtraError before any work, SweepInterrupted on Ctrl-C.

    >>> result = sweep("resnet18", {"batch": [1, 2], "mode": "infer"}, inputs=["{batch}x3x64x64"], workers=0)
    >>> [(row["batch"], row["params"], row["fits"]) for row in result.rows]
    [(1, 11689512, True), (2, 11689512, True)]
    """
    if workers is not None and workers < 0:
        raise InputError(f"sweep(workers={workers!r}): must be 0 (this process) or a number of processes")
    jobs = list_jobs(target, grid, inputs)
    with contextlib.ExitStack() as stack:
        journal = None if resume is None else stack.enter_context(Journal(resume))
        known = {} if journal is None else journal.rows
        rows = {job: known[job.key] for job in jobs if job.key in known
                and not (retry_failed and known[job.key].get("error") is not None)}
        left = sorted((job for job in jobs if job not in rows), key=lambda job: str(job.model_key[1:]))
        done = stack.enter_context(contextlib.closing(_run(left, executor, workers)))
        try:
            for job, row in done:
                rows[job] = row
                if journal is not None:
                    journal.append(row)
                if progress is not None:
                    progress(len(rows), len(jobs), row)
        except KeyboardInterrupt:
            raise SweepInterrupted(_collect(jobs, rows), len(jobs)) from None
    return _collect(jobs, rows)


def list_jobs(target: TargetLike, grid: Mapping[str, Any], inputs: Sequence[str] = ()) -> list[Job]:
    """The jobs of a sweep, in the order of the grid; nothing is built yet."""
    if isinstance(target, str):
        found = load_target(target)
    elif callable(target):
        found = Target(f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', type(target).__name__)}",
                       target)
    else:
        raise InputError(
            f"sweep(target={target!r}): must be a TARGET text, or a callable of no arguments that builds a model")
    return [Job(target, found.name, configuration, resolve_inputs(found, inputs, configuration))
            for configuration in expand_grid(grid)]


def _run(jobs: Sequence[Job], executor: Executor | None, workers: int | None) -> Generator[Done, None, None]:
    if not jobs:
        return
    if executor is not None:
        yield from run_in_executor(jobs, executor)
    elif workers == 0:
        for job in jobs:
            yield job, run_job(job)
    else:
        yield from run_in_processes(jobs, min(workers or os.cpu_count() or 1, len(jobs)))


def _collect(jobs: Sequence[Job], rows: Mapping[Job, Row]) -> SweepResult:
    return SweepResult(tuple(rows[job] for job in jobs if job in rows))


class Journal:
    """Appends rows to ``path``, a JSON line each, while it is open; `rows` are those there before, by identity.

    A last line that was cut short is dropped. Rows of other sweeps stay in the file.
    Raises InputError for a file that holds something else.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.rows: dict[tuple[Any, ...], Row] = {}

    def __enter__(self) -> Journal:
        if not self.path.absolute().parent.is_dir():
            raise InputError(f"{self.path}: the folder {self.path.absolute().parent} does not exist")
        whole = self._read()
        self._file = self.path.open("ab")
        self._file.truncate(whole)
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Keep a row, whatever happens next to this process."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Fill `rows`; the result is the length of what is whole."""
        text = self.path.read_bytes() if self.path.exists() else b""
        whole = text.rfind(b"\n") + 1
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                row = decode_json(line)
                check_row(row)
            except InputError as error:
                raise InputError(f"{self.path}:{number}: is no row of a sweep ({error}); name another file, or take "
                                 "the line out") from error
            self.rows[identify(row)] = row
        return whole
