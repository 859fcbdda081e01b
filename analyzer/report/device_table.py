"""Several devices of a process as tables: what each holds and does, and what is copied between them."""
from __future__ import annotations

from collections.abc import Iterator

from analyzer.results.profile import ProfileData
from analyzer.results.view import register_report
from analyzer.results.world import CopyInfo, DeviceInfo
from analyzer.units import add_quantities

from .fits import check_each
from .text_table import format_quantity, print_rows

DEVICE_HEADERS = ("Device", "Parameters", "At end", "Peak allocated", "Peak reserved", "Peak in", "Kernel time", "Fits")
DEVICE_LEFT = (0, 5, 7)  #: columns of text
COPY_HEADERS = ("Copied from", "to", "in", "Copies", "Size", "Time")
_ANSWERS = {True: "yes", False: "no", None: "not known"}


def list_device_rows(profile: ProfileData) -> Iterator[tuple[str, ...]]:
    """A row for each device; nothing where there is one."""
    verdicts = {} if profile.device is None else check_each(profile)
    for row in profile.devices:
        verdict = verdicts.get(row.name)
        yield (row.name, *(format_quantity(nbytes, "bytes") for nbytes in (
            row.param_bytes, row.allocated_bytes, row.peak_allocated_bytes, row.peak_reserved_bytes)),
            row.peak_phase or "", format_quantity(row.kernel_seconds, "seconds"),
            "" if verdict is None else _ANSWERS[verdict.fits])


def list_copy_rows(profile: ProfileData) -> Iterator[tuple[str, ...]]:
    """A row for each pair of devices and phase in which one copies to the other, the host among them."""
    for row in profile.copies:
        yield (row.source, row.target, row.phase, f"{row.copies:,}", format_quantity(row.bytes, "bytes"),
               format_quantity(row.seconds, "seconds"))


def describe_copies(profile: ProfileData) -> str | None:
    """What is copied from device to device in a step, in a line; None where there is one device."""
    between: list[CopyInfo] = [row for row in profile.copies if row.is_between_devices]
    if not profile.devices:
        return None
    if not between:
        return "nothing is copied from device to device"
    pairs = ", ".join(dict.fromkeys(f"{row.source} to {row.target}" for row in between))
    seconds = add_quantities([row.seconds for row in between])
    return (f"copied from device to device: {format_quantity(sum(row.bytes for row in between), 'bytes')} in "
            f"{sum(row.copies for row in between):,}, {format_quantity(seconds, 'seconds')} ({pairs})")


def keep_fullest(rows: tuple[DeviceInfo, ...], shown: int) -> list[str]:
    """The names of as many devices as are ``shown``, those that reserve the most."""
    fullest = sorted(rows, key=lambda row: -(row.peak_reserved_bytes or 0))[:shown]
    return [row.name for row in rows if row in fullest]


@register_report.shipped("devices")
def print_devices(profile: ProfileData, fmt: str = "text") -> str:
    """The tables, or that there is one device."""
    if not profile.devices:
        return f"The process has one device{'' if profile.device is None else f', {profile.device}'}."
    tables = [print_rows(DEVICE_HEADERS, list(list_device_rows(profile)), left=DEVICE_LEFT, fmt=fmt)]
    if profile.copies:
        tables.append(print_rows(COPY_HEADERS, list(list_copy_rows(profile)), left=(0, 1, 2), fmt=fmt))
    return "\n\n".join(tables)
