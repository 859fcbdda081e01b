"""A table of ranks as parts of a page: the kinds of ranks, their memory over each other, and each rank's own parts."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from analyzer.record.process_group import format_ranks
from analyzer.report.communication import sum_exposed
from analyzer.report.page.answer import Headline, Tile, capitalize_first
from analyzer.report.page.document import Part, choice_part, pack
from analyzer.report.page.headline import headline_part
from analyzer.report.page.memory import sort_categories, thin_out
from analyzer.report.page.profile_page import list_parts
from analyzer.results.profile import Profile
from analyzer.results.verdict import Verdict
from analyzer.units import format_bytes, format_count, format_seconds

from .rank_row import RankRow

_MOST_POINTS = 20_000  # of all curves together
_MOST_PACKED = 4_500_000  # bytes of the ranks' own parts: with what draws the charts a file stays below 10 MB
#: What bars and table show: title, unit, and the field of a row.
_QUANTITIES = (("Peak reserved", "bytes", "peak_reserved_bytes"), ("Host peak", "bytes", "host_peak_bytes"),
               ("Step", "seconds", "step_seconds"), ("Sent and received", "bytes", "comm_bytes"),
               ("Parameters", "count", "params"), ("Parameter size", "bytes", "param_bytes"),
               ("Optimizer states", "bytes", "optimizer_bytes"))


def rank_headline(size: int, rows: Sequence[RankRow], deciding: RankRow | None, slowest: RankRow | None,
                  step_seconds: float | None, step_range: tuple[float, float] | None,
                  profiles: Mapping[int, Profile]) -> Part:
    """What a page of ranks says first: the verdict on the rank that decides, and the figures of the job; ``step_range``
    is low and high of its step.
    """
    verdict = _find_verdict(deciding, profiles)
    said = [f"which of {size} ranks needs most memory is not known"]
    tiles = [Tile("Ranks", format_count(size), f"{len(rows)} kind{'s' if len(rows) > 1 else ''} in the table")]
    if deciding is not None:
        allocated = format_bytes(deciding.peak_allocated_bytes)
        said = [f"{allocated} allocated"] if verdict is None else str(verdict).splitlines()
        said[0] = f"{deciding.name} decides: {said[0]}"
        tiles.append(Tile("Most allocated", allocated, f"{format_bytes(deciding.peak_reserved_bytes)} reserved",
                          f"On {deciding.name}."))
    if step_seconds is not None:
        tiles.append(Tile("Step of the job", format_seconds(step_seconds),
                          "" if slowest is None else f"slowest rank {slowest.rank}",
                          "" if step_range is None else "Nine in ten measured steps take "
                          f"{format_seconds(step_range[0])} to {format_seconds(step_range[1])}."))
    exposed = [seconds for profile in profiles.values() if (seconds := sum_exposed(profile)) is not None]
    if any(exposed):
        tiles.append(Tile("Exposed communication", format_seconds(max(exposed)), "at most, of a rank"))
    return headline_part(Headline.of(None if verdict is None else verdict.fits, said[0], said[1:]), tiles)


def _find_verdict(row: RankRow | None, profiles: Mapping[int, Profile]) -> Verdict | None:
    """That of the profile of the row's rank, where there is one."""
    return None if row is None or row.rank not in profiles else profiles[row.rank].verdict


def describe_ranks(rows: Sequence[RankRow], profiles: Mapping[int, Profile], deciding: RankRow | None,
                   slowest: RankRow | None) -> dict[str, Any]:
    """The kinds of ranks by column; quantities of which nothing is known are left out. ``categories`` add up to what is
    allocated at the peaks; there are none where they are not known of every row.
    """
    known = [profiles.get(row.rank) for row in rows]
    parts = [{} if profile is None else profile.peak_by_category for profile in known]
    names = sort_categories(name for part in parts for name in part)
    adds_up = all(sum(part.values()) == row.peak_allocated_bytes for part, row in zip(parts, rows))
    exposed = [None if profile is None else sum_exposed(profile) for profile in known]
    quantities = [("Peak allocated", "bytes", [row.peak_allocated_bytes for row in rows]),
                  *((title, unit, [getattr(row, field) for row in rows]) for title, unit, field in _QUANTITIES),
                  ("Exposed communication", "seconds", exposed)]
    verdict = _find_verdict(deciding, profiles)
    return {"ranks": [format_ranks(row.ranks) for row in rows], "kind": [row.kind for row in rows],
            "alike": [len(row.ranks) for row in rows], "peak_phase": [row.peak_phase for row in rows],
            "quantities": [{"title": title, "unit": unit, "values": values} for title, unit, values in quantities
                           if any(value is not None for value in values)],
            "categories": {name: [part.get(name, 0) for part in parts] for name in names} if adds_up else {},
            "deciding": None if deciding is None else rows.index(deciding),
            "slowest": None if slowest is None else rows.index(slowest),
            "device": None if verdict is None else verdict.device,
            "capacity": None if verdict is None else verdict.capacity_bytes}


def describe_rank_memory(rows: Sequence[RankRow], profiles: Mapping[int, Profile]) -> dict[str, Any] | None:
    """What each kind of rank has allocated over its step; None where nothing is known of that. Of very many moments
    each stands for neighbours in its phase and is the highest of them.
    """
    known = [(row, profiles[row.rank].timeline) for row in rows if row.rank in profiles]
    known = [(row, timeline) for row, timeline in known if timeline]
    curves: list[dict[str, Any]] = []
    for row, timeline in known:
        points = thin_out(timeline, max(200, _MOST_POINTS // len(known)))
        phases, labels = ([dict.fromkeys(texts) for texts in ([p.phase or "" for p in points],
                                                              [str(p.label) for p in points])])
        places = [{text: i for i, text in enumerate(texts)} for texts in (phases, labels)]
        curves.append({
            "name": row.name, "phases": list(phases), "labels": list(labels),
            "phase": [places[0][p.phase or ""] for p in points], "label": [places[1][str(p.label)] for p in points],
            "allocated": [p.allocated_bytes for p in points], "seconds": [p.seconds for p in points]})
    return {"curves": curves} if curves else None


def list_rank_parts(rows: Sequence[RankRow], profiles: Mapping[int, Profile], deciding: RankRow | None) -> list[Part]:
    """The parts of the ranks' own pages, those of the rank that decides in sight; another can be chosen, as many of
    them as keep the file small.
    """
    ordered = [row for row in sorted(rows, key=lambda row: row != deciding) if row.rank in profiles]
    groups: dict[str, list[Part]] = {}
    packed = 0
    for row in ordered:
        parts = list(list_parts(profiles[row.rank]))
        packed += len(pack([dict(part.data) for part in parts])) + sum(len(part.lead) for part in parts)
        if groups and packed > _MOST_PACKED:
            break
        titled = [replace(part, title=capitalize_first(row.name)) if part.kind == "verdict" else part for part in parts]
        groups[row.name] = [replace(part, group=row.name) for part in titled]
    missing = len(ordered) - len(groups)
    note = f"{missing} more would make the file too large; their figures are in the table." if missing else ""
    choice = [choice_part("A rank by itself", list(groups), note)] if len(ordered) > 1 else []
    return [*choice, *(part for parts in groups.values() for part in parts)]
