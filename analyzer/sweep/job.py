"""One configuration, profiled where a worker is: what travels there and the row that comes back."""
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from analyzer.api.argument import build_model
from analyzer.api.profile import ProfileOptions, profile
from analyzer.recipe.recipe import Recipe
from analyzer.report.speed import RATES, read_rate
from analyzer.results.build import package_version
from analyzer.results.profile import Profile
from analyzer.zoo.command_option import make_inputs
from analyzer.zoo.input_spec import DTYPES, InputSpec
from analyzer.zoo.target import load_target

from .configuration import Configuration
from .result import COLUMNS, IDENTITY, Row, identify

TargetLike = str | Callable[[], nn.Module]


@dataclass(frozen=True)
class Job:
    """A configuration of a target, and what the model is called with."""

    target: TargetLike
    name: str
    configuration: Configuration
    inputs: tuple[InputSpec, ...]

    def start_row(self) -> Row:
        """The row without its figures."""
        known = {"target": self.name, **self.configuration.describe(), "inputs": " ".join(map(str, self.inputs)),
                 "torch_version": str(torch.__version__), "analyzer_version": package_version()}
        return {name: known.get(name) for name in COLUMNS}

    def fail(self, why: str) -> Row:
        """The row where there are no figures."""
        return self.start_row() | {"error": why}

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells its row from those of other jobs."""
        return identify(self.start_row())

    @property
    def model_key(self) -> tuple[TargetLike, Recipe]:
        """Jobs with the same one can share a built model."""
        return self.target, replace(self.configuration.recipe, optimizer=None, accumulate=1)


# A profile borrows its model and hooks into torch, so threads of a worker take turns; Python would let only one run
# anyway.
_turn = threading.Lock()


def run_job(job: Job) -> Row:
    """Profile one configuration; what the model or the profiler raises becomes the row's error."""
    with _turn:
        start = time.perf_counter()
        try:
            row = job.start_row() | measure(profile_job(job))
        except Exception as error:  # whatever a user's model raises; the sweep goes on
            find_model.cache_clear()
            row = job.fail(f"{type(error).__name__}: {error}")
        return row | {"profile_seconds": time.perf_counter() - start}


def profile_job(job: Job) -> Profile:
    """The profile of a job, on a model that is built once for all jobs that can share it."""
    configuration = job.configuration
    model = find_model(*job.model_key).train(configuration.mode == "train")
    args, kwargs = make_inputs(job.inputs)
    return profile(model, args, kwargs, device=configuration.device_spec,
                   autocast=None if configuration.autocast is None else DTYPES[configuration.autocast],
                   options=ProfileOptions(keep_events=False),
                   **configuration.recipe.profile_options(configuration.mode))


@lru_cache(maxsize=2)  # jobs come sorted by model; the second serves two neighbours that alternate
def find_model(target: TargetLike, recipe: Recipe) -> nn.Module:
    """The model of all jobs with the same `Job.model_key`."""
    factory = load_target(target).build if isinstance(target, str) else target
    return build_model(partial(recipe.build, factory))  # under the mode that holds no data, the recipe too


def measure(found: Profile) -> Row:
    """The figures of a row."""
    fit = found.fits()
    same = {name: getattr(found, name) for name in COLUMNS if name in Profile.__dataclass_fields__
            and name not in (*IDENTITY, "assumptions")}
    peaks = {f"{phase}_peak_allocated_bytes": found.phases[phase].peak_allocated_bytes
             if phase in found.phases else None for phase in ("forward", "backward", "optimizer")}
    rates = {name: read_rate(found, name) for name in RATES if name in COLUMNS}
    return {
        **same, **peaks, **rates, "fits": fit.fits, "free_bytes": fit.free_bytes,
        "uncounted_calls": sum(u.calls for u in found.uncounted), "assumptions": "; ".join(found.assumptions) or None}
