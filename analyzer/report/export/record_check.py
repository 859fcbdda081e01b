"""What must hold among the fields of a record that was saved, which no field's own type says."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from analyzer.hardware.device_file import is_device_file
from analyzer.results.profile import Profile
from analyzer.results.world import RankRun, WorldInfo

_MOST_RANKS = 2**24  # more than were ever run: views list them


def find_fault(record: Any) -> str | None:
    """What is wrong with a record as a whole; None where nothing is.

    >>> find_fault(RankRun(0, 6, 2)), find_fault(RankRun(0, 6, 0))
    (None, 'no run of ranks: RankRun(first=0, last=6, step=0)')
    """
    check = _CHECKS.get(type(record))
    return None if check is None else check(record)


def _check_run(run: RankRun) -> str | None:
    is_run = run.first <= run.last and run.step >= 1 and (run.last - run.first) // run.step < _MOST_RANKS
    return None if is_run else f"no run of ranks: {run}"


def _check_world(world: WorldInfo) -> str | None:
    return None if world.rank < world.size else f"rank {world.rank} of {world.size}"


def _check_profile(profile: Profile) -> str | None:
    """Whether what is told by its place in a list is there, and a device is named by its name: a saved profile opens no
    other file.
    """
    cluster = None if profile.world is None else profile.world.cluster
    for name, value in (("device", profile.device), ("world.cluster", cluster)):
        if value is not None and is_device_file(value):
            return f"{name} {value[:80]!r}: the name of a file, not of a {name.rpartition('.')[2]}"
    modules = [] if profile.modules is None else list(profile.modules.walk())
    deep = next((module for module in modules if module.depth >= len(modules)), None)
    if deep is not None:
        return f"modules: {deep.path!r} is at depth {deep.depth} of {len(modules)} modules"
    for i, call in enumerate(profile.module_calls):
        if call.parent is not None and call.parent >= i:
            return f"module_calls[{i}].parent: {call.parent} is no earlier call"
    spans = profile.spans
    lost = next((span.launch for span in spans if span.launch is not None and span.launch >= len(spans)), None)
    return None if lost is None else f"spans: one was launched by {lost}, of {len(spans)} spans"


_CHECKS: dict[Any, Callable[[Any], str | None]] = {
    RankRun: _check_run, WorldInfo: _check_world, Profile: _check_profile}
