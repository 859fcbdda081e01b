"""Runs jobs on an executor, or on processes of this sweep's own, and outlives a worker that dies."""
from __future__ import annotations

import multiprocessing
import os
import pickle  # nosec B403 # written, to see whether jobs can be sent, and never read
import signal
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from analyzer.errors import InputError

from .job import Job, run_job
from .result import Row

Done = tuple[Job, Row]

_DIED = ("the worker process died: killed, for example for memory; if every row says so, the script that calls sweep() "
         "lacks `if __name__ == '__main__':`")


def run_in_executor(jobs: Sequence[Job], executor: Executor) -> Iterator[Done]:
    """Rows as they come. What the executor itself raises for a job (a lost worker) becomes its row's error."""
    futures = {executor.submit(run_job, job): job for job in jobs}
    try:
        for future in as_completed(futures):
            yield futures[future], _take(future, futures[future])
    finally:
        for future in futures:
            future.cancel()


def _take(future: Future[Row], job: Job) -> Row:
    try:
        return future.result()
    except (Exception, CancelledError) as error:
        return job.fail(f"{type(error).__name__}: {error}")


def run_in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Done]:
    """Rows as they come, from fresh processes. Jobs of one that died run again alone; those that die again fail."""
    try:
        pickle.dumps(jobs)
    except Exception as error:  # pickle raises many kinds
        raise InputError(
            f"sweep: {jobs[0].name} cannot be sent to another process ({error}); give a TARGET text or a function at "
            f"the top level of a module, or pass an executor, or workers=0 to stay in this process") from error
    queue = deque(jobs)
    while queue:
        suspects = yield from _run_until_death(queue, workers)
        if len(suspects) == 1:
            yield suspects[0], suspects[0].fail(_DIED)
        elif suspects:
            yield from run_in_processes(suspects, 1)


def _run_until_death(queue: deque[Job], workers: int) -> Generator[Done, None, list[Job]]:
    """Work ``queue`` off, one job a process; the result is the jobs that ran when a process died."""
    # spawn: a fork would copy the threads' locks of torch and of the caller
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
    running: dict[Future[Row], Job] = {}
    suspects: list[Job] = []
    try:
        while (queue and not suspects) or running:
            while queue and not suspects and len(running) < workers:
                try:
                    running[pool.submit(run_job, queue[0])] = queue[0]
                except BrokenProcessPool:  # noticed before its futures say so
                    break
                queue.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if isinstance(future.exception(), BrokenProcessPool):
                    suspects.append(job)
                else:
                    yield job, _take(future, job)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return suspects


def _start_worker() -> None:
    torch.set_num_threads(1)  # nothing is computed; the cores belong to the other workers
    signal.signal(signal.SIGINT, _leave)


def _leave(*_: Any) -> None:
    # Ctrl-C reaches every process of the terminal: the caller keeps the rows, a worker has nothing to say
    os._exit(130)
