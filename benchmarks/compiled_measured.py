"""Compiled steps beside those that were measured on an H200: ``python -m benchmarks.compiled_measured`` writes into
docs/accuracy.md; with names, as ``gpt2/compile``, those cases alone are printed. The eager steps of the same models
stand with them, and watts and joules. No rule and no constant was made with those of ``truth/compiled_aside.json``.
"""
from __future__ import annotations

import math
import sys
import time
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

from analyzer import MetaTensorMode, Profile, profile
from analyzer.hardware import find_device
from analyzer.hardware.kernel_time.estimate import find_constants
from analyzer.hardware.power import joules_range, watts_of
from analyzer.parallel import world
from analyzer.profilers.call_sequence import CallTimer
from analyzer.record.log import Log
from analyzer.report.run_cost import find_step_work
from analyzer.zoo.torchvision_ops import define_torchvision_ops
from benchmarks.accuracy_serving import KINDS, POWER_LEFT_OUT
from benchmarks.compiled_models import BUILDERS, Forward
from benchmarks.page import describe_run, is_named, keep, map_apart, markdown, parse_parts, percent, publish
from benchmarks.truth_table import read_left_out, read_runs, read_truth

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


class Step(nn.Module):
    """The forward pass that was measured, with the model in it compiled as the variant says."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(self.model, *inputs)


def build(row: Row) -> tuple[Step, tuple[Any, ...]]:
    model, inputs, forward = BUILDERS[row.case](row.variant)
    model.train(not row.infers)
    compiled: Any = model
    parts = row.variant.split("_")
    if parts[0] != "eager" and "layers" not in parts and not row.case.startswith("titan"):  # whose blocks are compiled
        modes = {"reduce": "reduce-overhead", "max": "max-autotune-no-cudagraphs"}
        compiled = torch.compile(model, mode=modes.get(parts[0]), dynamic="dynamic" in parts or None)
    return Step(compiled, forward), inputs


class Result(NamedTuple):
    row: Row
    figures: dict[str, tuple[float, float | None]]  #: predicted and measured
    seconds: float                           #: of the profile itself
    energy: dict[str, tuple[float, float]]   #: as ``figures``, of a step among others; empty where not measured
    joules_range: tuple[float, float]        #: of joules, this model left out
    seconds_range: tuple[float, float]       #: of the step


def make_optimizer(row: Row, parameters: Any) -> torch.optim.Optimizer:
    """AdamW by operators on lists of tensors, its step compiled where the variant says so."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    if row.variant.startswith("compile"):
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def predict(row: Row, logs: list[Log]) -> Profile:
    """The profile of a measured step; its log is added to ``logs``."""
    define_torchvision_ops()  # transformers and timm import torchvision
    options: dict[str, Any] = {"device": DEVICE, "profilers": {"log": keep(logs)}}
    if row.infers:
        options["mode"] = "infer"
    else:
        options.update(loss_fn=lambda loss: loss, optimizer=partial(make_optimizer, row)
                       if row.variant.endswith("optimizer") else "adamw_fused")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if row.variant.endswith("high") else "highest")
    try:
        if row.case == "fsdp":
            with world(1):
                return profile(lambda: build(row)[0], args=(torch.zeros(8, 2048, dtype=torch.int64), ), **options)
        with MetaTensorMode():
            step, inputs = build(row)
        with functorch.patch(activation_memory_budget=0.5 if row.variant.endswith("budget") else 1.0):
            return profile(step, inputs, **options)
    finally:
        torch.set_float32_matmul_precision(before)


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
    forward, backward = p.phases["forward"], p.phases.get("backward")
    figures: dict[str, tuple[float | None, float | None]] = {
        "after forward": (forward.allocated_bytes, row.after_forward),
        "peak": (max(phase.peak_allocated_bytes or 0 for phase in p.phases.values()), row.peak_step),
        "peak forward": (forward.peak_allocated_bytes, row.peak_forward),
        "peak backward": (None if backward is None else backward.peak_allocated_bytes, row.peak_backward),
        "reserved": (p.peak_reserved_bytes, row.reserved),
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
        watts = watts_of(work, spec, numbers)
        assert watts is not None
        joules.append(watts * p.step_seconds)
        found["watts" + said] = watts, true
        found["joules a step" + said] = joules[-1], true * seconds
    return {**found, "step ms": (p.step_seconds * 1e3, seconds * 1e3)}, joules_range(
        joules[0], find_constants("power", spec), (p.step_seconds, *ends))


def section(results: list[Result], seconds: float) -> str:
    """Predicted, measured and error of each figure, a row a case."""
    rows = []
    for result in results:
        cells = []
        for name, (predicted, measured) in result.figures.items():
            if measured is None:
                cells.append("-")
                continue
            scale, digits = (1, 0) if name == "kernels" else (1, 2) if name.endswith("ms") else (MIB, 0)
            error = percent(predicted / measured - 1, signed=True)
            cells.append(f"{predicted / scale:,.{digits}f} / {measured / scale:,.{digits}f} {error}")
        rows.append([result.row.id, *cells, f"{result.seconds:.0f} s"])
    inside = sum(low <= result.row.step_ms / 1e3 <= high for result in results for low, high in [result.seconds_range])
    columns = [name if name in UNITLESS else f"{name}, MiB" for name in results[0].figures]
    return (f"{describe_run(seconds)}; predicted / measured.\n\n" + markdown(["step", *columns, "took"], rows)
            + "\n\n" + markdown(["of compiled steps", "median error", "worst"], summarize(results))
            + f"\n\nMeasured steps, eager ones too, take as long as the range that the profile tells in {inside} of "
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


def energy_section(results: list[Result], seconds: float) -> str:
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
    return (f"{describe_run(seconds)}; predicted / measured.\n\n" + markdown(["step", *names], cells)
            + "\n\n" + markdown([f"of {len(measured)} steps", "median error", "worst", "median with its sign"], rows)
            + f"\n\nMeasured joules are in the range that the profile tells in {inside} of {len(measured)} steps.")


def main() -> int:
    options = parse_parts(__doc__)
    sections = {}
    for name in ("compiled", "compiled_aside"):
        began = time.perf_counter()
        rows = [row for row in read_runs(name, Row) if is_named(row.id, options.parts)]
        results = map_apart(judge, rows, options.processes, tasks=1)
        if results:
            took, block = time.perf_counter() - began, name.replace("compiled", "compiled_measured", 1)
            sections.update({block: section(results, took), f"{block} energy": energy_section(results, took)})
    publish("accuracy.md", sections, not options.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
