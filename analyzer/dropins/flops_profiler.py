"""``flops_profiler.profiler``, the package flops-profiler: its defaults, its text and its tables of functions."""
from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from analyzer.report.compat.exact_text import FLOPS_PROFILER, flops_profiler_text
from analyzer.results.profile import Profile
from analyzer.tools.runtime.flops_profiler import run_profile

from . import deepspeed

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler(deepspeed.FlopsProfiler):
    """The profiler of flops-profiler: its report names the functions in each module, and each module has them in its
    ``__profile_table__`` from `start_profile` to `end_profile`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32))
    >>> prof = FlopsProfiler(model)
    >>> prof.start_profile()
    >>> out = model(torch.rand(8, 16))
    >>> {name: cost.macs for name, cost in model[0].__profile_table__.items()}
    {'linear': 4096}
    >>> prof.end_profile()
    """

    _dialect = FLOPS_PROFILER

    def __init__(self, model: torch.nn.Module, ds_engine: Any = None) -> None:
        super().__init__(model, ds_engine)

    def _report(self, profile: Profile, **options: Any) -> str:
        return flops_profiler_text(profile, **self._describe_engine(), **options)

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the forward pass of one step."""
        return FLOPS_PROFILER.flops(self._root.fwd_flops or 0) if as_string else self._root.fwd_flops

    def get_total_macs(self, as_string: bool = False) -> Any:
        """MACs of the forward pass of one step."""
        return FLOPS_PROFILER.macs(self._root.fwd_macs or 0) if as_string else self._root.fwd_macs

    def get_total_params(self, as_string: bool = False) -> Any:
        """Parameters of the model, each once."""
        return FLOPS_PROFILER.params(self._root.params or 0) if as_string else self._root.params


def get_model_profile(model: torch.nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = None,
                      kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True,
                      module_depth: int = -1, top_modules: int = 10, warm_up: int = 3, as_string: bool = False,
                      output_file: str | Path | None = None, ignore_modules: Collection[type] | None = None,
                      func_name: str = "forward") -> tuple[Any, Any, Any]:
    """Run the model in evaluation mode, print the report and return (FLOPs, MACs, parameters), with the defaults of
    flops-profiler: numbers, ten modules at each depth, three runs before.

    >>> get_model_profile(torch.nn.Linear(1000, 1000), input_shape=(8, 1000), print_profile=False)
    (16000000, 8000000, 1001000)
    """
    flops, macs, params = run_profile(
        FlopsProfiler(model), func_name, input_shape, args, kwargs, print_profile=print_profile, detailed=detailed,
        module_depth=module_depth, top_modules=top_modules, warm_up=warm_up, output_file=output_file,
        ignore_modules=ignore_modules)
    if as_string:
        rest = "" if flops // 1000 else " "  # as it writes a number without a unit there
        return FLOPS_PROFILER.flops(flops) + rest, FLOPS_PROFILER.macs(macs), FLOPS_PROFILER.params(params)
    return flops, macs, params
