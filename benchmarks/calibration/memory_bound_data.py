"""Measured kernels that memory bounds: float32 operators on six devices, and the operators of whole steps on one H200.
"""
from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from analyzer.hardware import DeviceSpec, find_device
from benchmarks.page import keep
from benchmarks.truth import table as truth_table

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ITEM_BYTES = 4
BINARY = ("add", "mul", "div", "pow")


class Row(NamedTuple):
    """One float32 operator on a matrix: seconds from an event before the call to one after it, on an idle device."""

    device: DeviceSpec
    op: str
    rows: int
    columns: int
    seconds: float

    @property
    def tensors(self) -> int:
        return 3 if self.op in BINARY else 2

    @property
    def nbytes(self) -> int:
        return self.tensors * ITEM_BYTES * self.rows * self.columns


@cache
def read_rows() -> tuple[Row, ...]:  # the operators of ``fp32_ops.csv.gz`` but for products and convolutions
    lines = [line for line in truth_table.read_rows("fp32_ops") if line["rows"]]
    devices = {name: find_device(name) for name in {line["device"] for line in lines}}
    return tuple(Row(devices[line["device"]], line["op"], int(line["rows"]), int(line["cols"]), float(line["us"]) / 1e6)
                 for line in lines)


class Sum(NamedTuple):
    """float16 additions of two activations as one kernel, without launches, at a resolution of a microsecond."""

    device: DeviceSpec
    nbytes: int
    seconds: float


@cache
def read_sums() -> tuple[Sum, ...]:
    lines = [line for line in truth_table.read_rows("llm_layers") if line["op"] == "add" and line["tp"] == "1"]
    devices = {"A100 (Vidur)": find_device("a100_80gb"), "H100 (Vidur)": find_device("h100_sxm")}
    return tuple(Sum(devices[line["device"]], 6 * int(line["tokens"]) * int(line["hidden"]), float(line["us"]) / 1e6)
                 for line in lines)


class Operator(NamedTuple):
    """An operator of one step, all calls with the same shapes: signatures with how often each was called, and the
    kernels' seconds together.
    """

    model: str
    op: str
    calls: tuple[tuple[Any, int], ...]
    seconds: float


#: Operators of the log by the name that the profiler saw.
SEEN_AS = {"aten::relu_": "aten::clamp_min_", "aten::relu": "aten::clamp_min", "aten::_to_copy": "aten::copy_",
           "aten::clone": "aten::copy_"}
#: Operators that call others, which the profiler saw on their own: what clears the result, a product before.
CLEARS = frozenset({"aten::embedding_dense_backward", "aten::nll_loss_backward", "aten::nll_loss2d_backward",
                    "aten::max_pool2d_with_indices_backward", "aten::upsample_bilinear2d_backward"})
MULTIPLIES = frozenset({"aten::_softmax_backward_data"})
#: Operators that copy what does not lie side by side.
COPIES = frozenset({"aten::native_layer_norm", "aten::native_layer_norm_backward"})
Shapes = tuple[tuple[int, ...], ...]


def shapes_of(signature: Any) -> Shapes:
    """Sizes of the tensors that a call is given one by one, those of numbers left out."""
    from analyzer.meta.spec import TensorSpec
    name = signature.op._schema.name
    if "_foreach" in name or "_fused" in name or name == "aten::cat":
        return ()
    if SEEN_AS.get(name, name) == "aten::copy_":
        return (tuple(signature.outputs[0]),) * 2
    return tuple(tuple(a) for a in signature.args if isinstance(a, TensorSpec) and a)


def seen_shapes(op: str, text: str) -> Shapes:  # the same of what the profiler wrote
    if "_foreach" in op or "_fused" in op or op == "aten::cat":
        return ()
    return tuple(tuple(shape) for shape in json.loads(text) if shape and not isinstance(shape[0], list))


def step_signatures(case: Any) -> Counter[Any]:
    """Signatures of the last step of a case on an H200 and how often each is called."""
    from analyzer import profile
    from benchmarks.accuracy.cases import build

    counts, logs = Counter[Any](), list[Any]()
    model, args, kwargs = build(case)
    profile(model, args, kwargs, mode=case.mode, optimizer=case.optimizer, autocast=case.autocast, device="h200",
            profilers={"count": keep(logs)})
    for step, call, _, number in logs[-1].tallies():
        if step == logs[-1].steps - 1:
            counts[call.signature] += number
    return counts


def case_operators(case: Any, measured: list[dict[str, Any]]) -> Iterator[Operator]:
    """The operators of a case whose calls the log has as often as the profiler saw them."""
    from analyzer.profilers.operator.pointwise import is_dense

    found: dict[tuple[str, Shapes], list[tuple[Any, int]]] = defaultdict(list)
    for signature, number in step_signatures(case).items():
        name = getattr(getattr(signature.op, "_schema", None), "name", "")
        is_counter = bool(signature.inputs) and signature.inputs[0].device == "cpu"
        if name and not is_counter:
            found[SEEN_AS.get(name, name), shapes_of(signature)].append((signature, number))
    seconds: dict[tuple[str, Shapes], float] = defaultdict(float)
    calls: Counter[tuple[str, Shapes]] = Counter()
    for row in measured:
        key = row["op"], seen_shapes(row["op"], row["shapes"])
        seconds[key] += row["us"] / 1e6
        calls[key] += row["n"]
    for (name, shapes), number in calls.items():
        logged = found.get((name, shapes))
        if not logged or sum(count for _, count in logged) != number:
            continue
        logged = [(signature, count) for signature, count in logged  # a power of one copies, and was seen on its own
                  if not (signature.op._schema.name == "aten::pow" and signature.args[1] == 1)]
        inputs = [spec for signature, _ in logged for spec in signature.inputs]
        if not logged or name in COPIES and not all(map(is_dense, inputs)):
            continue  # what it copies before was seen on its own
        total = seconds[name, shapes]
        for other, applies in (("aten::fill_", name in CLEARS), ("aten::mul", name in MULTIPLIES)):
            if applies:
                size = tuple(logged[0][0].outputs[0])
                key = other, (size,) if other == "aten::fill_" else (size, size)
                if not calls[key]:
                    break
                total += seconds[key] / calls[key] * number
        else:
            yield Operator(case.model, name, tuple(logged), total)


@cache
def read_operators() -> tuple[Operator, ...]:
    """The operators of ``latency.json`` that memory bounds, and what they were called with, from the profile of each
    case.
    """
    from benchmarks.accuracy.cases import measured_cases

    cases = {case.id: case for case in measured_cases()}
    measured = truth_table.read_truth("latency")["cases"]
    others = ("mm", "bmm", "addmm", "baddbmm")
    return tuple(operator for row in measured for operator in case_operators(
        cases[row["id"]], [op for op in row["ops"] if "conv" not in op["op"] and "attention" not in op["op"]
                           and op["op"].removeprefix("aten::") not in others]))
