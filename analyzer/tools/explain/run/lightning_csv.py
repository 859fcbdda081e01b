"""metrics.csv of Lightning's CSVLogger (``lightning/fabric/loggers/csv_logs.py``), with what its callbacks add
(``lightning/pytorch/callbacks/throughput_monitor.py``, ``device_stats_monitor.py``).
"""
from __future__ import annotations

import csv
import re
from collections.abc import Iterable

from .run_log import RunLog, to_number

# Columns by what they are. A logger's group separator and a Throughput's own one stand between the parts.
_COLUMNS = {name: re.compile(pattern) for name, pattern in {
    "device_samples_per_second": r"train[/|]device[/|]samples_per_sec$",
    "samples_per_second": r"train[/|]samples_per_sec$",
    "flops_per_second": r"train[/|]device[/|]flops_per_sec$",
    "mfu": r"train[/|]device[/|]mfu$",
    "allocated_bytes": r"DeviceStatsMonitor\.on_train_batch_end[/.]allocated_bytes\.all\.peak$",
    "active_bytes": r"DeviceStatsMonitor\.on_train_batch_end[/.]active_bytes\.all\.peak$",
    "reserved_bytes": r"DeviceStatsMonitor\.on_train_batch_end[/.]reserved_bytes\.all\.peak$"}.items()}
_TIME, _BATCHES = re.compile(r"train[/|]time$"), re.compile(r"train[/|]batches$")


def read_lightning(lines: Iterable[str]) -> RunLog | None:
    """The log of the rows; None: it is no file of the CSVLogger.

    >>> log = read_lightning(["epoch,step,train/batches,train/time", "0,9,10,5.0", "0,9,,", "0,19,20,9.0"])
    >>> log.series["step_seconds"], log.steps
    ([(9, 0.5), (19, 0.4)], 20)
    """
    rows = iter(lines)
    head = next(rows, "").split(",")
    if "step" not in head or len(set(head)) < len(head) or any(name != name.strip() for name in head):
        return None
    log = RunLog("Lightning's CSVLogger")
    columns = {name: place for place, column in enumerate(head) for name, pattern in _COLUMNS.items()
               if pattern.match(column)}
    time, batches = (next((place for place, column in enumerate(head) if pattern.match(column)), None)
                     for pattern in (_TIME, _BATCHES))
    before, step = (0.0, 0.0), 0
    for row in csv.reader(rows, quoting=csv.QUOTE_NONE):
        number = to_number(row[head.index("step")]) if len(row) == len(head) else None
        if number is None:
            continue
        step = int(number)
        for name, place in columns.items():
            log.add(name, step, to_number(row[place]))
        now = None if time is None or batches is None else (to_number(row[time]), to_number(row[batches]))
        if now is not None and now[0] is not None and now[1] is not None:
            if now[1] > before[1] and now[0] > before[0]:
                log.add("step_seconds", step, (now[0] - before[0]) / (now[1] - before[1]))
            before = now[0], now[1]
    log.steps = step + 1  # counted from 0
    if "step_seconds" in log.series:
        log.notes.append("the time is that of a batch, without validation; where gradients are accumulated, a step of "
                         "the optimizer has several")
    else:
        log.unknown.append("times and speeds: the callback ThroughputMonitor logs them")
    if not any(name.endswith("_bytes") for name in log.series):
        log.unknown.append("memory: the callback DeviceStatsMonitor logs it")
    log.unknown.append("tokens: no callback counts them")
    return log
