"""``flops_profiler.profiler``, the package flops-profiler: its defaults, its text and its tables of functions."""
from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from analyzer.output import FilePath
from analyzer.report.compat.deepspeed import FLOPS_PROFILER
from analyzer.tools.runtime import flops_profiler

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler(flops_profiler.FlopsProfiler):
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
    _puts_attributes = True

    def __init__(self, model: torch.nn.Module, ds_engine: Any = None) -> None:
        super().__init__(model, ds_engine)


def get_model_profile(model: torch.nn.Module, input_shape: tuple[int, ...] | None = None, args: Any = None,
                      kwargs: dict[str, Any] | None = None, print_profile: bool = True, detailed: bool = True,
                      module_depth: int = -1, top_modules: int = 10, warm_up: int = 3, as_string: bool = False,
                      output_file: FilePath | None = None, ignore_modules: Collection[type] | None = None,
                      func_name: str = "forward") -> tuple[Any, Any, Any]:
    """Run the model in evaluation mode, print the report and return (FLOPs, MACs, parameters), with the defaults of
    flops-profiler: numbers, ten modules at each depth, three runs before.

    >>> get_model_profile(torch.nn.Linear(1000, 1000), input_shape=(8, 1000), print_profile=False)
    (16000000, 8000000, 1001000)
    """
    flops, macs, params = flops_profiler.run_profile(
        FlopsProfiler(model), func_name, input_shape, args, kwargs, print_profile=print_profile, detailed=detailed,
        module_depth=module_depth, top_modules=top_modules, warm_up=warm_up, output_file=output_file,
        ignore_modules=ignore_modules)
    if as_string:
        rest = "" if flops // 1000 else " "  # as it writes a number without a unit there
        return FLOPS_PROFILER.flops(flops) + rest, FLOPS_PROFILER.macs(macs), FLOPS_PROFILER.params(params)
    return flops, macs, params
