"""The first screen of a page: the verdict in a sentence, the figures that people ask for, and the phases."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from analyzer.report.bound import find_remedy, list_bounds
from analyzer.report.column import format_quantity
from analyzer.report.speed import describe_seconds, format_step
from analyzer.report.summary import PHASE_COLUMNS, describe_out_of_memory, describe_run
from analyzer.results.info import BOUNDS, PhaseInfo, bound_seconds
from analyzer.results.profile import Profile

from .headline import write_headline, write_tile

_STATES = {True: "fits", False: "fails", None: "unknown"}


def write_verdict(profile: Profile) -> str:
    """HTML of the sentence and the tiles; what it says is in the profile, and needs no script."""
    _, *run = describe_run(profile)
    verdict = profile.verdict
    lines = str(verdict).splitlines() if verdict is not None else ["no device was given: whether it fits is not known"]
    if profile.out_of_memory is not None:
        lines.insert(1, describe_out_of_memory(profile.out_of_memory))
    state = _STATES[None if verdict is None else verdict.fits]
    title, *more = lines
    remedy = find_remedy(profile)
    return "".join([
        write_headline(title, [*more, *([f"Bound by {remedy}"] if remedy else [])], _write_tiles(profile), state),
        f'<details class="run"><summary>What was run</summary><p>{"<br>".join(map(escape, run))}</p></details>'])


def _write_tiles(p: Profile) -> Iterator[str]:
    size = format_quantity
    yield write_tile("Peak allocated", size(p.peak_allocated_bytes, "bytes"),
                     f"{size(p.peak_reserved_bytes, 'bytes')} reserved", "At most, over the first and a later step.")
    if p.step_seconds is not None:
        low_high = format_step(p).partition(" (")[2].rstrip(")")
        note = f"{p.how_timed}, {low_high}" if low_high else p.how_timed
        yield write_tile("Step time", size(p.step_seconds, "seconds"), note, describe_seconds(p))
    if p.device is not None and (mfu := p.mfu()) is not None:
        hfu = p.hfu()
        yield write_tile("MFU", size(mfu, "share"), "" if hfu in (None, mfu) else f"HFU {size(hfu, 'share')}",
                         "Model FLOPs utilization: forward and backward over the device's peak.")
    if p.tokens_per_second is not None:
        yield write_tile("Tokens a second", size(p.tokens_per_second, "count"),
                         "" if p.data_parallel_size in (None, 1) else f"of {p.data_parallel_size} copies")
    elif p.samples_per_second is not None:
        yield write_tile("Samples a second", size(p.samples_per_second, "count"))
    yield write_tile("Parameters", size(p.params, "count"), size(p.param_bytes, "bytes"))
    yield write_tile("FLOPs", size(p.hardware_flops, "count"),
                     "" if p.mode == "infer" else f"{size(p.fwd_flops, 'count')} forward")
    if p.comm:
        exposed = [phase.exposed_comm_seconds for phase in p.phases.values()]
        known = None if None in exposed else sum(seconds or 0 for seconds in exposed)
        yield write_tile("Exposed communication", size(known, "seconds"), "", "In which nothing is computed.")


def write_phases(profile: Profile) -> str:
    """HTML of the table of phases, of both steps, and of what bounds the steady one."""
    tables = [("Steady step", profile.phases), ("First step", profile.first_step)]
    written = [_write_phases(title, phases) for title, phases in tables if phases]
    bars = [_write_bound(name, phase) for name, phase in profile.phases.items()]
    if not any(bars):
        return "".join(written)
    keys = "".join(f'<span class="key {bound}">{bound}</span>' for bound in BOUNDS)
    rows = "".join(f"<li>{escape(' · '.join(cell for cell in row if cell != '-'))}</li>"
                   for row in _told_bounds(profile))
    return "".join([*written, f'<h3>What bounds it</h3><div class="keys" aria-hidden="true">{keys}</div>', *bars,
                    f'<ul class="spoken">{rows}</ul>'])


def _told_bounds(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name, *cells in list_bounds(profile):
        yield name, *(f"{bound} {cell}" for bound, cell in zip(BOUNDS, cells) if cell != "-")


def _write_phases(title: str, phases: dict[str, PhaseInfo]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in _headers(title))
    rows = [f'<tr><th scope="row">{escape(name)}</th>' + "".join(
        f"<td>{escape(column.format(getattr(phase, column.field)))}</td>" for column in PHASE_COLUMNS) + "</tr>"
            for name, phase in phases.items()]
    return (f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead>'
            f'<tbody>{"".join(rows)}</tbody></table></div>')


def _headers(title: str) -> Sequence[str]:
    return (title, *(column.header for column in PHASE_COLUMNS))


def _write_bound(name: str, phase: PhaseInfo) -> str:
    """One bar: the shares of a phase's time."""
    parts = bound_seconds(phase)
    total = sum(parts.values())
    if phase.launch_seconds is None or not total:
        return ""
    cells = "".join(
        f'<span class="{bound}" style="width:{100 * part / total:.2f}%" '
        f'title="{bound} {escape(format_quantity(part, "seconds"))}"></span>'
        for bound, part in parts.items() if part)
    return (f'<div class="bound"><span>{escape(name)}</span><div class="bar" aria-hidden="true">{cells}</div>'
            f'<span>{escape(format_quantity(phase.seconds, "seconds"))}</span></div>')
