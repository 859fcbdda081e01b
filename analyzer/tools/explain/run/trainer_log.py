"""Logs of transformers' Trainer: trainer_state.json, train_results.json and all_results.json, and the dictionaries that
it prints. Forms: ``trainer.py`` (log, the end of _inner_training_loop), ``trainer_callback.py`` (TrainerState,
PrinterCallback, ProgressCallback) and ``trainer_utils.py`` (speed_metrics, TrainerMemoryTracker) of transformers 5.17.
"""
from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from analyzer.errors import InputError
from analyzer.units import format_seconds

from .run_log import RunLog, to_number

_PRINTED = re.compile(r"\{'[^{}]*\}")
_ITEM = re.compile(r"'([^']+)': '?([-+0-9.eE]+)'?[,}]")
# Keys one of which each line of a Trainer has (trainer.py: _maybe_log_save_evaluate, train, evaluate).
_KNOWN = ("loss", "train_loss", "train_runtime", "eval_runtime", "learning_rate")
# The last digit that speed_metrics keeps of a runtime.
_RUNTIME_DIGIT = 1e-4
_LARGEST_JSON = 1 << 28  # bytes: a trainer_state.json of a million logged steps has some 200 MB


def read_json_log(path: Path, file: BinaryIO | gzip.GzipFile) -> RunLog:
    """A log that is one JSON document. Raises InputError for other ones."""
    text = file.read(_LARGEST_JSON + 1)
    if len(text) > _LARGEST_JSON:
        raise InputError(f"{path}: JSON of more than {_LARGEST_JSON >> 20} MiB, more than a log of a run has")
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: JSON that is damaged or was cut off ({str(error)[:120]})") from None
    if isinstance(found, dict) and str(found.get("format", "")).startswith("analyzer."):
        is_profile = found["format"] == "analyzer.profile"
        raise InputError(f"{path}: a saved {found['format'].removeprefix('analyzer.')[:40]} of analyzer, which is a "
                         "prediction, not what a run left behind" + (
                             f"; a run is held against it by: analyzer explain RUN --against {path}"
                             if is_profile else ""))
    log = read_trainer(found) if isinstance(found, dict) else None
    if log is None:
        raise InputError(f"{path}: JSON that no known program wrote as the log of a run; what is read are "
                         "trainer_state.json, train_results.json and all_results.json of transformers' Trainer, and "
                         "traces of torch.profiler")
    return log


def read_trainer(found: Mapping[str, Any]) -> RunLog | None:
    """The log of a decoded file; None: it is no Trainer's.

    >>> log = read_trainer({"train_runtime": 20.0, "train_samples_per_second": 16.0, "train_steps_per_second": 2.0})
    >>> log.figures["step_seconds"], log.figures["samples_per_second"]
    (0.5, 16.0)
    """
    history = found.get("log_history")
    if isinstance(history, list) and "global_step" in found:
        rows = [row for row in history if isinstance(row, dict)]
        return _read_rows(rows, "transformers' Trainer, trainer_state.json", found)
    if any(key.startswith(("train_", "eval_")) for key in found if isinstance(key, str)):
        return _read_rows([found], "transformers' Trainer, results", {})
    return None


def read_printed(lines: Iterable[str]) -> RunLog | None:
    """The log of printed dictionaries; None: there are none."""
    rows = []
    for line in lines:
        for text in _PRINTED.findall(line) if "{'" in line else ():
            row: dict[str, Any] = dict(_ITEM.findall(text))
            if any(key in row for key in _KNOWN):
                rows.append(row)
    return _read_rows(rows, "dictionaries that transformers' Trainer printed", {}) if rows else None


