"""``deepspeed.profiling.flops_profiler``: DeepSpeed's text to the label, its attributes of modules while it profiles,
and the ``"flops_profiler"`` section of its JSON configuration.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from analyzer.errors import InputError, is_count
from analyzer.output import drawing_plainly
from analyzer.report.compat.deepspeed import (
    bytes_to_string,
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from analyzer.report.compat.exact_text import DEEPSPEED, aggregate, deepspeed_text
from analyzer.results.profile import Profile
from analyzer.saved_format import load_json
from analyzer.tools.runtime import flops_profiler

from .cost_attribute import CostAttributes

__all__ = ["FlopsProfiler", "FlopsProfilerConfig", "bytes_to_string", "duration_to_string", "flops_to_string",
           "get_model_profile", "macs_to_string", "number_to_string", "params_to_string", "profile_with_config"]
SECTION = "flops_profiler"


class FlopsProfiler(flops_profiler.FlopsProfiler):
    """`analyzer.tools.runtime.FlopsProfiler` with the text of DeepSpeed, for scripts that parse it, and with what
    DeepSpeed leaves on modules from `start_profile` to `end_profile` (`CostAttributes`), which is right whenever a
    call of the model has returned.

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

    _attributes: CostAttributes | None = None
    _dialect = DEEPSPEED

    def start_profile(self, ignore_list: Collection[type] | None = None) -> None:
        """Begin to record; what was recorded before is dropped."""
        self._attributes = CostAttributes(self.model, self.convention)
        super().start_profile(ignore_list)

    def _record(self) -> None:
        super()._record()
        self._attributes = CostAttributes(self.model, self.convention)
        assert self._recorder is not None
        self._recorder.call_ended = self._attributes.fill

    def reset_profile(self) -> None:
        """Drop what was recorded; a recording that runs goes on."""
        super().reset_profile()
        if self._attributes is not None:
            self._attributes.put()

    def stop_profile(self) -> None:
        """End the recording; what was recorded can still be read."""
        super().stop_profile()
        if self._recorder is not None and self._attributes is not None:
            self._attributes.fill(self._recorder)

    def end_profile(self) -> None:
        """End the recording, forget it, and take the attributes off."""
        super().end_profile()
        if self._attributes is not None:
            self._attributes.remove()
            self._attributes = None

    def _report(self, profile: Profile, **options: Any) -> str:
        return deepspeed_text(profile, recompute_fwd_factor=self.recompute_fwd_factor, **self._describe_engine(),
                              **options)

    def _describe_engine(self) -> dict[str, Any]:
        asks = getattr(self.ds_engine, "wall_clock_breakdown", None)
        return {"engine": self.ds_engine is not None, "wall_clock_breakdown": asks is None or bool(asks())}

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules that cost most at each depth."""
        with drawing_plainly():
            print("\n".join(aggregate(self._root, self._dialect, module_depth, top_modules)))


def get_model_profile(model: torch.nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = None,
                      kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True,
                      module_depth: int = -1, top_modules: int = 1, warm_up: int = 1, as_string: bool = True,
                      output_file: str | Path | None = None, ignore_modules: Collection[type] | None = None,
                      mode: str = "forward", config: Mapping[str, Any] | str | Path | None = None
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
    flops, macs, params = flops_profiler.run_profile(
        FlopsProfiler(model, recompute_fwd_factor=factor), mode, input_shape, args, kwargs, print_profile=print_profile,
        detailed=detailed, module_depth=module_depth, top_modules=top_modules, warm_up=warm_up, output_file=output_file,
        ignore_modules=ignore_modules)
    if as_string:
        return number_to_string(flops), macs_to_string(macs), params_to_string(params)
    return flops, macs, params


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
    def read(cls, config: Mapping[str, Any] | str | Path) -> FlopsProfilerConfig:
        """Of a whole configuration or the path of its file; a section that is not there is not enabled. Raises
        InputError for what is no configuration and for settings that there are not.
        """
        section = read_config(config).get(SECTION, {})
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


def read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A whole configuration. Raises InputError where there is none."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        raise InputError(f"config={config!r}: must be a configuration of DeepSpeed's, or the path of one")
    try:
        found = load_json(config)
    except OSError as error:
        raise InputError(f"config={str(config)!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"config={str(config)!r}: is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise InputError(f"config={str(config)!r}: must hold an object")
    return found


class _ConfiguredEngine:
    """What a profiler asks of an engine, from a configuration, for one process."""

    world_size = dp_world_size = mp_world_size = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def gradient_accumulation_steps(self) -> int:
        return int(self._config.get("gradient_accumulation_steps", 1))

    def train_micro_batch_size_per_gpu(self) -> int:
        whole = self._config.get("train_batch_size", 1)
        return int(self._config.get("train_micro_batch_size_per_gpu", whole // self.gradient_accumulation_steps()))

    def wall_clock_breakdown(self) -> bool:
        return bool(self._config.get("wall_clock_breakdown", False))


class _ConfiguredProfiler(FlopsProfiler):
    """Profiles one step of a training loop, prints its report and ends."""

    def __init__(self, model: torch.nn.Module, config: FlopsProfilerConfig, engine: Any) -> None:
        super().__init__(model, engine, config.recompute_fwd_factor, start_step=config.profile_step,
                         end_step=config.profile_step)
        self.config = config
        if config.enabled:
            self.start_profile()

    def step(self) -> None:
        """A training step has ended."""
        super().step()
        config = self.config
        if self.started and self._step > config.profile_step:
            self.print_model_profile(config.profile_step, config.module_depth, config.top_modules, config.detailed,
                                     config.output_file)
            self.end_profile()


def profile_with_config(model: torch.nn.Module, config: Mapping[str, Any] | str | Path,
                        ds_engine: Any = None) -> FlopsProfiler:
    """A profiler that does for a training loop what a configuration asks of DeepSpeed's engine: with `step` called at
    the end of each step, it profiles the one after ``profile_step`` others, prints the report (or writes it to
    ``output_file``) and ends. Batch sizes and ``wall_clock_breakdown`` are read of the configuration too. It does
    nothing unless ``enabled``. Raises InputError as `FlopsProfilerConfig.read`.
    """
    whole = read_config(config)
    return _ConfiguredProfiler(model, FlopsProfilerConfig.read(whole), ds_engine or _ConfiguredEngine(whole))
