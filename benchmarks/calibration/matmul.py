"""Fits the constants of matrix products, ``python -m benchmarks.calibration.matmul``: about five minutes of one core.

What stands in ``fitted/matmul.json``: for each kind of arithmetic (`KINDS`) the constants of the formulas in
``analyzer/hardware/kernel_time/matmul.py``, found by coordinate search for the least mean of ``|log(predicted /
measured)|`` on a sample, pulled a little towards `START`, those of an architecture towards the generic ones. A spread
holds nine in ten cases that the constants were not fitted to: for a device other shapes, for the others other devices.
Cases and licences: `matmul_cases`.
"""
from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, find_device, roofline_seconds
from analyzer.hardware.kernel_time.estimate import BOUNDS, find_constants
from analyzer.hardware.kernel_time.matmul import KINDS, ProductMachine
from benchmarks.truth.table import write_constants

from .matmul_cases import FOLDS, Case, all_cases, sample, unaligned_cases

SAMPLE = 280  #: cases of a device and kind that a fit sees
JUDGED = 500  #: cases of a device and scheme that are judged

_SHARED = {"clock_hertz": 1.7e9}  # a usual boost clock
_COMMON = {"k_seconds": 2e-9, "wave_seconds": 5e-7, "split_seconds": 3e-6, "floor_seconds": 2e-6,
           "bandwidth_share": 0.8, "joules_scale": 1.2, "element_clocks": 0.18, "power": 2.0, "add_share": 0.2,
           "load_bytes_per_clock": 40.0, "peak_share": 0.85, "cache_share": 0.6, "slow_seconds": 1e-3,
           "store_bytes_per_clock": 15.0}
START = {"half": _COMMON, "byte": _COMMON, "single": {**_COMMON, "load_bytes_per_clock": 20.0, "k_seconds": 6e-9,
                                                      "slow_seconds": 3e-3}}
_PULL = 0.0015  # of one constant that is e times what is more general, in units of the mean error
_LIMITS = {"slow_seconds": (1e-4, 0.1), "joules_scale": (0.5, 3.0), "element_clocks": (0.001, 2.0),
           "peak_share": (0.2, 1.05), "bandwidth_share": (0.3, 1.0), "cache_share": (0.05, 1.0), "power": (1.0, 6.0)}
_CLOCKS = {"bmm before": 15e-6, "bmm after": 10e-6, "linear before": 25e-6, "linear after": 20e-6,
           "sglang quantized": 1e-7, "trtllm quantized": 8e-6}  # of harnesses: seconds beside the kernel
Values = dict[str, float]


def kind_of(case: Case) -> str:  # the kind of arithmetic whose constants a case takes
    return KINDS[case.dtype][0]


def predict(case: Case, machine: ProductMachine, clocks: Mapping[str, float]) -> tuple[float, str]:
    """What the harness of a case would have measured, in seconds, and what bounds the product."""
    time = machine.time(case.batch, case.m, case.n, case.k, case.row_bytes, case.cached_weights)
    if case.quantizes:
        return time.seconds + machine.quantizing_seconds(case.m * case.k) + clocks[case.clock], time.bound
    if case.clock:
        op = case.clock.rpartition(" ")[2]
        return clocks[f"{op} before"] + max(time.seconds, clocks[f"{op} after"]), time.bound
    return time.seconds, time.bound


def _machine_of(device: DeviceSpec, dtype: str, kind: str, values: Mapping[str, float]) -> ProductMachine:
    spread = dict.fromkeys(["unaligned_spread", *(f"{kind}.{bound}_spread" for bound in BOUNDS[:3])], 0.0)
    constants = {f"{kind}.{name}": values[name] for name in _COMMON}
    return ProductMachine(device, dtype, {**_SHARED, **spread, **constants})


def mean_error(cases: Iterable[Case], kind: str, values: Mapping[str, float], clocks: Mapping[str, Values]) -> float:
    """The mean of ``|log(predicted / measured)|``; ``clocks`` by device, "" for those of the fit itself."""
    machines: dict[tuple[str, str], ProductMachine] = {}
    total, count = 0.0, 0
    for case in cases:
        key = case.device, case.dtype
        if key not in machines:
            machines[key] = _machine_of(find_device(case.device), case.dtype, kind, values)
        seconds, _ = predict(case, machines[key], clocks.get(case.device, values))
        total += abs(math.log(seconds / case.seconds))
        count += 1
    return total / count


