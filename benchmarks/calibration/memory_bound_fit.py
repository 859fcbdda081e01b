"""How the constants of the kernels that memory bounds are fitted: which operators tell which, by what descent."""
from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.hardware.kernel_time.norm import layer_norm_time
from analyzer.hardware.kernel_time.pointwise import FAMILY, HBM_CAPABILITIES, pointwise_time, read_machine
from analyzer.hardware.kernel_time.reduction import softmax_time
from benchmarks.page import known

from .memory_bound_data import ITEM_BYTES, Operator, Row, read_operators, read_rows

FOLDS = 5
LARGE_SECONDS = 200e-6     # from here on an operator's time is its kernel's

Constants = dict[str, float]
#: What stands at the start, by the operators that fit it: value, least and most.
Bounds = Mapping[str, tuple[float, float, float]]
_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
#: The second is fitted to the float32 operators of older devices, and PyTorch 2.1: the powers, and rows of layer norms.
GROUPS, OLDER = ([(tuple(row["operators"]), cast(Bounds, row["bounds"])) for row in _TABLE[kind]]
                 for kind in ("groups", "older"))
#: Operators of steps that tell what memory gives.
STREAMS = ("aten::threshold_backward", "aten::add_", "aten::gelu")


def with_constants(device: DeviceSpec, constants: Mapping[str, float]) -> DeviceSpec:
    read_machine.cache_clear()
    return dataclasses.replace(device, calibration={FAMILY: dict(constants)})


def descend(loss: Callable[[Constants], float], bounds: Bounds, constants: Constants, rounds: int = 6) -> Constants:
    """The constants of ``bounds`` that make ``loss`` least, others as they are."""
    found = {**constants, **{name: constants.get(name, first) for name, (first, _, _) in bounds.items()}}
    best = loss(found)
    steps = dict.fromkeys(bounds, 0.2)
    for _ in range(rounds):
        for name, (_, low, high) in bounds.items():
            for sign in (1, -1):
                trial = {**found, name: min(high, max(low, found[name] * math.exp(sign * steps[name])))}
                value = loss(trial)
                if value < best:
                    found, best = trial, value
                    break
            else:
                steps[name] /= 2.5
    return found


def start() -> Constants:  # all constants before any fit
    found: Constants = {"hbm_fraction": 0.89, "gddr_fraction": 0.77, "spread": 0.2, "latency_spread": 0.4}
    for _, bounds in (*GROUPS, *OLDER):
        found.update({name: first for name, (first, _, _) in bounds.items()})
    return found


# ---- float32 operators timed from the host


def row_time(row: Row, device: DeviceSpec) -> KernelTime:
    machine = known(read_machine(device))
    if row.op == "softmax":
        time = softmax_time(row.rows, row.columns, ITEM_BYTES, device)
    elif row.op == "layer_norm":
        time = layer_norm_time(row.rows, row.columns, ITEM_BYTES, device)
    else:
        name = {"gelu": "gelu_instructions", "pow": "pow_instructions", "pow_scalar": "pow_instructions"}.get(row.op)
        time = pointwise_time(row.rows * row.columns, row.nbytes, device, operands=row.tensors,
                              instructions=machine.constants[name] if name else 0.0)
    return known(time)


class Harness(NamedTuple):
    """What a machine's host adds: ``floors``, seconds that an operator takes whatever its kernel; a kernel that is
    longer than ``gap`` makes it longer by the rest.
    """

    floors: Mapping[str, float]
    gap: float

    def seconds(self, row: Row, kernel: float) -> float:  # what the events around the call say
        floor = self.floors.get(row.op, 3e-5)
        return max(floor, floor - self.gap + kernel)


def fit_harness(rows: Sequence[Row]) -> Harness:
    """The host's part on one machine, from the smallest operators and from medium ones."""
    floors = {}
    for op in {row.op for row in rows}:
        small = [row.seconds for row in rows if row.op == op and row.nbytes / memory_rate(row.device) < 2e-6]
        if len(small) > 3:
            floors[op] = statistics.median(small)
    medium = [row for row in rows if row.op in floors and 20e-6 < row.nbytes / memory_rate(row.device) < 200e-6]
    if not medium:
        return Harness(floors, 12e-6)
    gaps = [floors[row.op] + row_time(row, row.device).seconds - row.seconds for row in medium if row.op == "relu"]
    return Harness(floors, statistics.median(gaps) if gaps else 12e-6)


def memory_rate(device: DeviceSpec) -> float:
    return known(device.memory_bandwidth)


def fraction_name(device: DeviceSpec) -> str:
    return "hbm_fraction" if device.compute_capability in HBM_CAPABILITIES else "gddr_fraction"


def reached_fraction(rows: Iterable[Row], margin: float = 0.0) -> float:
    """The median part of the bandwidth that large pointwise operators reach."""
    return statistics.median(row.nbytes / (row.seconds - margin) / memory_rate(row.device) for row in rows
                             if row.op not in ("softmax", "layer_norm", "pow", "pow_scalar")
                             and row.seconds > 5 * LARGE_SECONDS)