def _read_rows(rows: Sequence[Mapping[str, Any]], program: str, state: Mapping[str, Any]) -> RunLog:
    log = RunLog(program)
    last = to_number(state.get("global_step"))
    log.steps = None if last is None else int(last)
    end: Mapping[str, Any] = next((row for row in reversed(rows) if "train_runtime" in row and (
        "train_loss" in row or "train_steps_per_second" in row)), {})
    _read_step_times(log, [row for row in rows if row is not end])
    evaluated = sum(filter(None, (to_number(row.get("eval_runtime")) for row in rows)))
    log.runtime_seconds = to_number(end.get("train_runtime"))
    _read_speed(log, end, to_number(state.get("max_steps")), evaluated)
    for row in rows:
        _read_memory(log, row)
        if tokens := to_number(row.get("train_tokens_per_second")):  # since the start, of all processes
            log.figures["tokens_per_second"] = tokens
    if "allocated_bytes" not in log.figures:
        log.unknown.append("memory: the Trainer logs it with skip_memory_metrics=False (*_mem_gpu_* of its results)")
    if not log.series.get("step_seconds"):
        log.unknown.append("times of single steps, so neither warm-up nor outliers: the Trainer logs the time so far "
                           "with include_num_input_tokens_seen, and else the mean of the whole run alone")
    if not {"tokens_per_second"} & {*log.series, *log.figures}:
        log.unknown.append("tokens: counted with include_num_input_tokens_seen")
    return log


def _read_step_times(log: RunLog, rows: Sequence[Mapping[str, Any]]) -> None:
    """Times between two logged steps, where the Trainer wrote the time so far; evaluation between them is taken off."""
    before: tuple[float, float, float | None] | None = (0.0, 0.0, 0.0)
    evaluated = 0.0
    for row in rows:
        evaluated += to_number(row.get("eval_runtime")) or 0.0
        step, runtime = to_number(row.get("step")), to_number(row.get("train_runtime"))
        if step is None or runtime is None or "eval_runtime" in row:
            continue
        tokens = to_number(row.get("num_input_tokens_seen"))
        if before is not None and step > before[0] and runtime - before[1] > evaluated:
            seconds = runtime - before[1] - evaluated
            log.add("step_seconds", int(step), seconds / (step - before[0]))
            log.resolution["step_seconds"] = _RUNTIME_DIGIT
            if tokens is not None and before[2] is not None:
                log.add("tokens_per_second", int(step), (tokens - before[2]) / seconds)
        before, evaluated = (step, runtime, tokens), 0.0


def _read_speed(log: RunLog, end: Mapping[str, Any], planned: float | None, evaluated: float) -> None:
    """The speeds of the whole run. The Trainer divides the *planned* steps and samples by the time, so those of a run
    that ended early or went on from a checkpoint are too high, and are left out.
    """
    runtime, speed = log.runtime_seconds, to_number(end.get("train_steps_per_second"))
    if evaluated and runtime is not None:
        log.notes.append(f"{format_seconds(evaluated)} of the {format_seconds(runtime)} of training were evaluation, "
                         "which the samples a second of the Trainer count")
    if planned is not None and log.steps is not None and log.steps < planned:
        log.notes.append(f"{log.steps:,} of {planned:,.0f} planned steps were done")
        if speed is not None:
            log.unknown.append("speeds of the run: the Trainer's own divide the planned steps by the time, and fewer "
                               "were done")
            return
    if speed:
        # speed_metrics keeps three decimals of a speed, so the count says more where it is known.
        log.figures["step_seconds"] = 1 / speed if runtime is None else (
            runtime - evaluated) / (log.steps or speed * runtime)
        log.notes.append("the mean time of a step has the first steps, saving and what else is between steps in it; "
                         "after a checkpoint it is too low, since the Trainer counts all planned steps")
    samples = to_number(end.get("train_samples_per_second"))
    if samples:
        log.figures["samples_per_second"] = samples


def _read_memory(log: RunLog, row: Mapping[str, Any]) -> None:
    """The peak of training: what was there before the Trainer, what making it and what training left more, and the
    peak above that (TrainerMemoryTracker.update_metrics). A stage's figures stand in the metrics of the first call.
    """
    parts = [to_number(row.get(name)) for name in (
        "before_init_mem_gpu", "init_mem_gpu_alloc_delta", "train_mem_gpu_alloc_delta", "train_mem_gpu_peaked_delta")]
    if parts[2] is None or parts[3] is None:
        return
    known = [part for part in parts if part is not None]
    if len(known) == len(parts):
        log.figures["allocated_bytes"] = sum(known)
        log.notes.append("memory is that of rank 0's device 0, from the start of the process on; what was allocated "
                         "between making the Trainer and training is not in it")
    else:
        log.unknown.append(f"the peak: training took {(parts[2] + parts[3]) / 2**30:.2f} GiB more than was there "
                           "before, and before_init_mem_gpu and init_mem_gpu_alloc_delta are not in the file")
