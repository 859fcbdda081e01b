"""The catalogue and its devices as text."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analyzer.units import format_bytes, format_count, format_rate, format_seconds

from .catalogue import find_device, register_device
from .device_spec import DeviceSpec, Figure

_RATES = ("fp32", "tf32", "bf16", "fp16", "fp8")


def format_catalogue() -> str:
    """A table of the registered devices: memory, its bandwidth and dense peak rates; ``-`` is unknown or absent.

    >>> [row.split()[:5] for row in format_catalogue().splitlines() if row.startswith("h200 ")]
    [['h200', '139.80', 'GiB', '4.80', 'TB/s']]
    """
    rows = [(spec.name, format_bytes(spec.memory_bytes), format_rate(spec.memory_bandwidth),
             *(format_count(getattr(spec.flops_per_second, name)) for name in _RATES)) for spec in register_device]
    table = _lay_out(rows, ("name", "memory", "bandwidth", *_RATES))
    return f"{table}\n\nRates are dense peaks in FLOP/s, of the tensor cores but for fp32."


def format_device(device: str | DeviceSpec) -> str:
    """Every figure of a device with its source. Raises UnknownDeviceError for a name that the catalogue does not hold.

    >>> print(format_device("cpu").splitlines()[0])
    cpu (cpu)
    """
    spec = find_device(device)
    about = [spec.kind, spec.vendor, spec.architecture]
    if spec.compute_capability is not None:
        about.append("compute capability {}.{}".format(*spec.compute_capability))
    title = f"{spec.name} ({', '.join(part for part in about if part)})"
    if spec.aliases:
        title += f", also known as {', '.join(spec.aliases)}"
    figures = list(spec.figures())
    # a document serves many figures: each stands once, below, on one line so that its address can be copied
    documents = list(dict.fromkeys(figure.source for figure in figures if figure.source))
    rows = [(f.name, _format_figure(f), f"[{documents.index(f.source) + 1}]" if f.source else "unknown")
            for f in figures]
    table = _lay_out(rows, ("figure", "value", "source"))
    return "\n".join([title, "", table, "", *(f"[{i}] {document}" for i, document in enumerate(documents, 1))]).rstrip()


def _format_figure(figure: Figure) -> str:
    if figure.unit == "B":
        return format_bytes(figure.value)
    if figure.unit == "s":
        return format_seconds(figure.value)
    return format_count(figure.value, figure.unit)


def _lay_out(rows: Sequence[Any], headers: Sequence[str]) -> str:
    # at first use: `import analyzer` is to be quick
    from tabulate import tabulate  # type: ignore[import-untyped,unused-ignore]

    return str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
