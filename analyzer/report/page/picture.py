"""Memory over a step as a static picture: a PNG that stands where no script runs, on light and on dark paper."""
from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from analyzer.errors import MissingExtraError, how_to_install
from analyzer.results.info import MemoryEvent, TimelinePoint
from analyzer.results.profile import ProfileData
from analyzer.units import format_bytes

from .document import read_asset
from .part import find_blocks, shown_device, sort_categories, thin_out

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_PIXELS = 840            #: at which it is read best
_MOST_POINTS = 600            # more than the picture has columns for
_WIDTH, _HEIGHT, _DPI = 8.4, 2.9, 130
_COLORS = 128
_INK = "#7d7d7d"              # has the same contrast, 4.2 to 1, to white and to JupyterLab's dark paper
_SHORT = 0.09                 # of the width: the label of a phase takes as much
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def draw_memory(profile: ProfileData) -> bytes | None:
    """A PNG of memory by category; None without a timeline. Raises MissingExtraError without matplotlib."""
    points = thin_out(profile.timeline, _MOST_POINTS)
    if not points:
        return None
    with open_figure("the picture of memory") as figure:
        axes = figure.add_axes((0.075, 0.09, 0.76, 0.75))
        places = np.arange(len(points) + 1)
        stacks = stack_categories(points, profile.memory_events, shown_device(profile))
        if not stacks:
            stacks = {"allocated": [point.allocated_bytes for point in points]}
        colors = read_colors()
        axes.stackplot(places, [_end(values) for values in stacks.values()], step="post", labels=list(stacks),
                       colors=[colors.get(name, colors["other"]) for name in stacks], linewidth=0)
        reserved = [point.reserved_bytes for point in points if point.reserved_bytes is not None]
        if len(reserved) == len(points):
            axes.plot(places, _end(reserved), drawstyle="steps-post", color=_INK, linestyle=":", linewidth=1.2,
                      label="reserved")
        _finish(axes, max([*reserved, *(point.allocated_bytes for point in points)]), len(points))
        _mark_phases(axes, points)
        _mark_peak(axes, points)
        figure.legend(*(part[::-1] for part in axes.get_legend_handles_labels()), loc="center left",
                      bbox_to_anchor=(0.84, 0.5), frameon=False, labelcolor=_INK, handlelength=1, handleheight=1)
        return _print(figure)


def draw_curves(curves: Mapping[str, Sequence[int]], limits: Mapping[str, int]) -> bytes:
    """A PNG of bytes over a step: ``curves``, the first as an area, and levels. Raises MissingExtraError."""
    with open_figure("the picture of memory") as figure:
        axes = figure.add_axes((0.075, 0.09, 0.76, 0.82))
        colors = read_colors()
        for i, (name, values) in enumerate(curves.items()):
            places = np.linspace(0, 1, len(values) + 1)
            if i == 0:
                axes.fill_between(places, _end(values), step="post", color=colors["input"], alpha=0.45, linewidth=0,
                                  label=name)
            else:
                axes.plot(places, _end(values), drawstyle="steps-post", color=colors["activation"], linewidth=1.6,
                          label=name)
        for name, level in limits.items():
            axes.axhline(level, color=colors["temporary"], linestyle="--", linewidth=1.2, label=name)
        _finish(axes, max([*limits.values(), *(max(values) for values in curves.values())]), 1)
        figure.legend(loc="center left", bbox_to_anchor=(0.84, 0.5), frameon=False, labelcolor=_INK, handlelength=1)
        return _print(figure)


