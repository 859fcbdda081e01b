"""Measured attention: rows of serving libraries, and PyTorch's own operators of the steps on an H200."""
from __future__ import annotations

import json
import re
from functools import cache
from typing import NamedTuple

from analyzer.hardware import find_device
from analyzer.hardware.device_spec import DeviceSpec
from analyzer.hardware.kernel_time.attention import AttentionSize, find_phase
from benchmarks.truth_table import read_rows, read_truth

_OPERATOR = re.compile(r"aten::_(cudnn|efficient)_attention_(forward|backward)")


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
            match = _OPERATOR.fullmatch(operator["op"])
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
