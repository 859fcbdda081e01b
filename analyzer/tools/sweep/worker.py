"""Where jobs run beside this process: processes, of which each core has one, and clusters of Dask."""
from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import torch

from analyzer.errors import InputError, MissingExtraError, how_to_install


def start_worker() -> None:
    """Prepare a process of which each core has one."""
    torch.set_num_threads(1)  # nothing is computed; the cores belong to the other workers
    # Ctrl-C reaches every process of the terminal: the caller keeps the rows, a worker has nothing to say
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """A block in which this thread starts workers: what they inherit lets Ctrl-C wait until `start_worker`, as an
    import that is interrupted prints where it was.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ended_when_interrupted() -> Iterator[None]:
    """A block after whose KeyboardInterrupt the processes end that it started: those that still import have not heard
    of it, and would be waited for.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except KeyboardInterrupt:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise


@contextmanager
def connect(address: str | None) -> Iterator[Executor | None]:
    """The executor of the Dask cluster whose scheduler has this address; none without one. Raises InputError."""
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise MissingExtraError(
            f"--dask {address}: Dask is not installed: {how_to_install('sweep')}") from error
    connect: Any = Client  # untyped
    try:
        client = connect(address)
    except (OSError, ValueError) as error:
        raise InputError(f"--dask {address}: no scheduler answers there: {error}") from error
    with client:
        yield client.get_executor()
