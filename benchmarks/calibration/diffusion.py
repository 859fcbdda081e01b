"""Fits what pipelines of diffusers take beside their kernels, and watts of servers and of pipelines:
``python -m benchmarks.calibration.diffusion``, with diffusers, half an hour.

Data: ``benchmarks/truth/diffusion`` and ``benchmarks/truth/serving`` (github.com/ml-energy/leaderboard). Seconds:

- ``host_share``: the time that their hosts take to launch, over that of the host of ``calibration/host.py``;
- ``ring_seconds``: the host's, of each block of a ring's attention;
- ``exchange_share``: the rate at which tokens are exchanged and blocks are joined, over that of the links' and memory's
  models.

Watts, of the mix of what bounds kernels: the part of the limit that arithmetic takes (``arithmetic_share``) and joules
of a byte of memory; what small kernels and collectives take beyond a device that waits came out as 0 and is left out.
``idle_share`` is held: a device that waits takes a fifth of its limit (Patel et al., "POLCA: Power Oversubscription in
LLM Cloud Providers", arXiv 2308.12908v1: A100s that train Flan-T5 come down to 20 % between iterations, which is their
power where they wait; an H200 takes 134 to 136 W of 700, ``truth/energy.json``). Least absolute logarithms of predicted
over measured.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.power import watts_of
from analyzer.tools.diffusion.diffusion_profile import DiffusionProfile
from analyzer.tools.diffusion.run import compose, sum_bounds
from analyzer.tools.serving.pass_time import PassTimer
from benchmarks.accuracy_diffusion import LEFT_OUT, Measured, measure_all
from benchmarks.accuracy_serving import KINDS, POWER_LEFT_OUT, family, read_itls
from benchmarks.accuracy_serving import left_out as left_out_of_servers
from benchmarks.calibration.serving import find_spread, minimize
from benchmarks.truth_table import read_left_out, rounded, write_constants, write_left_out

START = {"host_share": 0.7, "ring_seconds": 1.5e-4, "exchange_share": 0.5}
STEPS = {"host_share": 0.1, "ring_seconds": 5e-5, "exchange_share": 0.1}
POWER = {"idle_share": 0.2, "arithmetic_share": 0.9, "byte_joules": 1.6e-10}
POWER_STEPS = {"arithmetic_share": 0.1, "byte_joules": 2e-11}


def fit(rows: Sequence[Measured]) -> dict[str, float]:
    def loss(constants: Mapping[str, float]) -> float:
        if constants["exchange_share"] <= 0:
            return math.inf
        return sum(abs(math.log((predict(row, constants).seconds or 1.0) / row.case.seconds)) for row in rows)

    return minimize(list(START), START, loss, STEPS)


def predict(row: Measured, constants: Mapping[str, float]) -> DiffusionProfile:
    return compose(row.pipeline, row.runs, find_device(row.case.device), row.case.degrees, constants={
        **POWER, "spread": 0.0, **constants})


class Power(NamedTuple):
    """Seconds by what bounds them, and measured watts of one device. ``parts``: the names of model and device."""

    parts: tuple[str, str]
    device: DeviceSpec
    spent: Mapping[str, float]
    watts: float

    def predict(self, constants: Mapping[str, float]) -> float:
        watts = watts_of(self.spent, self.device, constants)
        assert watts is not None
        return watts


def list_power(rows: Sequence[Measured], kind: str) -> list[Power]:
    """With times as predicted where the model, or the device (``kind``), was left out."""
    found = []
    for itl in read_itls():
        device = itl.deployment.device
        timer = PassTimer(itl.deployment, left_out_of_servers(kind, itl.model, device.name))
        found.append(Power((family(itl.model), device.name), device, timer.spent(itl.batch), itl.watts))
    for row in rows:
        parts = row.case.model, row.case.device
        spent = sum_bounds(predict(row, read_left_out(LEFT_OUT, kind, *parts)).parts)
        found.append(Power(parts, find_device(row.case.device), spent,
                           row.case.watts / row.case.degrees.ranks))
    return found


def fit_power(points: Sequence[Power]) -> dict[str, float]:
    weights = Counter(point.parts for point in points)  # each model on each device counts as much

    def loss(tried: Mapping[str, float]) -> float:
        return sum(abs(math.log(point.predict(tried) / point.watts)) / weights[point.parts] for point in points)

    return minimize(list(POWER_STEPS), POWER, loss, POWER_STEPS)


def main() -> None:
    rows = measure_all()
    constants = fit(rows)
    write_left_out(LEFT_OUT, {
        f"{kind}: {name}": fit([row for row in rows if getattr(row.case, kind) != name])
        for kind in sorted(KINDS) for name in sorted({getattr(row.case, kind) for row in rows})})
    found, spreads = {}, []
    for place, kind in enumerate(KINDS):
        points, errors = list_power(rows, kind), list[float]()
        for name in sorted({point.parts[place] for point in points}):
            power = fit_power([point for point in points if point.parts[place] != name])
            errors += [point.predict(power) / point.watts - 1 for point in points if point.parts[place] == name]
            found[f"{kind}: {name}"] = power
        spreads.append(find_spread(errors))
    write_left_out(POWER_LEFT_OUT, found)
    said = {"licence": "Apache-2.0", "date": date.today().isoformat()[:7],
            "data": "benchmarks/truth/diffusion, benchmarks/truth/serving (github.com/ml-energy/leaderboard)"}
    write_constants("diffusion", {**said, "note": "parts of what models predict, and seconds of the host: see there"
                                  }, rounded(constants))
    write_constants("power", {
        "command": "python -m benchmarks.calibration.diffusion", **said,
        "note": "parts of the power limit, and joules; idle_share is of arXiv 2308.12908; spread holds nine in ten "
                "watts, the model or the device left out"},
        rounded(fit_power(list_power(rows, "model")) | {"spread": max(spreads)}))


if __name__ == "__main__":
    main()
