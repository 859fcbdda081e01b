"""A prediction to hold a real run against: the same step, profiled here, and what it holds at its peak."""
from __future__ import annotations

import argparse
import re
import shlex
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from analyzer.api.prediction import SAVED_OPTIONS, predict
from analyzer.api.result import Profile
from analyzer.errors import AnalyzerError, InputError, ModelError
from analyzer.hardware import find_device, register_device
from analyzer.record.options import ProfileOptions
from analyzer.results.verdict import Advice
from analyzer.tools.advice.search import find_advice

# Options that a run may have had and the prediction has not, or the other way round.
_VARIANTS: tuple[tuple[str, str, Any], ...] = (
    ("--autocast bf16", "autocast", "bf16"), ("no --autocast", "autocast", None), ("--dtype bf16", "dtype", "bf16"),
    ("--checkpointing", "checkpointing", True), ("no --checkpointing", "checkpointing", False),
    ("--optimizer adamw", "optimizer", "adamw"), ("no --optimizer", "optimizer", None))
_LINE = re.compile(r"\.py:\d+(?: > |$)")
_DEVICE = "h200"  # as every other command takes where none is given


@dataclass(frozen=True)
class PredictedBlock:
    """A block of the prediction: ``line`` is the module or name that holds it, ``source`` its "file.py:123"."""

    bytes: int
    category: str
    line: str
    source: str | None
    is_freed: bool = False  #: later in the step


@dataclass(frozen=True)
class PredictedFailure:
    """Where the predicted step runs out of so much memory."""

    limit_bytes: int
    short_bytes: int
    requested_bytes: int
    allocated_bytes: int
    phase: str | None
    place: str        #: module or name
    operator: str | None
    source: str | None


