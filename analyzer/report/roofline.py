"""The roofline of a profile, as Williams, Waterman and Patterson draw it (CACM 52:4, 2009): data, files, an image."""
from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from analyzer.errors import InputError, MissingExtraError
from analyzer.hardware import DeviceSpec
from analyzer.hardware.listing import find_peak
from analyzer.output import check_output, write_output
from analyzer.profilers.kernel_time.call import convolutions_use_tf32, products_use_tf32
from analyzer.results.profile import Profile
from analyzer.results.run_cost import Roofline, RooflinePeak, RooflineRow
from analyzer.results.view import register_exporter, register_view
from analyzer.units import add_quantities, format_seconds

from .node_table import guard_formula
from .speed import find_product_dtype, is_convolution
from .text_width import escape_controls

DATA, IMAGES = (".json", ".csv"), (".png", ".svg", ".pdf")
_COLUMNS = ("name", "kind", "part", "type", "flops", "bytes", "intensity", "seconds", "flops_per_second", "ceiling",
            "bound")


class _Peaks(NamedTuple):
    """FLOP/s of products, of convolutions and of all else."""

    products: float | None
    convolutions: float | None
    others: float | None


@register_view.shipped("roofline")
def find_roofline(profile: Profile) -> Roofline:
    """What `Profile.roofline` gives."""
    if profile.device is None:
        raise InputError("roofline(): the profile names no device; profile with device=, e.g. device='h100'")
    spec, kind = profile.find_device(profile.device), find_product_dtype(profile) or "float32"
    peaks = _Peaks(find_peak(kind, spec, True, allow_tf32=products_use_tf32()),
                   find_peak(kind, spec, True, allow_tf32=convolutions_use_tf32()),
                   find_peak(kind, spec, False))
    rows = [*_list_operators(profile, spec, peaks), *_list_modules(profile, spec, peaks)]
    return Roofline(spec.name, spec.memory_bandwidth, _name_peaks(profile, kind, peaks), tuple(rows),
                    profile.seconds_method)


def _name_peaks(profile: Profile, kind: str, peaks: _Peaks) -> tuple[RooflinePeak, ...]:
    """The peaks that the step's work has, highest first."""
    convolves = any(row.macs and is_convolution(row) for row in profile.operators)
    multiplies = any(row.macs and not is_convolution(row) for row in profile.operators)
    named = [("convolutions" if peaks.convolutions != peaks.products else "products", peaks.convolutions, convolves),
             ("products", peaks.products, multiplies), ("other operators", peaks.others, True)]
    found = {f"{kind} {name}": rate for name, rate, is_there in named if is_there and rate is not None}
    return tuple(sorted([RooflinePeak(name, rate) for name, rate in found.items()], key=lambda p: -p.flops_per_second))


def _list_operators(profile: Profile, spec: DeviceSpec, peaks: _Peaks) -> Iterator[RooflineRow]:
    for row in profile.operators:
        nbytes = add_quantities((row.read_bytes, row.written_bytes))
        if row.flops == 0 and nbytes == 0:
            continue  # views
        convolved = row.macs if is_convolution(row) else 0
        yield _place(spec, peaks, row.macs, convolved, name=row.operator, kind="operator", part=row.phase,
                     flops=row.flops, bytes=nbytes, seconds=row.seconds)


def _list_modules(profile: Profile, spec: DeviceSpec, peaks: _Peaks) -> Iterator[RooflineRow]:
    for module in () if profile.modules is None else profile.modules.walk():
        if module.shared_with is not None:
            continue
        costs = {name: add_quantities([getattr(module, part) for part in parts if profile.mode != "infer"
                                       or part.startswith("fwd")]) for name, parts in _OF_MODULE.items()}
        if costs["flops"] == 0 and costs["bytes"] == 0:
            continue
        operators = [row for inner in module.walk() for row in inner.operators]
        convolved = sum(row.macs or 0 for row in operators if is_convolution(row))
        again = sum(row.macs or 0 for row in operators if row.phase == "recompute")
        macs = costs.pop("macs")
        yield _place(spec, peaks, None if macs is None else macs + again, convolved, name=module.path, kind="module",
                     part="step", type=module.type, **costs)


#: What a module's quantities are sums of; its backward bytes and seconds have what runs again in them.
_OF_MODULE = {
    "flops": ("fwd_flops", "bwd_flops", "recompute_flops"), "macs": ("fwd_macs", "bwd_macs"),
    "bytes": ("fwd_read_bytes", "fwd_written_bytes", "bwd_read_bytes", "bwd_written_bytes"),
    "seconds": ("fwd_seconds", "bwd_seconds")}


def _place(spec: DeviceSpec, peaks: _Peaks, macs: int | None, convolved: int | None, **facts: Any) -> RooflineRow:
    """A row with its ceiling: FLOPs over the longer of what arithmetic takes at its peaks and bytes at theirs.
    Multiply-adds are two FLOPs at the rate of products; what else a row with products does runs beside them.
    """
    flops, nbytes = facts["flops"], facts["bytes"]
    if not flops or nbytes is None or macs is None or convolved is None or not spec.memory_bandwidth:
        return RooflineRow(**facts)
    parts = ((2 * (macs - convolved), peaks.products), (2 * convolved, peaks.convolutions)) if macs else (
        (flops, peaks.others),)
    times = [None if rate is None else count / rate for count, rate in parts if count]
    arithmetic, moving = add_quantities(times), nbytes / spec.memory_bandwidth
    if arithmetic is None:
        return RooflineRow(**facts)
    return RooflineRow(**facts, ceiling=flops / max(arithmetic, moving),
                       bound="arithmetic" if arithmetic > moving else "memory")


