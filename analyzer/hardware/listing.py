"""Devices as a table, the one at hand, and the roofline of each."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any

from analyzer.errors import InputError
from analyzer.units import format_bytes, format_count, format_rate, format_seconds

from .catalogue import find_device, register_device
from .device_spec import DeviceSpec, find_peak


def roofline_seconds(flops: int | None, bytes_moved: int | None, dtype: object, device: DeviceSpec,
                     uses_tensor_cores: bool, allow_tf32: bool = False) -> float | None:
    """Seconds that the slower of arithmetic and memory needs at its peak, or None if a figure that it takes is unknown:
    the roofline of Williams, Waterman and Patterson (CACM 52:4, 2009), nothing else. For ``dtype``,
    ``uses_tensor_cores`` and ``allow_tf32`` see ``find_peak``. Raises InputError for a negative count.
    """
    if flops is None or bytes_moved is None:
        return None
    if flops < 0 or bytes_moved < 0:
        raise InputError(
            f"roofline_seconds(flops={flops}, bytes_moved={bytes_moved}): counts are not negative; pass None for "
            "unknown")
    seconds = 0.0
    for amount, rate in ((flops, find_peak(dtype, device, uses_tensor_cores, allow_tf32) if flops else None),
                         (bytes_moved, device.memory_bandwidth)):
        if amount:
            if rate is None:
                return None
            seconds = max(seconds, amount / rate)
    return seconds


_RATES = ("fp32", "tf32", "bf16", "fp16", "fp8")


def format_catalogue() -> str:
    """A table of the registered devices: memory, its bandwidth and dense peak rates; ``-`` is unknown or absent."""
    rows = [(spec.name, format_bytes(spec.memory_bytes), format_rate(spec.memory_bandwidth),
             *(format_count(getattr(spec.flops_per_second, name)) for name in _RATES)) for spec in register_device]
    table = _lay_out(rows, ("name", "memory", "bandwidth", *_RATES))
    return f"{table}\n\nRates are dense peaks in FLOP/s, of the tensor cores but for fp32."


def format_device(device: str | DeviceSpec) -> str:
    """Every figure of a device with its source. Raises UnknownDeviceError for a name that is in no catalogue."""
    spec = find_device(device)
    about = [spec.kind, spec.vendor, spec.architecture]
    if spec.compute_capability is not None:
        about.append("compute capability {}.{}".format(*spec.compute_capability))
    title = f"{spec.name} ({', '.join(part for part in about if part)})"
    if spec.aliases:
        title += f", also known as {', '.join(spec.aliases)}"
    figures = list(spec.figures())
    # a document serves many figures: each stands once, below, its address in one piece so that it can be copied
    documents = list(dict.fromkeys(figure.source for figure in figures if figure.source))
    formats: dict[str, Callable[[float | None], str]] = {"B": format_bytes, "s": format_seconds}
    rows = [(f.name, formats[f.unit](f.value) if f.unit in formats else format_count(f.value, f.unit),
             f"[{documents.index(f.source) + 1}]" if f.source else "unknown")
            for f in figures]
    table = _lay_out(rows, ("figure", "value", "source"))
    lines = [title, "", table, "", *(f"[{i}] {document}" for i, document in enumerate(documents, 1))]
    return "\n".join([line if "\n" in line else fill(line, 120, subsequent_indent="    ", break_long_words=False,
                                                      break_on_hyphens=False) for line in lines]).rstrip()


def _lay_out(rows: Sequence[Any], headers: Sequence[str]) -> str:
    # at first use: `import analyzer` is to be quick
    from tabulate import tabulate  # type: ignore[import-untyped,unused-ignore]

    return str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