@dataclass(frozen=True)
class Prediction:
    """A step by its name, on a device, and whether that was chosen by its memory."""

    name: str
    profile: Profile
    device: str
    is_chosen: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether it is what it is: of a script or a saved profile, of which no option can be another."""
        return re.search(r"\.py( |$)|\.json$", self.name) is not None


def read_prediction(arguments: argparse.Namespace, capacity_bytes: int | None = None) -> Prediction:
    """What ``--against`` names: a saved profile (.json), a script (.py) that is run dry, with the arguments that follow
    it, or a TARGET with the options of `analyzer profile`. Without ``--device`` the one of the catalogue whose memory
    is nearest to ``capacity_bytes``.
    """
    text: str = arguments.against
    script, *words = _split(text)
    if text.endswith(".json"):
        found = Profile.from_json(Path(text))
        return Prediction(text, found, found.device or "")
    is_chosen = arguments.device is None and capacity_bytes is not None
    device = arguments.device or (_DEVICE if capacity_bytes is None else _find_nearest(capacity_bytes))
    if script.endswith(".py"):
        from analyzer.tools.dryrun.script import dry_run

        done = dry_run(script, words, device=device, options=ProfileOptions(unknown_value="placeholder"))
        if done.profile is None:
            raise InputError(f"--against {text}: the script ended before a step: {done.error}")
        return Prediction(text, done.profile, device, is_chosen)
    return Prediction(text, predict(complete(arguments, device))[0], device, is_chosen)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text) or [""]
    except ValueError as error:
        raise InputError(f"--against {text}: {error}; give a script and its arguments as a shell takes them") from error


def complete(arguments: argparse.Namespace, device: str) -> argparse.Namespace:
    """The options of `analyzer profile` for the step that ``--against`` names."""
    step = copy(arguments)
    for name in SAVED_OPTIONS:
        setattr(step, name, getattr(arguments, name, None))
    step.target, step.device, step.skew, step.convention = arguments.against, device, 0.0, "own"
    return step


def _find_nearest(capacity_bytes: int) -> str:
    return min([(abs(spec.memory_bytes - capacity_bytes), spec.name) for spec in register_device
                if spec.memory_bytes is not None])[1]


def list_variants(arguments: argparse.Namespace, prediction: Prediction) -> Iterator[tuple[str, Profile]]:
    """The same step with each of `_VARIANTS` that it has not already; those that the model cannot take are left out,
    and all of a script and of a saved profile, which are what they are.
    """
    if prediction.is_fixed:
        return
    for flag, name, value in _VARIANTS:
        step = complete(arguments, prediction.device)
        if getattr(step, name) == value:
            continue
        setattr(step, name, value)
        try:
            found = predict(step)
        except (AnalyzerError, ModelError):
            continue
        yield flag, found[0]


def list_at_peak(profile: Profile) -> list[PredictedBlock]:
    """What the prediction holds when it holds most, in bytes that were asked for."""
    live: dict[int, int] = {}
    best: list[int] = []
    freed: set[int] = set()
    held = most = 0
    for number, event in enumerate(profile.memory_events):
        if event.action == "alloc":
            live[event.address] = number
            held += event.bytes
            if held > most:
                most, best = held, list(live.values())
        elif event.action == "free" and (born := live.pop(event.address, None)) is not None:
            held -= event.bytes
            freed.add(born)
    nodes = {node.name: node for node in profile.nodes}
    found = []
    for number in best:
        event = profile.memory_events[number]
        node = nodes.get(event.label)
        line = event.label.partition(" > ")[0] if _LINE.search(event.label) else None  # of a script, outside of modules
        found.append(PredictedBlock(event.bytes if event.requested_bytes is None else event.requested_bytes,
                                    event.category, event.label if node is None else node.module_path or node.name,
                                    line if node is None else node.source, number in freed))
    return found


def find_failure(profile: Profile, limit_bytes: int) -> PredictedFailure | None:
    """Where the step would fail if the allocator could reserve ``limit_bytes``: where the segments that have a block in
    use are more, for idle ones are given back before a request fails. None where it would not.
    """
    starts: list[int] = []       # of segments, in order
    sizes: dict[int, int] = {}   # of segments; none of expandable ones, which give back pages
    users: Counter[int] = Counter()  # blocks by segment
    segment_of: dict[int, int] = {}
    used = held = 0
    for number, event in enumerate(profile.memory_events):
        if event.action == "segment_alloc":
            insort(starts, event.address)
            sizes[event.address] = event.bytes
        elif event.action == "alloc":
            place = bisect_right(starts, event.address) - 1
            segment = starts[place] if place >= 0 and event.address < starts[place] + sizes[starts[place]] else -1
            segment_of[event.address] = segment
            held += event.bytes
            users[segment] += 1
            used += event.bytes if segment < 0 else sizes[segment] if users[segment] == 1 else 0
            if used > limit_bytes:
                return _describe(profile, number, used - limit_bytes, held - event.bytes, limit_bytes)
        elif event.action == "free" and event.address in segment_of:
            segment = segment_of.pop(event.address)
            held -= event.bytes
            users[segment] -= 1
            used -= event.bytes if segment < 0 else sizes[segment] if not users[segment] else 0
    return None


def _describe(profile: Profile, number: int, short_bytes: int, held_bytes: int, limit_bytes: int) -> PredictedFailure:
    event = profile.memory_events[number]
    node = next((node for node in profile.nodes if node.name == event.label), None)
    point = next((point for point in profile.timeline if (point.event or 0) > number), None)
    return PredictedFailure(
        limit_bytes, short_bytes, event.bytes if event.requested_bytes is None else event.requested_bytes, held_bytes,
        None if point is None else point.phase, event.label if node is None else node.module_path or node.name,
        None if point is None else point.operator, None if node is None else node.source)


def advise(arguments: argparse.Namespace, prediction: Prediction, limit_bytes: int) -> Advice | None:
    """The first change with which the step fits where the allocator can reserve so much; None of a script and of a
    saved profile, whose models are not known here.
    """
    if prediction.is_fixed:
        return None
    step = complete(arguments, prediction.device)
    verdict, reserved = prediction.profile.verdict, prediction.profile.peak_reserved_bytes
    if verdict is None or verdict.needed_bytes is None or reserved is None:
        return None
    unseen = verdict.needed_bytes - reserved  # what is taken beside the allocator, which the limit leaves out
    step.device = replace(find_device(prediction.device), memory_bytes=limit_bytes + unseen)
    return find_advice(step, quick=True)
