"""How the constants of the kernels that memory bounds are fitted: which operators tell which, by what descent."""
from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from analyzer.hardware import DeviceSpec, find_device
from analyzer.hardware.kernel_time.estimate import KernelTime
from analyzer.hardware.kernel_time.norm import layer_norm_time
from analyzer.hardware.kernel_time.pointwise import FAMILY, HBM_CAPABILITIES, pointwise_time, read_machine
from analyzer.hardware.kernel_time.reduction import softmax_time

from .memory_bound_data import ITEM_BYTES, Operator, Row, read_operators, read_rows

FOLDS = 5
LARGE_SECONDS = 200e-6     # from here on an operator's time is its kernel's

Constants = dict[str, float]
#: What stands at the start, by the operators that fit it: value, least and most.
Bounds = Mapping[str, tuple[float, float, float]]
GROUPS: tuple[tuple[tuple[str, ...], Bounds], ...] = (
    (("add", "add_", "mul", "copy_", "div", "threshold_backward", "clamp_min_", "pow"), {
        "floor_seconds": (1.1e-6, 0.8e-6, 2e-6), "address_instructions": (50, 10, 150),
        "dimension_instructions": (4.5, 1, 20), "operand_instructions": (6, 1, 20),
        "convert_instructions": (95, 20, 300), "cast_latencies": (2.5, 0.5, 8),
        "address_latencies": (2.5, 0.5, 8)}),
    (("gelu",), {"gelu_instructions": (46, 10, 200)}),
    (("gelu_backward",), {"gelu_backward_instructions": (66, 10, 300)}),
    (("native_dropout",), {"random_fraction": (0.72, 0.3, 1), "random_latencies": (4, 1, 15)}),
    (("native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward"), {
        "latency_seconds": (3.7e-7, 2e-7, 8e-7), "block_seconds": (7.5e-8, 2e-8, 3e-7),
        "gradient_latencies": (1.7, 1, 4), "normalize_fraction": (0.65, 0.3, 1)}),
    (("sum", "mean"), {
        "reduction_fraction": (0.8, 0.4, 1), "reduction_instructions": (20, 5, 80), "block_latencies": (3, 0.5, 10),
        "sharing_seconds": (4.7e-6, 1e-6, 1e-5), "round_seconds": (3.1e-7, 1e-7, 1e-6)}),
    (("native_layer_norm",), {"row_instructions": (230, 50, 1000), "row_latencies": (6, 1, 20)}),
    (("native_layer_norm_backward",), {"column_step_latencies": (2.85, 1, 10)}),
    (("_log_softmax", "_log_softmax_backward_data"), {
        "softmax_instructions": (60, 10, 200), "inner_softmax_instructions": (178, 30, 500)}),
    (("_foreach_add_", "_foreach_mul_", "_foreach_lerp_", "_foreach_addcdiv_", "_foreach_sqrt", "_foreach_div_",
      "_fused_adamw_"), {"list_instructions": (22, 2, 100), "list_access_instructions": (12, 2, 40)}),
    (("embedding_dense_backward",), {
        "library_seconds": (5.5e-6, 1e-6, 2e-5), "index_step_latencies": (3.5, 1, 10)}),
    (("nll_loss_forward", "nll_loss_backward"), {"lone_loads": (22, 5, 100)}),
    (("nll_loss2d_forward", "nll_loss2d_backward"), {"position_latencies": (2.8, 1, 10)}),
    (("upsample_bilinear2d_backward",), {"atomic_instructions": (7, 1, 50)}),
    (("upsample_bilinear2d",), {"plane_latencies": (0.85, 0.1, 5)}),
    (("max_pool2d_with_indices", "max_pool2d_with_indices_backward"), {"tap_instructions": (60, 10, 300)}),
    (("cat",), {"cat_instructions": (214, 20, 1000)}))
#: Fitted to the float32 operators of older devices, and PyTorch 2.1: the powers, and the rows of layer norms.
OLDER: tuple[tuple[tuple[str, ...], Bounds], ...] = ((("pow_scalar",), {"pow_instructions": (105, 20, 500)}),
                                                     (("layer_norm",), {"row_instructions": (330, 100, 1000)}))
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
    machine = read_machine(device)
    assert machine is not None
    if row.op == "softmax":
        time = softmax_time(row.rows, row.columns, ITEM_BYTES, device)
    elif row.op == "layer_norm":
        time = layer_norm_time(row.rows, row.columns, ITEM_BYTES, device)
    else:
        name = {"gelu": "gelu_instructions", "pow": "pow_instructions", "pow_scalar": "pow_instructions"}.get(row.op)
        time = pointwise_time(row.rows * row.columns, row.nbytes, device, operands=row.tensors,
                              instructions=machine.constants[name] if name else 0.0)
    assert time is not None
    return time


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
    assert device.memory_bandwidth is not None
    return device.memory_bandwidth


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
