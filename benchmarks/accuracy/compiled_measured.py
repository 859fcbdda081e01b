"""Compiled steps beside those that were measured on an H200: ``python -m benchmarks.accuracy.compiled_measured`` writes
into docs/accuracy.md; with names, as ``gpt2/compile``, those cases alone are printed. Eager steps of the same models
stand with them, and watts and joules. Bytes are those that the script that measures tells in a dry run, times are of a
profile. The steps of ``truth/compiled_aside.json`` were measured later than the rules were made; docs/accuracy.md names
the rules that were mended with them in view.
"""
from __future__ import annotations

import json
import math
import sys
import time
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from statistics import median
from typing import Any, NamedTuple

import torch

from analyzer import MetaTensorMode, Profile, profile
from analyzer.hardware import find_device
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import joules_range, watts_of
from analyzer.parallel import world
from analyzer.profilers.call_sequence import CallTimer
from analyzer.record.log import Log
from analyzer.report.run_cost import find_step_work
from analyzer.tools.dryrun.script import dry_run
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks.accuracy import compiled_script
from benchmarks.accuracy.compiled_script import build, make_optimizer, settings
from benchmarks.accuracy.serving import KINDS, POWER_LEFT_OUT
from benchmarks.page import describe_run, is_named, keep, known, map_apart, markdown, parse_parts, percent, publish
from benchmarks.truth.table import read_left_out, read_runs, read_truth

DEVICE = "h200"
MIB = 2**20
UNITLESS = ("kernels", "kernel ms", "step ms")


class Row(NamedTuple):
    """A measured step; ``truth/compiled.json`` says how. Inference has no backward pass."""

    case: str
    variant: str
    after_forward: int
    after_backward: int | None
    peak_forward: int
    peak_backward: int | None
    peak_step: int
    reserved: int
    step_ms: float
    host_ms: float
    kernel_ms: float
    kernels: int
    memops: int
    launches: int

    @property
    def id(self) -> str:
        return f"{self.case}/{self.variant}"

    @property
    def infers(self) -> bool:
        return self.case.endswith("infer")


class Result(NamedTuple):
    row: Row
    figures: dict[str, tuple[float, float | None]]  #: predicted and measured
    seconds: float                           #: of the profile itself
    energy: dict[str, tuple[float, float]]   #: as ``figures``, of a step among others; empty where not measured
    joules_range: tuple[float, float]        #: of joules, this model left out
    seconds_range: tuple[float, float]       #: of the step


def predict(row: Row, logs: list[Log]) -> Profile:
    """The profile of a measured step; its log is added to ``logs``."""
    define_torchvision_ops()  # transformers and timm import torchvision
    options: dict[str, Any] = {"device": DEVICE, "profilers": {"log": keep(logs)}}
    if row.infers:
        options["mode"] = "infer"
    else:
        options.update(loss_fn=lambda loss: loss, optimizer=partial(make_optimizer, row.variant))
    with settings(row.variant):
        if row.case == "fsdp":
            with world(1):
                return profile(lambda: build(row.case, row.variant)[0],
                               args=(torch.zeros(8, 2048, dtype=torch.int64), ), **options)
        with MetaTensorMode():
            step, inputs = build(row.case, row.variant)
        return profile(step, inputs, **options)


def run_dry(row: Row, *held: int) -> dict[str, int]:
    """What the script that measures prints in a dry run, in a process that ``held`` so many bytes before."""
    printed = StringIO()
    with redirect_stdout(printed):
        run = dry_run(compiled_script.__file__, [row.id, *map(str, held)], device=DEVICE, steps=99,
                      world=world(1) if row.case == "fsdp" else None)
    if run.error is not None:
        raise run.error
    found: dict[str, int] = json.loads(printed.getvalue().splitlines()[-1])
    return found


def count_kernels(log: Log) -> int:
    """The kernels of a log's last step, without copies and fills."""
    timer = CallTimer(log, find_device(DEVICE))
    return sum(tally.number * timer.time(tally.call).kernel.kernels for tally in log.tallies()
               if tally.step == log.steps - 1)


def judge(row: Row) -> Result:
    torch.set_num_threads(1)
    logs: list[Log] = []
    began = time.perf_counter()
    p = predict(row, logs)
    seconds = time.perf_counter() - began
    told = {case: figures for case, *figures in read_truth("compiled_aside")["first"]}
    *first, held = told.get(row.id, (None, None, 0))
    memory = run_dry(row, *[held] if held else [])
    figures: dict[str, tuple[float | None, float | None]] = {
        "after forward": (memory["after forward"], row.after_forward),
        "peak": (memory["peak step"], row.peak_step),
        "peak forward": (memory["peak forward"], row.peak_forward),
        "peak backward": (memory.get("peak backward"), row.peak_backward),
        "reserved": (memory["reserved step"], row.reserved),
        "first peak": (memory["peak first"], first[0]), "first reserved": (memory["reserved first"], first[1]),
        "kernels": (count_kernels(logs[-1]), row.kernels),
        "kernel ms": (None if p.kernel_seconds is None else p.kernel_seconds * 1e3, row.kernel_ms),
        "step ms": (None if p.step_seconds is None else p.step_seconds * 1e3, row.step_ms)}
    return Result(row, {name: (math.nan if predicted is None else predicted, measured)
                        for name, (predicted, measured) in figures.items()}, seconds, *compare_energy(row, p),
                  p.step_seconds_range or (math.nan, math.nan))


