"""An out-of-memory error in words: who has the memory; whether it is in pieces, another's, or simply too little."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any, Literal

from analyzer.report.text_table import print_rows
from analyzer.report.text_width import clean
from analyzer.units import format_bytes, format_percent

from .oom_text import OutOfMemoryText
from .recording.line import describe_frames

_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]")
#: What is the matter.
Cause = Literal["no figures", "one tensor", "limit", "another process", "fragmentation", "free but refused", "too much"]


@dataclass(frozen=True)
class OwnersOfMemory:
    """What an error's figures come to. Bytes; None: the text does not say.

    ``own_bytes`` are all that this process takes, ``outside_bytes`` those of them that are not PyTorch's (the context
    of CUDA, libraries), ``other_bytes`` those of other processes, ``beside_bytes`` those beside PyTorch's where it is
    not known whether they are this process's or another's, ``lacking_bytes`` what is missing at least.
    """

    cause: Cause
    own_bytes: int | None
    outside_bytes: int | None
    other_bytes: int | None
    beside_bytes: int | None
    lacking_bytes: int | None
    is_guessed: bool = False  #: a process that the text names by its number is taken to be this one


def find_owners(error: OutOfMemoryText) -> OwnersOfMemory:
    """Who has the memory, and why the request failed."""
    own, others, is_guessed = error.process_bytes, dict(error.others), False
    reserved = error.reserved_bytes if error.reserved_bytes is not None else error.allocated_bytes
    if own is None and reserved is not None:
        # In a container the driver's numbers of processes are not those that PyTorch knows itself by, so this process
        # is told as another one; it has at least what PyTorch reserved.
        near = [pid for pid, size in others.items() if size >= reserved * 0.99]
        if near:
            own, is_guessed = others.pop(min(near, key=lambda pid: others[pid])), True
    used = None if error.capacity_bytes is None or error.free_bytes is None else error.capacity_bytes - error.free_bytes
    # A text that names this process comes from a driver that lists all: no other one is no other one. MPS has no list.
    is_listed = own is not None and error.capacity_bytes is not None
    other = sum(others.values()) if others or is_listed else None
    outside = None if own is None or reserved is None else max(0, own - reserved)
    beside = None if own is not None or used is None or reserved is None else max(0, used - reserved - (other or 0))
    lacking = _find_lacking(error)
    return OwnersOfMemory(_find_cause(error, other, lacking), own, outside, other, beside, lacking, is_guessed)


def _find_lacking(error: OutOfMemoryText) -> int | None:
    """What is missing even where all that is cached were in one piece."""
    if error.requested_bytes is None:
        return None
    taken = _find_taken(error)
    rooms = [room for room in (error.free_bytes, None if error.allowed_bytes is None or taken is None else
                               error.allowed_bytes - taken) if room is not None]
    return max(0, error.requested_bytes - min(rooms) - (error.unallocated_bytes or 0)) if rooms else None


def _find_taken(error: OutOfMemoryText) -> int | None:
    """What counts towards the limit of this process."""
    if error.capacity_bytes is None:  # MPSAllocator.mm counts other allocations too
        return error.process_bytes
    return error.allocated_bytes if error.reserved_bytes is None else error.reserved_bytes


def _find_cause(error: OutOfMemoryText, other: int | None, lacking: int | None) -> Cause:
    requested = error.requested_bytes
    if requested is None or error.capacity_bytes is None and error.allowed_bytes is None:
        return "no figures"
    if error.capacity_bytes is not None and requested > error.capacity_bytes:
        return "one tensor"
    # Of a request that what is cached could hold, the pieces are too small, whatever other processes have.
    if error.unallocated_bytes is not None and error.unallocated_bytes >= requested:
        return "fragmentation"
    taken = _find_taken(error)
    if error.allowed_bytes is not None and taken is not None and taken + requested > error.allowed_bytes and (
            error.free_bytes is None or error.free_bytes >= requested):
        return "limit"
    short = requested - (error.free_bytes or 0)
    if other is not None and short > 0 and other >= short:
        return "another process"
    if error.free_bytes is not None and error.free_bytes >= requested:
        return "free but refused"
    if lacking == 0:
        return "fragmentation"
    return "no figures" if error.allocated_bytes is None and other is None else "too much"


def describe_errors(name: str, errors: Sequence[OutOfMemoryText]) -> str:
    """The first error in words, and the others in a table."""
    parts = [fill(f"{clean(name)}: {len(errors)} out-of-memory error{'s' * (len(errors) > 1)}"
                  + _name_ranks(errors), 120), describe_error(errors[0])]
    if len(errors) > 1:
        rows = [("-" if error.rank is None else str(error.rank), f"{error.line:,}", format_bytes(error.requested_bytes),
                 format_bytes(error.free_bytes), format_bytes(error.allocated_bytes),
                 format_bytes(error.unallocated_bytes), find_owners(error).cause) for error in errors]
        parts.append(print_rows(("Rank", "Line", "Asked for", "Free", "Allocated", "Cached", "What it is"), rows,
                                left=(6,)))
    return "\n\n".join(parts)


def _name_ranks(errors: Sequence[OutOfMemoryText]) -> str:
    ranks = sorted({error.rank for error in errors if error.rank is not None})
    if not ranks:
        return ""
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f", of rank{'s' * (len(ranks) > 1)} {named}"


def describe_error(error: OutOfMemoryText) -> str:
    """Who has the memory, and what is the matter."""
    owners = find_owners(error)
    rows = [(what, format_bytes(size), format_percent(None if size is None or not error.capacity_bytes else
                                                      size / error.capacity_bytes), said)
            for what, size, said in _list_owners(error, owners) if size is not None]
    where = f"line {error.line:,}" + ("" if error.rank is None else f", rank {error.rank}") + (
        "" if error.device is None else f", device {error.device}")
    asked = "an allocation" if error.requested_bytes is None else format_bytes(error.requested_bytes)
    head = f"{where}: {asked} could not be had" + ("" if not error.frames else
                                                   f", at {clean(str(describe_frames(error.frames)))}")
    return "\n\n".join([fill(head, 120, subsequent_indent="  "),
                        *[print_rows(("Who has the memory", "Bytes", "Share", ""), rows, left=(0, 3))] * bool(rows),
                        fill(_say(error, owners), 120)])


def _list_owners(error: OutOfMemoryText, owners: OwnersOfMemory) -> list[tuple[str, int | None, str]]:
    return [("allocated by PyTorch", error.allocated_bytes,
             "" if error.private_bytes is None else f"{format_bytes(error.private_bytes)} in private pools"),
            ("cached by PyTorch, not allocated", error.unallocated_bytes, ""),
            ("this process beside PyTorch", owners.outside_bytes, "the device's context, libraries"),
            ("other processes", owners.other_bytes,
             ", ".join(f"{pid}: {format_bytes(size)}" for pid, size in list(error.others.items())[:4]
                       if not (owners.is_guessed and size == owners.own_bytes))),
            ("beside PyTorch", owners.beside_bytes, "the device's context, libraries, other processes"),
            ("free", error.free_bytes, ""), ("the device", error.capacity_bytes, ""),
            ("what this process may take", error.allowed_bytes, "")]


def _say(error: OutOfMemoryText, owners: OwnersOfMemory) -> str:
    requested, cached = format_bytes(error.requested_bytes), format_bytes(error.unallocated_bytes)
    lacks = "" if not owners.lacking_bytes else f" At least {format_bytes(owners.lacking_bytes)} are missing."
    said = {
        "no figures": ("" if error.requested_bytes is not None else
                       "Without an amount the text is mostly the driver's own, which refused memory to something "
                       "beside PyTorch's allocator (a context, a kernel's code, a library): often another process has "
                       "the device, and nvidia-smi tells which. ")
                      + "The text has too few figures to say who has the memory; where the process can be run again, "
                      "torch.cuda.memory._dump_snapshot(FILE) after the error writes what can be explained whole.",
        "one tensor": f"One tensor of {requested} is larger than the device: the operation must be done in parts, or "
                      "its batch or sequence be smaller.",
        "fragmentation": f"Fragmentation: {cached} are cached and not used, "
                         + ("" if (error.unallocated_bytes or 0) >= (error.requested_bytes or 0) else
                            f"with the {format_bytes(error.free_bytes)} that are free ")
                         + f"more than the {requested} that were asked for, but not in one piece. "
                         + _avoid_fragmentation(error),
        "limit": f"The limit of this process: it may take {format_bytes(error.allowed_bytes)} "
                 "(set_per_process_memory_fraction, or the server's own share)"
                 + ("" if error.free_bytes is None else f", and the device has {format_bytes(error.free_bytes)} free")
                 + ". Raise the limit, or take less." + lacks,
        "another process": f"Another process: others hold {format_bytes(owners.other_bytes)}; without them the "
                           f"{requested} would have been there. nvidia-smi lists them; a process that has died before "
                           "may still hold its memory.",
        "free but refused": f"The device says that {format_bytes(error.free_bytes)} are free, more than the "
                            f"{requested} that were asked for: something else refuses it, such as the driver's or the "
                            "host's limit (WSL, an integrated GPU), or a request by another stream at that moment.",
        "too much": "Simply too much: what PyTorch reserved is in use, and no other process is known to hold what is "
                    "missing. A smaller batch or sequence, checkpoints, a leaner optimizer or a larger device "
                    "is needed." + lacks}[owners.cause]
    if owners.is_guessed and owners.own_bytes is not None:
        said += (f" (The process of {format_bytes(owners.own_bytes)} is taken to be this one, as a container hides "
                 "its number.)")
    return said


def _avoid_fragmentation(error: OutOfMemoryText) -> str:
    """The setting of the allocator for the platform of the traceback. Builds for Windows pass expandable segments over
    (``PYTORCH_C10_DRIVER_API_SUPPORTED`` of CUDAAllocatorConfig.h; pull request 189163 of July 2026 is to define it).
    """
    if any(_WINDOWS_PATH.match(frame.file) for frame in error.frames):
        return ("On Windows PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512 avoids some of it; expandable_segments, "
                "which PyTorch suggests, builds for Windows up to 2.13 pass over with a warning.")
    return "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids most of it."


def to_dict(error: OutOfMemoryText) -> dict[str, Any]:
    """An error and what its figures come to, as plain values."""
    return {**asdict(error), **asdict(find_owners(error))}
