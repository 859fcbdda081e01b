"""What is under torch.compile, as text: graphs, breaks, kernels, and the eager step beside the compiled one."""
from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from analyzer.errors import InputError
from analyzer.on_use import load
from analyzer.results.info import CompiledInfo
from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report

from .quantity import ROOT, print_data, read_quantity
from .text_table import Column, check_layout, format_quantity, print_rows
from .text_width import escape_controls

_COLUMNS = (Column("name", "", "text"), Column("calls", "Calls", "number"), Column("graphs", "Graphs", "number"),
            Column("operators", "Operators", "number"), Column("recomputed", "Recomputed", "number"),
            Column("saved_bytes", "Saved", "bytes"), Column("fwd_kernels", "Fwd kernels", "number"),
            Column("fwd_extern_kernels", "Fwd others", "number"), Column("bwd_kernels", "Bwd kernels", "number"),
            Column("bwd_extern_kernels", "Bwd others", "number"))
_WIDTH = 116

#: Rows of the eager step beside the compiled one: what, a quantity (see `analyzer.report.quantity`), and its unit.
_BESIDE = (("memory after forward", "phases.forward.allocated_bytes", "bytes"),
           ("peak allocated", "peak_allocated_bytes", "bytes"), ("peak reserved", "peak_reserved_bytes", "bytes"),
           ("saved for backward", "saved_bytes", "bytes"), ("forward", "phases.forward.seconds", "seconds"),
           ("backward", "phases.backward.seconds", "seconds"), ("optimizer", "phases.optimizer.seconds", "seconds"),
           ("step", "step_seconds", "seconds"), ("kernels' own time", "kernel_seconds", "seconds"),
           ("kernels", "kernels", "number"), ("recomputed FLOPs", "recompute_flops", "count"),
           ("hardware FLOPs", "hardware_flops", "count"))


def describe_compiled(profile: ProfileData) -> list[str]:
    """What is compiled, in a line; none where nothing is.

    >>> from analyzer.on_use import load
    >>> from analyzer.results.info import BreakInfo
    >>> row = CompiledInfo(path="h.0", type="Block", calls=1, graphs=2, operators=40, recomputed=9, saved_bytes=64,
    ...                    fwd_kernels=5, bwd_kernels=7, fwd_extern_kernels=4, bwd_extern_kernels=8,
    ...                    breaks=(BreakInfo("data decide a size", "net.py:7"),))
    >>> describe_compiled(ProfileData(name="net", mode="train", compiled=(row, replace(row, path="h.1"))))
    ['compiled: 2 Block in 4 graphs, 2 breaks; 24 generated kernels and 24 others; 18 of 80 operators run again in \
backward']
    """
    rows = profile.compiled
    if not rows:
        return []
    breaks = sum([len(row.breaks) for row in rows])
    generated = sum([row.fwd_kernels + row.bwd_kernels for row in rows])
    others = sum([row.fwd_extern_kernels + row.bwd_extern_kernels for row in rows])
    again, operators = sum([row.recomputed for row in rows]), sum([row.operators for row in rows])
    graphs = sum([row.graphs for row in rows])
    return [f"compiled: {', '.join(name_compiled(rows))} in {graphs:,} graph{'' if graphs == 1 else 's'}, "
            f"{breaks or 'no'} break{'' if breaks == 1 else 's'}; {generated:,} generated kernels and {others:,} others"
            + (f"; {again:,} of {operators:,} operators run again in backward" if again else "")]


def name_compiled(rows: Sequence[CompiledInfo]) -> Iterator[str]:
    """Classes and functions, with how many there are of each."""
    kinds = [row.function or row.type for row in rows]
    for kind in dict.fromkeys(kinds):
        yield kind if kinds.count(kind) == 1 else f"{kinds.count(kind)} {kind}"


