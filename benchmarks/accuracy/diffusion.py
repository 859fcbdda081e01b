"""How near predictions of image and video pipelines come to measurements: ``python -m benchmarks.accuracy.diffusion``,
ten minutes, with diffusers, which writes the block of docs/accuracy.md.

Data: ``benchmarks/truth/diffusion``, see its README.md. Kernels are timed by the models of kernels, which saw none of
these. The constants of pipelines and of watts (``benchmarks/calibration/diffusion.py``) are fitted with the model that
is judged left out, and once more with its device left out.
"""
from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from analyzer.hardware import find_device
from analyzer.tools.diffusion.components import Pipeline
from analyzer.tools.diffusion.diffusion_profile import DiffusionProfile
from analyzer.tools.diffusion.pipeline import read_pipeline
from analyzer.tools.diffusion.run import Runs, compose, run_components
from analyzer.tools.diffusion.sharing import Degrees
from benchmarks.accuracy.serving import KINDS, POWER_LEFT_OUT, describe
from benchmarks.page import describe_run, known, markdown, publish
from benchmarks.truth.table import read_left_out, read_rows


class Case(NamedTuple):
    """A measured batch. ``watts``: of all devices; ``joules``: of one image or video."""

    model: str
    device: str
    batch: int
    sizes: tuple[tuple[str, Any], ...]
    degrees: Degrees
    seconds: float
    watts: float
    joules: float


def read_cases() -> list[Case]:
    found = []
    for row in read_rows("generated", "diffusion"):
        kind = "video" if row["video_height"] else "image"
        sizes = {"height": row[f"{kind}_height"], "width": row[f"{kind}_width"], "frames": row["num_frames"],
                 "steps": row["inference_steps"]}
        degrees = json.loads(row["parallelization"])
        found.append(Case(row["model"], find_device(row["gpu_model"]).name, int(row["batch_size"]),
                          tuple((name, int(value)) for name, value in sizes.items() if value),
                          Degrees(degrees["ring_degree"], degrees["ulysses_degree"]), float(row["batch_latency_s"]),
                          float(row["avg_power_watts"]), float(row[f"energy_per_{kind}_joules"])))
    return found


class Measured(NamedTuple):
    """A case, its pipeline, and a call of each of its components."""

    case: Case
    pipeline: Pipeline
    runs: Runs


@functools.cache
def measure_all() -> tuple[Measured, ...]:
    """Components are profiled once for each model, device and batch."""
    pipelines: dict[object, Pipeline] = {}
    runs: dict[object, Runs] = {}
    found = []
    for case in read_cases():
        key, spec = (case.model, case.batch, case.sizes), find_device(case.device)
        if key not in pipelines:
            pipelines[key] = read_pipeline(case.model, case.batch, **dict(case.sizes))
        if (key, case.device) not in runs:
            runs[key, case.device] = run_components(pipelines[key], spec, "flash", True)
        found.append(Measured(case, pipelines[key], runs[key, case.device]))
    return tuple(found)


LEFT_OUT = "diffusion/left_out"  # of times; written by the calibration


class Judged(NamedTuple):
    """How far off a prediction is: predicted over measured less 1."""

    case: Case
    seconds: float
    watts: float
    joules: float


def judge(kind: str, row: Measured) -> Judged:
    case = row.case
    times, power = (read_left_out(name, kind, case.model, case.device) for name in (LEFT_OUT, POWER_LEFT_OUT))
    found: DiffusionProfile = compose(row.pipeline, row.runs, find_device(case.device), case.degrees,
                                      constants={**times, **power})
    return Judged(case, *(known(getattr(found, name)) / getattr(case, name) - 1 for name in Judged._fields[1:]))


def _list_parts(case: Case) -> tuple[str, ...]:
    """The parts of the data that a case is of."""
    return "", f", {'one device' if case.degrees.ranks == 1 else 'several devices'}", f", {case.model} on {case.device}"


def tell_errors(rows: Sequence[Measured]) -> str:
    """A row for each quantity and for the parts of the data, a column for each of ``KINDS``."""
    judged = [[judge(kind, row) for row in rows] for kind in KINDS]
    names = dict.fromkeys((case.model, case.device) for case in (row.case for row in rows))
    lines: list[list[str]] = []
    of_models: list[list[str]] = []
    for what in ("seconds", "watts", "joules"):
        for name in ("", ", one device", ", several devices", *(f", {model} on {device}" for model, device in names)):
            errors = [[getattr(one, what) for one in column if name in _list_parts(one.case)] for column in judged]
            (of_models if " on " in name else lines).append(
                [f"{what}{name} ({len(errors[0])}): median error, nine in ten", *map(describe, errors)])
    heads = ["", *(f"{kind} left out" for kind in KINDS)]
    return f"{markdown(heads, lines)}\n\n{markdown(heads, of_models, cases='accuracy/pipelines')}"


def main() -> None:
    start = time.perf_counter()
    text = tell_errors(measure_all())
    publish("accuracy.md", {"accuracy.diffusion": f"{describe_run(time.perf_counter() - start)}.\n\n{text}"}, True)


if __name__ == "__main__":
    main()
