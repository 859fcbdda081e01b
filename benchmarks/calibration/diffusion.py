"""Fits what pipelines of diffusers take beside their kernels, and watts of servers, pipelines and training steps:
``python -m benchmarks.calibration.diffusion``, with diffusers, ten minutes.

Data: ``benchmarks/truth/diffusion`` and ``benchmarks/truth/serving`` (github.com/ml-energy/leaderboard), and
``benchmarks/truth/energy.json``. Seconds:

- ``host_share``: the time that hosts of pipelines take to launch, over that of the host of ``calibration/host.py``;
- ``ring_seconds``: the host's, of each block of a ring's attention;
- ``exchange_share``: the rate at which tokens are exchanged, over that of the links' model.

Watts, parts of the device's limit (see `watts_of`): ``kernel_share`` while kernels compute, ``product_share`` of
products at their peak rate, ``traffic_share`` of bytes at the memory's rate. ``idle_share`` is held: a device that
waits takes a fifth of its limit (Patel et al., "POLCA: Power Oversubscription in LLM Cloud Providers", arXiv
2308.12908v1: A100s that train Flan-T5 come down to 20 % between iterations, which is their power where they wait; an
H200 takes 134 to 136 W of 700, ``truth/energy.json``). Least absolute logarithms of predicted over measured, in which
each model on each device counts as much, and for watts servers, pipelines and steps do, too.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.power import Work, watts_of
from analyzer.report.run_cost import find_step_work
from analyzer.tools.diffusion.diffusion_profile import DiffusionProfile
from analyzer.tools.diffusion.run import compose, find_mean_work
from analyzer.tools.serving.pass_time import PassTimer
from analyzer.tools.serving.watts import find_work
from benchmarks.accuracy.compiled_measured import DEVICE, Row
from benchmarks.accuracy.compiled_measured import predict as predict_step
from benchmarks.accuracy.diffusion import LEFT_OUT, Measured, measure_all
from benchmarks.accuracy.serving import KINDS, POWER_LEFT_OUT, family, find_factor, read_itls
from benchmarks.accuracy.serving import left_out as left_out_of_servers
from benchmarks.calibration.serving import minimize
from benchmarks.page import known, quantile
from benchmarks.truth.table import read_left_out, read_runs, read_truth, rounded, write_constants, write_left_out

START = {"host_share": 0.7, "ring_seconds": 1.5e-4, "exchange_share": 0.5}
STEPS = {"host_share": 0.1, "ring_seconds": 5e-5, "exchange_share": 0.1}
POWER = {"idle_share": 0.2, "kernel_share": 0.4, "product_share": 1.0, "traffic_share": 0.5}
POWER_STEPS = {"kernel_share": 0.08, "product_share": 0.2, "traffic_share": 0.1}


def fit(rows: Sequence[Measured]) -> dict[str, float]:
    alike = Counter((row.case.model, row.case.device) for row in rows)

    def loss(constants: Mapping[str, float]) -> float:
        if constants["exchange_share"] <= 0:
            return math.inf
        return sum(abs(math.log((predict(row, constants).seconds or 1.0) / row.case.seconds))
                   / alike[row.case.model, row.case.device] for row in rows)

    return minimize(list(START), START, loss, STEPS)


def predict(row: Measured, constants: Mapping[str, float]) -> DiffusionProfile:
    return compose(row.pipeline, row.runs, find_device(row.case.device), row.case.degrees, constants={
        **POWER, "spread": 0.0, **constants})


class Power(NamedTuple):
    """What one device does, and its measured watts. ``parts``: the names of model and device."""

    source: str
    parts: tuple[str, str]
    device: DeviceSpec
    work: Work
    watts: float

    def predict(self, constants: Mapping[str, float]) -> float:
        return known(watts_of(self.work, self.device, constants))


def list_steps() -> list[Power]:
    """Training steps whose watts were measured."""
    measured = {case: watts for case, _, watts, *_ in read_truth("energy")["rows"]}
    device, found = find_device(DEVICE), []
    for row in read_runs("compiled", Row):
        if row.id in measured:
            work = known(find_step_work(predict_step(row, []), device))
            found.append(Power("steps", (row.case, device.name), device, work, measured[row.id]))
    return found


def list_power(rows: Sequence[Measured], steps: Sequence[Power], kind: str) -> list[Power]:
    """With times as predicted where the model, or the device (``kind``), was left out."""
    found = list(steps)
    for itl in read_itls():
        device = itl.deployment.device
        timer = PassTimer(itl.deployment, left_out_of_servers(kind, itl.model, device.name))
        found.append(Power("servers", (family(itl.model), device.name), device, find_work(timer, itl.batch), itl.watts))
    for row in rows:
        parts, ranks = (row.case.model, row.case.device), row.case.degrees.ranks
        profile = predict(row, read_left_out(LEFT_OUT, kind, *parts))
        work = known(find_mean_work(profile.parts, len(row.pipeline.text) + 1, ranks))
        found.append(Power("pipelines", parts, find_device(row.case.device), work, row.case.watts / ranks))
    return found


def fit_power(points: Sequence[Power]) -> dict[str, float]:
    alike = Counter((point.source, point.parts) for point in points)
    models = Counter(source for source, _ in alike)

    def loss(tried: Mapping[str, float]) -> float:
        return sum(abs(math.log(point.predict(tried) / point.watts))
                   / alike[point.source, point.parts] / models[point.source] for point in points)

    return minimize(list(POWER_STEPS), POWER, loss, POWER_STEPS)


def main() -> None:
    rows = measure_all()
    constants = fit(rows)
    write_left_out(LEFT_OUT, {
        f"{kind}: {name}": fit([row for row in rows if getattr(row.case, kind) != name])
        for kind in sorted(KINDS) for name in sorted({getattr(row.case, kind) for row in rows})})
    found, spreads, steps = {}, [], list_steps()
    for place, kind in enumerate(KINDS):
        points, errors = list_power(rows, steps, kind), list[float]()
        for name in sorted({point.parts[place] for point in points}):
            power = fit_power([point for point in points if point.parts[place] != name])
            errors += [point.predict(power) / point.watts - 1 for point in points if point.parts[place] == name]
            found[f"{kind}: {name}"] = power
        spreads.append(quantile(list(map(find_factor, errors)), 0.9))
    write_left_out(POWER_LEFT_OUT, found)
    said = {"licence": "Apache-2.0", "date": date.today().isoformat()[:7],
            "data": "benchmarks/truth/diffusion, benchmarks/truth/serving (github.com/ml-energy/leaderboard), and for "
                    "watts benchmarks/truth/energy.json (an H200)"}
    write_constants("diffusion", {**said, "note": "parts of what models predict, and seconds of the host: see there"
                                  }, rounded(constants))
    write_constants("power", {
        "command": "python -m benchmarks.calibration.diffusion", **said,
        "note": "parts of the power limit; idle_share is of arXiv 2308.12908; spread holds nine in ten watts, the "
                "model or the device left out"},
        rounded(fit_power(list_power(rows, steps, "model")) | {"spread": max(spreads)}))


if __name__ == "__main__":
    main()
