"""What `nvidia-smi --query-gpu=... --format=csv` writes in a loop (`-l`, `-lms`), with or without units and header."""
from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .run_log import RunLog, to_number

# Names that --query-gpu takes, as nvidia-smi --help-query-gpu has them; a header has the unit behind some.
_NAME = re.compile(r"^([a-z_]+(?:\.[a-z_0-9]+)*)(?: \[(.+)\])?$")
_QUERIED = ("memory.", "utilization.", "power.", "temperature.", "clocks.", "index", "uuid", "pci.", "timestamp",
            "fan.", "name", "pstate", "driver_version", "count", "gpu_")
_CELL = re.compile(r"^(-?\d+(?:\.\d+)?) (%|MiB|W|MHz)$")
_WHO = ("index", "gpu_uuid", "uuid", "pci.bus_id", "gpu_bus_id")
_MIB = 1 << 20


def read_device_csv(lines: Iterable[str]) -> RunLog | None:
    """The log of the fullest device of a file; None: it is none of nvidia-smi.

    >>> log = read_device_csv(["timestamp, memory.used [MiB], utilization.gpu [%]",
    ...                        "2026/01/05 10:00:00.100, 812 MiB, 3 %", "2026/01/05 10:00:01.100, 40536 MiB, 98 %"])
    >>> log.figures["used_bytes"] >> 20, log.series["utilization.gpu [%]"]
    (40536, [(1, 3.0), (2, 98.0)])
    """
    rows = csv.reader(lines, skipinitialspace=True, quoting=csv.QUOTE_NONE)
    head = next(rows, [])
    names = [_NAME.match(cell.strip()) for cell in head]
    is_header = bool(head) and all(names) and any(cell.startswith(_QUERIED) for cell in head)
    is_bare = not is_header and any(_CELL.match(cell.strip()) for cell in head)
    if not (is_header or is_bare):
        return None
    log = RunLog("nvidia-smi")
    columns = [cell.strip() for cell in head] if is_header else [
        f"column {number}" for number in range(1, len(head) + 1)]
    by_device: defaultdict[str, list[Sequence[str]]] = defaultdict(list)
    who = next((columns.index(name) for name in _WHO if name in columns), None)
    broken = 0
    for row in rows if is_header else [head, *rows]:
        if len(row) == len(columns):
            by_device[row[who].strip() if who is not None else ""].append(row)
        elif row and row != head:
            broken += 1
    used = next((place for place, name in enumerate(columns) if name.startswith("memory.used")), None)
    device = max(by_device, key=lambda name: max((_read_cell(row[used])[0] or 0 for row in by_device[name]), default=0)
                 if used is not None else 0, default=None)
    if device is None:
        return None
    _add_columns(log, columns, by_device[device], used)
    if len(by_device) > 1:
        log.notes.append(f"of {len(by_device)} devices this is {device}, the one with most memory in use")
    if broken:
        log.notes.append(f"{broken} lines of another form were left out")
    if is_bare:
        log.unknown.append("what the columns are: the file has no header (noheader); a query without it names them")
    elif used is None:
        log.unknown.append("memory: memory.used was not queried")
    log.unknown.append("times of steps and tokens: nvidia-smi does not know of them")
    if who is None:
        log.unknown.append("which device: index was not queried, so lines of several would be taken for one's")
    return log


def _add_columns(log: RunLog, columns: Sequence[str], rows: Sequence[Sequence[str]], used: int | None) -> None:
    for place, column in enumerate(columns):
        if column in (*_WHO, "timestamp", "name", "driver_version", "count"):
            continue
        cells = [_read_cell(row[place]) for row in rows]
        unit = next((unit for _, unit in cells if unit), "")
        if not unit and column.startswith("column "):
            continue
        if place == used:
            name, factor = "used_bytes", _MIB
        else:
            name, factor = column if "[" in column or not unit else f"{column} [{unit}]", 1
        for number, (value, _) in enumerate(cells, 1):
            log.add(name, number, None if value is None else value * factor)
    if log.series.get("used_bytes"):
        log.figures["used_bytes"] = int(max(value for _, value in log.series["used_bytes"]))
        log.resolution["used_bytes"] = _MIB


def _read_cell(text: str) -> tuple[float | None, str]:
    """A value and its unit; None for what nvidia-smi could not tell ([N/A], [Not Supported])."""
    match = _CELL.match(text.strip())
    return (to_number(match[1]), match[2]) if match else (to_number(text.strip()), "")
