"""``calflops.calculate_flops``: FLOPs, MACs and trained parameters, counted as DeepSpeed's profiler counts."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from analyzer.api.argument import set_training
from analyzer.api.profile import profile
from analyzer.profilers.flops import make_flops_profiler
from analyzer.report.compat.deepspeed import flops_to_string, macs_to_string, number_to_string, params_to_string
from analyzer.tools.runtime.flops_profiler import make_call

__all__ = ["calculate_flops", "flops_to_string", "macs_to_string", "number_to_string", "params_to_string"]


def calculate_flops(model: nn.Module, input_shape: tuple[int, ...] | None = None, *, args: Sequence[Any] = (),
                    kwargs: Mapping[str, Any] | None = None, include_backPropagation: bool = False,
                    compute_bp_factor: float = 2.0, print_results: bool = True, print_detailed: bool = True,
                    output_as_string: bool = True, output_precision: int = 2,
                    output_unit: str | None = None) -> tuple[Any, Any, Any]:
    """FLOPs, MACs and parameters of a forward pass in evaluation mode. The report that is printed is that of
    `analyzer.dropins.deepspeed`.

    ``include_backPropagation`` returns the forward pass and ``compute_bp_factor`` times as much. Raises InputError for
    arguments that cannot be used, and whatever the model itself raises.

    >>> calculate_flops(nn.Linear(1000, 1000), input_shape=(8, 1000), print_results=False)
    ('16 MFLOPS', '8 MMACs', '1 M')
    """
    _, args, call_kwargs = make_call(model, "forward", input_shape, args or None, dict(kwargs or {}),
                                     caller="calculate_flops")
    with set_training(model, False):
        found = profile(model, tuple(args), call_kwargs, mode="infer",
                        profilers={"flops": make_flops_profiler("deepspeed")})
    if print_results:
        print(found.report("deepspeed", detailed=print_detailed))
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    factor = 1 + compute_bp_factor if include_backPropagation else 1
    flops, macs = (factor * (count or 0) for count in (found.fwd_flops, found.fwd_macs))
    if not output_as_string:
        return flops, macs, params
    return (flops_to_string(flops, output_unit, output_precision), macs_to_string(macs, output_unit, output_precision),
            params_to_string(params, output_unit, output_precision))
