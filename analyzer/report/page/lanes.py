"""What the host and each stream do over the step, as data of a page."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from analyzer.profilers.schedule import PICOSECONDS
from analyzer.report.communication import sum_exposed
from analyzer.results.profile import Profile
from analyzer.results.span import SpanInfo

_MOST_SPANS = 100_000  # a file of 10,000 nodes has about 60,000


def describe_lanes(profile: Profile) -> dict[str, Any] | None:
    """The spans of a profile by column, their times in picoseconds, what repeats by number; None where no time is
    known. Of very many, neighbours in a lane that run for one module are one.
    """
    spans: Sequence[SpanInfo] = profile.spans
    if not spans:
        return None
    merged = len(spans) > _MOST_SPANS
    if merged:
        spans = list(_merge(spans))
    texts: dict[str, list[str]] = {}
    columns: dict[str, list[int]] = {}
    for field in ("lane", "kind", "name", "operator", "module_path", "phase"):
        values = [getattr(span, field) or "" for span in spans]
        texts[field] = list(dict.fromkeys(values))
        places = {text: i for i, text in enumerate(texts[field])}
        columns[field] = [places[value] for value in values]
    return {"texts": texts, "columns": columns, "merged": merged, "exposed_seconds": sum_exposed(profile),
            "start": [round(span.start_seconds * PICOSECONDS) for span in spans],
            "seconds": [round(span.seconds * PICOSECONDS) for span in spans]}


def _merge(spans: Sequence[SpanInfo]) -> Iterator[SpanInfo]:
    """One span for neighbours of a lane that are of one kind, module and phase, from where the first begins to where
    the last ends.
    """
    by_lane: dict[str, list[SpanInfo]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    for found in by_lane.values():
        for _, group in groupby(found, key=lambda span: (span.kind, span.module_path, span.phase)):
            first, *more = group
            end = more[-1].end_seconds if more else first.end_seconds
            yield first._replace(seconds=end - first.start_seconds, name=first.name if not more else first.module_path)
