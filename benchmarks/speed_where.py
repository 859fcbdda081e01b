"""The section of the speed benchmark that tells where the time of a profile goes."""
from __future__ import annotations

import cProfile
import gc
import pstats
from collections import Counter
from pathlib import Path

from .speed_contender import Prepared, prepare
from .speed_report import Report
from .speed_table import markdown

ROOMS = ("meta", "cuda", "memory", "record", "replay", "fx", "profilers", "results", "hardware")


def room_of(path: str) -> str:
    """Where the time of a function counts: a room of the package, torch, the model's library, or a built-in function.

    >>> paths = "/x/analyzer/meta/dispatch.py", "/y/torch/nn/modules/module.py", "~", "/y/torchvision/models/resnet.py"
    >>> tuple(map(room_of, paths))
    ('analyzer/meta', 'torch', 'built-in functions', 'model libraries')
    """
    parts = Path(path).parts
    if path == "~":
        return "built-in functions"
    if "analyzer" in parts:
        room = parts[parts.index("analyzer") + 1]
        return f"analyzer/{room}" if room in ROOMS else "analyzer, other"
    if "torch" in parts:
        return "torch"
    return "model libraries" if {"torchvision", "transformers"} & set(parts) else "Python"


def measure_where(report: Report) -> None:
    """Where the time of a profile goes, by cProfile."""
    watch = cProfile.Profile()
    for case in report.cases:
        on = Prepared(case)
        run = prepare("profile", on)
        assert not isinstance(run, str), run
        gc.collect()
        watch.runcall(run)
    rooms: Counter[str] = Counter()
    functions: list[tuple[float, int, str]] = []
    for (path, line, name), (_, calls, own, _, _) in pstats.Stats(watch).stats.items():  # type: ignore[attr-defined]
        rooms[room_of(path)] += own
        where = name if path == "~" else f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"
        functions.append((own, calls, where))
    whole = sum(rooms.values())
    share = [[room, f"{own / whole:.1%}"] for room, own in rooms.most_common()]
    top = [[f"`{where}`", f"{own / whole:.1%}", f"{calls}"]
           for own, calls, where in sorted(functions, reverse=True)[:20]]
    report.add(
        "Where the time goes",
        f"`cProfile` over one warm `profile()` of each of the {len(report.cases)} models: the share of time "
        "inside functions of each room themselves (measuring makes calls dearer than they are).",
        markdown(["room", "share"], share), markdown(["function", "share", "calls"], top))