def search(error: Callable[[Values], float], start: Values, prior: Mapping[str, float], names: Iterable[str],
           sweeps: int) -> Values:
    """The values that make ``error`` least, one at a time by steps that shrink; drawn to ``prior``."""
    def full(values: Values) -> float:
        return error(values) + _PULL * sum(abs(math.log(values[name] / prior[name])) for name in names if name in prior)

    values = dict(start)
    best = full(values)
    steps: Values = {}
    for sweep in range(sweeps):
        if not steps or max(steps.values()) < 0.02:
            steps = dict.fromkeys(names, 0.35 if sweep == 0 else 0.15)  # once more, from what is found
        for name in names:
            low, high = _LIMITS.get(name, (0.0, math.inf))
            for sign in (1, -1):
                trial = {**values, name: min(max(values[name] * math.exp(sign * steps[name]), low), high)}
                least = full(trial)
                if least < best - 1e-5:
                    values, best = trial, least
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.5
    return values


def fit(cases: list[Case], prior: Values, clocks: Mapping[str, Values], sweeps: int = 10) -> Values:
    """Constants of one kind for the devices of the cases, and the harness's figures where ``clocks`` has none."""
    kind = kind_of(cases[0])
    names = list(_COMMON)
    for case in cases:
        if case.clock and case.device not in clocks:
            names += [name for name in _CLOCKS if name.split()[0] in case.clock and name not in names]
    return search(lambda values: mean_error(cases, kind, values, clocks), {**_CLOCKS, **prior}, prior, names, sweeps)


def fit_unaligned(values: Values, without: str = "") -> tuple[float, float]:
    """``element_clocks`` on tensor cores, with the other constants of an H200, and the spread of what they give;
    ``without`` a model of ``latency.json``.
    """
    cases = list(unaligned_cases(without))
    found = search(lambda trial: mean_error(cases, "half", trial, {}), values, {}, ["element_clocks"], 12)
    errors = sorted(mean_error([case], "half", found, {}) for case in cases)
    return found["element_clocks"], math.exp(errors[int(0.9 * len(errors))]) - 1


def constants_without(model: str) -> Values:
    """What a judgement of a model's steps in ``latency.json`` may know, as ``DeviceSpec.calibration["matmul"]`` takes
    it: the rest is not fitted to that file.
    """
    values = {name.removeprefix("half."): value for name, value in
              find_constants("matmul", find_device("h200")).items() if name.startswith("half.")}
    return {"half.element_clocks": fit_unaligned({**_CLOCKS, **values}, model)[0]}


Unit = tuple[str, str]  # a kind of arithmetic and a device


def units_of(cases: Iterable[Case]) -> dict[Unit, list[Case]]:
    units: dict[Unit, list[Case]] = {}
    for case in cases:
        units.setdefault((kind_of(case), case.device), []).append(case)
    return units


def own_clocks(units: Mapping[Unit, list[Case]]) -> dict[str, Values]:
    """What each machine's harness adds to a kernel, by device, fitted with the device's constants."""
    clocks: dict[str, Values] = {}
    for (kind, device), cases in units.items():
        values = fit(sample(cases, SAMPLE), START[kind], {})
        clocks.setdefault(device, {}).update(
            {name: values[name] for name in _CLOCKS if any(name.split()[0] in case.clock for case in cases)})
    return clocks


def _architecture(device: str) -> str:
    return find_device(device).architecture or ""