def compare_energy(row: Row, p: Profile) -> tuple[dict[str, tuple[float, float]], tuple[float, float]]:
    """Watts, joules and seconds of a step beside those measured, by constants that this model's steps did not help to
    fit, and that none of these steps did, or, of steps that no constant was fitted to, by those of the package; and
    the range of the former joules.
    """
    spec, ends = find_device(DEVICE), p.step_seconds_range
    aside, fitted = ({case: (seconds, watts) for case, seconds, watts, *_ in rows}
                     for rows in (read_truth("compiled_aside")["energy"], read_truth("energy")["rows"]))
    if row.id in aside:
        constants = {"": find_constants("power", spec)}
    elif row.id in fitted:
        constants = {f", {said} left out": read_left_out(POWER_LEFT_OUT, kind, row.case, DEVICE)
                     for kind, said in zip(KINDS, ("model", "all steps"))}
    else:
        return {}, (math.nan, math.nan)
    seconds, true = {**fitted, **aside}[row.id]
    work = find_step_work(p, spec)
    assert work is not None and p.step_seconds is not None and ends is not None
    found, joules = {}, []
    for said, numbers in constants.items():
        watts = known(watts_of(work, spec, numbers))
        joules.append(watts * p.step_seconds)
        found["watts" + said] = watts, true
        found["joules a step" + said] = joules[-1], true * seconds
    return {**found, "step ms": (p.step_seconds * 1e3, seconds * 1e3)}, joules_range(
        joules[0], find_constants("power", spec), (p.step_seconds, *ends))


def section(results: list[Result], seconds: float, cases: str) -> str:
    """Predicted, measured and error of each figure, a row a case."""
    names = [name for name in results[0].figures if any(result.figures[name][1] is not None for result in results)]
    rows = []
    for result in results:
        cells = []
        for name in names:
            predicted, measured = result.figures[name]
            if measured is None:
                cells.append("-")
                continue
            scale, digits = (1, 0) if name == "kernels" else (1, 2) if name.endswith("ms") else (MIB, 0)
            error = percent(predicted / measured - 1, signed=True)
            cells.append(f"{predicted / scale:,.{digits}f} / {measured / scale:,.{digits}f} {error}")
        rows.append([result.row.id, *cells, f"{result.seconds:.0f} s"])
    inside = sum(low <= result.row.step_ms / 1e3 <= high for result in results for low, high in [result.seconds_range])
    columns = [name if name in UNITLESS else f"{name}, MiB" for name in names]
    return (f"{describe_run(seconds)}; predicted / measured.\n\n" + markdown(
        ["step", *columns, "took"], rows, cases=cases)
            + "\n\n" + markdown(["of compiled steps", "median error", "worst"], summarize(results))
            + f"\n\nMeasured steps, eager ones too, lie in the range that the profile tells in {inside} of "
              f"{len(results)} cases.")


def summarize(results: list[Result]) -> list[list[str]]:
    """Of each figure of compiled steps, the median and the worst of the errors without their signs."""
    rows = []
    for name in results[0].figures:
        errors = [abs(predicted / measured - 1) for predicted, measured in
                  (result.figures[name] for result in results if not result.row.variant.startswith("eager"))
                  if measured is not None]
        if errors:
            rows.append([name, percent(median(errors), 2), percent(max(errors))])
    return rows


def energy_section(results: list[Result], seconds: float, cases: str) -> str:
    """Predicted, measured and error of watts, joules and seconds, a row a step, and how many joules are in their range.
    """
    measured = [result for result in results if result.energy]
    if not measured:
        return "No energy was measured of these steps."
    names = list(measured[0].energy)
    cells, rows = [[result.row.id] for result in measured], []
    for name in names:
        pairs, digits = [result.energy[name] for result in measured], 0 if name.startswith("watts") else 2
        errors = [predicted / true - 1 for predicted, true in pairs]
        for cell, (predicted, true), error in zip(cells, pairs, errors, strict=True):
            cell.append(f"{predicted:,.{digits}f} / {true:,.{digits}f} {percent(error, signed=True)}")
        rows.append([name, percent(median(map(abs, errors))), percent(max(map(abs, errors))),
                     percent(median(errors), signed=True)])
    inside = sum(result.joules_range[0] <= result.energy[names[1]][1] <= result.joules_range[1] for result in measured)
    return (f"{describe_run(seconds)}; predicted / measured.\n\n" + markdown(["step", *names], cells, cases=cases)
            + "\n\n" + markdown([f"of {len(measured)} steps", "median error", "worst", "median with its sign"], rows)
            + f"\n\nMeasured joules are in the range that the profile tells in {inside} of {len(measured)} steps.")


def main() -> int:
    options = parse_parts(__doc__)
    sections = {}
    for name, memory, energy in (("compiled", "accuracy.compiled_measured", "accuracy.compiled_measured energy"),
                                 ("compiled_aside", "accuracy.compiled_measured aside",
                                  "accuracy.compiled_measured aside-energy")):
        began = time.perf_counter()
        rows = [row for row in read_runs(name, Row) if is_named(row.id, options.parts)]
        results = map_apart(judge, rows, options.processes, tasks=1)
        if results:
            took = time.perf_counter() - began
            sections.update({memory: section(results, took, f"accuracy/{name}_steps"),
                             energy: energy_section(results, took, f"accuracy/{name}_energy")})
    publish("accuracy.md", sections, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
