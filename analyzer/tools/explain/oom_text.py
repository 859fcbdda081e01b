"""The texts of out-of-memory errors, found in logs of any program.

Forms and their sources: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 1.13 to 2.14 (one form up to 2.0, another one
since 2.1, whose "capacty" became "capacity" in 2.2; later processes, a limit and private pools were added; ROCm builds
say HIP), ``CUDAMallocAsyncAllocator.cpp`` (ComfyUI runs with it), ``c10/xpu/XPUCachingAllocator.cpp`` and
``aten/src/ATen/mps/MPSAllocator.mm``.
"""
from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from .recording.snapshot import StackFrame

LONGEST_LINE = 20_000  # characters of a line of a log that are looked at
_BEFORE = 400           # lines of a traceback before its error
_AFTER = 8              # lines that an error's text is broken into, by its own form or by who quoted it

_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|[KMGT]i?B)\b"
_UNITS = {"b": 1, "bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}  # MPSAllocator.mm writes GB for powers of 1024
# A limit or a process of 2^64 bytes is what a driver says that does not know (Windows; no limit was set).
_UNKNOWN_BYTES = 1 << 60

_ERROR = re.compile(r"would exceed allowed memory(?:\. \(out of memory\))?|out of memory", re.IGNORECASE)
_BACKEND = re.compile(r"\b(CUDA|HIP|XPU|MPS)\b(?: backend)?(?: error:)? out of memory")
_FIGURES = {name: re.compile(pattern.replace("SIZE", _SIZE), re.IGNORECASE) for name, pattern in {
    "requested": r"(?:tried to allocate|Requested\s*:) SIZE",
    "capacity": r"(?:has a total capaci?ty of SIZE|; SIZE total capacity|Device limit\s*: SIZE)",
    "free": r"(?:of which SIZE is free|; SIZE free|Free \(according to CUDA\)\s*: SIZE)",
    "process": r"this process has SIZE memory in use",
    "allowed": r"(?:[.;,] SIZE allowed|memory fraction\)\s*: SIZE|max allowed: SIZE)",
    "allocated": r"(?:allocated memory,? SIZE is allocated by PyTorch|; SIZE already allocated|MPS allocated: SIZE"
                 r"|Currently allocated\s*: SIZE)",
    "private": r"with SIZE allocated in private pools",
    "unallocated": r"and SIZE is reserved by PyTorch but unallocated",
    "reserved": r"; SIZE reserved in total by PyTorch",
    "other": r"other allocations: SIZE"}.items()}
_PROCESS = re.compile(rf"\bProcess (\d+) has {_SIZE} memory in use", re.IGNORECASE)
_DEVICE = re.compile(r"\bGPU (\d+)\b|on device (\d+)\b")
_FILE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Who wrote a line: torchrun ([rank1]:), vLLM ((EngineCore pid=112), (VllmWorker rank=3 pid=1090), (Worker_TP0 pid=9)),
# SGLang ([2025-05-19 23:22:28 TP3]), Ray ((pid=1, ip=...)), torchrun --tee ([default0]: with the role's name and the
# rank of its host, elastic/multiprocessing/tail_log.py), srun --label (" 3: ").
_RANK = re.compile(r"\[rank(\d+)\]|\brank=(\d+)\b|\[[\d\- :]+ (?:DP\d+ )?TP(\d+)[ \]]|_TP(\d+)\b")
_LAUNCHED_RANK = re.compile(r"^\s*(?:\[[A-Za-z]\w*?(\d+)\]:|(\d+): )")  # of a line without another mark
_WRITER = re.compile(r"^\s*(?:\[[\d\-TZ:. ]+\] ?)?(\(\w[^()\n]{0,60}pid=\d+[^()\n]{0,40}\)|\[[A-Za-z]\w*\d\]:"
                     r"|\d+: |\[[\d\- :]+ [DT]P\d+(?: TP\d+)?\])")

# Colours, as Python 3.13 has them in tracebacks and rich in logs, movements of the cursor, and links: the control
# sequences CSI and OSC of ECMA-48.
_CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


@dataclass(frozen=True)
class OutOfMemoryText:
    """One error. Bytes are what the text says, to the two decimals that it has; None: it does not say.

    ``unallocated_bytes`` are reserved and not allocated; ``process_bytes`` are all that the driver counts for this
    process, ``others`` those of other processes by their number.
    """

    backend: str | None
    line: int                        #: of the log, from 1
    requested_bytes: int | None
    capacity_bytes: int | None
    free_bytes: int | None
    process_bytes: int | None
    others: dict[int, int]
    allowed_bytes: int | None
    allocated_bytes: int | None
    private_bytes: int | None
    unallocated_bytes: int | None
    device: int | None = None
    rank: int | None = None
    frames: list[StackFrame] = field(default_factory=list, compare=False)  #: innermost first
    count: int = field(default=1, compare=False)  #: how often the log has it

    @property
    def reserved_bytes(self) -> int | None:
        """Allocated or cached by PyTorch."""
        if self.allocated_bytes is None or self.unallocated_bytes is None:
            return None
        return self.allocated_bytes + self.unallocated_bytes


def remove_codes(line: str) -> str:
    r"""A line without what a terminal does not show of it.

    >>> remove_codes("\x1b[1;36m2.00\x1b[0m GiB")
    '2.00 GiB'
    """
    return _CODES.sub("", line) if "\x1b" in line else line


def find_errors(lines: Iterable[str]) -> list[OutOfMemoryText]:
    """The errors of a text, each once: a program that logs an error and ends with it says it twice.

    >>> text = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 8.00 GiB total capacity; 6.00 GiB "
    >>> text += "already allocated; 512.00 MiB free; 6.50 GiB reserved in total by PyTorch)"
    >>> found, = find_errors([text])
    >>> found.capacity_bytes >> 20, found.unallocated_bytes >> 20, found.free_bytes >> 20
    (8192, 512, 512)
    """
    found: dict[tuple[object, ...], OutOfMemoryText] = {}
    before: deque[str] = deque(maxlen=_BEFORE)
    numbered = enumerate((line[:LONGEST_LINE].rstrip("\n") for line in lines), 1)
    waiting: deque[tuple[int, str]] = deque()
    while True:
        while len(waiting) <= _AFTER and (more := next(numbered, None)) is not None:
            waiting.append(more)
        if not waiting:
            break
        number, line = waiting.popleft()
        matches = list(_ERROR.finditer(line))
        for match, end in zip(matches, [*[match.start() for match in matches[1:]], len(line)]):
            rest = [text for _, text in islice(waiting, _AFTER)] if end == len(line) else []
            error = _read_error(line, match.start(), end, rest, number, before)
            if error is not None:
                _add(found, error)
        before.append(line)
    return list(found.values())


def _add(found: dict[tuple[object, ...], OutOfMemoryText], error: OutOfMemoryText) -> None:
    """Add it, unless it is one that is there, in other words or again."""
    key = (error.rank, error.requested_bytes, error.capacity_bytes, error.free_bytes, error.allocated_bytes)
    known = found.get(key)
    if known is None and error.rank is None:  # the program's last line does not say again which rank it is
        known = next((other for other in found.values() if (None, *key[1:]) == (
            None, other.requested_bytes, other.capacity_bytes, other.free_bytes, other.allocated_bytes)), None)
    if known is None:
        found[key] = error
        return
    object.__setattr__(known, "count", known.count + 1)
    known.frames.extend([] if known.frames else error.frames)


def _read_error(line: str, start: int, end: int, rest: list[str], number: int,
                before: deque[str]) -> OutOfMemoryText | None:
    writer = _WRITER.match(line)
    prefix = writer[1] if writer else ""
    text = line[max(0, start - 40):end]
    for other in rest:  # a text in several lines, each behind its writer's mark, or marked as a quotation
        if _ERROR.search(other):
            break
        text += " " + re.sub(r"^[\s>#|*E]*", "", other.replace(prefix, "", 1) if prefix else other)
    figures = {name: _find_size(pattern, text) for name, pattern in _FIGURES.items()}
    backend = _BACKEND.search(line[max(0, start - 30):end])
    if figures["requested"] is None and backend is None:
        return None  # talk of memory, not an error
    allocated, unallocated = figures["allocated"], figures["unallocated"]
    if unallocated is None and figures["reserved"] is not None and allocated is not None:
        unallocated = figures["reserved"] - allocated
    device = _DEVICE.search(text)
    capacity, process = figures["capacity"], figures["process"]
    if process is None and figures["other"] is not None and allocated is not None:
        process = allocated + figures["other"]  # MPS
    return OutOfMemoryText(
        backend[1] if backend else "CUDA" if "would exceed" in line else None, number, figures["requested"], capacity,
        figures["free"], process, {int(pid): size for pid, *found in _PROCESS.findall(text)
                                   if (size := _to_bytes(*found)) is not None},
        figures["allowed"], allocated, figures["private"], unallocated,
        None if device is None else int(next(filter(None, device.groups()))),
        find_rank(line), _read_frames(before, prefix))


def find_rank(line: str) -> int | None:
    """Who wrote a line: its rank, or of torchrun's and srun's marks the one that they give it.

    >>> find_rank("[default2]:[rank10]: OutOfMemoryError"), find_rank("[default2]: Error"), find_rank(" 3: Error")
    (10, 2, 3)
    """
    rank = _RANK.search(line) or _LAUNCHED_RANK.search(line)
    return None if rank is None else int(next(filter(None, rank.groups())))


def _find_size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    groups = [group for group in match.groups() if group is not None]
    return _to_bytes(*groups)


def _to_bytes(number: str, unit: str) -> int | None:
    found = round(float(number) * _UNITS[unit.lower()])
    return None if found >= _UNKNOWN_BYTES else found


def _read_frames(before: deque[str], prefix: str) -> list[StackFrame]:
    """The frames of the traceback that ends where an error stands, of the same writer."""
    frames: list[StackFrame] = []
    for line in reversed(before):
        if prefix and not ((mark := _WRITER.match(line)) and mark[1] == prefix):
            continue
        if match := _FILE.search(line):
            frames.append(StackFrame(match[3], match[1], int(match[2])))
        elif "Traceback (most recent call last)" in line or _ERROR.search(line):
            break
    return frames
