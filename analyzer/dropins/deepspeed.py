"""``deepspeed.profiling.flops_profiler``, and the ``"flops_profiler"`` section of DeepSpeed's JSON configuration."""
from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch

from analyzer.errors import InputError, is_count
from analyzer.output import FilePath, is_path
from analyzer.report.compat.deepspeed import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from analyzer.saved_format import load_json
from analyzer.tools.runtime import flops_profiler

__all__ = ["FlopsProfiler", "FlopsProfilerConfig", "bytes_to_string", "duration_to_string", "flops_to_string",
           "get_model_profile", "macs_to_string", "number_to_string", "params_to_string", "profile_with_config"]
SECTION = "flops_profiler"


class FlopsProfiler(flops_profiler.FlopsProfiler):
    """`analyzer.tools.runtime.FlopsProfiler` with what DeepSpeed leaves on modules from `start_profile` to
    `end_profile` (`CostAttributes`), which is right whenever a call of the model has returned.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU())
    >>> prof = FlopsProfiler(model)
    >>> prof.start_profile()
    >>> out = model(torch.rand(8, 16))
    >>> model[0].__flops__, model[1].__flops__, model.__params__
    (8192, 256, 544)
    >>> prof.end_profile()
    >>> hasattr(model, "__flops__")
    False
    """

    _puts_attributes = True


def get_model_profile(model: torch.nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = None,
                      kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True,
                      module_depth: int = -1, top_modules: int = 1, warm_up: int = 1, as_string: bool = True,
                      output_file: FilePath | None = None, ignore_modules: Collection[type] | None = None,
                      mode: str = "forward", config: Mapping[str, Any] | FilePath | None = None
                      ) -> tuple[Any, Any, Any]:
    """Run the model in evaluation mode, print DeepSpeed's report and return (FLOPs, MACs, parameters).

    The arguments are those of DeepSpeed's function. ``config``, a configuration of DeepSpeed's or the path of one, says
    how deep and detailed the report is and where it goes, before the other arguments.

    >>> get_model_profile(torch.nn.Linear(1000, 1000), input_shape=(8, 1000), print_profile=False)
    ('16 M', '8 MMACs', '1 M')
    """
    factor = 0.0
    if config is not None:
        found = FlopsProfilerConfig.read(config)
        module_depth, top_modules, detailed = found.module_depth, found.top_modules, found.detailed
        output_file, factor = found.output_file or output_file, found.recompute_fwd_factor
    return flops_profiler.get_model_profile(model, input_shape, args, kwargs, print_profile, detailed, module_depth,
                                            top_modules, warm_up, as_string, output_file, ignore_modules, mode,
                                            recompute_fwd_factor=factor)


@dataclass(frozen=True)
class FlopsProfilerConfig:
    """The ``"flops_profiler"`` section of a configuration, with DeepSpeed's defaults.

    >>> FlopsProfilerConfig.read({"flops_profiler": {"enabled": True, "top_modules": 3}}).top_modules
    3
    """

    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: int = 1              #: how many steps go before the one that is profiled
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any] | FilePath) -> FlopsProfilerConfig:
        """Of a whole configuration or its file. Raises InputError for what is none, and for unknown settings."""
        section = _read_config(config).get(SECTION, {})
        if not isinstance(section, Mapping):
            raise InputError(f'"{SECTION}": {section!r}: must be an object of settings')
        known = [field.name for field in fields(cls)]
        for name in section:
            if name not in known:
                raise InputError(f'"{SECTION}": no setting {name!r}; settings are {", ".join(known)}')
        found = cls(**section)
        for name in ("enabled", "detailed"):
            if not isinstance(getattr(found, name), bool):
                raise InputError(f'"{SECTION}": {name}={getattr(found, name)!r}: must be true or false')
        if not (is_count(found.profile_step) and is_count(found.module_depth, -1) and is_count(found.top_modules, 1)):
            raise InputError(f'"{SECTION}": {dict(section)}: a step is 0 or more, a depth 0 or more or -1 for all, and '
                             "at least one module is named")
        return found


def _read_config(config: Mapping[str, Any] | FilePath) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not is_path(config):
        raise InputError(f"config={config!r}: must be a configuration of DeepSpeed's, or the path of one")
    try:
        found = load_json(config)
    except OSError as error:
        raise InputError(f"config={os.fspath(config)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"config={os.fspath(config)!r}: is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"config={os.fspath(config)!r}: must hold an object")
    return found


class _ConfiguredProfiler(FlopsProfiler):
    def __init__(self, model: torch.nn.Module, config: FlopsProfilerConfig, engine: Any) -> None:
        super().__init__(model, engine, config.recompute_fwd_factor, start_step=config.profile_step,
                         end_step=config.profile_step)
        self.config = config
        if config.enabled:
            self.start_profile()

    def step(self) -> None:
        super().step()
        config = self.config
        if self.started and self._step > config.profile_step:
            self.print_model_profile(config.profile_step, config.module_depth, config.top_modules, config.detailed,
                                     config.output_file)
            self.end_profile()


def profile_with_config(model: torch.nn.Module, config: Mapping[str, Any] | FilePath,
                        ds_engine: Any = None) -> FlopsProfiler:
    """A profiler that does for a training loop what a configuration asks of DeepSpeed's engine: with `step` called at
    the end of each step, it profiles the one after ``profile_step`` others, prints the report (or writes it to
    ``output_file``) and ends. Batch sizes and ``wall_clock_breakdown`` are read of the configuration too. It does
    nothing unless ``enabled``. Raises InputError as `FlopsProfilerConfig.read`.
    """
    whole = _read_config(config)

    def count_steps() -> int:
        return int(whole.get("gradient_accumulation_steps", 1))

    def find_batch() -> int:
        return int(whole.get("train_micro_batch_size_per_gpu", whole.get("train_batch_size", 1) // count_steps()))

    engine = SimpleNamespace(  # of one process
        world_size=1, dp_world_size=1, mp_world_size=1, gradient_accumulation_steps=count_steps,
        train_micro_batch_size_per_gpu=find_batch,
        wall_clock_breakdown=lambda: bool(whole.get("wall_clock_breakdown", False)))
    return _ConfiguredProfiler(model, FlopsProfilerConfig.read(whole), ds_engine or engine)
