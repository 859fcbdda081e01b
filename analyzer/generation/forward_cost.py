"""What each pass of a recorded run cost."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from analyzer.api.session import Run

Pass = TypeVar("Pass")


def fill_costs(run: Run, passes: Sequence[Pass], names: Sequence[str]) -> list[Pass]:
    """``passes``, records of which each is a step of the log, with their fields ``names``, which are those of a phase,
    as in the forward phase of that step; None is unknown.
    """
    rows: dict[int, dict[str, Any]] = {}
    for annotation in run.annotate():
        for (step, phase), row in annotation.phases.items():
            if phase == "forward":
                rows.setdefault(step, {}).update(row)
    filled: list[Any] = list(passes)
    return [replace(record, **{name: rows.get(i, {}).get(name) for name in names}) for i, record in enumerate(filled)]
