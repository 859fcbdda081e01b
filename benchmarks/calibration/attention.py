"""Constants of the attention kernels, fitted: ``python -m benchmarks.calibration.attention``.

Data: ``benchmarks/truth/kernels/attention.csv.gz`` (from github.com/ai-dynamo/aiconfigurator, Apache-2.0) for the
kernels of serving libraries on five devices, and the attention operators of ``benchmarks/truth/latency.json``
(measured for this project on one H200) for PyTorch's own.

Method: for each library and phase, the constants of ``analyzer.hardware.kernel_time.attention`` that make the mean
of ``|log(predicted / measured)|`` least, by coordinate descent over their logarithms within bounds that physics gives,
on at most `ROWS` rows. Three levels: a device's own rows; a generation's, from the devices whose tensor cores take the
same instructions (half-way to all devices' where they are of several architectures); all. The spread of a device holds
nine in ten of the residuals of folds by shape, that of a generation or of any device nine in ten of the residuals of
devices left out.

PyTorch's cuDNN and memory-efficient kernels are known from one device and a handful of shapes: few constants are
fitted there, the rest are FlashAttention 3's. Its FlashAttention 2 is that of serving libraries on Ampere and Ada, less
the cache.
"""
from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from analyzer.hardware import find_device
from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.kernel_time.attention import (
    BACKWARD_PRODUCTS,
    KERNEL_CLOCKS,
    MMA,
    TCGEN05,
    WGMMA,
    AttentionSize,
    find_phase,
    predict,
)
from analyzer.hardware.listing import roofline_seconds
from benchmarks.page import known
from benchmarks.truth.table import read_rows, read_truth, spread_of, write_constants

_MEASURED = re.compile(r"aten::_(cudnn|efficient)_attention_(forward|backward)")


class Sample(NamedTuple):
    """One measured time. ``shape`` is what rows of all libraries at one point share; ``model`` its program, if any, and
    ``source`` the library and its kernel.
    """

    device: DeviceSpec
    kernel: str
    phase: str
    size: AttentionSize
    seconds: float
    shape: str
    model: str = ""
    source: str = ""


@cache
def read_serving() -> list[Sample]:
    """The rows of ``kernels/attention.csv.gz`` but Triton's, a path that libraries take where they have no better."""
    samples = []
    for row in read_rows("attention"):
        if row["kernel"] == "triton":
            continue
        kernel = row["framework"].partition("-")[0]
        number = {name: int(row[name]) for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim",
                                                    "causal", "window")}
        size = AttentionSize(number["batch"], number["heads"], number["kv_heads"], number["q_len"], number["kv_len"],
                             number["head_dim"], number["head_dim"], 2, bool(number["causal"]), number["window"])
        device = find_device(row["device"])
        samples.append(Sample(device, kernel, find_phase(kernel, size, device), size, float(row["us"]) * 1e-6,
                              repr(tuple(size)), source=f"{row['framework']} {row['kernel']}"))
    return samples


