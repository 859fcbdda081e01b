"""Launchers inside a script: of the processes that they would start, the rank of the world runs, in this one."""
from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing

from analyzer.distributed.world import world_of_one
from analyzer.distributed.world_state import WorldSpec, current_world
from analyzer.errors import InputError
from analyzer.meta.intercept.replacement import Undo, answer
from analyzer.meta.state import active, current

from .saved_file import assume

# What libraries do so that all ranks agree, or to see that they do: they are taken to, as no other rank runs.
# Accelerate broadcasts the states of random generators, which have no data; ZeRO-3 compares lists of numbers with those
# that rank 0 broadcasts, in the first passes.

_TAKEN = {"accelerate.utils.random": ("Accelerate's broadcasts of random generators' states were left out",
                                      "synchronize_rng_state"),
          "deepspeed.runtime.zero.utils": ("DeepSpeed's comparisons with rank 0 were left out",
                                           "assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")}


class _JobOfOne(threading.local):
    until: ExitStack | None = None  #: left when this thread's dry run is told
    is_alone = False                #: whether its script made a world of this process


_job = _JobOfOne()


def run_one_process(until: ExitStack) -> Iterator[Undo]:
    """Replace what starts processes or waits for them; each result undoes one replacement. A world that a script makes
    of its own process lasts until ``until`` is left.
    """
    yield partial(vars(_job).clear)
    _job.until = until
    for owner in (dist, c10d):
        yield answer(owner, "init_process_group", _init, passes_original=True)
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("spawn", "start_processes"):
            if callable(getattr(owner, name, None)):
                yield answer(owner, name, _spawn)


def _spawn(fn: Any, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
    spec = _find_world("torch.multiprocessing.spawn", nprocs, nprocs, f"(nprocs={nprocs})")
    fn(spec.local_rank if nprocs == spec.local_size else spec.rank, *args)
    return None if join else _Joined()


def _init(original: Any, *args: Any, **kwargs: Any) -> None:
    size = kwargs.get("world_size", os.environ.get("WORLD_SIZE", "N"))
    if current_world() is None and not _is_alone(size):
        raise InputError(f"init_process_group() waits for the other ranks of a job: add --world {size} to run one of "
                         f"them without the others")
    # a script that was alone may have the function by its name from before; the world asks for the fake backend
    is_asked_by_world = dist.Backend.FAKE in (*args, *kwargs.values())
    (original if is_asked_by_world or not _job.is_alone else dist.init_process_group)(*args, **kwargs)


def _is_alone(ranks: Any) -> bool:
    """Whether a job of so many ``ranks`` is this process, which is then in a world of one until the dry run ends."""
    if str(ranks) != "1" or _job.until is None:
        return False
    _job.until.enter_context(world_of_one())
    _job.is_alone = True
    return True


def choose_device(original: Any, mesh: Any) -> Any:
    """A mesh sets the device of a launched rank where CUDA is not initialized yet: neither asked nor in use."""
    spec, state = current_world(), current()
    if spec is not None and state is not None and not active.is_device_asked and mesh.device_type == "cuda" and not any(
            [allocator.reserved_bytes for allocator in state.space.allocators.values()]):
        torch.cuda.set_device(spec.local_rank)
    return original(mesh)


class _Joined:
    """Answers as the context of processes that have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def _launch(config: Any, entrypoint: Any, args: list[Any], **_: Any) -> dict[int, Any]:
    """``torch.distributed.run``: a function or a command, of which a Python script runs in this process."""
    name = "torch.distributed.run"
    spec = _find_world(name, config.max_nodes * config.nproc_per_node, config.nproc_per_node)
    os.environ.update(spec.environment())
    if callable(entrypoint):
        return {spec.local_rank: entrypoint(*args)}
    words = [str(word) for word in args if word != "-u"]
    if Path(str(entrypoint)).name.startswith("python") and words[:1] == ["-m"]:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif Path(str(entrypoint)).name.startswith("python") and words:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).absolute().parent))
        runpy.run_path(words[0], run_name="__main__")
    else:
        raise InputError(f"{name} would start {entrypoint!r}, which is no Python script: it cannot run without data")
    return {}


def _find_world(name: str, ranks: int, processes: int, call: str = "") -> WorldSpec:
    """The world in place of the one of so many ranks that a launcher would start, in so many processes on a host."""
    spec = current_world() or (current_world() if _is_alone(ranks) else None)
    if spec is None:
        raise InputError(f"{name}{call} starts the {ranks} ranks of a job: add --world {ranks} to run one of them")
    if processes not in (spec.local_size, spec.size):
        assume(f"{name} would start {processes} processes on a host; the job that was asked for has "
               f"{spec.local_size} on each and {spec.size} in all, of which rank {spec.rank} ran")
    return spec


#: What to answer instead of functions of modules, by their places in these.
LAUNCHES: dict[str, dict[str, Callable[..., Any]]] = {
    "torch.distributed.launcher.api": {"launch_agent": _launch},
    **{module: dict.fromkeys(names, partial(lambda text, *_, **__: assume(text), text))
       for module, (text, *names) in _TAKEN.items()}}