def fit_levels(units: Mapping[Unit, list[Case]], kind: str, clocks: Mapping[str, Values],
               without: str = "") -> tuple[Values, dict[str, Values]]:
    """The generic constants of a kind and those by architecture, ``without`` a device."""
    pools = {device: sample(cases, SAMPLE // 3) for (of, device), cases in units.items()
             if of == kind and device != without}
    generic = fit([case for pool in pools.values() for case in pool], START[kind], clocks)
    architectures: dict[str, list[Case]] = {}
    for device, pool in pools.items():
        architectures.setdefault(_architecture(device), []).extend(pool)
    return generic, {name: fit(pool, generic, clocks, sweeps=6) for name, pool in architectures.items()}


Judged = tuple[str, str, str, float, float, float, float]


class Residual(NamedTuple):  # a case, its scheme ("fold" or "device"), and what was predicted of it
    case: Case
    scheme: str
    seconds: float
    bound: str

    @property
    def place(self) -> tuple[str, str, str]:  # whose spread holds it: a kind, a device or "" for any, and a bound
        return kind_of(self.case), self.case.device if self.scheme == "fold" else "", self.bound


def _judge(cases: Iterable[Case], scheme: str, kind: str, values: Values,
           clocks: Mapping[str, float]) -> Iterator[Residual]:
    machines: dict[str, ProductMachine] = {}
    for case in cases:
        if case.dtype not in machines:
            machines[case.dtype] = _machine_of(find_device(case.device), case.dtype, kind, values)
        yield Residual(case, scheme, *predict(case, machines[case.dtype], clocks))


def residuals(units: Mapping[Unit, list[Case]], clocks: Mapping[str, Values]) -> list[Residual]:
    """Cases predicted with constants that they did not help to fit, by fold of shapes and with their device left out.

    With a device left out its harness's figures, which are not of the products, are its own.
    """
    found: list[Residual] = []
    for (kind, device), cases in units.items():
        for fold in range(FOLDS):
            values = fit(sample([case for case in cases if case.fold != fold], SAMPLE), START[kind], {})
            judged = sample([case for case in cases if case.fold == fold], JUDGED // FOLDS, seed=1)
            found += _judge(judged, "fold", kind, values, values)
        generic, architectures = fit_levels(units, kind, clocks, without=device)
        values = architectures.get(_architecture(device), generic)
        found += _judge(sample(cases, JUDGED, seed=2), "device", kind, values, clocks.get(device, {}))
    return found


def spreads(found: Iterable[Residual]) -> dict[tuple[str, str, str], float]:
    """What nine in ten of ``|log(predicted / measured)|`` are within, as a spread, by place of a residual.

    A place of fewer than 20 residuals takes that of its kind and device, whatever the bound.
    """
    errors: dict[tuple[str, str], dict[str, list[float]]] = {}
    for residual in found:
        error = abs(math.log(residual.seconds / residual.case.seconds))
        errors.setdefault(residual.place[:2], {}).setdefault(residual.bound, []).append(error)
    widths: dict[tuple[str, str, str], float] = {}
    for place, by_bound in errors.items():
        whole = [error for some in by_bound.values() for error in some]
        for bound in BOUNDS[:3]:
            some = by_bound.get(bound, [])
            ordered = sorted(some if len(some) >= 20 else whole)
            widths[place[0], place[1], bound] = round(math.exp(ordered[int(0.9 * len(ordered))]) - 1, 3)
    return widths


def cross_validate() -> list[Judged]:
    """Rows (family, device, scheme, measured, predicted, spread, roofline), in seconds; schemes as in `residuals`."""
    units = units_of(all_cases())
    found = residuals(units, own_clocks(units))
    spread = spreads(found)
    rows: list[Judged] = []
    for residual in found:
        case = residual.case
        itemsize = KINDS[case.dtype][1]
        nbytes = case.batch * (itemsize * case.k * (case.m + case.n) + max(itemsize, 2) * case.m * case.n)
        roofline = roofline_seconds(2 * case.batch * case.m * case.n * case.k, nbytes, case.dtype,
                                    find_device(case.device), True)
        rows.append((case.family, case.device, residual.scheme, case.seconds, residual.seconds,
                     spread[residual.place], roofline or math.nan))
    return rows


def _rounded(kind: str, values: Values, place: str, spread: Mapping[tuple[str, str, str], float]) -> Values:
    return {f"{kind}.{name}": float(f"{values[name]:.3g}") for name in _COMMON} | {
        f"{kind}.{bound}_spread": spread[kind, place, bound] for bound in BOUNDS[:3]}


def main() -> None:
    units = units_of(all_cases())
    clocks = own_clocks(units)
    found = residuals(units, clocks)
    spread = spreads(found)
    table: dict[str, dict[str, Values]] = {"architectures": {}, "devices": {}}
    generic: Values = dict(_SHARED)
    clocks_of_element, generic["unaligned_spread"] = (
        round(figure, 3) for figure in fit_unaligned(fit(sample(units["half", "h200"], SAMPLE), START["half"], {})))
    for kind in START:
        values, architectures = fit_levels(units, kind, clocks)
        generic |= _rounded(kind, values, "", spread)
        for name, constants in architectures.items():
            table["architectures"].setdefault(name, {}).update(_rounded(kind, constants, "", spread))
    for (kind, device), cases in units.items():
        constants = fit(sample(cases, SAMPLE), START[kind], {})
        table["devices"].setdefault(device, {}).update(_rounded(kind, constants, device, spread))
    for constants in (generic, *table["architectures"].values(), *table["devices"].values()):
        constants |= {f"{kind}.element_clocks": clocks_of_element for kind in ("half", "byte")
                      if f"{kind}.element_clocks" in constants}
    write_constants("matmul", {
        "data": "benchmarks/truth: kernels/gemm.csv.gz, kernels/llm_layers.csv.gz (products), kernels/fp32_ops.csv.gz "
                "(bmm, linear), latency.json (bf16 products of unaligned rows, for half.element_clocks only)",
        "licence": "Apache-2.0 (gemm), MIT (llm_layers, fp32_ops), measured for this project (latency)",
        "date": datetime.date.today().isoformat(),
        "note": "by kind: half 16-bit and TF32 on tensor cores, byte 8-bit, single CUDA cores; see the script"},
        generic, **table)


if __name__ == "__main__":
    main()