@register_exporter.shipped("roofline")
def write_roofline(profile: Profile, path: str | Path | None = None) -> Roofline:
    """The roofline, also written to ``path`` if one is given: its data as .json or .csv, or drawn as .png, .svg or
    .pdf. Raises InputError for other names, MissingExtraError where an image is asked for without matplotlib.
    """
    if path is None:
        return find_roofline(profile)
    suffix = check_roofline(path)
    found = find_roofline(profile)
    if suffix in IMAGES:
        write_output(path, draw_roofline(found, profile.name, suffix))
    else:
        write_output(path, _format_csv(found) if suffix == ".csv" else _format_json(found))
    return found


def check_roofline(path: str | Path) -> str:
    """The suffix of a file that a roofline can be written to. Raises what `write_roofline` raises, before the work."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*DATA, *IMAGES):
        raise InputError(f"roofline {str(path)!r}: must end in {', '.join((*DATA, *IMAGES))}")
    check_output(path)
    if suffix in IMAGES:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(f"roofline {str(path)!r}: an image needs matplotlib, which is not installed: pip "
                                    "install 'symbolic-analyzer[report]', or write .json or .csv") from error
    return suffix


def _format_json(found: Roofline) -> str:
    rows = [{name: getattr(row, name) for name in _COLUMNS} for row in found]
    return json.dumps({
        "device": found.device, "memory_bandwidth": found.memory_bandwidth, "seconds_method": found.seconds_method,
        "peaks": [{"name": p.name, "flops_per_second": p.flops_per_second} for p in found.peaks],
        "rows": rows}, indent=1, allow_nan=False) + "\n"


def _format_csv(found: Roofline) -> str:
    """The rows; the peaks are rows of kind "peak", whose ceiling they are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for peak in found.peaks:
        writer.writerow([peak.name, "peak", *[""] * 7, peak.flops_per_second, ""])
    if found.memory_bandwidth is not None:
        writer.writerow([f"{found.device} memory: bytes a second", "peak", *[""] * 7, found.memory_bandwidth, "memory"])
    for row in found:
        cells = [getattr(row, name) for name in _COLUMNS]
        writer.writerow([guard_formula(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def draw_roofline(found: Roofline, name: str, suffix: str) -> bytes:
    """The image: both axes logarithmic, each leaf operator and module a point as large as its share of the time. Names
    are text and no formula between dollar signs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="FLOPs to a byte", ylabel="FLOP/s")
    axes.set_title(escape_controls(f"{name} on {found.device} (time: {found.seconds_method})"), parse_math=False)
    placed = [row for row in found if row.intensity and row.flops_per_second]
    longest = max([row.seconds or 0.0 for row in placed if row.kind == "operator"], default=1.0)
    for kind, marker, color in (("operator", "o", "tab:blue"), ("module", "^", "tab:orange")):
        rows = [row for row in placed if row.kind == kind]
        sizes = [12 + 200 * min(1.0, (row.seconds or 0.0) / longest) for row in rows]
        axes.scatter([row.intensity or 0.0 for row in rows], [row.flops_per_second or 0.0 for row in rows], s=sizes,
                     marker=marker, color=color, alpha=0.5, label=f"{kind}s")
    shown = sorted((row for row in placed if row.kind == "operator"), key=lambda row: -(row.seconds or 0.0))[:_LABELS]
    for i, row in enumerate(shown, 1):
        axes.annotate(str(i), (row.intensity or 0.0, row.flops_per_second or 0.0), fontsize=8, ha="center", va="center")
    lines = [f"{i}  {row.name}, {row.part}: {format_seconds(row.seconds)}" for i, row in enumerate(shown, 1)]
    axes.text(0.01, 0.99, escape_controls("\n".join(lines)), parse_math=False, transform=axes.transAxes, ha="left",
              va="top", fontsize=8)
    _draw_roof(axes, found, [row.intensity or 1.0 for row in placed])
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower right")
    image = io.BytesIO()
    figure.savefig(image, format=suffix[1:], dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    return image.getvalue()


_LABELS = 12  # the longest operators, which are numbered


def _draw_roof(axes: Any, found: Roofline, intensities: list[float]) -> None:
    """The slope of the bandwidth up to each flat peak."""
    if not found.memory_bandwidth or not found.peaks:
        return
    bandwidth, top = found.memory_bandwidth, found.peaks[0].flops_per_second
    left = min([*intensities, 0.1])
    right = max([*intensities, 10 * top / bandwidth])
    for i, peak in enumerate(found.peaks):
        ridge = peak.flops_per_second / bandwidth
        xs = [left, ridge, right] if i == 0 else [ridge, right]
        axes.plot(xs, [min(x * bandwidth, peak.flops_per_second) for x in xs], color="black", linewidth=1,
                  linestyle="-" if i == 0 else "--")
        label = escape_controls(f"{peak.name}: {peak.flops_per_second / 1e12:,.1f} TFLOP/s")
        axes.annotate(label, (right, peak.flops_per_second), ha="right", va="bottom", fontsize=8, parse_math=False)