def fit_rows(rows: Sequence[Row], constants: Constants) -> Constants:
    """The constants that float32 operators tell: both kinds of memory, powers and rows."""
    found = dict(constants)
    for kind in ("hbm_fraction", "gddr_fraction"):
        names = sorted({row.device.name for row in rows if fraction_name(row.device) == kind})
        if names:
            found[kind] = statistics.mean(reached_fraction(row for row in rows if row.device.name == name)
                                          for name in names)
    for ops, bounds in OLDER:
        chosen = [row for row in rows if row.op in ops and row.seconds > LARGE_SECONDS]
        chosen = random.Random(0).sample(chosen, min(len(chosen), 150))
        fractions = {row.device.name: reached_fraction(r for r in rows if r.device.name == row.device.name)
                     for row in chosen}

        def loss(trial: Constants, chosen: Sequence[Row] = chosen, fractions: Constants = fractions) -> float:
            devices = {row.device.name: with_constants(row.device, {**trial, fraction_name(row.device): fractions[
                row.device.name]}) for row in chosen}
            return sum(abs(math.log((row_time(row, devices[row.device.name]).seconds + 2e-5) / row.seconds))
                       for row in chosen)

        found = descend(loss, bounds, found)
    return found


# ---- operators of whole steps


def operator_seconds(operator: Operator, device: DeviceSpec) -> tuple[float, bool]:
    """Predicted seconds of an operator's calls, and whether most of them is bound by latency."""
    from analyzer.profilers.kernel_time import default_time, find_rule

    seconds = waiting = 0.0
    for signature, count in operator.calls:
        rule = find_rule(signature.op) or default_time
        time = rule(signature, device)
        assert time is not None, signature
        seconds += time.seconds * count
        waiting += time.seconds * count if time.bound == "latency" else 0.0
    return seconds, waiting > seconds / 2


def fit_operators(operators: Sequence[Operator], constants: Constants) -> Constants:
    """The constants that operators of steps tell; the H200's part of its bandwidth first."""
    device = find_device("h200")
    names = {operator.op.removeprefix("aten::") for operator in operators}
    large = [operator for operator in operators if operator.op in STREAMS
             and operator.seconds / sum(n for _, n in operator.calls) > 2e-5]

    def loss(chosen: Sequence[Operator]) -> Callable[[Constants], float]:
        def total(trial: Constants) -> float:
            trial_device = with_constants(device, trial)
            return sum(min(1.0, abs(math.log(operator_seconds(operator, trial_device)[0] / operator.seconds)))
                       * math.sqrt(operator.seconds) for operator in chosen)
        return total

    found = descend(loss(large), {"hbm_fraction": (0.9, 0.6, 1.0)}, constants)
    for ops, bounds in GROUPS:
        if names & set(ops):
            found = descend(loss([operator for operator in operators if operator.op.removeprefix("aten::") in ops]),
                            bounds, found)
    return found


# ---- all fits


@cache
def steps_constants(without: str = "") -> Constants:
    """The constants of an H200 from the operators of all models or without one."""
    return fit_operators([operator for operator in read_operators() if operator.model != without], start())


@cache
def rows_constants(without: str = "", fold: int = -1) -> Constants:
    """The generic constants: from the H200's operators, and from the float32 operators without a device or fold."""
    rows = [row for row in read_rows() if row.device.name != without and fold_of(row) != fold]
    base = {**steps_constants(), "hbm_fraction": 0.89}
    return fit_rows(rows, base)


def fold_of(row: Row) -> int:  # the fold of a shape, the same for all devices and operators
    return random.Random(row.rows * 1_000_003 + row.columns).randrange(FOLDS)


@cache
def architecture_fractions(without: str = "") -> dict[str, Constants]:
    """The part of its bandwidth that an architecture reaches: the mean of its devices, one of them left out."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in names_of_devices():
        device = find_device(name)
        if name != without and device.architecture:
            kinds = found.setdefault(device.architecture, {})
            kinds.setdefault(fraction_name(device), []).append(
                reached_fraction(row for row in read_rows() if row.device.name == name))
    return {name: {kind: statistics.mean(values) for kind, values in kinds.items()} for name, kinds in found.items()}


def constants_without_device(name: str) -> Constants:
    """What the product would take for a device of which there are no rows."""
    siblings = architecture_fractions(name).get(find_device(name).architecture or "", {})
    return {**rows_constants(without=name), **siblings}


@cache
def device_constants(name: str, fold: int = -1) -> Constants:
    """The constants of a device of which there are float32 operators."""
    rows = [row for row in read_rows() if row.device.name == name and fold_of(row) != fold]
    return {**rows_constants(fold=fold), fraction_name(rows[0].device): reached_fraction(rows)}


@cache
def harness_of(name: str, fold: int) -> Harness:
    """The host's part on the machine of a device, the rows of a fold left out."""
    device = with_constants(find_device(name), device_constants(name, fold))
    rows = [row._replace(device=device) for row in read_rows() if row.device.name == name and fold_of(row) != fold]
    return fit_harness(rows)


def names_of_devices() -> list[str]:
    return sorted({row.device.name for row in read_rows()})