@cache
def read_operators() -> list[Sample]:
    """PyTorch's attention operators in the steps of ``latency.json``, each point of a model once.

    The log has shapes but neither causality nor dropout: GPT-2 is causal, and BERT, GPT-2 and T5 drop a tenth of the
    weights when they train.
    """
    found: dict[tuple[object, ...], list[float]] = {}
    for case in read_truth("latency")["cases"]:
        name = case["id"]
        model = name.partition("-")[0]
        for operator in case["ops"]:
            match = _MEASURED.fullmatch(operator["op"])
            if match:
                kernel, direction = match.groups()
                shapes = json.loads(operator["shapes"])
                backward = direction == "backward"
                query = shapes[1 if backward else 0]
                batch, heads, length, width = (query if kernel == "cudnn" else [query[0], query[2], query[1], query[3]])
                place = {("cudnn", True): 8, ("efficient", True): 4}.get((kernel, backward), 3)
                size = AttentionSize(batch, heads, heads, length, length, width, width, 2 if kernel == "cudnn" else 4,
                                     model == "gpt2", 0, "train" in name and model in ("bert_base", "gpt2", "t5_base"),
                                     bool(shapes[place]))
                found.setdefault((model, kernel, direction, size), []).append(operator["us"] / operator["n"] * 1e-6)
    device = find_device("h200")
    return [Sample(device, kernel, direction, size, sorted(times)[len(times) // 2], repr(tuple(size)), model)  # type: ignore[arg-type]
            for (model, kernel, direction, size), times in found.items()]

ROWS = 240
FOLDS = 3
JUDGED = 500
DEVICES = ("a100_80gb", "b200", "h100_sxm", "h200", "l40s")
PHASES = ("prefill", "encoder", "decode")
#: Devices whose tensor cores take the same instructions.
GENERATIONS = {MMA: ("a100_80gb", "l40s"), WGMMA: ("h100_sxm", "h200"), TCGEN05: ("b200",)}

#: Where FlashAttention 2 was measured without pages.
FLASH_SOURCES = {"a100_80gb": ("sglang", "prefill"), "l40s": ("vllm", "encoder")}
FLASH_BACKWARD_RATE = 63 / 73

Fitted = dict[str, float]
#: First guess, lowest and highest value of each constant; equal bounds: not fitted.
Start = Mapping[str, tuple[float, float, float]]
_COMMON: Start = {"memory": (0.7, 0.2, 1.1), "floor": (13e3, 3e3, 35e3), "p": (1.5, 1.0, 3.0)}
_TILES: Start = {"mma": (0.7, 0.2, 1.5), "exp": (0.9, 0.3, 3.0), "tile": (3e3, 2e2, 1e4), "tail": (0.4, 0.05, 1.5),
                 "wide": (1.0, 0.5, 1.2), "write": (2.0, 0.2, 8.0)}
_KEYS: Start = {"tile": (3e3, 2e2, 1e4), "block": (5e2, 2e1, 4e3), "alone": (1e3, 1e2, 6e3),
                "combine": (3e3, 2e2, 2e4), "swap": (5e3, 5e2, 2e4), "write": (2.0, 2.0, 2.0)}
START: Mapping[str, Start] = {"prefill": {**_TILES, **_COMMON}, "encoder": {**_TILES, **_COMMON},
                              "decode": {**_KEYS, **_COMMON}}


def error_of(sample: Sample, constants: Mapping[str, float]) -> float:  # the logarithm of predicted over measured
    time = predict(sample.size, sample.kernel, sample.phase, sample.device, constants)
    return math.log(known(time).seconds / sample.seconds)


def moves_of(steps: Mapping[str, float], with_pairs: bool) -> Iterator[dict[str, float]]:
    """Directions to try, in logarithms: one constant up or down, or two at once."""
    for name, step in steps.items():
        yield {name: step}
        yield {name: -step}
    if with_pairs:
        for (one, step), (other, another) in itertools.combinations(steps.items(), 2):
            for sign, turn in itertools.product((1, -1), repeat=2):
                yield {one: sign * step, other: turn * another}


def fit(samples: Sequence[Sample], start: Start, guess: Mapping[str, float] | None = None) -> Fitted:
    """The constants within their bounds that make the mean absolute error least; errors above e count as e.

    Of a handful of samples the squares count, and constants that trade with each other move in pairs.
    """
    few = len(samples) < 20
    samples = samples if len(samples) <= ROWS else random.Random(0).sample(samples, ROWS)
    found = {name: (guess or {}).get(name, first) for name, (first, _, _) in start.items()}

    def loss(constants: Mapping[str, float]) -> float:
        return sum(min(1.0, abs(error_of(sample, constants))) ** (2 if few else 1) for sample in samples)

    best = loss(found)
    steps = {name: 0.3 for name, (_, low, high) in start.items() if low < high}
    for _ in range(60 if few else 14):
        improved = set()
        for move in moves_of(steps, few):
            trial = {**found, **{name: min(start[name][2], max(start[name][1], found[name] * math.exp(step)))
                                 for name, step in move.items()}}
            value = loss(trial)
            if value < best:
                found, best = trial, value
                improved |= set(move)
        steps = {name: step * 1.3 if name in improved else step / 2.5 for name, step in steps.items()}
        if max(steps.values(), default=0.0) < 0.01:
            break
    return found


def fold_of(sample: Sample) -> int:  # the fold of a shape: the same for all devices and libraries
    return random.Random(sample.shape).randrange(FOLDS)


@cache
def groups() -> dict[tuple[str, str], list[Sample]]:
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in read_serving():
        found.setdefault((sample.kernel, sample.phase), []).append(sample)
    return found


def of_devices(samples: Sequence[Sample], names: Sequence[str]) -> list[Sample]:
    """The samples of some devices, as many of each."""
    parts = [[sample for sample in samples if sample.device.name == name] for name in names]
    return [sample for part in parts if part
            for sample in random.Random(1).sample(part, min(len(part), 2 * ROWS // len(names)))]


def blend(one: Fitted, other: Fitted) -> Fitted:  # constants half-way between two fits, in their logarithms
    return {name: math.sqrt(value * other[name]) for name, value in one.items()}


def fit_without(samples: Sequence[Sample], device: str, start: Start) -> Fitted:
    """Constants for a device that is left out: those of its architecture if another has it, else half-way between its
    generation's and all others', as one device of other make says little of a generation.
    """
    siblings = next(names for names in GENERATIONS.values() if device in names)
    others = [name for name in DEVICES if name != device]
    rows = of_devices(samples, [name for name in siblings if name != device])
    if rows and siblings == GENERATIONS[WGMMA]:  # both are Hopper
        return fit(rows, start)
    whole = fit(of_devices(samples, others), start)
    return blend(fit(rows, start), whole) if rows else whole


class Calibration:  # all fits of one library's phase, cross-validated ones beside those that the product takes
    def __init__(self, samples: Sequence[Sample], phase: str) -> None:
        self.samples, start = samples, START[phase]
        self.generic = fit(of_devices(samples, DEVICES), start)
        self.devices, self.generations = {}, {}
        self.fold_errors: dict[str, list[tuple[Sample, float]]] = {}
        self.left_out_errors: dict[str, list[tuple[Sample, float]]] = {}
        for generation, names in GENERATIONS.items():
            rows = of_devices(samples, names)
            if rows:
                own = fit(rows, start, self.generic)
                self.generations[generation] = blend(own, self.generic) if generation == MMA else own
        for name in DEVICES:
            rows = [sample for sample in samples if sample.device.name == name]
            if len(rows) < 100:
                continue
            self.devices[name] = fit(rows, start, self.generic)
            without = fit_without(samples, name, start)
            judged = random.Random(2).sample(rows, min(len(rows), JUDGED // 2))
            self.left_out_errors[name] = [(sample, error_of(sample, without)) for sample in judged]
            self.fold_errors[name] = []
            for fold in range(FOLDS):
                trained = fit([sample for sample in rows if fold_of(sample) != fold], start)
                self.fold_errors[name] += [(sample, error_of(sample, trained)) for sample in judged
                                           if fold_of(sample) == fold]
        left_out = [error for errors in self.left_out_errors.values() for _, error in errors]
        self.generic["spread"] = spread_of(left_out)
        for generation, constants in self.generations.items():
            constants["spread"] = spread_of([error for name in GENERATIONS[generation]
                                             for _, error in self.left_out_errors.get(name, [])] or left_out)
        for name, constants in self.devices.items():
            constants["spread"] = spread_of(error for _, error in self.fold_errors[name])


@cache
def calibrate() -> dict[tuple[str, str], Calibration]:
    return {key: Calibration(samples, key[1]) for key, samples in groups().items()}


#: PyTorch's kernels: fitted where the bounds differ, FlashAttention 3's on Hopper where not.
_OPERATOR: Start = {"memory": (0.7, 0.7, 0.7), "floor": (KERNEL_CLOCKS,) * 3, "p": (1.5, 1.5, 1.5),
                    "dropout": (0.2, 0.02, 5.0), "mask": (0.1, 0.01, 5.0), "tile": (3e3, 4e2, 2e4),
                    "tail": (0.6, 0.05, 1.5)}
OPERATORS: Mapping[tuple[str, str], Start] = {
    ("cudnn", "forward"): {**_OPERATOR, "mma": (1.1, 1.1, 1.1), "exp": (1.0, 0.8, 1.5)},
    ("cudnn", "backward"): {**_OPERATOR, "mma": (0.7, 0.7, 0.7), "exp": (2.0, 0.8, 8.0)},
    ("efficient", "forward"): {**_OPERATOR, "mma": (0.2, 0.05, 1.0), "exp": (1.0, 1.0, 1.0)},
    ("efficient", "backward"): {**_OPERATOR, "mma": (0.2, 0.05, 1.0), "exp": (2.5, 2.5, 2.5)}}


@cache
def fit_operators(without: str = "") -> dict[tuple[str, str], Fitted]:
    """The constants of PyTorch's kernels, of all models or without one."""
    return {key: fit([sample for sample in read_operators() if (sample.kernel, sample.phase) == key
                      and sample.model != without], start) for key, start in OPERATORS.items()}


def flatten(parts: Mapping[tuple[str, str], Fitted], generation: str) -> dict[str, float]:
    """Constants under the names of the file, at four digits."""
    return {f"{kernel}.{generation}.{phase}.{name}": float(f"{value:.4g}")
            for (kernel, phase), constants in sorted(parts.items()) for name, value in sorted(constants.items())}


def operators_measured() -> dict[tuple[str, str], Fitted]:
    """PyTorch's kernels on the H200: the spread is what their errors are with their model left out."""
    errors: dict[tuple[str, str], list[float]] = {}
    for sample in read_operators():
        key = sample.kernel, sample.phase
        errors.setdefault(key, []).append(error_of(sample, fit_operators(sample.model)[key]))
    return {key: {**constants, "spread": spread_of(errors[key])} for key, constants in fit_operators().items()}


def operators_everywhere() -> dict[tuple[str, str], Fitted]:
    """The same on devices without data: no nearer than serving libraries' kernels on a device that was left out."""
    least = calibrate()["vllm", "encoder"].generic["spread"]
    return {key: {**constants, "spread": max(least, constants["spread"])}
            for key, constants in operators_measured().items()}


def constants_without(model: str) -> dict[str, float]:
    """PyTorch's kernels fitted without a model of ``latency.json``, as ``DeviceSpec.calibration["attention"]`` takes
    them: what a judgement of that model's steps may know.
    """
    return flatten({key: {**constants, "spread": operators_measured()[key]["spread"]}
                    for key, constants in fit_operators(model).items()}, "any")


def flash_of(name: str, fitted: Mapping[tuple[str, str], Fitted]) -> dict[tuple[str, str], Fitted]:
    """PyTorch's FlashAttention 2 on a device, from libraries that run it on keys that lie side by side.

    One kernel's floor, no cache to write; dropout as in cuDNN's. Backward: two and a half times the products, at 63/73
    of the forward's rate (Dao, FlashAttention-2, 2023, section 4.1: up to 73 % and 63 % of an A100's peak).
    """
    operators = fit_operators()
    tiles = {**fitted["vllm", "prefill"], **fitted[FLASH_SOURCES[name]],
             "tail": fitted["vllm", "prefill"]["tail"], "wide": min(1.0, fitted["vllm", "prefill"]["wide"])}
    found: dict[tuple[str, str], Fitted] = {}
    for phase, constants in (("forward", tiles), ("decode", fitted["vllm", "decode"])):
        found["flash", phase] = {**{constant: value for constant, value in constants.items() if constant != "write"},
                                 "floor": KERNEL_CLOCKS, "dropout": operators["cudnn", "forward"]["dropout"]}
    found["flash", "backward"] = {
        **found["flash", "forward"], "mma": tiles["mma"] * FLASH_BACKWARD_RATE,
        "exp": tiles["exp"] * BACKWARD_PRODUCTS / FLASH_BACKWARD_RATE, "tile": tiles["tile"] * BACKWARD_PRODUCTS,
        "dropout": operators["cudnn", "backward"]["dropout"], "spread": max(0.3, tiles["spread"])}
    return found


def write_product() -> None:
    fits = calibrate()
    generic = flatten({**{key: found.generic for key, found in fits.items()}, **operators_everywhere()}, "any")
    devices = {}
    flash: list[dict[tuple[str, str], Fitted]] = []
    for generation, names in GENERATIONS.items():
        generic |= flatten({key: found.generations[generation] for key, found in fits.items()
                            if generation in found.generations}, generation)
        for name in names:
            parts = {key: found.devices[name] for key, found in fits.items() if name in found.devices}
            if name in FLASH_SOURCES:
                flash.append(flash_of(name, parts))
                parts |= flash[-1]
            devices[name] = flatten(parts, generation)
    devices["h200"] |= flatten(operators_measured(), "any")
    width = fits["vllm", "prefill"].generic["spread"]
    generic |= flatten({key: {**blend(flash[0][key], flash[1][key]), "spread": width} for key in flash[0]}, MMA)
    write_constants("attention", {
        "data": "benchmarks/truth/kernels/attention.csv.gz (github.com/ai-dynamo/aiconfigurator) and the attention "
                "operators of benchmarks/truth/latency.json (measured on an H200 for this project)",
        "licence": "Apache-2.0; the project's own", "date": "2026-11",
        "note": "clocks (tile, block, alone, combine, swap, floor), clocks an element (dropout, mask) or ratios; "
                "spread by folds of shapes for devices, by devices left out for all else"}, generic, {}, devices)


def roofline(sample: Sample) -> float:
    """Seconds of the data sheet's roofline: products under the mask, and queries, keys, values and output once."""
    size = sample.size
    pairs: float = size.q_len * size.kv_len
    if size.causal:
        pairs -= size.q_len * (size.q_len - 1) / 2
    if size.window:
        pairs = min(pairs, size.q_len * (size.window + 1))
    keys = min(size.kv_len, size.window + size.q_len) if size.window else size.kv_len
    nbytes = 2 * size.batch * size.head_dim * size.item_bytes * (size.q_len * size.heads + keys * size.kv_heads)
    seconds = roofline_seconds(round(4 * size.batch * size.heads * size.head_dim * pairs), nbytes,
                               "bfloat16" if size.item_bytes == 2 else "float32", sample.device, True)
    return known(seconds)


@cache
def judged_by_device() -> dict[tuple[str, str], list[tuple[Sample, float, float]]]:
    """Up to `JUDGED` samples of each scheme and device, with their error and the spread that was stated."""
    rows: dict[tuple[str, str], list[tuple[Sample, float, float]]] = {}
    for sample, scheme, error, width in judged():
        rows.setdefault((scheme, sample.device.name), []).append((sample, error, width))
    return {key: random.Random(4).sample(found, min(JUDGED, len(found))) for key, found in sorted(rows.items())}


def judged() -> Iterator[tuple[Sample, str, float, float]]:
    """Samples with their scheme, error and the spread that was stated without them."""
    for _, found in sorted(calibrate().items()):
        for scheme, table in (("fold", found.fold_errors), ("device", found.left_out_errors)):
            for name, errors in table.items():
                if scheme == "fold":
                    width = found.devices[name]["spread"]
                else:  # what the other devices' residuals say
                    others = [error for other, rows in table.items() if other != name for _, error in rows]
                    width = spread_of(others) if others else 0.5
                for sample, error in errors:
                    yield sample, scheme, error, width


def cross_validate() -> list[tuple[str, str, str, float, float, float, float]]:
    """Rows of (family, device, scheme, measured seconds, predicted seconds, spread, roofline seconds)."""
    return [("attention", sample.device.name, scheme, sample.seconds, sample.seconds * math.exp(error), spread,
             roofline(sample)) for (scheme, _), rows in judged_by_device().items() for sample, error, spread in rows]


if __name__ == "__main__":
    write_product()
