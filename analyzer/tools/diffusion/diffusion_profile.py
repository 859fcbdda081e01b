"""What a batch of images or videos costs, as plain data and as a screen."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

from analyzer.report.export.json_format import read_record, write_record
from analyzer.report.text_table import format_quantity, print_rows
from analyzer.report.text_width import escape_controls
from analyzer.results.info import longest_bound
from analyzer.saved_format import SavedFormat
from analyzer.units import format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionPart:
    """One module of a pipeline, and one of its calls. None is unknown."""

    name: str
    calls: int
    seconds: float | None = None            #: of one call
    seconds_range: tuple[float, float] | None = None
    bounds: dict[str, float] = field(default_factory=dict)  #: of these, by what they wait for
    product_seconds: float | None = None    #: what its products would take at the device's peak rate, on one device
    traffic_seconds: float | None = None    #: what its bytes would take at the memory's rate, on one device
    param_bytes: int | None = None
    peak_allocated_bytes: int | None = None  #: of one call, its own weights included
    flops: int | None = None                 #: of one call


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionProfile:
    """A batch through a pipeline on ``ring`` x ``ulysses`` devices. Seconds are of the whole batch."""

    name: str
    device: str
    batch_size: int
    height: int
    width: int
    frames: int | None = None               #: None of images
    steps: int
    ring: int = 1
    ulysses: int = 1
    parts: tuple[DiffusionPart, ...] = ()
    peak_allocated_bytes: int | None = None  #: of one device: weights of all modules, and the most that one call takes
    watts: float | None = None               #: of all devices, in the mean
    joules: float | None = None              #: of all devices, for one image or video
    joules_range: tuple[float, float] | None = None
    grams: float | None = None               #: of carbon dioxide for one of them, by the caller's factor
    assumptions: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        return None if any(part.seconds is None for part in self.parts) else sum(
            part.calls * (part.seconds or 0.0) for part in self.parts)

    @property
    def seconds_range(self) -> tuple[float, float] | None:
        if any(part.seconds_range is None for part in self.parts):
            return None
        low, high = (sum(part.calls * part.seconds_range[end] for part in self.parts if part.seconds_range is not None)
                     for end in (0, 1))
        return low, high

    @property
    def gpus(self) -> int:
        return self.ring * self.ulysses

    def to_json(self, path: str | Path | None = None) -> str:
        """All of it as JSON text, also written to ``path`` if one is given."""
        return write_record(self, FORMAT, path)

    @classmethod
    def from_json(cls, source: str | Path) -> DiffusionProfile:
        """Read what `to_json` wrote. Raises ProfileFormatError for anything else."""
        found: DiffusionProfile = read_record(cls, source, "DiffusionProfile.from_json", FORMAT)
        return found

    def table(self, fmt: str = "text") -> str:
        """A row for each module, and the whole."""
        rows = [[part.name, str(part.calls), format_quantity(part.seconds, "seconds"),
                 format_quantity(None if part.seconds is None else part.calls * part.seconds, "seconds"),
                 longest_bound(part.bounds) or "-", format_quantity(part.flops, "count"),
                 format_quantity(part.param_bytes, "bytes"), format_quantity(part.peak_allocated_bytes, "bytes")]
                for part in self.parts]
        total = ["whole", "", "", format_quantity(self.seconds, "seconds"), "", "", "",
                 format_quantity(self.peak_allocated_bytes, "bytes")]
        return print_rows(("", "Calls", "A call", "All", "Bound by", "FLOPs of a call", "Weights", "Peak allocated"),
                          [*rows, total], fmt=fmt)

    def summary(self) -> str:
        """What it takes, where it goes, and what was assumed."""
        kind = "image" if self.frames is None else "video"
        size = f"{self.height} x {self.width}" + ("" if self.frames is None else f", {self.frames} frames")
        how = "" if self.gpus == 1 else f" (ring {self.ring}, ulysses {self.ulysses})"
        several = kind if self.batch_size == 1 else f"{kind}s"
        lines = [f"{self.name} on {self.gpus} x {self.device}{how}: {self.batch_size} {several} of {size}, "
                 f"{self.steps} steps", "", self.table(), ""]
        if self.seconds is None:
            lines.append(f"seconds are not known: a figure of {self.device} that kernels' times take is not; "
                         f"`analyzer devices {self.device}` lists them, DeviceSpec adds them")
        else:
            ends = "" if self.seconds_range is None else " ({} to {})".format(*map(format_seconds, self.seconds_range))
            lines.append(f"{format_seconds(self.seconds)}{ends}, {self.batch_size / self.seconds:.3g} {kind}s a second")
        if self.watts is None or self.joules is None:
            lines.append(f"watts and joules are not known: they take seconds and the power limit of {self.device}")
        else:
            ends = "" if self.joules_range is None else " ({:.3g} to {:.3g})".format(*self.joules_range)
            lines.append(f"{self.watts:.0f} W, {self.joules:.3g} J for one {kind}{ends}")
        if self.grams is not None:
            lines.append(f"{self.grams:.3g} g of CO2 for one {kind}")
        return escape_controls("\n".join([*lines, *(
            fill(f"assumed: {text}", 118, subsequent_indent="  ") for text in self.assumptions)]))


FORMAT = SavedFormat("analyzer.diffusion", 1, "profile of a pipeline", "predict it again")