@contextmanager
def open_figure(what: str, width: float = _WIDTH, height: float = _HEIGHT) -> Iterator[Figure]:
    """A figure of so many inches in a style of its own. Raises MissingExtraError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"{what}: matplotlib is not installed; {how_to_install('report')}") from error
    with rc_context({"text.usetex": False, "font.family": "sans-serif", "font.size": 9, "legend.fontsize": 8.5,
                     "axes.linewidth": 0.8, "path.sketch": None}):
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        yield figure


def stack_categories(points: Sequence[TimelinePoint], events: Sequence[MemoryEvent],
                     device: int = 0) -> dict[str, Any]:
    """Bytes at each moment by category, in the order in which they are stacked; nothing where they are not known."""
    blocks, holders = find_blocks(points, events, device)
    changes: dict[str, Any] = {}
    for block in blocks:
        change = changes.setdefault(holders[block.holder][1], np.zeros(len(points) + 1, dtype=np.int64))
        change[block.born] += block.bytes
        change[block.freed] -= block.bytes
    return {name: np.cumsum(changes[name])[:len(points)] for name in sort_categories(changes)}


def _end(values: Sequence[int]) -> list[int]:
    """Steps end where the last value was held for as long as the others."""
    return [*values, values[-1]]


def _finish(axes: Axes, top: int, width: float) -> None:
    """Axes that show bytes from 0 to above ``top``, in units of 1024, in colours for any paper."""
    axes.set_xlim(0, width)
    axes.set_ylim(0, top * 1.08 or 1)
    axes.set_xticks([])
    axes.set_xlabel("operator calls, in order", color=_INK, labelpad=4)
    ticks = find_ticks(top)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color=_INK, alpha=0.25, linewidth=0.6)
    axes.patch.set_alpha(0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)


def find_ticks(top: int) -> dict[int, str]:
    """At most six round numbers of bytes from 0 to ``top``, and their text.

    >>> find_ticks(3 * 2**30)
    {0: '0', 1073741824: '1 GiB', 2147483648: '2 GiB', 3221225472: '3 GiB'}
    """
    power = max(0, min(len(_UNITS) - 1, (top.bit_length() - 1) // 10))
    unit = 1024**power
    step = next(step for step in _STEPS if top / unit / step <= 6) * unit
    return {value: f"{value // unit} {_UNITS[power]}" if value else "0" for value in range(0, top + 1, step)}


def _mark_phases(axes: Axes, points: Sequence[TimelinePoint]) -> None:
    """A line where a phase begins, and its name above it; names of short phases stand above one another."""
    start, labelled, raised = 0, -np.inf, 0
    for phase, group in groupby(points, key=lambda point: point.phase or ""):
        if start:
            axes.axvline(start, color=_INK, linewidth=0.8, alpha=0.7)
        raised = raised + 1 if start - labelled < len(points) * _SHORT else 0
        is_last = start > len(points) * (1 - _SHORT)
        axes.annotate(phase, (start, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                      xytext=(-2 if is_last else 2, 2 + 10 * raised), color=_INK,
                      ha="right" if is_last else "left", va="bottom")
        start, labelled = start + len(list(group)), start


def _mark_peak(axes: Axes, points: Sequence[TimelinePoint]) -> None:
    peak = max(range(len(points)), key=lambda i: points[i].allocated_bytes)
    nbytes = points[peak].allocated_bytes
    is_late = peak > len(points) * 0.8
    axes.plot([peak + 0.5], [nbytes], marker="v", color=_INK, markersize=5)
    axes.annotate(f"peak {format_bytes(nbytes)}", (peak, nbytes), xytext=(-6 if is_late else 6, 3),
                  textcoords="offset points", color=_INK, ha="right" if is_late else "left", fontweight="bold")


def _print(figure: Figure) -> bytes:
    """The figure on transparent paper, in few colours: a quarter of the bytes, which a notebook keeps."""
    from PIL import Image  # which matplotlib needs
    from PIL.Image import Quantize

    drawn, buffer = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, transparent=True)
    Image.open(drawn).quantize(_COLORS, Quantize.FASTOCTREE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


@cache
def read_colors() -> dict[str, str]:
    """The page's colours on light paper, by what they stand for."""
    light = read_asset("page.css").partition("}")[0]
    return {name.replace("-", " "): color for name, color in re.findall(r"--([\w-]+): (#\w+)", light)}