@register_report.shipped("compile")
def report_compiled(profile: ProfileData, fmt: str = "text") -> str:
    """What is compiled: a row for each module and function, breaks with their lines; then the eager step, which is
    profiled for it, beside the compiled one. ``fmt`` is a format of `Profile.module_tree`; CSV has the rows alone.
    """
    check_layout(None, 0, fmt, "compile")
    if not profile.compiled:
        return ("nothing is under torch.compile: profile(torch.compile(model), ...), model.compile(), or --compile of "
                "`analyzer profile`")
    if fmt == "csv":
        return escape_controls(draw_compiled(profile, fmt))
    try:
        beside = draw_beside(load("analyzer.api.profile:profile_eagerly")(profile), profile, fmt)
    except InputError as error:
        beside = textwrap.fill(f"The eager step is not known here: {error}. Of two saved profiles `analyzer compare "
                               "eager.json compiled.json` tells what differs", _WIDTH)
    return escape_controls("\n\n".join([*describe_compiled(profile), draw_compiled(profile, fmt), beside]))


def draw_compiled(profile: ProfileData, fmt: str = "text") -> str:
    """A row for each module and function, those that are alike as one, and below it breaks and recompilations."""
    groups: dict[str, list[CompiledInfo]] = {}
    for row in profile.compiled or ():
        groups.setdefault(repr(replace(row, path="")), []).append(row)
    parts = [print_data(_COLUMNS, [[_name(alike), *(_add_up(column, alike) for column in _COLUMNS[1:])]
                                   for alike in groups.values()], fmt)]
    notes = [note for alike in groups.values() for note in _list_notes(alike)]
    if notes and fmt != "csv":
        parts.append("\n".join([textwrap.fill(f"- {note}", _WIDTH, subsequent_indent="  ", break_long_words=False)
                                for note in dict.fromkeys(notes)]))
    return "\n\n".join(parts)


def _name(rows: Sequence[CompiledInfo]) -> str:
    kind = rows[0].function or rows[0].type
    if len(rows) == 1:
        return f"{rows[0].path or ROOT} {kind}"
    return f"{_fold([row.path for row in rows])} ({len(rows)}) {kind}"


def _fold(paths: Sequence[str]) -> str:
    """The first of several paths, with the last in the place where they differ.

    >>> _fold(["h.0.mlp", "h.1.mlp", "h.11.mlp"]), _fold(["encoder.0", "decoder.0.x"])
    ('h.{0-11}.mlp', 'encoder.0 to decoder.0.x')
    """
    first, last = paths[0].split("."), paths[-1].split(".")
    if len(first) != len(last) or sum([a != b for a, b in zip(first, last)]) != 1:
        return f"{paths[0]} to {paths[-1]}"
    return ".".join([a if a == b else f"{{{a}-{b}}}" for a, b in zip(first, last)])


def _add_up(column: Column, rows: Sequence[CompiledInfo]) -> int | None:
    known = [value for row in rows if (value := getattr(row, column.field)) is not None]
    return sum(known) if known else None


def _list_notes(rows: Sequence[CompiledInfo]) -> Iterator[str]:
    """Breaks, recompilations and settings of rows that are alike."""
    first = rows[0]
    for at in first.breaks:
        yield f"{_name(rows)}: the graph ends{'' if at.source is None else f' at {at.source}'}: {at.reason}"
    for reason in first.recompilations:
        yield f"{_name(rows)}: compiled again: {reason}"
    if first.cuda_graphs:
        yield f"{_name(rows)}: each pass is launched as one CUDA graph"
    settings = [f"{name}={value}" for name, value in first.config.items() if name != "triton.cudagraphs"]
    if settings:
        yield f"{_name(rows)}: {', '.join(settings)}"


def draw_beside(eager: ProfileData, compiled: ProfileData, fmt: str = "text") -> str:
    """A row for each figure that compilation changes: eager, compiled, and how much more or less that is."""
    rows = []
    for title, name, unit in _BESIDE:
        before, after = read_quantity(eager, name), read_quantity(compiled, name)
        if before is None and after is None:
            continue
        change = "" if not before or after is None else f"{after / before - 1:+.1%}"
        rows.append((title, format_quantity(before, unit), format_quantity(after, unit), change))
    return print_rows(("", "Eager", "Compiled", "Change"), rows, fmt=fmt)
